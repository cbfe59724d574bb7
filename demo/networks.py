"""Reads LoRAs in kohya's format: which layer each part belongs to, and the difference that it makes."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from safetensors import SafetensorError
from safetensors.torch import load_file

from demo.original_names import original_names

Layer = torch.nn.Linear | torch.nn.Conv2d
"""What a LoRA can change."""


_PARTS = {"lora_down.weight", "lora_up.weight", "alpha"}


class NetworkError(ValueError):
    """A LoRA cannot be used; the message says why."""


def layers_of(pipeline: DiffusionPipeline) -> dict[str, Layer]:
    """The layers that a LoRA can change, by the names that kohya's trainer gives them."""
    unet = {name: layer for name, layer in pipeline.unet.named_modules() if isinstance(layer, Layer)}
    found: dict[str, Layer] = {f"lora_unet_{name}": layer for name, layer in unet.items()}
    found |= {f"lora_unet_{original}": unet[name] for name, original in original_names(unet).items()}
    encoders = {"lora_te_": "text_encoder", "lora_te1_": "text_encoder", "lora_te2_": "text_encoder_2"}
    for prefix, part in encoders.items():
        encoder = getattr(pipeline, part, None)
        for name, layer in encoder.named_modules() if encoder is not None else ():
            if isinstance(layer, Layer):  # newer versions of transformers have no level "text_model"
                found[f"{prefix}text_model_{name.removeprefix('text_model.')}"] = layer
    return {name.replace(".", "_"): layer for name, layer in found.items()}


def deltas_of(file: Path, layers: dict[str, Layer]) -> dict[Layer, torch.Tensor]:
    """The float32 difference, in the weight's shape, for each layer that a LoRA changes. Raises NetworkError."""
    if not file.is_file():
        raise NetworkError(f"{file}: there is no such file")
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise NetworkError(f"{file}: this is no whole safetensors file, or it cannot be read ({error})") from None
    others = sorted({key.partition(".")[2] for key in tensors} - _PARTS)
    if others or not tensors:
        held = f"it holds {', '.join(others[:3])}" if others else "it is empty"
        raise NetworkError(f"{file}: the demo adds LoRAs in kohya's format only; {held}")
    found = {}
    for name in dict.fromkeys(key.partition(".")[0] for key in tensors):
        if name not in layers:
            raise NetworkError(f"{file}: this model has no layer for {name}")
        try:
            delta = _delta(tensors, name).view(layers[name].weight.shape)
        except (KeyError, IndexError, RuntimeError) as error:
            raise NetworkError(f"{file}: {name} does not fit this model's layer, or is incomplete ({error})") from None
        if not torch.isfinite(delta).all():
            raise NetworkError(f"{file}: {name} holds NaN or infinity")
        found[layers[name]] = delta
    return found


def _delta(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    down, up = (tensors[f"{name}.lora_{part}.weight"].float() for part in ("down", "up"))
    factor = tensors[f"{name}.alpha"].item() / len(down) if f"{name}.alpha" in tensors else 1.0
    return factor * up.flatten(1) @ down.flatten(1)
