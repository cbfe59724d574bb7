"""Whoever writes into the whole weight changes the weight, packed again in place."""

from __future__ import annotations

import operator

import pytest
import torch

from lib_fp8 import get_format
from strangers.helpers import assert_bits, assert_stores, bits_of, convert, is_parameter, on_plain, truth


def _seed():
    return torch.Generator().manual_seed(3)


RETURNING = {
    "iadd": operator.iadd,
    "isub": operator.isub,
    "imul": lambda w, d: operator.imul(w, 0.37),
    "itruediv": lambda w, d: operator.itruediv(w, 3),
    "add_alpha": lambda w, d: w.add_(d, alpha=0.3),
    "add_float32": lambda w, d: w.add_(d.float()),
    "add_itself": lambda w, d: w.add_(w),
    "mul_row": lambda w, d: w.mul_(d[0]),
    "mul_column": lambda w, d: w.mul_(d[:, :1]),
    "sub_scalar": lambda w, d: w.sub_(0.01),
    "zero": lambda w, d: w.zero_(),
    "fill": lambda w, d: w.fill_(0.25),
    "neg": lambda w, d: w.neg_(),
    "clamp": lambda w, d: w.clamp_(-0.03, 0.03),
    "lerp": lambda w, d: w.lerp_(d, 0.5),
    "addcmul": lambda w, d: w.addcmul_(d, d, value=2),
    "masked_fill": lambda w, d: w.masked_fill_(d > 0, 0.5),
    "index_add": lambda w, d: w.index_add_(0, torch.tensor([1, 3], device=d.device), d[:2]),
    "index_copy": lambda w, d: w.index_copy_(0, torch.tensor([1, 3], device=d.device), d[:2]),
    "addmm": lambda w, d: w.addmm_(d[:, :4], d[:4]),
    "copy_plain": lambda w, d: w.copy_(d),
    "copy_float32": lambda w, d: w.copy_(d.float() / 3),
    "copy_row": lambda w, d: w.copy_(d[0]),
    "copy_transposed": lambda w, d: w.copy_(d.t().contiguous().t()),
    "out_add": lambda w, d: torch.add(d, d, out=w),
    "out_mul_itself": lambda w, d: torch.mul(w, d, out=w),
    "out_mm": lambda w, d: torch.mm(d[:, :4], d[:4], out=w),
    "out_clamp": lambda w, d: torch.clamp(d, 0, 1, out=w),
    "init_constant": lambda w, d: torch.nn.init.constant_(w, 0.125),
}

SILENT = {
    "foreach_mul": lambda w, d: torch._foreach_mul_([w], 0.3),
    "foreach_add": lambda w, d: torch._foreach_add_([w], [d], alpha=0.5),
    "foreach_mixed": lambda w, d: torch._foreach_mul_([d.clone(), w, d.clone()], [0.1, 0.2, 0.3]),
    "foreach_addcmul": lambda w, d: torch._foreach_addcmul_([w], [d], [d], 1.5),
    "foreach_neg": lambda w, d: torch._foreach_neg_([w]),
    "foreach_copy": lambda w, d: torch._foreach_copy_([w], [d]),
}


def _ids(table):
    return [pytest.param(function, id=name) for name, function in table.items()]


@pytest.mark.parametrize("write", _ids(RETURNING))
def test_write_is_packed_in_place_and_returns_the_weight(weight, delta, write):
    change, plain = delta(weight), truth(weight)
    on_plain(write, plain, change)
    handle, inner = weight.detach(), weight.qdata

    result = write(weight, change)

    assert result is weight
    assert is_parameter(weight)
    assert weight.dtype == plain.dtype
    assert weight.qdata is inner
    assert_stores(weight, plain)
    assert_stores(handle, plain)


@pytest.mark.parametrize("write", _ids(SILENT))
def test_foreach_write_is_packed_in_place(weight, delta, write):
    if write is SILENT["foreach_copy"] and not hasattr(torch, "_foreach_copy_"):
        pytest.skip(f"torch {torch.__version__} has no _foreach_copy_")
    change, plain = delta(weight), truth(weight)
    on_plain(write, plain, change)

    write(weight, change)

    assert is_parameter(weight)
    assert_stores(weight, plain)


