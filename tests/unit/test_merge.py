"""Merging: deltas summed in float32 over the original, rounded once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import (
    FORMAT_NAMES,
    assert_packed_like,
    assert_same_bits,
    bits,
    decoded,
    need_format,
    reference_decode,
    reference_pack,
    to_numpy,
)
from torch import nn

from lib_fp8 import QuantWeight, get_format
from lib_fp8.merge import merged_weight, write_rounded_once


@pytest.fixture
def original(rng, logical_dtype, device):
    return (torch.randn(16, 24, generator=rng) * 0.03).to(device, logical_dtype)


@pytest.fixture
def deltas(rng, device):
    """Three networks at 2 % of the weight, of mixed dtypes."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    return [(torch.randn(16, 24, generator=rng) * 0.0006).to(device, dtype) for dtype in dtypes]


@pytest.mark.parametrize("count", range(4))
def test_sum(original, deltas, count):
    before, given = original.clone(), [delta.clone() for delta in deltas]
    merged = merged_weight(original, iter(deltas[:count]))
    expected = to_numpy(original) + sum((to_numpy(delta) for delta in deltas[:count]), np.zeros(1))
    np.testing.assert_allclose(to_numpy(merged), expected, rtol=3e-7, atol=1e-8)
    assert merged.dtype == torch.float32
    assert merged.device == original.device
    merged.fill_(7)
    assert_same_bits(original, before)
    for delta, value in zip(deltas, given):
        assert_same_bits(delta, value)


def test_a_small_delta_survives_among_large_ones(device):
    original = torch.full((2, 2), 1024.0, dtype=torch.float16, device=device)
    merged = merged_weight(original, [torch.full((2, 2), 2.0**-11, device=device)] * 2)
    assert torch.equal(merged.cpu(), torch.full((2, 2), 1024.0 + 2.0**-10))


def test_over_a_quantized_original(original, deltas, storage_format):
    weight = QuantWeight.from_weight(original, storage_format)
    merged = merged_weight(weight, deltas)
    expected = to_numpy(decoded(weight, torch.float32)) + sum(to_numpy(delta) for delta in deltas)
    np.testing.assert_allclose(to_numpy(merged), expected, rtol=3e-7, atol=1e-8)
    assert not isinstance(merged, QuantWeight)
    assert weight.same_bits(QuantWeight.from_weight(original, storage_format).packed)


def test_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"\(4, 1\).*\(4, 4\)"):
        merged_weight(torch.zeros(4, 4), [torch.zeros(4, 4), torch.zeros(4, 1)])


def test_written_into_8_bits_rounds_once(original, deltas, storage_format):
    parameter = nn.Parameter(QuantWeight.from_weight(original, storage_format), requires_grad=False)
    inner = parameter.packed
    value = merged_weight(original, deltas)
    write_rounded_once(parameter, value)
    assert_packed_like(*parameter.packed, reference_pack(value, storage_format.name), storage_format.name)
    assert all(now is then for now, then in zip(parameter.packed, inner))
    assert parameter.dtype == original.dtype


def test_written_into_a_plain_weight(original, deltas):
    parameter = nn.Parameter(original.clone(), requires_grad=False)
    value = merged_weight(original, deltas)
    write_rounded_once(parameter, value)
    assert_same_bits(parameter, value.to(original.dtype))


@pytest.mark.parametrize("std", [0.03, 0.001])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_the_whole_delta_arrives(name, std, rng):
    """Gain of the delta over the original; merging one by one into rounded weights loses a third of it."""
    storage_format = need_format(name)
    original = (torch.randn(256, 256, generator=rng) * std).half()
    deltas = [torch.randn(256, 256, generator=rng) * std * 0.02 for _ in range(3)]
    parameter = QuantWeight.from_weight(original, storage_format)
    base = original.double()
    write_rounded_once(parameter, merged_weight(original, deltas))
    total = sum(delta.double() for delta in deltas)
    scale = None if parameter.scale is None else to_numpy(parameter.scale)
    effect = torch.from_numpy(reference_decode(bits(parameter.qdata), scale, name)) - base
    noise = 0.06 if std > 0.01 or get_format(name).scale_of else 0.6
    assert ((effect * total).sum() / (total * total).sum()).item() == pytest.approx(1, abs=noise)


def test_removal_gives_the_first_bits_again(original, deltas, storage_format):
    parameter = QuantWeight.from_weight(original, storage_format)
    before = parameter.clone()
    for count in (1, 3, 2, 0):
        write_rounded_once(parameter, merged_weight(original, deltas[:count]))
    assert_same_bits(parameter, before)
