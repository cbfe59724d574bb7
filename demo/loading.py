"""Reads a checkpoint in the WebUI's format into diffusers' networks, without a network connection."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline, StableDiffusionXLPipeline
from diffusers.loaders.single_file_utils import SingleFileComponentError
from diffusers.utils import logging as diffusers_logging
from safetensors import SafetensorError, safe_open
from transformers import CLIPTokenizer

from demo.model import CLIP
from demo.original_names import original_names, original_vae_name

CONFIGURATIONS = Path(__file__).resolve().parent / "configurations"
_UNET = "model.diffusion_model."
_ATTENTION = "model.diffusion_model.input_blocks.{}.1.transformer_blocks.0.attn2.to_k.weight"
_OPEN_CLIP = "conditioner.embedders.1.model.transformer.resblocks.{}.{}"
_BLOCK = (
    "attn.in_proj_weight",
    "attn.out_proj.weight",
    "ln_1.weight",
    "ln_2.weight",
    "mlp.c_fc.weight",
    "mlp.c_proj.weight",
)
_FAMILIES = {64: "shapes-sd1", 768: "sd1", 2048: "sdxl"}
"""Width of the text states to the folder of configurations."""

diffusers_logging.set_verbosity_error()
diffusers_logging.disable_progress_bar()


class CheckpointError(ValueError):
    """A file cannot be used; the message says why and what can."""


def family_of(file: Path) -> str:
    """Which configuration a checkpoint needs: shapes-sd1, sd1 or sdxl. Raises CheckpointError."""
    if file.suffix.lower() != ".safetensors":
        raise CheckpointError(f"{file}: only .safetensors files are read")
    if not file.is_file():
        raise CheckpointError(f"{file}: {'this is a folder' if file.is_dir() else 'there is no such file'}")
    try:
        with safe_open(file, "pt") as opened:
            shapes = {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: this is no whole safetensors file, or it cannot be read ({error})") from None
    widths = [shapes[key][1] for key in map(_ATTENTION.format, (1, 4)) if len(shapes.get(key, ())) == 2]
    channels = shapes.get(f"{_UNET}input_blocks.0.0.weight", [0, 0])[1:2]
    if not widths or widths[0] not in _FAMILIES or channels != [4]:
        raise CheckpointError(f"{file}: a Stable Diffusion 1 or SDXL checkpoint for text-to-image is needed")
    return _FAMILIES[widths[0]]


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
    except (SingleFileComponentError, LookupError, RuntimeError, ValueError, OSError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise CheckpointError(f"{file}: {' '.join(lines[:2])}") from error
    _check_complete(file, pipeline)
    if pipeline.vae.config.force_upcast:  # SDXL's overflows in float16
        pipeline.vae.float()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _check_complete(file: Path, pipeline: DiffusionPipeline) -> None:
    """diffusers fills what a file lacks with random values; that is no answer here."""
    unet, vae = pipeline.unet.state_dict(), pipeline.vae.state_dict()
    names = original_names(key.rsplit(".", 1)[0] for key in unet)
    wanted = [f"{_UNET}{names[layer]}.{kind}" for layer, kind in (key.rsplit(".", 1) for key in unet)]
    wanted += [f"first_stage_model.{original_vae_name(key)}" for key in vae]
    two = getattr(pipeline, "text_encoder_2", None)
    encoder = "cond_stage_model" if two is None else "conditioner.embedders.0"
    for key, value in pipeline.text_encoder.state_dict().items():
        if value.is_floating_point():  # positions are counted anew
            wanted.append(f"{encoder}.transformer.text_model.{key.removeprefix('text_model.')}")
    if two is not None:
        wanted += [_OPEN_CLIP.format(layer, part) for layer in range(two.config.num_hidden_layers) for part in _BLOCK]
    with safe_open(file, "pt") as opened:
        missing = sorted({*wanted} - {*opened.keys()})
    if missing:
        raise CheckpointError(f"{file}: {len(missing)} tensors are missing, such as {missing[0]}")
