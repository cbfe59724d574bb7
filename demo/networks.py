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
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise NetworkError(f"{file}: this is no whole safetensors file ({error})") from None
    found = {}
    for key in (key for key in tensors if key.endswith(".lora_down.weight")):
        name = key.removesuffix(".lora_down.weight")
        if name not in layers:
            raise NetworkError(f"{file}: this model has no layer for {name}")
        down, up = tensors[key].float(), tensors[f"{name}.lora_up.weight"].float()
        factor = tensors[f"{name}.alpha"].item() / len(down) if f"{name}.alpha" in tensors else 1.0
        shape = layers[name].weight.shape
        delta = factor * up.flatten(1) @ down.flatten(1)
        if delta.numel() != shape.numel():
            raise NetworkError(f"{file}: {name} does not have the shape of this model's layer")
        found[layers[name]] = delta.view(shape)
    if not found:
        raise NetworkError(f"{file}: no LoRA in kohya's format was found in it")
    return found
