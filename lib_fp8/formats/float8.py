"""float8 formats: one power-of-two scale per output channel, and the unscaled cast that the WebUI itself uses.

A power of two costs no accuracy in a floating format and makes ``q * scale`` exact, so that decoding to float16
gives the same values as decoding to float32 and rounding. Scales are float32: they follow a row to wherever float32
does, far beyond the powers that float16 has. The ranges are those of the OCP 8-bit floating point
specification: e4m3fn reaches 448 and has no infinity, e5m2 reaches 57344.
"""

from __future__ import annotations

import functools

import torch

from lib_fp8.formats.base import Format, register

_STEP_OF_FLOAT32 = 2.0**-149  # its smallest positive number; a smaller step is of no use


def _power_of_two_scale(absmax: torch.Tensor, *, largest: float, step: float) -> torch.Tensor:
    """The smallest power of two s with absmax / s <= largest; 1 for a row of zeros."""
    wanted = (absmax / largest).clamp_(min=_STEP_OF_FLOAT32 / step)
    mantissa, exponent = torch.frexp(wanted)  # wanted = mantissa * 2**exponent, mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scale = torch.ldexp(torch.ones_like(absmax), exponent)
    # No scale is zero, not even where a device takes subnormals for zero.
    return torch.where((absmax > 0) & (scale > 0), scale, torch.ones_like(scale))


def _encode(weight: torch.Tensor, scale: torch.Tensor | None, *, dtype_name: str, largest: float) -> torch.Tensor:
    # Clamp first: what an overflowing cast gives (NaN, infinity, the largest value) depends on the torch version.
    scaled = weight if scale is None else weight.div_(scale)
    return scaled.clamp_(-largest, largest).to(getattr(torch, dtype_name))


def _decode(qdata: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    weight = qdata.to(dtype)
    return weight if scale is None else weight.mul_(scale)


def _float8(name: str, dtype_name: str, largest: float, step: float, *, bits: int, scaled: bool) -> Format:
    return register(
        Format(
            name=name,
            storage_dtype_name=dtype_name,
            largest=largest,
            scale_of=functools.partial(_power_of_two_scale, largest=largest, step=step) if scaled else None,
            encode=functools.partial(_encode, dtype_name=dtype_name, largest=largest),
            decode=_decode,
            significant_bits=bits,
        )
    )


E4M3FN = _float8("float8_e4m3fn", "float8_e4m3fn", 448.0, 2.0**-9, bits=4, scaled=True)
E5M2 = _float8("float8_e5m2", "float8_e5m2", 57344.0, 2.0**-16, bits=3, scaled=True)
E4M3FN_UNSCALED = _float8("float8_e4m3fn unscaled", "float8_e4m3fn", 448.0, 2.0**-9, bits=4, scaled=False)
