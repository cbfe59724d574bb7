"""Renames diffusers' and transformers' weights to those of a Stable Diffusion 1 checkpoint."""

from __future__ import annotations

import torch

from demo.original_names import original_names, original_vae_name
from tools.tiny_sd.networks import Networks


def _vae_value(key: str, value: torch.Tensor) -> torch.Tensor:
    """Attention is made of Linear layers here, of 1x1 convolutions there."""
    return value[..., None, None] if ".mid.attn_1." in key and value.dim() == 2 else value


def checkpoint(networks: Networks, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    """All weights under the names of a Stable Diffusion 1 checkpoint."""
    found: dict[str, torch.Tensor] = {}
    unet = networks.unet.state_dict()
    layers = original_names({key.rsplit(".", 1)[0]: None for key in unet})
    for key, value in unet.items():
        layer, kind = key.rsplit(".", 1)
        found[f"model.diffusion_model.{layers[layer]}.{kind}"] = value
    for key, value in networks.vae.state_dict().items():
        name = f"first_stage_model.{original_vae_name(key)}"
        found[name] = _vae_value(name, value)
    for key, value in networks.text_encoder.state_dict().items():
        found[f"cond_stage_model.transformer.text_model.{key.removeprefix('text_model.')}"] = value
    weights = {key: value.detach().to(dtype).contiguous() for key, value in found.items() if value.is_floating_point()}
    places = torch.arange(77).unsqueeze(0)
    return {**weights, "cond_stage_model.transformer.text_model.embeddings.position_ids": places}
