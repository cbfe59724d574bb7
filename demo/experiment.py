"""The main job, once for each way to hold the weights: load, convert, add LoRAs, generate, measure, compare."""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from demo import measures
from demo.generation import Pictures, Work, denoise, generate
from demo.loading import load_pipeline
from demo.networks import deltas_of, layers_of
from demo.shapes import judge
from demo.shapes.subject import Subject
from demo.variants import FULL_PRECISION, VARIANTS, Variant

NO_LORA = ""
"""Label of the pictures without LoRAs; no file can have it."""


@dataclass(frozen=True)
class Plan:
    """What is run."""

    checkpoint: Path
    work: Work
    loras: dict[str, Path]
    lora_work: Work
    """Usually fewer pictures than `work`; its prompts and seeds are the first of those."""
    device: torch.device
    dtype: torch.dtype
    subjects: tuple[Subject, ...] | None = None
    """What the prompts describe, if the judge can read the pictures."""


@dataclass(frozen=True)
class LoraEffect:
    """How much of what LoRAs change in full precision they change here."""

    cosine: float
    """Of the change of the final latents, against the change in full precision: the direction."""
    strength: float
    """Length of that change in the direction of the one in full precision, over the latter's length."""
    reading: float | None
    """The judge's: change of the styles it reads, over the change in full precision; None if it cannot tell."""


@dataclass(frozen=True)
class Row:
    """One way's figures."""

    name: str
    stored_bytes: int
    float16_bytes: int
    peak_bytes: int
    seconds_per_step: float
    psnr: tuple[float, ...]
    ssim: tuple[float, ...]
    following: float | None
    effects: dict[str, LoraEffect]

    @property
    def median_psnr(self) -> float:
        """In dB; infinite for full precision itself."""
        return statistics.median(self.psnr)


@dataclass(frozen=True)
class Result:
    """All figures, and the pictures by way and by LoRAs."""

    plan: Plan
    rows: tuple[Row, ...]
    pictures: dict[str, dict[str, Pictures]]

    def row(self, name: str) -> Row:
        """The figures of one way."""
        return next(row for row in self.rows if row.name == name)


def lora_sets(loras: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Each LoRA alone, and all together if there are several."""
    sets: dict[str, tuple[str, ...]] = {name: (name,) for name in loras}
    return sets if len(loras) < 2 else {**sets, " + ".join(loras): tuple(loras)}


def _styles(pixels: np.ndarray) -> np.ndarray:
    """The judge's reading of hollow shapes and of stripes, mean over the pictures."""
    readings = [judge.read(picture) for picture in pixels]
    return np.array([[reading.hollow, reading.stripes] for reading in readings]).mean(0)


@dataclass(frozen=True)
class Run:
    """What one way gave, before it is compared."""

    pictures: dict[str, Pictures]
    """Without LoRAs, and with each set of them."""
    stored_bytes: int
    float16_bytes: int
    peak_bytes: int


def run_variant(variant: Variant, plan: Plan, say: Callable[[str], None]) -> Run:
    """Load, convert, count bytes, generate without LoRAs and with each set of them."""
    say(f"{variant.name}: {len(plan.work.prompts)} pictures")
    pipeline = load_pipeline(plan.checkpoint, plan.dtype)
    layers = layers_of(pipeline)
    deltas = {name: deltas_of(file, layers) for name, file in plan.loras.items()}
    touched = {layer for found in deltas.values() for layer in found}
    originals = {layer: layer.weight.detach().clone() for layer in touched}
    float16_bytes = 2 * sum(parameter.numel() for parameter in pipeline.unet.parameters())
    variant.convert(pipeline.unet)
    pipeline.to(plan.device)
    backups = {layer: layer.weight.detach().clone() for layer in touched}
    stored = measures.stored_bytes(pipeline.unet)
    one_step = dataclasses.replace(plan.work, steps=1)
    peak = measures.peak_bytes(pipeline.unet, lambda: denoise(pipeline, one_step, slice(0, 1)))
    pictures = {NO_LORA: generate(pipeline, plan.work)}
    for label, names in lora_sets(list(deltas)).items():
        say(f"{variant.name}: {len(plan.lora_work.prompts)} pictures with LoRA {label}")
        with torch.no_grad():
            for layer in touched:
                added = [deltas[name][layer].to(plan.device) for name in names if layer in deltas[name]]
                layer.weight.copy_(backups[layer])
                if added:
                    variant.merge(layer.weight, originals[layer].to(plan.device), added)
        pictures[label] = generate(pipeline, plan.lora_work)
    return Run(pictures, stored, float16_bytes, peak)


def _effect(plain: Pictures, styled: Pictures, full_plain: Pictures, full_styled: Pictures, read: bool) -> LoraEffect:
    count = len(styled.latents)
    change = styled.latents - plain.latents[:count]
    full_change = full_styled.latents - full_plain.latents[:count]
    kept = None
    if read:
        moved = _styles(styled.pixels) - _styles(plain.pixels[:count])
        full_moved = _styles(full_styled.pixels) - _styles(full_plain.pixels[:count])
        counted = np.abs(full_moved) > 0.25  # a LoRA for one style hardly moves the other
        kept = float((moved[counted] / full_moved[counted]).min()) if counted.any() else None
    return LoraEffect(measures.cosine(full_change, change), measures.strength(full_change, change), kept)


def run(plan: Plan, say: Callable[[str], None]) -> Result:
    """Run all ways, one after another, so that one model is in memory at a time."""
    rows: list[Row] = []
    pictures: dict[str, dict[str, Pictures]] = {}
    for variant in VARIANTS:
        held = run_variant(variant, plan, say)
        gc.collect()  # modules refer to each other in circles
        found = pictures[variant.name] = held.pictures
        full = pictures[FULL_PRECISION]
        following = None
        if plan.subjects is not None:
            seen = [judge.read(picture).follows(s) for picture, s in zip(found[NO_LORA].pixels, plan.subjects)]
            following = statistics.mean(seen)
        effects = {
            label: _effect(found[NO_LORA], found[label], full[NO_LORA], full[label], plan.subjects is not None)
            for label in found
            if label != NO_LORA
        }
        rows.append(
            Row(
                name=variant.name,
                seconds_per_step=found[NO_LORA].seconds_per_step,
                psnr=tuple(measures.psnr(full[NO_LORA].pixels, found[NO_LORA].pixels)),
                ssim=tuple(measures.ssim(full[NO_LORA].pixels, found[NO_LORA].pixels)),
                following=following,
                effects=effects,
                stored_bytes=held.stored_bytes,
                float16_bytes=held.float16_bytes,
                peak_bytes=held.peak_bytes,
            )
        )
    return Result(plan, tuple(rows), pictures)
