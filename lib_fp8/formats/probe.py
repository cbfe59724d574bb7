"""Whether a device can do what a format needs: tried with a few values, never read off a version number."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from lib_fp8.capability import is_out_of_memory

if TYPE_CHECKING:
    from lib_fp8.formats.base import Format

_ROWS = ((96.0, -0.5, 2.0, 0.0), (0.0, 0.0, 0.0, 0.0), (-0.75, 0.5, 0.25, -0.125))
"""A small weight whose values every floating format here holds exactly, and int8 within half a step."""
_STEP = 1 / 127
"""Of int8, as a share of the largest value of a row; rounding to bfloat16 may take some of the other half."""


@functools.lru_cache(maxsize=None)
def format_problem(storage_format: Format, device_type: str) -> str | None:
    """Say why a device cannot hold weights in a format, write them and read them; None if it can.

    Args:
        storage_format: the format.
        device_type: ``cpu``, ``cuda``, ``mps``, ...; ``meta`` holds whatever torch knows.

    Returns:
        One line for the user, or None. The answer is cached: a device does not learn while it runs.

    Raises:
        Exception: the device has no memory for trying, which says nothing about the format.
    """
    name = storage_format.storage_dtype_name
    if not isinstance(getattr(torch, name, None), torch.dtype):
        return f"torch {torch.__version__} has no {name}"
    if device_type == "meta":
        return None
    try:
        wrong = _wrong_step(storage_format, device_type)
    except Exception as error:  # whatever the backend raises, the answer is the same: not here
        if is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        return f"{device_type} cannot hold {storage_format.name} ({reason})"
    return None if wrong is None else f"{device_type} does not {wrong} {storage_format.name} correctly"


def _wrong_step(storage_format: Format, device_type: str) -> str | None:
    """Pack, move and decode as weights are; the name of what gives other values than it should."""
    values = torch.tensor(_ROWS)
    weight = values.to(device_type)
    scale = None
    if storage_format.scale_of is not None:
        absmax = weight.abs().amax(1, keepdim=True)
        if not bool(torch.isfinite(absmax).all() & (absmax <= storage_format.top(torch.float32)).all()):
            return "compare"
        scale = storage_format.scale_of(absmax)
    encoded = storage_format.encode(weight.clone(), scale)
    qdata = torch.empty_like(weight, dtype=storage_format.storage_dtype).copy_(encoded)
    moved = qdata.clone().cpu().to(device_type)
    if not torch.equal(moved.view(torch.uint8), qdata.view(torch.uint8)):
        return "move"
    exact = storage_format.significant_bits is not None
    tolerance = 0.0 if exact else values.abs().amax(1, keepdim=True) * _STEP
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if not _has(dtype, device_type):
            continue
        decoded = storage_format.decode(moved, scale, dtype)
        if decoded.dtype != dtype or bool(((decoded.float().cpu() - values).abs() > tolerance).any()):
            return "cast"
    return None


def _has(dtype: torch.dtype, device_type: str) -> bool:
    """Whether a device knows a floating dtype at all; no weight has one that it does not."""
    try:
        return torch.ones(1, device=device_type).to(dtype).float().item() == 1
    except Exception as error:  # whatever the backend raises
        if is_out_of_memory(error):
            raise
        return False
