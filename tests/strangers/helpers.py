"""What these tests share: converted layers, their plain twins, and an oracle for the 8-bit formats.

The oracle is written from the OCP 8-bit specification in numpy and uses nothing of the product.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np
import pytest
import torch

import lib_fp8
from lib_fp8 import QuantWeight


def _float8_magnitudes(mantissa_bits: int, bias: int, finite_codes: int) -> np.ndarray:
    codes = np.arange(finite_codes)
    exponent, mantissa = codes >> mantissa_bits, (codes & ((1 << mantissa_bits) - 1)) / 2**mantissa_bits
    return np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent - bias))


MAGNITUDES = {
    "float8_e4m3fn": _float8_magnitudes(mantissa_bits=3, bias=7, finite_codes=0x7F),
    "float8_e5m2": _float8_magnitudes(mantissa_bits=2, bias=15, finite_codes=0x7C),
}
"""Every finite magnitude of a float8 dtype; the index is the code without its sign bit."""
LARGEST = {
    torch.float16: {"float8_e4m3fn": 61440.0, "float8_e5m2": 57344.0, "int8": 65504.0},
    torch.bfloat16: {"float8_e4m3fn": 1.875 * 2.0**127, "float8_e5m2": 1.75 * 2.0**127, "int8": np.inf},
    torch.float32: {"float8_e4m3fn": 1.875 * 2.0**127, "float8_e5m2": 1.75 * 2.0**127, "int8": np.inf},
}
"""The largest value of a scaled format that is finite in a dtype."""


class Bits(NamedTuple):
    """Codes (uint8) and scales (float32 or None) of a weight."""

    codes: np.ndarray
    scale: np.ndarray | None


def round_to_float8(values: np.ndarray, dtype_name: str) -> np.ndarray:
    """Codes of the nearest float8 values, ties to even, overflow to the largest value."""
    table = MAGNITUDES[dtype_name]
    magnitude = np.minimum(np.abs(values).astype(np.float64), table[-1])
    above = np.searchsorted(table, magnitude)
    below = np.maximum(above - 1, 0)
    up, down = table[above] - magnitude, magnitude - table[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (code | (np.signbit(values) << 7)).astype(np.uint8)


def expected_bits(plain: torch.Tensor, storage_format: lib_fp8.Format) -> Bits:
    """What a weight of this format must hold after these finite values were stored in it."""
    values = plain.detach().cpu().float().numpy()
    dtype_name = storage_format.storage_dtype_name
    if storage_format.name.endswith("unscaled"):
        return Bits(round_to_float8(values, dtype_name), None)
    values = values.clip(-LARGEST[plain.dtype][dtype_name], LARGEST[plain.dtype][dtype_name])
    absmax = np.abs(values).max(axis=tuple(range(1, values.ndim)), keepdims=True)
    if storage_format.name == "int8":
        with np.errstate(divide="ignore"):
            unit = 2.0 ** np.maximum(np.floor(np.log2(absmax.astype(np.float64))) - 22, -149)
        scale = np.where(absmax == 0, 1, np.ceil(absmax / np.float64(127) / unit) * unit).astype(np.float32)
        codes = np.rint(values / scale.astype(np.float32)).clip(-127, 127).astype(np.int8)
        return Bits(codes.view(np.uint8), scale)
    with np.errstate(divide="ignore"):
        exponent = np.ceil(np.log2(absmax.astype(np.float64) / MAGNITUDES[dtype_name][-1])).clip(
            -149 - np.log2(MAGNITUDES[dtype_name][1])
        )
    scale = np.where(absmax == 0, 1, 2.0**exponent).astype(np.float32)
    return Bits(round_to_float8(values / scale.astype(np.float64), dtype_name), scale)


def bits_of(weight: QuantWeight) -> Bits:
    """A copy of what a weight holds."""
    scale = None if weight.scale is None else weight.scale.cpu().numpy().copy()
    return Bits(weight.qdata.cpu().view(torch.uint8).numpy().copy(), scale)


def decode(bits: Bits, storage_format: lib_fp8.Format, dtype: torch.dtype) -> torch.Tensor:
    """The plain values that bits stand for, without the product; contiguous, on the CPU."""
    if storage_format.name == "int8":
        values = bits.codes.view(np.int8).astype(np.float32)
    else:
        table = np.append(MAGNITUDES[storage_format.storage_dtype_name].astype(np.float32), np.nan)
        sign = np.where(bits.codes & 0x80, -1, 1).astype(np.float32)
        values = table[np.minimum(bits.codes & 0x7F, len(table) - 1)] * sign
    if bits.scale is not None:
        values = values * bits.scale  # exact: at most 24 significant bits
    return torch.from_numpy(values).to(dtype)


def truth(weight: QuantWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The plain tensor that a weight stands for, with its device and strides."""
    plain = decode(bits_of(weight), weight.format, dtype or weight.dtype)
    return torch.empty_strided(weight.shape, weight.stride(), dtype=plain.dtype, device=weight.device).copy_(plain)


