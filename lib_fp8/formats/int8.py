"""int8 format: symmetric, one absmax scale per output channel; needs no float8 dtype, so it works everywhere.

The scale is rounded to float16 before the weights are divided by it: decoding to float16 is then one stock torch
kernel, ``int8 * float16``, with one rounding.
"""

from __future__ import annotations

import torch

from lib_fp8.formats.base import Format, register

_LARGEST = 127  # -128 is left out: the format is symmetric
_SMALLEST_SCALE = 2.0**-24  # the smallest positive float16


def _scale_of(absmax: torch.Tensor) -> torch.Tensor:
    scale = (absmax / _LARGEST).clamp(_SMALLEST_SCALE, torch.finfo(torch.float16).max)
    return torch.where(absmax == 0, torch.ones_like(scale), scale).to(torch.float16)


def _encode(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    assert scale is not None
    # int8 has no NaN. pack() gives a row that holds one a scale of NaN, so the code written here does not matter.
    return weight.div_(scale).nan_to_num_(0.0).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)


def _decode(qdata: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    assert scale is not None
    if dtype == scale.dtype:
        return torch.mul(qdata, scale)
    return qdata.to(dtype).mul_(scale)


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
