"""How alike two pictures or latents are, and how much memory is held; pure functions, nothing of lib_fp8 in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from skimage import metrics
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


def psnr(wanted: np.ndarray, got: np.ndarray) -> list[float]:
    """Peak signal-to-noise ratio of each picture, in dB; infinite where nothing differs. uint8 (n, h, w, 3)."""
    with np.errstate(divide="ignore"):
        return [float(metrics.peak_signal_noise_ratio(a, b, data_range=255)) for a, b in zip(wanted, got)]


def ssim(wanted: np.ndarray, got: np.ndarray) -> list[float]:
    """Structural similarity of each picture, 1 at best. uint8 (n, h, w, 3)."""
    return [float(metrics.structural_similarity(a, b, channel_axis=2, data_range=255)) for a, b in zip(wanted, got)]


def strength(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """How long `got` is in the direction of `wanted`, against `wanted` itself: 1 if nothing is lost. In float64."""
    a, b = wanted.double().flatten(), got.double().flatten()
    return (a @ b / (a @ a)).item()


def cosine(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Cosine of the angle between two tensors seen as vectors, in float64."""
    a, b = wanted.double().flatten(), got.double().flatten()
    return (a @ b / (a.norm() * b.norm())).item()


def signal_to_noise(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """10 log10(signal power / error power), in dB."""
    error = (got.double() - wanted.double()).pow(2).mean().item()
    return math.inf if error == 0 else 10 * math.log10(wanted.double().pow(2).mean().item() / error)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors inside a wrapper of any of the libraries measured, or the tensor itself."""
    names = ("qdata", "scale", "_data", "_scale")
    found = [getattr(tensor, name, None) for name in names] if type(tensor).__name__ != "Parameter" else []
    inner = [part for part in found if isinstance(part, torch.Tensor)]
    yield from inner or [tensor]


def stored_bytes(model: torch.nn.Module) -> int:
    """Bytes of all distinct storages, counted here and not by the libraries measured."""
    tensors = (part for tensor in (*model.parameters(), *model.buffers()) for part in parts_of(tensor))
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class _LiveBytes(TorchDispatchMode):
    """Follows the storages that operations make, and remembers the most that lived at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        wrapped = [kind for kind in types if kind not in (torch.Tensor, torch.nn.Parameter)]
        if wrapped:
            with self:
                return wrapped[0].__torch_dispatch__(func, types, args, kwargs)
        result = func(*args, **kwargs)
        for value in tree_flatten(result)[0]:
            if type(value) in (torch.Tensor, torch.nn.Parameter):
                self.note(value.untyped_storage())
        self.update_peak()
        return result

    def note(self, storage: torch.UntypedStorage) -> None:
        """Count a storage for as long as it lives."""
        self.storages.setdefault(StorageWeakRef(storage), storage.nbytes())

    def update_peak(self) -> None:
        """Forget what has died, and compare what lives with the most so far."""
        self.storages = {ref: size for ref, size in self.storages.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.storages.values()))


def peak_bytes(model: torch.nn.Module, work: Callable[[], Any]) -> int:
    """Bytes of the model, and of what operations make beside it, at the worst moment while `work` runs."""
    live = _LiveBytes()
    for tensor in (*model.parameters(), *model.buffers()):
        for part in parts_of(tensor):
            live.note(part.untyped_storage())
    live.update_peak()
    with live:
        work()
    return live.peak
