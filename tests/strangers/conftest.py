"""Converted layers for every storage format, logical dtype and device."""

from __future__ import annotations

import pytest
import torch

from strangers.helpers import convert


@pytest.fixture(scope="package", autouse=True)
def _one_thread():
    """Tensors this small only lose by being shared among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def delta(logical_dtype, device, rng):
    """``delta(weight)`` makes a plain tensor like a weight, of the size that a LoRA adds."""

    def make(weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return (torch.randn(weight.shape, generator=rng) * 0.02).to(device, dtype or logical_dtype)

    return make


def _fill(layer: torch.nn.Module, rng: torch.Generator) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.05)
    return layer.requires_grad_(False)


@pytest.fixture
def linear(storage_format, logical_dtype, device, rng):
    """A converted Linear."""
    return convert(_fill(torch.nn.Linear(24, 16), rng).to(device, logical_dtype), storage_format)


@pytest.fixture
def conv(storage_format, logical_dtype, device, rng):
    """A converted Conv2d."""
    return convert(_fill(torch.nn.Conv2d(6, 8, 3, padding=1), rng).to(device, logical_dtype), storage_format)


@pytest.fixture(params=["linear", "conv"])
def layer(request, linear, conv):
    """Both kinds of converted layer."""
    return {"linear": linear, "conv": conv}[request.param]


@pytest.fixture
def weight(linear):
    """The weight of a converted Linear: 16 x 24."""
    return linear.weight
