"""Files for AnimateDiff and ControlNet in their real layouts, for SD1, with random values of the usual size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

State = dict[str, torch.Tensor]
WIDTHS = (320, 640, 1280, 1280)
"""Channels of the four levels of the UNet."""
CONTEXT = 768
INPUTS = (320, 320, 320, 320, 640, 640, 640, 1280, 1280, 1280, 1280, 1280)
"""Channels that the input blocks give."""
ATTENTION = (320, 320, 640, 640, 1280, 1280, *(1280,) * 3, *(640,) * 3, *(320,) * 3, 1280)
"""Channels of the blocks with attention: input, output, middle."""


class Values:
    """Random weights and biases, the same for the same seed, in float16."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, spread: float) -> torch.Tensor:
        return (torch.randn(shape, generator=self._generator) * spread).half()

    def layer(self, name: str, *shape: int, bias: bool = True, gain: float = 1.0) -> State:
        """A Linear or Conv2d."""
        fan_in = torch.Size(shape[1:]).numel()
        found = {f"{name}.weight": self.normal(*shape, spread=gain * fan_in**-0.5)}
        return found | ({f"{name}.bias": self.normal(shape[0], spread=0.02)} if bias else {})

    def norm(self, name: str, width: int) -> State:
        return {f"{name}.weight": 1 + self.normal(width, spread=0.1), f"{name}.bias": self.normal(width, spread=0.1)}


def _positions(width: int, frames: int) -> torch.Tensor:
    angles = torch.arange(frames)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    return torch.stack([angles.sin(), angles.cos()], 2).reshape(1, frames, width)


def _temporal(values: Values, name: str, width: int, attentions: int = 2) -> State:
    found = values.norm(f"{name}.norm", width) | values.layer(f"{name}.proj_in", width, width)
    block = f"{name}.transformer_blocks.0"
    for n in range(attentions):
        attention = f"{block}.attention_blocks.{n}"
        for part in ("to_q", "to_k", "to_v"):
            found |= values.layer(f"{attention}.{part}", width, width, bias=False)
        found |= values.layer(f"{attention}.to_out.0", width, width)
        found[f"{attention}.pos_encoder.pe"] = _positions(width, 32)
        found |= values.norm(f"{block}.norms.{n}", width)
    found |= values.layer(f"{block}.ff.net.0.proj", 8 * width, width) | values.layer(
        f"{block}.ff.net.2", width, 4 * width
    )
    return found | values.norm(f"{block}.ff_norm", width) | values.layer(f"{name}.proj_out", width, width, gain=0.3)


def motion_module(seed: int, middle: bool = False) -> State:
    """AnimateDiff V3; with a part for the middle block it is V2."""
    values, found = Values(seed), {}
    parts = [(f"down_blocks.{level}", n, width) for level, width in enumerate(WIDTHS) for n in range(2)]
    parts += [(f"up_blocks.{level}", n, width) for level, width in enumerate(WIDTHS[::-1]) for n in range(3)]
    parts += [("mid_block", 0, WIDTHS[-1])] if middle else []
    for block, n, width in parts:
        found |= _temporal(values, f"{block}.motion_modules.{n}.temporal_transformer", width)
    return found


MOTION_LORA = ("attention_blocks_0_to_q", "attention_blocks_1_to_out_0", "ff_net_2")


def motion_lora(seed: int) -> State:
    """A LoRA for layers of a motion module, by the names that AnimateDiff gives them."""
    values, found = Values(seed), {}
    for level, width in enumerate(WIDTHS):
        for layer in MOTION_LORA:
            block = f"down_blocks_{level}_motion_modules_0_temporal_transformer_transformer_blocks_0_{layer}"
            inputs = 4 * width if layer.startswith("ff") else width
            found |= values.layer(f"{block}.lora_up", width, 4, bias=False)
            found |= values.layer(f"{block}.lora_down", 4, inputs, bias=False)
    return found


def _encoder(checkpoint: Path) -> State:
    """The half of the UNet that a ControlNet is a copy of."""
    prefix = "model.diffusion_model."
    parts = tuple(prefix + part for part in ("time_embed", "input_blocks", "middle_block"))
    with safe_open(checkpoint, "pt") as file:
        names = [name for name in file.keys() if name.startswith(parts)]  # noqa: SIM118  # it is no dictionary
        return {name.removeprefix(prefix): file.get_tensor(name) for name in names}


def _hint_block(values: Values) -> State:
    widths = (3, 16, 16, 32, 32, 96, 96, 256, 320)
    found: State = {}
    for n, (inputs, width) in enumerate(itertools.pairwise(widths)):
        found |= values.layer(f"input_hint_block.{2 * n}", width, inputs, 3, 3)
    return found


