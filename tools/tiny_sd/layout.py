"""Renames diffusers' and transformers' weights to those of a Stable Diffusion 1 checkpoint."""

from __future__ import annotations

import re

import torch

from demo.original_names import original_names
from tools.tiny_sd.networks import Networks

_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def vae_key(key: str) -> str:
    """The key in Stable Diffusion 1's layout, without `first_stage_model.`."""
    key = key.replace("mid_block.attentions.0", "mid.attn_1").replace("conv_norm_out", "norm_out")
    for theirs, original in _VAE_ATTENTION.items():
        key = key.replace(f"mid.attn_1.{theirs}.", f"mid.attn_1.{original}.")
    key = re.sub(r"mid_block\.resnets\.(\d)", lambda found: f"mid.block_{int(found[1]) + 1}", key)
    key = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", key)
    key = re.sub(r"up_blocks\.(\d)\.upsamplers\.0", lambda found: f"up.{3 - int(found[1])}.upsample", key)
    key = re.sub(r"down_blocks\.(\d)\.resnets", r"down.\1.block", key)
    key = re.sub(r"up_blocks\.(\d)\.resnets", lambda found: f"up.{3 - int(found[1])}.block", key)
    return key.replace("conv_shortcut", "nin_shortcut")


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
        name = f"first_stage_model.{vae_key(key)}"
        found[name] = _vae_value(name, value)
    for key, value in networks.text_encoder.state_dict().items():
        found[f"cond_stage_model.transformer.text_model.{key.removeprefix('text_model.')}"] = value
    weights = {key: value.detach().to(dtype).contiguous() for key, value in found.items() if value.is_floating_point()}
    places = torch.arange(77).unsqueeze(0)
    return {**weights, "cond_stage_model.transformer.text_model.embeddings.position_ids": places}
