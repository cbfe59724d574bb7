"""The panel under the switch: what is in 8 bits now, measured; and the same for programs."""

from __future__ import annotations

import html
from typing import Any

import gradio as gr
from fastapi import FastAPI

from lib_fp8.report import mebibytes
from lib_fp8.source import FILE
from lib_fp8.webui import lora, snapshot
from lib_fp8.webui.settings import LORA_FROM_FILE
from lib_fp8.webui.snapshot import Part

STATUS_ROUTE = "/sdapi/v1/fp8-weight"


def status() -> dict[str, Any]:
    """What is true of the model in use, ready for JSON; byte counts were measured when somebody last worked on it."""
    now = snapshot.latest()
    if now.checkpoint is None:
        return {"loaded": False, "enabled": False, "parts": [], "note": None, "problem": None}
    return {
        "loaded": True,
        "enabled": now.enabled,
        "checkpoint": now.checkpoint,
        "parts": [_part(part) for part in now.parts],
        "note": now.note,
        "problem": now.problem,
        "lora": now.lora,
        "lora_layers": dict(now.lora_layers),
        "lora_problem": now.lora_problem,
    }


def _part(part: Part) -> dict[str, Any]:
    return {
        "part": part.name,
        "format": part.report.format,
        "converted": part.report.converted,
        "kept": dict(part.report.kept),
        "bytes_full_precision": part.bytes_full_precision,
        "bytes": part.bytes,
        "notes": list(part.report.notes),
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
