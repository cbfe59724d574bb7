"""pack and unpack against numpy and ml_dtypes: bits, scales, strides, special values, error figures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import (
    FORMAT_NAMES,
    OpWatch,
    assert_packed_like,
    bits,
    need_format,
    reference_decode,
    reference_pack,
    to_numpy,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from torch import nn

import lib_fp8
from lib_fp8 import get_format
from lib_fp8.quantize import pack, row_absmax, unpack

EDGE = 448.0 * 2.0 ** torch.arange(-12.0, 6.0)[:, None]
NAN, INF = float("nan"), float("inf")
ROWS_IN_A_CHUNK = 64  # of 4096 elements


def normal(*shape, std=0.03):
    return lambda rng: torch.randn(shape, generator=rng) * std


def with_values(*values):
    def build(rng):
        weight = torch.randn(len(values) + 1, 9, generator=rng)
        for row, value in enumerate(values):
            weight[row, row % 9] = value
        return weight

    return build


WEIGHTS = {
    "linear": normal(24, 40),
    "conv": normal(6, 5, 3, 3),
    "channels_last": lambda rng: normal(6, 5, 3, 3)(rng).to(memory_format=torch.channels_last),
    "transposed": lambda rng: normal(40, 24)(rng).t(),
    "one element": normal(1, 1),
    "no rows": normal(0, 4),
    "rows of all sizes": lambda rng: torch.randn(40, 16, generator=rng) * torch.logspace(-9, 4, 40)[:, None],
    "beyond float16": lambda rng: torch.randn(74, 16, generator=rng) * torch.logspace(-44.5, 37.5, 74)[:, None],
    "the largest": lambda rng: torch.tensor([65504.0, 65472.0, 63488.0, 61440.0, -65504.0, 3.4028e38])[:, None],
    "subnormal": normal(8, 16, std=2.0**-22),
    "tiny rows": normal(8, 16, std=2.0**-36),
    "zero rows": lambda rng: torch.randn(4, 8, generator=rng) * torch.tensor([0.0, 1.0, 0.0, -0.0])[:, None],
    "at the edge": lambda rng: torch.cat([EDGE, -EDGE, *(torch.nextafter(EDGE, EDGE * way) for way in (0, 2))]),
    "beyond the range": with_values(465.0, 500.0, 1e4, -1e4, 6e4),
    "infinity": with_values(INF, -INF, 500.0),
    "NaN": with_values(NAN, 1.0, NAN, -INF),
    "nothing finite": lambda rng: torch.tensor([[NAN, NAN], [INF, INF], [-INF, NAN]]),
    **{f"{rows} rows": normal(rows, 4096) for rows in (ROWS_IN_A_CHUNK - 1, ROWS_IN_A_CHUNK, 2 * ROWS_IN_A_CHUNK + 1)},
    "long rows": normal(3, 300_000),
}


@pytest.fixture(params=WEIGHTS)
def weight(request, logical_dtype, device, rng):
    return WEIGHTS[request.param](rng).to(device, logical_dtype)


def test_bits_strides_and_input(weight, storage_format):
    before = weight.clone()
    packed = pack(weight, storage_format)
    assert_packed_like(*packed, reference_pack(weight, storage_format.name), storage_format.name)
    assert packed.qdata.dtype == getattr(torch, storage_format.storage_dtype_name)
    assert packed.qdata.stride() == weight.stride()
    if packed.scale is not None:
        assert packed.scale.dtype == torch.float32
        assert packed.scale.shape == (weight.shape[0], *[1] * (weight.dim() - 1))
    np.testing.assert_array_equal(to_numpy(weight), to_numpy(before))


def test_decoding_rounds_once_into_a_new_tensor(weight, storage_format):
    packed = pack(weight, storage_format)
    scale = None if packed.scale is None else to_numpy(packed.scale)
    exact = torch.from_numpy(reference_decode(bits(packed.qdata), scale, storage_format.name))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        plain = unpack(packed, storage_format, dtype)
        np.testing.assert_array_equal(to_numpy(plain), to_numpy(exact.to(dtype)))
        assert plain.dtype == dtype
        assert plain.stride() == packed.qdata.stride()
        plain.fill_(7)
    assert_packed_like(*packed, reference_pack(weight, storage_format.name), storage_format.name)


@pytest.mark.parametrize("name", [name for name in FORMAT_NAMES if name.startswith("float8")])
def test_float16_decoding_is_float32_decoding_rounded(name, rng):
    storage_format = need_format(name)
    packed = pack(WEIGHTS["rows of all sizes"](rng), storage_format)
    half, single = (unpack(packed, storage_format, dtype) for dtype in (torch.float16, torch.float32))
    assert torch.equal(half, single.half())


def test_every_float16_value_as_a_row(storage_format, device):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    weight = values[torch.isfinite(values)].reshape(-1, 1).to(device)
    packed = pack(weight, storage_format)
    assert_packed_like(*packed, reference_pack(weight, storage_format.name), storage_format.name)


def test_unscaled_is_the_direct_cast(device):
    storage_format = need_format("float8_e4m3fn unscaled", device)
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    weight = values[values.abs() <= 448].reshape(2, -1).to(device)
    np.testing.assert_array_equal(bits(pack(weight, storage_format).qdata), bits(weight.to(torch.float8_e4m3fn)))


def test_values_beyond_the_range_saturate(storage_format):
    beyond = torch.tensor([[465.0, 1e4, -1e4, INF, -INF, 1e30]])
    packed = pack(beyond, storage_format)
    values = unpack(packed, storage_format, torch.float32)
    largest = {"int8": 127.0, "float8_e5m2": 57344.0}.get(storage_format.name, 448.0)
    largest *= 1.0 if packed.scale is None else packed.scale.item()
    assert torch.equal(values.abs()[0, 3:5], torch.tensor([largest, largest]))
    assert torch.equal(values.sign()[0, 3:], beyond.sign()[0, 3:])
    assert packed.scale is None or values[0, 5] == pytest.approx(1e30, rel=0.07)


SIZES = (1e-37, 1e-30, 1e-20, 1e-9, 3e-7, 3e-6, 3e-4, 1.0, 1e3, 1.2e4, 1e9, 1e20, 6e37)
"""Standard deviations."""
DECIBELS = {"int8": 42, "float8_e4m3fn": 31, "float8_e5m2": 25}


@pytest.mark.parametrize("name", DECIBELS)
@pytest.mark.parametrize("size", SIZES)
def test_the_error_does_not_depend_on_the_size(name, size, logical_dtype, rng):
    """Whatever size the dtype can hold, its subnormal numbers included."""
    storage_format = need_format(name)
    weight = (torch.randn(256, 512, generator=rng).double() * size).to(logical_dtype)
    if not bool(weight.any() and weight.isfinite().all()):
        pytest.skip(f"{logical_dtype} has no {size}")
    value = to_numpy(unpack(pack(weight, storage_format), storage_format, torch.float32))
    exact = to_numpy(weight)
    with np.errstate(divide="ignore"):
        noise = 10 * np.log10((exact**2).sum() / ((value - exact) ** 2).sum())
    assert noise >= DECIBELS[name]


@pytest.mark.parametrize("name", DECIBELS)
def test_the_largest_value_of_a_dtype_stays_finite(name, logical_dtype):
    storage_format = need_format(name)
    largest = torch.finfo(logical_dtype).max
    weight = torch.tensor([[largest, -largest, 1.0]], dtype=logical_dtype)
    value = unpack(pack(weight, storage_format), storage_format, logical_dtype)
    assert torch.isfinite(value).all()
    bits_of_mantissa = {"int8": 8, "float8_e4m3fn": 3, "float8_e5m2": 2}[name]
    np.testing.assert_allclose(to_numpy(value)[0, :2], to_numpy(weight)[0, :2], rtol=2.0**-bits_of_mantissa)


@pytest.mark.parametrize("name", DECIBELS)
def test_what_the_logical_dtype_cannot_hold_becomes_its_largest(name):
    storage_format = need_format(name)
    packed = pack(torch.tensor([[1e9, -1e9, 1e5]]), storage_format, dtype=torch.float16)
    value = to_numpy(unpack(packed, storage_format, torch.float16))
    largest = {"int8": 65504, "float8_e4m3fn": 61440, "float8_e5m2": 57344}[name]
    np.testing.assert_array_equal(value, [[largest, -largest, largest]])


@pytest.mark.parametrize("name", DECIBELS)
def test_the_smallest_numbers_of_float32(name):
    """Beside each other they differ by one step of 2**-149, and int8 has 127 steps."""
    storage_format = need_format(name)
    steps = torch.arange(1, 2049, dtype=torch.int32)[:, None]
    value = unpack(pack(steps.view(torch.float32), storage_format), storage_format, torch.float32)
    found = value.view(torch.int32)
    assert bool(((found - steps).abs() <= steps / (8 if name == "float8_e5m2" else 16)).all())
    row = torch.arange(-127, 128, dtype=torch.float64)[None] * 2.0**-149
    if name == "int8":
        value = unpack(pack(row.float(), storage_format), storage_format, torch.float32)
        assert torch.equal(value.double(), row)


@pytest.mark.parametrize("name", DECIBELS)
def test_a_device_without_subnormal_numbers(name, rng):
    """It makes zeros of rows that need them, and never NaN."""
    storage_format = need_format(name)
    weight = torch.randn(80, 64, generator=rng) * torch.logspace(-44, 3, 80)[:, None]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot leave them out")
    try:
        value = unpack(pack(weight, storage_format), storage_format, torch.float32)
    finally:
        torch.set_flush_denormal(False)
    assert torch.isfinite(value).all()
    normal = weight.abs().amax(1) > 1e-28
    error = (value - weight).double().norm(dim=1) / weight.double().norm(dim=1)
    assert bool((error[normal] < 0.08).all())


def test_a_nan_stays_a_nan(storage_format, device):
    weight = torch.ones(3, 4, device=device)
    weight[1, 2] = NAN
    lost = torch.isnan(unpack(pack(weight, storage_format), storage_format, torch.float32)).cpu()
    expected = torch.zeros(3, 4, dtype=torch.bool)
    expected[1, slice(None) if storage_format.name == "int8" else 2] = True
    assert torch.equal(lost, expected)


@pytest.mark.parametrize(
    ("name", "std", "figure"),
    [
        *[("float8_e4m3fn", std, 0.0265) for std in (0.03, 0.001)],
        *[("float8_e5m2", std, 0.053) for std in (0.03, 0.001)],
        *[("int8", std, 0.0076) for std in (0.03, 0.001)],
        ("float8_e4m3fn unscaled", 0.03, 0.0287),
        ("float8_e4m3fn unscaled", 0.02, 0.033),
        ("float8_e4m3fn unscaled", 0.005, 0.113),
        ("float8_e4m3fn unscaled", 0.001, 0.56),
    ],
)
def test_relative_error(name, std, figure, rng):
    storage_format = need_format(name)
    weight = torch.randn(512, 512, generator=rng) * std
    error = unpack(pack(weight, storage_format), storage_format, torch.float32) - weight
    assert (error.norm() / weight.norm()).item() == pytest.approx(figure, rel=0.05)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_any_float32_matrix(name):
    storage_format = need_format(name)

    @settings(max_examples=150, deadline=None, derandomize=True, database=None)
    @given(
        arrays(
            np.float32,
            array_shapes(min_dims=2, max_dims=4, max_side=4),
            elements=st.floats(width=32),
        )
    )
    def check(values):
        weight = torch.from_numpy(values.copy())
        packed = pack(weight, storage_format)
        assert_packed_like(*packed, reference_pack(weight, name), name)

    check()


def test_known_absmax_changes_nothing(storage_format, rng, device):
    weight = WEIGHTS["NaN"](rng).to(device)
    absmax = row_absmax(weight)
    given_absmax = absmax.clone()
    packed = pack(weight, storage_format, absmax)
    assert_packed_like(*packed, reference_pack(weight, storage_format.name), storage_format.name)
    np.testing.assert_array_equal(to_numpy(absmax), to_numpy(given_absmax))


def test_row_absmax(weight):
    values = np.abs(to_numpy(weight.flatten(1)))
    absmax = row_absmax(weight)
    assert absmax.dtype == torch.float32
    assert absmax.shape == (weight.shape[0], *[1] * (weight.dim() - 1))
    np.testing.assert_array_equal(to_numpy(absmax).ravel(), values.max(axis=1, initial=0))


@pytest.mark.parametrize("weight", [torch.ones(4), torch.tensor(1.0), torch.ones(2, 2, dtype=torch.int32)], ids=str)
def test_refuses_what_is_no_weight(weight):
    with pytest.raises(ValueError, match="cannot pack"):
        pack(weight, get_format("int8"))


def test_only_storage_ops_touch_float8(rng):
    """Ops on float8 differ between versions and devices; copies, casts and views are what all of them have."""
    storage_format = need_format("float8_e4m3fn")
    float8 = (torch.float8_e4m3fn, torch.float8_e5m2)
    allowed = {
        *("copy_", "clone", "view", "to", "_to_copy", "empty_like", "slice", "detach", "alias", "expand"),
    }
    seen = set()

    def see(func, inputs, outputs):
        if any(tensor.dtype in float8 for tensor in (*inputs, *outputs)):
            seen.add(func._schema.name.removeprefix("aten::"))

    model = nn.Sequential(nn.Linear(8, 8), nn.Conv2d(2, 2, 3)).half()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    policy = lib_fp8.Policy(storage_format.name, keep=())
    x = torch.randn(2, 8, generator=rng, requires_grad=True)
    with OpWatch(see):
        lib_fp8.convert_model(model, policy)
        model[0](x).sum().backward()
        model.load_state_dict(model.state_dict())
        with lib_fp8.StreamingConversion([(model, policy)]):
            model.load_state_dict(state)
        weight = model[0].weight
        with torch.no_grad():
            weight += 1
            weight[0] = weight[1] * 2
            weight.copy_(weight.clone().float())
        assert weight.same_bits(weight.to(torch.float32).packed)
        model.to(torch.bfloat16).to(memory_format=torch.channels_last)
        weight.data = torch.zeros(8, 8)
        lib_fp8.restore_model(model)
    assert {"copy_", "_to_copy", "empty_like"} <= seen, "the watch sees nothing"
    assert seen <= allowed
