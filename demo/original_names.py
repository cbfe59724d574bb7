"""What diffusers' layers are called in the original layout of Stable Diffusion 1 and SDXL checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_ENDS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_LEVEL = 3
"""Blocks of a level: two residual ones, and one that changes the picture's size or is a third residual one."""
_PLACE = re.compile(r"(?:(down|up)_blocks\.(\d)|mid_block)\.(resnets|attentions|downsamplers|upsamplers)\.(\d)\.(.+)")


def original_names(names: Iterable[str]) -> dict[str, str]:
    """Map the names of a UNet's layers, all of them given, to the original ones.

    Raises:
        KeyError: a name that such a UNet does not have.
    """
    names = list(names)
    attended = {name.split(".")[1] for name in names if re.match(r"up_blocks\.\d\.attentions\.", name)}
    return {name: _ENDS.get(name) or _original(name, attended) for name in names}


def _original(name: str, attended: set[str]) -> str:
    match = _PLACE.fullmatch(name)
    if match is None:
        raise KeyError(f"{name} is no layer of a Stable Diffusion 1 or SDXL UNet")
    side, level, part, index, rest = match.groups()
    rest = _RESNET[rest] if part == "resnets" else rest
    inner = 0 if part == "resnets" else 1
    if side is None:
        return f"middle_block.{2 * int(index) if part == 'resnets' else 1}.{rest}"
    step = _LEVEL * int(level) + int(index)
    if part == "downsamplers":
        return f"input_blocks.{_LEVEL * (int(level) + 1)}.0.op"
    if part == "upsamplers":
        return f"output_blocks.{_LEVEL * int(level) + 2}.{2 if level in attended else 1}.conv"
    return f"input_blocks.{1 + step}.{inner}.{rest}" if side == "down" else f"output_blocks.{step}.{inner}.{rest}"


def original_vae_name(key: str) -> str:
    """The original name of a tensor of the autoencoder with four levels, without `first_stage_model.`."""
    key = key.replace("mid_block.attentions.0", "mid.attn_1").replace("conv_norm_out", "norm_out")
    for theirs, original in _VAE_ATTENTION.items():
        key = key.replace(f"mid.attn_1.{theirs}.", f"mid.attn_1.{original}.")
    key = re.sub(r"mid_block\.resnets\.(\d)", lambda found: f"mid.block_{int(found[1]) + 1}", key)
    key = re.sub(r"down_blocks\.(\d)\.downsamplers\.0", r"down.\1.downsample", key)
    key = re.sub(r"up_blocks\.(\d)\.upsamplers\.0", lambda found: f"up.{3 - int(found[1])}.upsample", key)
    key = re.sub(r"down_blocks\.(\d)\.resnets", r"down.\1.block", key)
    key = re.sub(r"up_blocks\.(\d)\.resnets", lambda found: f"up.{3 - int(found[1])}.block", key)
    return key.replace("conv_shortcut", "nin_shortcut")
