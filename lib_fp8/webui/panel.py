"""The panel under the switch: what is in 8 bits now, measured; and the same for programs."""

from __future__ import annotations

import html
from typing import Any

import gradio as gr
import torch
from fastapi import FastAPI
from modules import sd_models

from lib_fp8 import Report, measure
from lib_fp8.report import mebibytes
from lib_fp8.source import FILE
from lib_fp8.webui import guests, lora
from lib_fp8.webui.settings import LORA_FROM_FILE
from lib_fp8.webui.storage import FULL_PRECISION, record_of
from lib_fp8.webui.targets import find_targets

STATUS_ROUTE = "/sdapi/v1/fp8-weight"
_TRIES = 9


def status() -> dict[str, Any]:
    """What is true of the model in use, ready for JSON; byte counts are measured now."""
    for _ in range(_TRIES):
        try:
            return _status()
        except RuntimeError:  # a dictionary of the model changed meanwhile: pictures are being made in another thread
            continue
    return _status()


def _status() -> dict[str, Any]:
    model = sd_models.model_data.sd_model
    if model is None:
        return {"loaded": False, "enabled": False, "parts": [], "note": None, "problem": None}
    record = record_of(model)
    parts = []
    for target in find_targets(model):
        report = record.reports.get(target.kind)
        if report is None or record.applied.policy_for(target.kind) is None:
            continue
        parts.append(_part(target.kind, target.module, report))
    parts += [_part(guest.name, module, report) for module, guest, report in guests.converted()]
    layers = lora.layers_by_source(model)
    return {
        "loaded": True,
        "enabled": record.applied != FULL_PRECISION,
        "checkpoint": model.sd_checkpoint_info.name,
        "parts": parts,
        "note": ". ".join(note for note in (record.applied.note, record.note) if note) or None,
        "problem": record.problem,
        "lora": record.lora,
        "lora_layers": layers,
        "lora_problem": None if record.originals is None else record.originals.file.problem(),
    }


def _part(name: str, module: torch.nn.Module, report: Report) -> dict[str, Any]:
    before, after = measure(module)
    return {
        "part": name,
        "format": report.format,
        "converted": report.converted,
        "kept": dict(report.kept),
        "bytes_full_precision": before,
        "bytes": after,
        "notes": list(report.notes),
    }


def status_html() -> str:
    """The status as the panel shows it."""
    now = status()
    if not now["loaded"]:
        return _wrap("<p>No model is loaded.</p>")
    lines = []
    if now["problem"]:
        lines.append(f"<p style='color: #dc2626'>{html.escape(now['problem'])}</p>")
    state = ":" if now["enabled"] else ": full precision."
    lines.append(f"<p>{html.escape(now['checkpoint'])}{state}</p>")
    if now["parts"]:
        lines += _table(now["parts"])
    if now["note"]:
        lines.append(f"<p>{html.escape(now['note'])}</p>")
    if not now["enabled"]:
        return _wrap("".join(lines))
    lines += [
        f"<p>{html.escape(part['part'])}: {html.escape(note)}</p>" for part in now["parts"] for note in part["notes"]
    ]
    lines.append(f"<p>{html.escape(_lora_line(now))}</p>")
    return _wrap("".join(lines))


def _table(parts: list[dict[str, Any]]) -> list[str]:
    lines = ["<table><tr>"]
    lines += [f"<th>{title}</th>" for title in ("", "format", "layers in 8 bits", "kept", "memory", "saved")]
    lines.append("</tr>")
    for part in parts:
        before, after = part["bytes_full_precision"], part["bytes"]
        kept = "; ".join(f"{count} by {reason}" for reason, count in part["kept"].items())
        cells = (
            part["part"],
            part["format"],
            str(part["converted"]),
            str(sum(part["kept"].values())),
            f"{mebibytes(before)} → {mebibytes(after)}",
            f"{mebibytes(before - after)} ({1 - after / before:.0%})" if before else "",
        )
        lines.append(f"<tr title='{html.escape(kept, quote=True)}'>")
        lines += [f"<td>{html.escape(cell)}</td>" for cell in cells]
        lines.append("</tr>")
    lines.append("</table>")
    return lines


def _lora_line(now: dict[str, Any]) -> str:
    layers, problem = now["lora_layers"], now["lora_problem"] if now["lora"] == LORA_FROM_FILE else None
    line = lora.described(layers) if layers else f"LoRA: none in use ({now['lora']})"
    if problem is None:
        return f"{line}."
    if FILE in layers:
        return f"{line}. It cannot be taken out: {problem}. Put the file back, or choose another checkpoint."
    return f"{line}, because {problem}." if layers else f"{line}. {problem}, so LoRA will be added at run time."


def _wrap(content: str) -> str:
    return f"<div class='fp8-status'>{content}</div>"


def component(**kwargs: Any) -> gr.HTML:
    """Build the panel; called by the settings page with the usual arguments of a component."""
    kwargs.pop("label", None)
    with gr.Row(elem_id="fp8_status_row", equal_height=False):
        panel = gr.HTML(**kwargs)
        refresh = gr.Button("Refresh", elem_id="fp8_status_refresh", size="sm", scale=0)
    refresh.click(fn=status_html, inputs=[], outputs=[panel], show_progress=False)
    return panel


def add_route(_: Any, app: FastAPI) -> None:
    """Offer the status to programs, behind the same authentication as the WebUI's own routes; none without --api."""
    neighbour = next((route for route in app.routes if getattr(route, "path", "") == "/sdapi/v1/memory"), None)
    if neighbour is None or any(getattr(route, "path", "") == STATUS_ROUTE for route in app.routes):
        return
    app.add_api_route(STATUS_ROUTE, status, methods=["GET"], dependencies=neighbour.dependencies)
