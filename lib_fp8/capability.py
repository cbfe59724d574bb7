"""What this torch can do on a device, probed and never read off a version number; and its words for "out of memory"."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch


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


_OUT_OF_MEMORY_TYPES = (MemoryError, torch.cuda.OutOfMemoryError, getattr(torch, "OutOfMemoryError", MemoryError))
_OUT_OF_MEMORY = (
    "out of memory",  # CUDA, HIP, MPS, XPU
    "out_of_memory",  # the CUDA driver: CUDA_ERROR_OUT_OF_MEMORY
    "outofmemory",  # hipErrorOutOfMemory, DirectX's E_OUTOFMEMORY
    "alloc_failed",  # cuBLAS, cuDNN, cuSOLVER, hipBLAS: CUBLAS_STATUS_ALLOC_FAILED
    "allocfailed",  # MIOpen: miopenStatusAllocFailed
    "rocblas_status_memory_error",
    "out_of_device_memory",  # Level Zero, which XPU computes with
    "out_of_host_memory",
    "out_of_resources",
    "could not allocate tensor",  # DirectML
    "not enough gpu video memory",
    "failed to allocate private mtlbuffer",  # MPS
    "invalid buffer size:",
    "can't allocate memory",  # torch's allocator for the CPU
    "not enough memory",  # the same on Windows
    "cannot allocate memory",  # Linux and macOS, when a file is mapped
    "os error 1455",  # Windows: the paging file is too small
    "bad allocation",  # C++
    "bad_alloc",
)
"""Words of the allocators of devices and of the machine, in lower case."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, of a device or of the machine."""
    if isinstance(error, _OUT_OF_MEMORY_TYPES):
        return True
    said = str(error).lower()
    return any(words in said for words in _OUT_OF_MEMORY)
