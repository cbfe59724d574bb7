"""Branches beside an 8-bit weight: part of its value for whoever reads, moves or copies it, gone when it is written."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import bits, decoded, to_numpy
from torch import nn

from lib_fp8 import QuantWeight, capability
from lib_fp8.branch import Computed, LowRank
from lib_fp8.capability import autocast_enabled

SHAPES = {"linear": (6, 8), "conv": (6, 4, 3, 3)}
FACTOR = 0.75


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def shape(request):
    return request.param


@pytest.fixture
def factors(shape, rng, device):
    """Of rank 2, in half precision as networks keep them."""
    up, down = torch.randn(shape[0], 2, generator=rng), torch.randn(2, int(np.prod(shape[1:])), generator=rng)
    return (up * 0.2).half().to(device), (down * 0.2).half().to(device)


@pytest.fixture
def weight(shape, rng, storage_format, logical_dtype, device):
    """Without branches."""
    return QuantWeight.from_weight(torch.randn(shape, generator=rng).to(device, logical_dtype), storage_format)


@pytest.fixture
def branched(weight, factors):
    weight.set_branches((LowRank(*factors, FACTOR),))
    return weight


def delta(factors, shape):
    up, down = (to_numpy(factor) for factor in factors)
    return FACTOR * (up @ down).reshape(shape)


def base(weight):
    return to_numpy(decoded(weight, torch.float32))


def assert_values(tensor, expected, dtype=None):
    """Rounded to the dtype, once for each branch."""
    steps = 2 * torch.finfo(dtype or tensor.dtype).eps
    np.testing.assert_allclose(to_numpy(tensor), expected, rtol=steps, atol=steps)


def test_low_rank(branched, factors, shape):
    """In every dtype; the inner tensors are as before."""
    expected = base(branched) + delta(factors, shape)
    for dtype in (branched.dtype, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        found = branched.dequantize(dtype)
        assert found.dtype == dtype
        assert_values(found, expected, torch.float32 if dtype == torch.float64 else dtype)
    np.testing.assert_array_equal(to_numpy(branched.without_branches(torch.float32)), base(branched))


def test_several_of_both_kinds(weight, factors, shape):
    """A computed branch is given the weight without the others, in float32."""
    seen = []

    def half_of_it(value):
        seen.append(value)
        return value * 0.5

    weight.set_branches((LowRank(*factors, FACTOR), Computed(half_of_it)))
    assert_values(weight.dequantize(), base(weight) * 1.5 + delta(factors, shape))
    assert seen[0].dtype == torch.float32
    np.testing.assert_array_equal(to_numpy(seen[0]), base(weight))


def test_layers_compute_with_them(shape, rng, storage_format, factors, device):
    layer = nn.Linear(8, 6) if len(shape) == 2 else nn.Conv2d(4, 6, 3)
    layer.to(device)
    x = torch.randn((3, 8) if len(shape) == 2 else (2, 4, 5, 5), generator=rng).to(device).requires_grad_()
    packed = QuantWeight.from_weight(layer.weight.detach(), storage_format)
    packed.set_branches((LowRank(*factors, FACTOR),))
    plain = torch.from_numpy(base(packed) + delta(factors, shape)).to(device).requires_grad_()
    layer.weight = nn.Parameter(packed, requires_grad=False)
    assert layer.weight.branches
    y = layer(x)
    compute = F.linear if len(shape) == 2 else F.conv2d
    expected = compute(x.double(), plain, layer.bias.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
    gradient = torch.autograd.grad(y.sum(), x)[0]
    wanted = torch.autograd.grad(expected.sum(), x)[0]
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5)


def test_a_change_before_backward_is_noticed(rng, storage_format, device):
    weight = QuantWeight.from_weight(torch.randn(6, 8, generator=rng).to(device), storage_format)
    y = F.linear(torch.randn(3, 8, generator=rng).to(device).requires_grad_(), weight)
    weight.set_branches((LowRank(torch.ones(6, 1, device=device), torch.ones(1, 8, device=device), 1.0),))
    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        y.sum().backward()


AUTOCAST = torch.bfloat16


def cosine(one, other):
    return float((one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other))


@pytest.mark.parametrize("count", [1, 8])
def test_small_deltas_survive_autocast(storage_format, logical_dtype, rng, count):
    """What is added is what the factors say, to the working precision; the cast to the layer's dtype comes after it."""
    weight = QuantWeight.from_weight((torch.randn(64, 96, generator=rng) * 0.03).to(logical_dtype), storage_format)
    branches = tuple(
        LowRank(torch.randn(64, 4, generator=rng) * 0.01, torch.randn(4, 96, generator=rng) * 0.01, 0.7)
        for _ in range(count)
    )
    plain, expected = base(weight), sum(delta((branch.up, branch.down), (64, 96)) * 0.7 / FACTOR for branch in branches)
    weight.set_branches(branches)
    with torch.autocast("cpu", dtype=AUTOCAST):
        found = to_numpy(weight.dequantize(torch.float32))
        in_8_bits = to_numpy(weight.without_branches(torch.float32))
    np.testing.assert_array_equal(in_8_bits, plain)
    assert cosine(found - plain, expected) >= 0.9999


