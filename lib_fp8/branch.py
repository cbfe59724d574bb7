"""Branches: what is added to a weight each time it is decoded, beside its 8-bit data and never rounded with it.

The weight is decoded, the branches are added, and the layer computes with the sum. For the sizes of Stable Diffusion
that takes no more arithmetic than a side path through the activations (``out * in * rank`` against
``tokens * (out + in) * rank``), and whoever reads the weight sees the same values as the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from lib_fp8.capability import without_autocast


class Branch(Protocol):
    """Something that is added to a decoded weight."""

    def add_to(self, total: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """The total with this branch added, a new tensor.

        Args:
            total: the weight and the branches before this one.
            base: the weight alone, for branches that depend on it; neither is changed.
        """

    def to(self, device: torch.device) -> Branch:
        """The same branch with its tensors on another device."""


@dataclass(frozen=True)
class LowRank:
    """``factor * up @ down``, in the dtype of the weight it is added to.

    Attributes:
        up: (out, rank).
        down: (rank, in), or (rank, in * height * width) for a convolution.
        factor: multiplier, and whatever else scales the product.
    """

    up: torch.Tensor
    down: torch.Tensor
    factor: float

    def add_to(self, total: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        up, down = self.up.to(total.dtype), self.down.to(total.dtype)
        if total.dim() == 2:
            return torch.addmm(total, up, down, alpha=self.factor)
        return torch.add(total, (up @ down).view(total.shape), alpha=self.factor)

    def to(self, device: torch.device) -> LowRank:
        return replace(self, up=self.up.to(device), down=self.down.to(device))


@dataclass(frozen=True)
class Computed:
    """Whatever a function makes of the weight: ``delta(weight) -> difference``, both float32 and of its shape."""

    delta: Callable[[torch.Tensor], torch.Tensor]

    def add_to(self, total: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        return total + self.delta(base.float()).to(total.dtype)

    def to(self, device: torch.device) -> Computed:
        return self  # the function gets its tensors to where the weight is


def with_branches(weight: torch.Tensor, branches: Iterable[Branch]) -> torch.Tensor:
    """Add branches to a plain weight, which is not changed; in its dtype, whatever autocast makes of the layer."""
    total = weight
    with without_autocast(weight.device.type):
        for branch in branches:
            total = branch.add_to(total, weight)
    return total


def working_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which branches are added; matrix products in half precision are slow on a CPU, or missing."""
    return torch.float32 if device.type == "cpu" and dtype in (torch.float16, torch.bfloat16) else dtype
