"""int8 format: symmetric, one absmax scale per output channel; needs no float8 dtype, so it works everywhere.

The scale is float32, rounded up to 17 significant bits before the weights are divided by it: its product with seven
bits is then exact in float32, so that decoding to any dtype rounds once.
"""

from __future__ import annotations

import functools

import torch

from lib_fp8.capability import is_out_of_memory
from lib_fp8.formats.base import Format, register

_LARGEST = 127  # -128 is left out: the format is symmetric
_LARGEST_SCALE = 66052 * 2.0**105  # of 17 bits, the largest whose product with 127 is a float32
_BINADE = 0x7F800000
"""The bits of a float32's exponent."""


def _scale_of(absmax: torch.Tensor) -> torch.Tensor:
    binade = (absmax.view(torch.int32) & _BINADE).view(torch.float32)  # the power of two below absmax, 0 below 2**-126
    unit = (binade * 2.0**-22).clamp_(min=2.0**-149)
    scale = (absmax / unit / _LARGEST).ceil_().mul_(unit).clamp_(max=_LARGEST_SCALE)  # 2**23 / 127 units: 17 bits
    return torch.where(scale > 0, scale, torch.ones_like(scale))  # also where a device takes subnormals for zero


def _encode(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    assert scale is not None
    # int8 has no NaN. pack() gives a row that holds one a scale of NaN, so the code written here does not matter.
    return weight.div_(scale).nan_to_num_(0.0).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)


def _decode(qdata: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    assert scale is not None
    if _multiplies_and_casts(qdata.device.type):
        return torch.mul(qdata, scale, out=torch.empty_like(qdata, dtype=dtype))
    return qdata.to(torch.float32).mul_(scale).to(dtype)


@functools.lru_cache(maxsize=None)
def _multiplies_and_casts(device_type: str) -> bool:
    """Whether a product of int8 and float32 into another dtype is one kernel, which casts as it goes."""
    if device_type == "cpu":
        return False  # it would cast a copy of each operand first
    try:
        factor = torch.full((1, 1), 0.5, device=device_type)
        codes = torch.full((1, 2), 3, dtype=torch.int8, device=device_type)
        return torch.mul(codes, factor, out=torch.empty_like(codes, dtype=torch.float16)).tolist() == [[1.5, 1.5]]
    except Exception as error:  # whatever the backend raises
        if is_out_of_memory(error):
            raise
        return False


INT8 = register(
    Format(
        name="int8",
        storage_dtype_name="int8",
        largest=float(_LARGEST),
        scale_of=_scale_of,
        encode=_encode,
        decode=_decode,
    )
)
