"""Reads a checkpoint in the WebUI's format into diffusers' networks, without a network connection."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline, StableDiffusionXLPipeline
from diffusers.utils import logging as diffusers_logging
from safetensors import SafetensorError, safe_open
from transformers import CLIPTokenizer

from demo.model import CLIP
from demo.original_names import original_names

CONFIGURATIONS = Path(__file__).resolve().parent / "configurations"
_UNET = "model.diffusion_model."
_ATTENTION = "model.diffusion_model.input_blocks.{}.1.transformer_blocks.0.attn2.to_k.weight"
_FAMILIES = {64: "shapes-sd1", 768: "sd1", 2048: "sdxl"}
"""Width of the text states to the folder of configurations."""

diffusers_logging.set_verbosity_error()
diffusers_logging.disable_progress_bar()


class CheckpointError(ValueError):
    """A file cannot be used; the message says why and what can."""


def family_of(file: Path) -> str:
    """Which configuration a checkpoint needs: shapes-sd1, sd1 or sdxl. Raises CheckpointError."""
    if file.suffix != ".safetensors":
        raise CheckpointError(f"{file}: only .safetensors files are read")
    if not file.is_file():
        raise CheckpointError(f"{file}: there is no such file")
    try:
        with safe_open(file, "pt") as opened:
            keys = set(opened.keys())
            found = next((key for key in (_ATTENTION.format(1), _ATTENTION.format(4)) if key in keys), None)
            width = opened.get_slice(found).get_shape()[1] if found else None
            first = f"{_UNET}input_blocks.0.0.weight"
            channels = opened.get_slice(first).get_shape()[1] if first in keys else None
    except SafetensorError as error:
        raise CheckpointError(f"{file}: this is no whole safetensors file ({error})") from None
    if width not in _FAMILIES or channels != 4:
        raise CheckpointError(f"{file}: a Stable Diffusion 1 or SDXL checkpoint for text-to-image is needed")
    return _FAMILIES[width]


def load_pipeline(file: Path, dtype: torch.dtype = torch.float32) -> DiffusionPipeline:
    """All networks of a checkpoint, on the CPU. Raises CheckpointError."""
    family = family_of(file)
    tokenizer = CLIPTokenizer.from_pretrained(CLIP)
    parts = {"tokenizer": tokenizer}
    kind = StableDiffusionPipeline
    if family == "sdxl":
        kind = StableDiffusionXLPipeline
        parts["tokenizer_2"] = CLIPTokenizer.from_pretrained(CLIP, pad_token="!")
    else:
        parts["safety_checker"] = None
    try:
        pipeline = kind.from_single_file(
            str(file), config=str(CONFIGURATIONS / family), torch_dtype=dtype, local_files_only=True, **parts
        )
    except (KeyError, RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"{file}: {str(error).splitlines()[0]}") from error
    _check_complete(file, pipeline.unet)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _check_complete(file: Path, unet: torch.nn.Module) -> None:
    """diffusers fills layers that a file lacks with random values; that is no answer here."""
    wanted = {key: key.rsplit(".", 1) for key in unet.state_dict()}
    names = original_names(layer for layer, _ in wanted.values())
    with safe_open(file, "pt") as opened:
        held = set(opened.keys())
    missing = [key for layer, kind in wanted.values() if (key := f"{_UNET}{names[layer]}.{kind}") not in held]
    if missing:
        raise CheckpointError(f"{file}: {len(missing)} tensors of the UNet are missing, such as {missing[0]}")
