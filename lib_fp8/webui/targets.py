"""Finding the parts of a WebUI model whose weights may be stored in 8 bits, whatever kind of model it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

UNET = "UNet"
CLIP_L = "CLIP-L"
OPEN_CLIP = "OpenCLIP"
T5 = "T5"
TEXT_ENCODERS = (CLIP_L, OPEN_CLIP, T5)


@dataclass(frozen=True)
class Target:
    """A part of a model.

    Attributes:
        kind: one of the names above.
        module: the part itself, below what the WebUI wraps around text encoders.
        key_prefix: what the checkpoint puts before the names of its tensors.
    """

    kind: str
    module: torch.nn.Module
    key_prefix: str


def find_targets(model: Any) -> list[Target]:
    """The diffusion model (UNet or MMDiT) and the text encoders of a WebUI model, loaded or being loaded."""
    diffusion_model = model.model.diffusion_model
    return [Target(UNET, diffusion_model, "model.diffusion_model."), *_text_encoders(model)]


def _text_encoders(model: Any) -> Iterator[Target]:
    if hasattr(model, "conditioner"):  # SDXL and its refiner
        for position, embedder in enumerate(model.conditioner.embedders):
            yield from _clip_target(embedder, f"conditioner.embedders.{position}.")
    elif hasattr(model, "text_encoders"):  # SD3
        for kind, name in ((CLIP_L, "clip_l"), (OPEN_CLIP, "clip_g"), (T5, "t5xxl")):
            if (encoder := getattr(model.text_encoders, name, None)) is not None:
                yield Target(kind, encoder, f"text_encoders.{name}.")
    else:
        yield from _clip_target(model.cond_stage_model, "cond_stage_model.")


def _clip_target(embedder: Any, key_prefix: str) -> Iterator[Target]:
    embedder = getattr(embedder, "wrapped", embedder)
    if hasattr(embedder, "transformer"):  # transformers' CLIPTextModel
        yield Target(CLIP_L, embedder, key_prefix)
    elif hasattr(getattr(embedder, "model", None), "transformer"):  # open_clip's text tower
        yield Target(OPEN_CLIP, embedder, key_prefix)


def is_sdxl(model: Any) -> bool:
    """Whether "Enable for SDXL" means this model."""
    return hasattr(model, "conditioner")