KINDS = {
    "low rank": lambda factors: LowRank(*factors, FACTOR),
    "computed": lambda factors: Computed(
        lambda weight: (weight.flatten(1) @ weight.flatten(1).t() @ weight.flatten(1)).view_as(weight)
    ),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_autocast_changes_nothing(weight, factors, kind):
    weight.set_branches((kind(factors),))
    expected = weight.dequantize(torch.float32)
    with torch.autocast(weight.device.type, dtype=AUTOCAST):
        assert torch.equal(weight.dequantize(torch.float32), expected)
        assert autocast_enabled(weight.device.type)


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "xpu", "mps", "hpu", "privateuseone"])
def test_autocast_is_switched_off_where_it_acts_and_nowhere_else(monkeypatch, device_type):
    """A device that has none must not be asked to: older torch raises an error then."""
    switched = []

    class Autocast(contextlib.nullcontext):
        def __init__(self, kind, enabled):
            super().__init__()
            switched.append((kind, enabled))

    monkeypatch.setattr(torch, "autocast", Autocast)
    with capability.without_autocast(device_type):
        assert switched == []
    monkeypatch.setattr(capability, "autocast_enabled", lambda kind: kind == device_type)
    with capability.without_autocast(device_type):
        assert switched == [(device_type, False)]


COPIES = {
    "clone": torch.clone,
    "deepcopy": copy.deepcopy,
    "to another dtype": lambda weight: weight.to(torch.float32 if weight.dtype == torch.bfloat16 else torch.bfloat16),
    "copy": lambda weight: weight.to(weight.device, copy=True),
    "channels last": lambda weight: (
        weight.to(memory_format=torch.channels_last, copy=True) if weight.dim() == 4 else weight.clone()
    ),
    "copy_": lambda weight: QuantWeight.from_weight(torch.zeros_like(weight.dequantize()), weight.format).copy_(weight),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_they_move_with_the_weight(branched, factors, shape):
    expected = base(branched) + delta(factors, shape)
    layer = _layer(branched)
    for place in ("cpu", "cuda", "cpu"):
        layer.to(place)
        assert {str(branch.up.device.type) for branch in layer.weight.branches} == {place}
        assert_values(layer.weight.dequantize(), expected)


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_copies_have_their_own(branched, factors, shape, make):
    expected = base(branched) + delta(factors, shape)
    other = make(branched)
    assert isinstance(other, QuantWeight)
    assert_values(other.dequantize(), expected)
    branched.set_branches(())
    assert_values(other.dequantize(), expected)
    assert_values(branched.dequantize(), base(branched))


HANDLES = {
    "detach": torch.Tensor.detach,
    "data": lambda weight: weight.data,
    "parameter": lambda weight: nn.Parameter(weight, requires_grad=False),
    "state dict": lambda weight: _layer(weight).state_dict()["weight"],
}


def _layer(weight):
    layer = nn.Module()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


@pytest.mark.parametrize("make", HANDLES.values(), ids=HANDLES)
def test_handles_share_them(weight, factors, shape, make):
    handle = make(weight)
    weight.set_branches((LowRank(*factors, FACTOR),))
    assert_values(handle.dequantize(), base(weight) + delta(factors, shape))
    handle.set_branches(())
    assert weight.branches == ()


WRITES = {
    "store_": lambda weight, value: weight.store_(value),
    "copy_": lambda weight, value: weight.copy_(value),
    "fill": lambda weight, value: weight.zero_().add_(value),
    "index": lambda weight, value: weight.__setitem__(slice(None), value),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_gives_the_whole_value(branched, rng, write):
    value = torch.randn(branched.shape, generator=rng).to(branched)
    write(branched, value)
    assert branched.branches == ()
    packed = QuantWeight.from_weight(value, branched.format)
    np.testing.assert_array_equal(bits(branched.qdata), bits(packed.qdata))


def test_adding_to_it_packs_the_sum(branched, factors, shape):
    expected = base(branched) + delta(factors, shape) + 1
    branched += 1
    assert branched.branches == ()
    packed = QuantWeight.from_weight(torch.from_numpy(expected).to(branched.device, torch.float32), branched.format)
    error = np.abs(to_numpy(branched.dequantize(torch.float32)) - expected).max()
    rounding = np.abs(to_numpy(packed.dequantize(torch.float32)) - expected).max()
    assert error <= rounding * 1.5 + 2 * torch.finfo(branched.dtype).eps * np.abs(expected).max()


def test_strangers_read_them(branched, factors, shape):
    expected = base(branched) + delta(factors, shape)
    assert_values(branched * 2, expected * 2)
    assert_values(torch.nn.Parameter(branched, requires_grad=False).float(), expected, branched.dtype)
    assert_values(torch.from_numpy(np.asarray(branched.dequantize().float().cpu())), expected, branched.dtype)
