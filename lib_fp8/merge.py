"""Merging deltas into a weight: all summed in float32 over the original, rounded once. Knows no LoRA format."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lib_fp8.qweight import QuantWeight


def merged_weight(original: torch.Tensor, deltas: Iterable[torch.Tensor]) -> torch.Tensor:
    """Sum deltas over an original in float32; the original is not changed.

    The deltas are added to each other first, in the order given, so a caller that sorts them by name gets a result
    that does not depend on the order in which a user names his networks.

    Args:
        original: the unrounded weight, any floating dtype.
        deltas: tensors of the same shape.

    Returns:
        float32, shape and device of the original.

    Raises:
        ValueError: a delta has another shape.
    """
    total: torch.Tensor | None = None
    for delta in deltas:
        if delta.shape != original.shape:
            raise ValueError(f"delta has shape {tuple(delta.shape)}, the weight {tuple(original.shape)}")
        addend = delta.to(device=original.device, dtype=torch.float32)
        total = addend.clone() if total is None else total.add_(addend)
    base = original.dequantize(torch.float32) if isinstance(original, QuantWeight) else original.float()
    return base.clone() if total is None else total.add_(base)


def write_rounded_once(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Store a float32 value in a parameter: packed, or cast where the parameter is plain."""
    if isinstance(parameter, QuantWeight):
        parameter.store_(value)
    else:
        parameter.copy_(value)
