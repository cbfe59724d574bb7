"""``param.data = x`` packs x; the Parameter, its format and its name in the module stay."""

from __future__ import annotations

import pytest
import torch

from strangers.helpers import assert_bits, assert_plain, assert_stores, bits_of, convert, is_parameter, truth

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_data_is_packed(linear, delta, dtype):
    weight, plain = linear.weight, delta(linear.weight, dtype)
    weight.data = plain
    assert linear.weight is weight
    assert is_parameter(weight)
    assert weight.dtype == dtype
    assert_stores(weight, plain)


def test_packed_data_does_not_follow_its_source(weight, delta):
    plain = delta(weight)
    kept = plain.clone()
    weight.data = plain
    plain.zero_()
    assert_stores(weight, kept)


def test_other_shape_is_taken_over(linear, logical_dtype, device):
    plain = torch.linspace(-1, 1, 60, device=device).to(logical_dtype).view(5, 12)
    linear.weight.data = plain
    assert linear.weight.shape == (5, 12)
    assert linear.weight.stride() == plain.stride()
    assert_stores(linear.weight, plain)
    linear.bias = None
    assert linear(torch.ones(2, 12, device=device)).shape == (2, 5)


def test_strides_are_taken_over(conv, delta):
    plain = delta(conv.weight).to(memory_format=torch.channels_last)
    conv.weight.data = plain
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert_stores(conv.weight, plain)


def test_data_of_another_weight_is_taken_over(weight, storage_format, device):
    other = convert(torch.nn.Linear(24, 16).to(device), storage_format).weight
    weight.data = other.data
    assert weight.dtype == torch.float32
    assert_bits(weight, bits_of(other))


def test_earlier_handle_keeps_the_old_values(weight, delta):
    handle, before = weight.detach(), bits_of(weight)
    weight.data = delta(weight)
    assert_bits(handle, before)


WRITES = {
    "copy": lambda data, d: data.copy_(d),
    "add": lambda data, d: data.add_(d),
    "rows": lambda data, d: data.__setitem__(slice(0, 3), data[0:3] + d[0:3]),
    "setitem": lambda data, d: data.__setitem__(Ellipsis, d),
    "zero": lambda data, d: data.zero_(),
}


@pytest.mark.parametrize("write", [pytest.param(value, id=name) for name, value in WRITES.items()])
def test_write_into_data_reaches_the_weight(weight, delta, write):
    change, plain = delta(weight), truth(weight)
    write(plain, change)
    write(weight.data, change)
    assert_stores(weight, plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cast_of_its_own_data_keeps_the_bits(linear, dtype):
    before, weight = bits_of(linear.weight), linear.weight
    weight.data = weight.data.to(dtype)
    assert linear.weight is weight
    assert weight.dtype == dtype
    assert_bits(weight, before)


def test_set_through_the_tensor_class_is_not_ignored(weight, delta):
    plain, before = delta(weight), bits_of(weight)
    try:
        torch.Tensor.data.__set__(weight, plain)
    except (RuntimeError, TypeError):
        assert_bits(weight, before)
    else:
        assert_stores(weight, plain)


def test_vector_to_parameters(linear):
    plain = truth(linear.weight)
    vector = torch.nn.utils.parameters_to_vector(linear.parameters())
    assert_plain(vector, torch.cat([plain.flatten(), linear.bias]))
    torch.nn.utils.vector_to_parameters(vector * 0.5, linear.parameters())
    assert_stores(linear.weight, plain * 0.5)


def test_plain_parameter_may_replace_the_weight(linear, delta, device):
    plain = delta(linear.weight, torch.float32)
    linear.weight = torch.nn.Parameter(plain, requires_grad=False)
    linear.float()
    x = torch.ones(2, 24, device=device)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, plain, linear.bias))


def test_bare_tensor_is_refused_as_for_any_parameter(linear, delta):
    before = bits_of(linear.weight)
    with pytest.raises(TypeError):
        linear.weight = delta(linear.weight)
    assert_bits(linear.weight, before)


def test_integer_data_is_refused_and_leaves_the_bits(weight):
    before = bits_of(weight)
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        weight.data = torch.zeros(16, 24, dtype=torch.int64, device=weight.device)
    assert_bits(weight, before)
