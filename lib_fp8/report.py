"""What a conversion did, measured from the tensors themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from lib_fp8.qweight import QuantWeight

MIB = 1024 * 1024


def _inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if isinstance(tensor, QuantWeight):
        yield from (inner for inner in tensor.packed if inner is not None)
    else:
        yield tensor


def stored_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind tensors, shared storages counted once, those on the meta device not at all."""
    storages = {}
    for tensor in tensors:
        for inner in _inner_tensors(tensor):
            if inner.device.type != "meta":
                storage = inner.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measure(model: torch.nn.Module) -> tuple[int, int]:
    """Bytes of all parameters and buffers: if its QuantWeights were plain weights of their logical dtype, and now."""
    tensors = [*model.parameters(), *model.buffers()]
    packed = [tensor for tensor in tensors if isinstance(tensor, QuantWeight)]
    now = stored_bytes(tensors)
    plain = sum(weight.numel() * weight.element_size() for weight in packed)
    return now - stored_bytes(packed) + plain, now


@dataclass(frozen=True)
class Report:
    """The outcome of converting one model.

    Attributes:
        format: storage format that was used.
        converted: number of layers now held in 8 bits.
        kept: (reason, number of layers) for the layers left in full precision.
        bytes_before: bytes of all parameters and buffers in full precision.
        bytes_after: the same, now.
        seconds: time spent packing.
        notes: lines that the user should read: a format that was replaced, values that were clamped.
    """

    format: str
    converted: int
    kept: tuple[tuple[str, int], ...]
    bytes_before: int
    bytes_after: int
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def kept_count(self) -> int:
        """Number of layers left in full precision."""
        return sum(count for _, count in self.kept)

    @property
    def saved(self) -> int:
        """Bytes saved."""
        return self.bytes_before - self.bytes_after

    def summary(self) -> str:
        """One line: layers, format, sizes."""
        share = self.saved / self.bytes_before if self.bytes_before else 0.0
        return (
            f"{self.converted} layers in {self.format}, {self.kept_count} kept, "
            f"{mebibytes(self.bytes_before)} -> {mebibytes(self.bytes_after)} "
            f"({mebibytes(self.saved)} or {share:.0%} saved, {self.seconds:.1f} s)"
        )


def mebibytes(count: int) -> str:
    """Bytes as users read them, in MiB."""
    return f"{count / MIB:.1f} MB"


def count_reasons(reasons: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """(reason, how often), most frequent first."""
    return tuple(Counter(reasons).most_common())
