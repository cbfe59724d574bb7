"""The ways to hold the weights that are compared: how each converts a model, and how each adds LoRAs to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import lib_fp8
from lib_fp8.merge import merged_weight, write_rounded_once

FULL_PRECISION = "full precision"


@dataclass(frozen=True)
class Variant:
    """One way."""

    name: str
    convert: Callable[[torch.nn.Module], object]
    """Changes the model in place."""
    merge: Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], None]
    """Writes (parameter, original, deltas): the sum goes into the parameter."""


def as_the_webui(unet: torch.nn.Module) -> None:
    """The conversion built into the WebUI 1.8 to 1.10: an unscaled cast, biases too, undone around each forward."""
    for module in unet.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
            dtype = module.weight.dtype
            module.to(torch.float8_e4m3fn)
            module.register_forward_pre_hook(lambda module, _, dtype=dtype: module.to(dtype) and None)
            module.register_forward_hook(lambda module, *_: module.to(torch.float8_e4m3fn) and None)


def _merge_as_the_webui(parameter: torch.Tensor, original: torch.Tensor, deltas: Sequence[torch.Tensor]) -> None:
    """One network after the other onto the weight as it is stored, each time rounded."""
    for delta in deltas:
        parameter.copy_((parameter.to(delta.dtype) + delta).to(parameter.dtype))


def _merge_plain(parameter: torch.Tensor, original: torch.Tensor, deltas: Sequence[torch.Tensor]) -> None:
    parameter.copy_(original.float() + torch.stack([delta.float() for delta in deltas]).sum(0))


def _merge_once(parameter: torch.Tensor, original: torch.Tensor, deltas: Sequence[torch.Tensor]) -> None:
    write_rounded_once(parameter, merged_weight(original, deltas))


def _ours(storage_format: str) -> Variant:
    policy = lib_fp8.Policy(format=storage_format)
    return Variant(storage_format, lambda unet: lib_fp8.convert_model(unet, policy), _merge_once)


VARIANTS = (
    Variant(FULL_PRECISION, lambda _: None, _merge_plain),
    *(_ours(name) for name in ("float8_e4m3fn", "float8_e5m2", "int8")),
    Variant("as the WebUI does it", as_the_webui, _merge_as_the_webui),
)