def rounded(plain: torch.Tensor, storage_format: lib_fp8.Format) -> torch.Tensor:
    """What is left of plain values after they were stored."""
    return decode(expected_bits(plain, storage_format), storage_format, plain.dtype).to(plain.device)


def assert_bits(weight: torch.Tensor, expected: Bits) -> None:
    """The weight is still an 8-bit one and holds exactly these bits."""
    assert isinstance(weight, QuantWeight)
    found = bits_of(weight)
    np.testing.assert_array_equal(found.codes, expected.codes)
    if expected.scale is None:
        assert found.scale is None
    else:
        np.testing.assert_array_equal(found.scale.view(np.uint32), expected.scale.view(np.uint32))


def assert_stores(weight: torch.Tensor, plain: torch.Tensor) -> None:
    """The weight holds these plain values, rounded once to its format."""
    assert weight.shape == plain.shape
    assert_bits(weight, expected_bits(plain, weight.format))


def assert_plain(value: torch.Tensor, expected: torch.Tensor) -> None:
    """An ordinary tensor, equal to the expected one in dtype, device and every value."""
    assert type(value) in (torch.Tensor, torch.nn.Parameter)
    assert not isinstance(value, QuantWeight)
    torch.testing.assert_close(value.detach(), expected.detach(), rtol=0, atol=0, equal_nan=True)


def is_parameter(value: torch.Tensor) -> bool:
    """As every foreign ``isinstance`` sees it."""
    return isinstance(value, torch.nn.Parameter)


def on_plain(function, *args):
    """Result of plain torch; skips where this torch has no kernel for the dtype on this device."""
    try:
        return function(*args)
    except RuntimeError as error:
        if "not implemented for" in str(error):
            pytest.skip(f"torch {torch.__version__}: {str(error).splitlines()[0]}")
        raise


def convert(model: torch.nn.Module, storage_format: lib_fp8.Format) -> torch.nn.Module:
    """Convert every Linear and Conv2d of a model."""
    lib_fp8.convert_model(model, lib_fp8.Policy(format=storage_format.name, keep=()))
    return model


def with_twin(model: torch.nn.Module, storage_format: lib_fp8.Format) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Convert a model; return it and a copy that holds the same values in plain frozen tensors."""
    twin = copy.deepcopy(model)
    convert(model, storage_format)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantWeight):
            owner, _, field = name.rpartition(".")
            setattr(twin.get_submodule(owner), field, torch.nn.Parameter(truth(parameter), requires_grad=False))
    return model, twin


def close(value: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Equal to a float64 result within the rounding of a dtype (that of the value where none is given)."""
    step = torch.finfo(dtype or value.dtype).eps
    scale = float(exact.detach().abs().max().clamp(min=1e-6))
    torch.testing.assert_close(value.detach().double(), exact.detach().double(), rtol=4 * step, atol=4 * step * scale)
