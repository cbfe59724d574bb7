"""Shows a result: a table on the console, a page in one file, and a picture grid."""

from __future__ import annotations

import base64
import io
import math
import statistics
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from demo.experiment import NO_LORA, Result, Row
from demo.variants import FULL_PRECISION

SHOWN = 8
"""Pictures of a row on the page."""
AMPLIFIED = 8
"""Differences are shown this many times as large as they are."""
TITLES = ("", "stored", "of float16", "peak", "s/step", "PSNR", "worst", "SSIM", "prompt following")
_HERE = Path(__file__).resolve().parent


def mebibytes(count: float) -> str:
    """For people."""
    return f"{count / 2**20:.1f} MiB"


def _decibels(value: float) -> str:
    return "same" if math.isinf(value) else f"{value:.1f} dB"


def titles_of(result: Result) -> list[str]:
    """Heads of the table's columns."""
    names = TITLES if result.plan.subjects is not None else TITLES[:-1]
    return [*names, *(f"LoRA {label}" for label in result.rows[0].effects)]


def cells_of(row: Row) -> list[str]:
    """A line of the table."""
    cells = [
        row.name,
        mebibytes(row.stored_bytes),
        f"{row.stored_bytes / row.float16_bytes:.1%}",
        mebibytes(row.peak_bytes),
        f"{row.seconds_per_step:.3f}",
        _decibels(row.median_psnr),
        _decibels(min(row.psnr)),
        f"{statistics.mean(row.ssim):.4f}",
    ]
    if row.following is not None:
        cells.append(f"{row.following:.1%}")
    for effect in row.effects.values():
        reading = "" if effect.reading is None else f"{effect.reading:.1%}, "
        cells.append(f"{reading}{effect.strength:.1%}, {effect.cosine:.4f}")
    return cells


def legend_of(result: Result) -> str:
    """What the columns mean."""
    parts = [
        "stored: all weights of the UNet. of float16: the same against float16. peak: weights, and the most that lives"
        " beside them during a step with one picture. s/step: a batch with guidance. PSNR, worst, SSIM: against full"
        " precision; median, lowest, mean.",
    ]
    if result.plan.dtype.itemsize == 4:
        parts.append("A CPU computes in float32, which is twice float16.")
    if result.plan.subjects is not None:
        parts.append("prompt following: share of pictures in which the judge reads shape and both colours as asked.")
    if result.rows[0].effects:
        parts.append(
            "LoRA: how much of the LoRA's effect in full precision is kept: "
            + ("by the judge's reading; " if result.plan.subjects is not None else "")
            + "strength and cosine of the change of the final latents."
        )
    return " ".join(parts)


def console_table(result: Result) -> str:
    """All figures as text, in columns."""
    lines = [titles_of(result), *(cells_of(row) for row in result.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        )
        for line in lines
    )


def difference(wanted: np.ndarray, got: np.ndarray) -> np.ndarray:
    """How far two pictures are apart, amplified; black where they agree. uint8 (h, w, 3)."""
    apart = np.abs(wanted.astype(int) - got.astype(int)) * AMPLIFIED
    return apart.clip(0, 255).astype(np.uint8)


def _data_url(picture: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _grids(result: Result) -> list[dict[str, Any]]:
    grids = []
    for label, full in result.pictures[FULL_PRECISION].items():
        shown = slice(0, SHOWN)
        rows = []
        for name, found in result.pictures.items():
            pixels = found[label].pixels[shown]
            rows.append({"name": name, "pictures": [_data_url(picture) for picture in pixels]})
            if name != FULL_PRECISION:
                apart = [difference(a, b) for a, b in zip(full.pixels[shown], pixels)]
                rows.append({"name": f"difference, {AMPLIFIED} times", "pictures": [_data_url(p) for p in apart]})
        prompts = result.plan.work.prompts[: len(rows[0]["pictures"])]
        title = "Without LoRA" if label == NO_LORA else f"With LoRA {label}"
        note = "Below each row: its difference from full precision, amplified." if label == NO_LORA else ""
        grids.append({"title": title, "note": note, "prompts": prompts, "rows": rows})
    return grids


def page(result: Result) -> str:
    """The report as one HTML file without links to anything else."""
    largest = max(row.stored_bytes for row in result.rows)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("report.html.j2").render(
        checkpoint=result.plan.checkpoint.name,
        count=len(result.plan.work.prompts),
        work=result.plan.work,
        small=result.plan.work.side < 128,
        device=result.plan.device.type.upper(),
        float32=result.plan.dtype.itemsize == 4,
        bars=[
            {
                "name": row.name,
                "width": round(75 * row.stored_bytes / largest, 1),
                "text": f"{mebibytes(row.stored_bytes)} ({row.stored_bytes / row.float16_bytes:.1%} of float16)",
            }
            for row in result.rows
        ],
        titles=titles_of(result),
        table=[cells_of(row) for row in result.rows],
        legend=legend_of(result),
        grids=_grids(result),
    )


def _block(result: Result, label: str, columns: int, cell: int) -> Image.Image:
    """Rows of pictures, one for each way, for one set of LoRAs."""
    gap, margin, head = 4, 180, 26
    found = {name: by_label[label].pixels[:columns] for name, by_label in result.pictures.items()}
    image = Image.new("RGB", (margin + columns * (cell + gap), head + len(found) * (cell + gap)), "white")
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(15)
    pen.text((margin, 4), "without LoRA" if label == NO_LORA else f"with LoRA {label}", fill="black", font=font)
    for line, (name, pixels) in enumerate(found.items()):
        y = head + line * (cell + gap)
        pen.text((4, y + cell // 2 - 8), name, fill="black", font=font)
        for column, picture in enumerate(pixels):
            scaled = Image.fromarray(picture).resize((cell, cell), Image.Resampling.LANCZOS)
            image.paste(scaled, (margin + column * (cell + gap), y))
    return image


def grid_picture(result: Result, columns: int = 6, cell: int = 80) -> Image.Image:
    """The pictures of every way below each other; a block without LoRAs and one with each set of them, two abreast."""
    blocks = [_block(result, label, columns, cell) for label in result.pictures[FULL_PRECISION]]
    width, height = blocks[0].size
    image = Image.new("RGB", (width * min(2, len(blocks)), height * -(-len(blocks) // 2)), "white")
    for number, block in enumerate(blocks):
        image.paste(block, (number % 2 * width, number // 2 * height))
    return image


def write(result: Result, folder: Path) -> Path:
    """Write page and grid into a folder, and return the page's place."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / "grid.part"
    grid_picture(result).save(unfinished, "PNG", optimize=True)
    unfinished.replace(folder / "grid.png")
    place = folder / "report.html"
    unfinished = place.with_suffix(".part")
    unfinished.write_text(page(result), encoding="utf-8")
    return unfinished.replace(place)