@pytest.mark.parametrize("draw", [torch.Tensor.normal_, torch.Tensor.uniform_], ids=["normal", "uniform"])
def test_random_fill_draws_what_a_plain_weight_draws(weight, draw, device):
    if device.type != "cpu":
        pytest.skip("the seeded generator of this test lives on the CPU")
    plain = truth(weight)
    draw(plain, generator=_seed())
    assert draw(weight, generator=_seed()) is weight
    assert_stores(weight, plain)


def test_convolution_weight_is_packed_in_place(conv, delta):
    change, plain = delta(conv.weight), truth(conv.weight)
    plain += change
    before = conv.weight
    conv.weight += change
    assert conv.weight is before
    assert_stores(conv.weight, plain)


def test_channels_last_weight_is_packed_in_place(conv, delta):
    conv.to(memory_format=torch.channels_last)
    change, plain = delta(conv.weight), truth(conv.weight)
    plain *= change
    conv.weight *= change
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert_stores(conv.weight, plain)


def test_module_initialisation_reaches_the_weight(linear, device, logical_dtype):
    twin = torch.nn.Linear(24, 16).to(device, logical_dtype)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        twin.reset_parameters()
        torch.manual_seed(5)
        linear.reset_parameters()
    assert_stores(linear.weight, twin.weight)


def test_copy_between_weights_of_one_format_copies_the_bits(weight, storage_format, device):
    other = convert(torch.nn.Linear(24, 16).to(device), storage_format).weight
    expected = bits_of(other)
    assert weight.copy_(other) is weight
    assert_bits(weight, expected)
    other.zero_()
    assert_bits(weight, expected)


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fn unscaled"])
def test_copy_from_another_format_packs_the_values(weight, name, device):
    if (problem := get_format(name).problem(device)) is not None:
        pytest.skip(problem)
    other = convert(torch.nn.Linear(24, 16).to(device, weight.dtype), get_format(name)).weight
    expected = bits_of(other) if weight.format.name == name else None
    weight.copy_(other)
    if expected is None:
        assert_stores(weight, truth(other))
    else:
        assert_bits(weight, expected)


def test_copy_to_a_plain_tensor_gives_the_values(weight):
    target = torch.full_like(truth(weight), 7)
    assert target.copy_(weight) is target
    assert torch.equal(target, truth(weight))


def test_layer_computes_with_what_was_written(linear, delta, device):
    x = torch.eye(24, device=device)
    before = linear(x)
    change = delta(linear.weight)
    plain = truth(linear.weight) + change * 4
    linear.weight += change * 4
    assert not torch.equal(linear(x), before)
    assert_stores(linear.weight, plain)
    expected = truth(linear.weight, torch.float32).t() + linear.bias.float()
    torch.testing.assert_close(linear(x), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "write",
    [lambda w: w.add_(torch.zeros(3, device=w.device)), lambda w: w.copy_(torch.zeros(5, 5, device=w.device))],
    ids=["add", "copy"],
)
def test_failed_write_raises_and_leaves_the_bits(weight, write):
    before = bits_of(weight)
    with pytest.raises(RuntimeError):
        write(weight)
    assert_bits(weight, before)


@pytest.mark.parametrize(
    "reshape",
    [lambda w: w.t_(), lambda w: w.unsqueeze_(0), lambda w: w.resize_(2, 2)],
    ids=["t", "unsqueeze", "resize"],
)
def test_change_of_shape_in_place_raises_and_leaves_the_bits(weight, reshape):
    before = bits_of(weight)
    with pytest.raises(RuntimeError):
        reshape(weight)
    assert weight.shape == (16, 24)
    assert_bits(weight, before)


@pytest.mark.parametrize("operate", [operator.add, operator.sub, operator.mul, operator.truediv])
def test_arithmetic_gives_plain_results_and_leaves_the_weight(weight, delta, operate):
    before, plain, other = bits_of(weight), truth(weight), delta(weight) + 1
    for result, expected in (
        (operate(weight, other), operate(plain, other)),
        (operate(other, weight), operate(other, plain)),
        (operate(weight, 2), operate(plain, 2)),
    ):
        assert type(result) is torch.Tensor
        assert torch.equal(result.nan_to_num(), expected.nan_to_num())
    assert_bits(weight, before)
