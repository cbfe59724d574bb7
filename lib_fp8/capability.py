"""What this torch and this device can do with 8-bit dtypes: probed once, never read off a version number."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

_PROBE_VALUES = (0.5, -2.0, 0.0, 96.0)
"""Values that every 8-bit dtype offered here holds exactly, so that a round trip shows whether casts work."""


@functools.lru_cache(maxsize=None)
def storage_problem(dtype_name: str, device_type: str) -> str | None:
    """Say why a device cannot store and cast a dtype; None if it can.

    Args:
        dtype_name: name of the dtype in torch, such as ``float8_e4m3fn``.
        device_type: ``cpu``, ``cuda``, ``mps``, ...; ``meta`` stores whatever torch knows.

    Returns:
        One line for the user, or None. The answer is cached: a device does not learn while it runs.
    """
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        return f"torch {torch.__version__} has no {dtype_name}"
    if device_type == "meta" or not dtype.is_floating_point:
        return None
    try:
        values = torch.tensor(_PROBE_VALUES).to(device_type)
        stored = torch.empty_like(values, dtype=dtype).copy_(values.to(dtype))
        moved = stored.clone().cpu().to(device_type)
        back = [moved.to(other).float().cpu().tolist() for other in (torch.float32, torch.float16)]
    except Exception as error:  # whatever the backend raises, the answer is the same: not here
        if is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        return f"{device_type} cannot hold {dtype_name} ({reason})"
    if any(values != list(_PROBE_VALUES) for values in back):
        return f"{device_type} does not cast {dtype_name} correctly"
    return None


@functools.lru_cache(maxsize=None)
def can_make_zeros(dtype: torch.dtype, device_type: str) -> bool:
    """Whether a parameter on the meta device can be made a real one of a dtype; torch 2.1 cannot with float8."""
    try:
        torch.zeros_like(torch.empty(1, device="meta"), device=device_type, dtype=dtype)
    except Exception as error:  # whatever the backend raises
        if is_out_of_memory(error):
            raise
        return False
    return True


def _query_autocast(device_type: str) -> bool:
    try:
        return torch.is_autocast_enabled(device_type)
    except RuntimeError:  # a device without autocast, such as meta
        return False


def _query_autocast_before_2_4(device_type: str) -> bool:
    query = {
        "cpu": torch.is_autocast_cpu_enabled,
        "cuda": torch.is_autocast_enabled,
        "xpu": getattr(torch, "is_autocast_xpu_enabled", None),
        "hpu": getattr(torch, "is_autocast_hpu_enabled", None),
    }.get(device_type)
    return query() if query is not None else False


def _accepts_device_type() -> bool:
    try:
        torch.is_autocast_enabled("cpu")
    except TypeError:
        return False
    return True


autocast_enabled = _query_autocast if _accepts_device_type() else _query_autocast_before_2_4
"""``autocast_enabled(device_type) -> bool``: whether autocast acts on that kind of device in this thread."""


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """A context in which autocast does not act on that kind of device."""
    # Where autocast does not act, it may not even exist: older torch refuses to switch it off on MPS.
    return torch.autocast(device_type, enabled=False) if autocast_enabled(device_type) else contextlib.nullcontext()


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""The words of the allocators of CUDA and MPS, of the CPU, and of CUDA's libraries."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, of a device or of the machine."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY)