def _ways_out(values: Values) -> State:
    found = values.layer("middle_block_out.0", 1280, 1280, 1, 1, gain=0.3)
    for n, width in enumerate(INPUTS):
        found |= values.layer(f"zero_convs.{n}.0", width, width, 1, 1, gain=0.3)
    return found


def controlnet(seed: int, checkpoint: Path) -> State:
    """ControlNet 1.1 for SD1."""
    values = Values(seed)
    found = _encoder(checkpoint) | _hint_block(values) | _ways_out(values)
    return {f"control_model.{name}": value for name, value in found.items()}


def control_lora(seed: int, checkpoint: Path, rank: int = 8) -> State:
    """Two factors for each layer, to be added to the weights of the UNet in use; norms and biases as they are."""
    values = Values(seed)
    found = {"lora_controlnet": torch.zeros(1)} | _hint_block(values) | _ways_out(values)
    for name, value in _encoder(checkpoint).items():
        if not name.endswith(".weight") or value.dim() < 2:
            found[name] = value
            continue
        layer, ones = name.removesuffix(".weight"), (1,) * (value.dim() - 2)
        found[f"{layer}.up"] = values.normal(len(value), rank, *ones, spread=0.1)
        found[f"{layer}.down"] = values.normal(rank, *value.shape[1:], spread=0.2 * value[0].numel() ** -0.5)
    return found


def sparse_control(seed: int, checkpoint: Path) -> State:
    """SparseCtrl (of scribbles): a ControlNet with motion modules of its own.

    That of RGB pictures takes latents, which ControlNet encodes with noise that no seed determines.
    """
    values, hint = Values(seed), "input_hint_block.0"
    found = _encoder(checkpoint) | _ways_out(values)
    found |= values.layer(f"{hint}.conv_in", 16, 4, 3, 3) | values.layer(f"{hint}.conv_out", 320, 256, 3, 3)
    for n, (inputs, width) in enumerate(((16, 16), (16, 32), (32, 32), (32, 96), (96, 96), (96, 256))):
        found |= values.layer(f"{hint}.blocks.{n}", width, inputs, 3, 3)
    for level, width in enumerate(WIDTHS):
        for n in range(2):
            name = f"down_blocks.{level}.motion_modules.{n}.temporal_transformer"
            found |= _temporal(values, name, width, attentions=1)
    return found


def t2i_adapter(seed: int) -> State:
    """T2I-Adapter for colour pictures."""
    values = Values(seed)
    found = values.layer("conv_in", 320, 192, 3, 3)
    for n in range(8):
        width, before = WIDTHS[n // 2], WIDTHS[max(n // 2 - 1, 0)]
        if n % 2 == 0 and width != before:
            found |= values.layer(f"body.{n}.in_conv", width, before, 1, 1)
        found |= values.layer(f"body.{n}.block1", width, width, 3, 3)
        found |= values.layer(f"body.{n}.block2", width, width, 1, 1)
    return found


def ip_adapter(seed: int) -> State:
    """IP-Adapter for SD1 over CLIP-H, four tokens."""
    values = Values(seed)
    found = values.layer("image_proj.proj", 4 * CONTEXT, 1024) | values.norm("image_proj.norm", CONTEXT)
    for n, width in enumerate(ATTENTION):
        for part in ("to_k_ip", "to_v_ip"):
            found |= values.layer(f"ip_adapter.{2 * n + 1}.{part}", width, CONTEXT, bias=False)
    return found


def lllite(seed: int) -> State:
    """ControlNet-LLLite, at the attention of some input blocks."""
    values, found = Values(seed), {}
    for block, depth in ((1, 1), (2, 1), (4, 2), (5, 2)):
        for attention in ("attn1_to_q", "attn1_to_v"):
            name = f"lllite_unet_input_blocks_{block}_1_transformer_blocks_0_{attention}"
            kernel = 2 * depth
            found |= values.layer(f"{name}.conditioning1.0", 16, 3, 4, 4)
            found |= values.layer(f"{name}.conditioning1.2", 32, 16, kernel, kernel)
            width = WIDTHS[depth - 1]
            found |= values.layer(f"{name}.down.0", 64, width) | values.layer(f"{name}.mid.0", 64, 64 + 32)
            found |= values.layer(f"{name}.up.0", width, 64)
    return found


def write(folder: Path, states: Iterator[tuple[str, State]]) -> None:
    """Write files into a folder that may not be there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, state in states:
        save_file({key: value.contiguous() for key, value in state.items()}, folder / f"{name}.safetensors")
