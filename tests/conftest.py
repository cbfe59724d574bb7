"""Shared fixtures: the formats this torch has, the logical dtypes, and the devices of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lib_fp8 import format_names, get_format  # noqa: E402

LOGICAL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=_devices())
def device(request):
    return torch.device(request.param)


@pytest.fixture(params=format_names())
def storage_format(request, device):
    """Every registered format; skipped, with the reason, where the device cannot hold it."""
    found = get_format(request.param)
    if (problem := found.problem(device)) is not None:
        pytest.skip(problem)
    return found


@pytest.fixture(params=LOGICAL_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def logical_dtype(request):
    return request.param


@pytest.fixture
def rng():
    """A seeded generator; the global one stays untouched."""
    return torch.Generator().manual_seed(20240607)
