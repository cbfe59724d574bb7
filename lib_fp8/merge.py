"""Merging deltas into a weight: all summed in float32 over the original, rounded once. Knows no LoRA format."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lib_fp8.qweight import Contents, QuantWeight


class DeltaSum:
    """Deltas of one weight, added to each other in float32 in the order given; one float32 tensor is kept.

    The original is added last, so a caller that sorts deltas by name gets a result that does not depend on the order
    in which a user names his networks.
    """

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None

    def __bool__(self) -> bool:
        """Whether anything was added."""
        return self._total is not None

    def add(self, delta: torch.Tensor, device: torch.device) -> None:
        """Add a delta of any floating dtype, which is not changed; the sum is kept on the device."""
        addend = delta.to(device=device, dtype=torch.float32)
        if self._total is None:
            self._total = addend.clone() if addend is delta else addend
        else:
            self._total.add_(addend)

    def onto(self, original: torch.Tensor) -> torch.Tensor:
        """The original plus the sum in a new float32 tensor."""
        base = original.dequantize(torch.float32) if isinstance(original, QuantWeight) else original.float()
        return base + self._total if self._total is not None else base.clone()


def merged_weight(original: torch.Tensor, deltas: Iterable[torch.Tensor]) -> torch.Tensor:
    """Sum deltas over an original in float32, as ``DeltaSum`` does; the original is not changed.

    Args:
        original: the unrounded weight, any floating dtype.
        deltas: tensors of the same shape.

    Returns:
        float32, shape and device of the original.

    Raises:
        ValueError: a delta has another shape.
    """
    total = DeltaSum()
    for delta in deltas:
        if delta.shape != original.shape:
            raise ValueError(f"delta has shape {tuple(delta.shape)}, the weight {tuple(original.shape)}")
        total.add(delta, original.device)
    return total.onto(original)


def write_rounded_once(parameter: torch.Tensor, value: torch.Tensor, contents: Contents | None = None) -> None:
    """Store a float32 value in a parameter: packed, and known by ``contents``; or cast where the parameter is plain."""
    if isinstance(parameter, QuantWeight):
        parameter.store_(value, contents)
    else:
        parameter.copy_(value)
