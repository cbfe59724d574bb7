"""Overflow, NaN, infinity and zero rows; the bits are the same on every torch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lib_fp8
from lib_fp8 import QuantWeight
from strangers.helpers import (
    MAGNITUDES,
    assert_stores,
    bits_of,
    convert,
    round_to_float8,
    truth,
)

float8_only = pytest.mark.parametrize(
    "storage_format", [name for name in lib_fp8.format_names() if "float8" in name], indirect=True
)


def _holder(storage_format, plain):
    layer = torch.nn.Linear(plain.shape[1], plain.shape[0], bias=False)
    layer.weight = torch.nn.Parameter(plain.clone(), requires_grad=False)
    return layer, lib_fp8.convert_model(layer, lib_fp8.Policy(format=storage_format.name, keep=()))


# The oracle itself


@pytest.mark.parametrize("dtype_name", list(MAGNITUDES))
def test_oracle_agrees_with_ml_dtypes(dtype_name, rng):
    dtype, table = getattr(ml_dtypes, dtype_name), MAGNITUDES[dtype_name]
    halfway = (table[:-1] + table[1:]) / 2
    values = np.concatenate([table, halfway, np.nextafter(halfway, 0), np.nextafter(halfway, 1e9)])
    random = torch.randn(4096, generator=rng, dtype=torch.float64).exp2().numpy() * table[40]
    values = np.concatenate([values, random, [0.0]])
    values = np.concatenate([values, -values]).astype(np.float32)
    values = values.clip(-table[-1], table[-1])
    np.testing.assert_array_equal(round_to_float8(values, dtype_name), values.astype(dtype).view(np.uint8))


@float8_only
def test_bits_of_a_conversion_agree_with_ml_dtypes(storage_format, logical_dtype, rng):
    plain = (torch.randn(32, 40, generator=rng) * torch.logspace(-4, 2, 32)[:, None]).to(logical_dtype)
    weight = QuantWeight.from_weight(plain, storage_format)
    scale = 1 if weight.scale is None else weight.scale.numpy().astype(np.float64)
    dtype = getattr(ml_dtypes, storage_format.storage_dtype_name)
    limit = float(ml_dtypes.finfo(dtype).max)
    codes = (plain.double().numpy() / scale).clip(-limit, limit).astype(np.float32).astype(dtype).view(np.uint8)
    np.testing.assert_array_equal(bits_of(weight).codes, codes)


def test_conversion_and_writes_give_the_expected_bits(storage_format, logical_dtype, rng):
    plain = (torch.randn(32, 40, generator=rng) * torch.logspace(-4, 2, 32)[:, None]).to(logical_dtype)
    layer, _ = _holder(storage_format, plain)
    assert_stores(layer.weight, plain)
    layer.weight.copy_(plain * 0.1)
    assert_stores(layer.weight, plain * 0.1)


def test_large_values_are_clamped_or_scaled(storage_format, logical_dtype):
    plain = torch.tensor([[465.0, -500.0], [1e4, -1e4], [6e4, 6e4], [448.0, -464.0]], dtype=logical_dtype)
    layer, report = _holder(storage_format, plain)
    assert_stores(layer.weight, plain)
    assert torch.equal(layer.weight + 0, truth(layer.weight))
    if storage_format.name.endswith("unscaled"):
        assert torch.equal(truth(layer.weight), 448 * plain.sign())
        assert any("clamped" in note for note in report.notes)
    else:
        assert torch.allclose(truth(layer.weight).float(), plain.float(), rtol=0.13)
        assert not any("clamped" in note for note in report.notes)


def test_row_of_zeros(storage_format, logical_dtype, device):
    plain = torch.zeros(3, 4, dtype=logical_dtype, device=device)
    plain[1] = torch.tensor([0.5, -0.25, 0, 1.0])
    layer, _ = _holder(storage_format, plain)
    assert torch.equal(layer.weight + 0, truth(layer.weight))
    assert not bool(truth(layer.weight)[0].any())
    scale = layer.weight.scale
    assert scale is None or bool((torch.isfinite(scale) & (scale > 0)).all())
    y = layer(torch.ones(2, 4, device=device))
    assert bool(torch.isfinite(y).all())


def test_tiny_rows_keep_finite_scales(storage_format, device):
    plain = torch.full((4, 8), 1.0, device=device) * torch.tensor([1e-30, 1e-12, 1e-8, 1e-6], device=device)[:, None]
    weight = QuantWeight.from_weight(plain, storage_format)
    assert weight.scale is None or bool((torch.isfinite(weight.scale) & (weight.scale > 0)).all())
    assert bool(torch.isfinite(weight + 0).all())
    assert bool(((weight + 0).abs() <= 1e-5).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_conversion_keeps_a_layer_that_is_not_finite_and_says_so(storage_format, logical_dtype, device, bad):
    plain = torch.ones(4, 4, dtype=logical_dtype, device=device)
    plain[2, 1] = bad
    layer, report = _holder(storage_format, plain)
    assert not isinstance(layer.weight, QuantWeight)
    assert torch.equal(layer.weight.nan_to_num(7), plain.nan_to_num(7))
    assert report.converted == 0
    assert any("NaN or infinity" in reason for reason, _ in report.kept)


def test_nan_written_by_a_stranger_stays_visible(weight):
    weight[3, 5] = float("nan")
    values = weight + 0
    assert bool(torch.isnan(values[3, 5]))
    assert not bool(torch.isnan(values[:3]).any())
    assert not bool(torch.isnan(values[4:]).any())
    assert bool(torch.isnan(weight.sum()))
    assert bool(weight.isnan().any())
    weight.zero_()
    assert not bool(weight.any())


@pytest.mark.parametrize("value", [float("inf"), -float("inf")], ids=str)
def test_infinity_written_by_a_stranger_becomes_the_largest_value(weight, value):
    rest = truth(weight)
    weight[3, 5] = value
    values = weight + 0
    assert bool(torch.isfinite(values).all())
    assert values[3, 5].sign() == torch.tensor(value).sign()
    assert values[3, 5].abs() == values[3].abs().max()
    assert torch.equal(values[:3], rest[:3])


def test_lora_that_overflows_is_clamped(weight):
    weight += torch.full_like(truth(weight), 6e4)
    assert bool(torch.isfinite(weight + 0).all())


def test_layer_with_overflow_gives_finite_pictures(storage_format, device):
    layer = torch.nn.Conv2d(2, 2, 3).to(device)
    torch.nn.init.constant_(layer.weight, 1000.0)
    convert(torch.nn.ModuleList([layer]), storage_format)
    assert bool(torch.isfinite(layer(torch.ones(1, 2, 4, 4, device=device))).all())


# N3


class OnlyStorageOps(TorchDispatchMode):
    """Fails when a float8 tensor is given to an op that some torch does not have for it."""

    allowed = {"_to_copy", "copy_", "slice", "view", "detach", "alias", "clone", "empty_like", "as_strided", "select"}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for value in torch.utils._pytree.tree_flatten((args, kwargs or {}))[0]:
            if type(value) is torch.Tensor and "float8" in str(value.dtype):
                name = func._schema.name.split("::")[1]
                assert name in self.allowed, f"{name} on {value.dtype}"
        return func(*args, **(kwargs or {}))


@float8_only
def test_float8_tensors_are_only_stored_copied_and_cast(storage_format, device):
    layers = torch.nn.ModuleList([torch.nn.Linear(24, 16), torch.nn.Conv2d(6, 8, 3)]).to(device)
    x, image = torch.ones(2, 24, device=device, requires_grad=True), torch.ones(1, 6, 4, 4, device=device)
    with OnlyStorageOps():
        convert(layers, storage_format)
        for layer in layers:
            layer.half().float()
            layer.weight += 0.01
            layer.weight[0] = 1
            layer.weight.copy_(layer.weight.clone())
            layer.load_state_dict(layer.state_dict())
        layers[0](x).sum().backward()
        layers[1](image)
        assert repr(layers[0].weight)
