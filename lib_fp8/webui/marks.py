"""What a parameter is known by after it was written to, so that a write by others is noticed."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lib_fp8.qweight import Contents, QuantWeight


class Verdict(enum.Enum):
    """What became of a parameter since it was marked.

    Attributes:
        SAME: it holds the same values, wherever it was moved.
        BUILT_ON: others wrote into it in place, on top of what it held.
        REPLACED: others gave it other values as a whole, or took it away.
    """

    SAME = enum.auto()
    BUILT_ON = enum.auto()
    REPLACED = enum.auto()


class Mark(Protocol):
    """What one parameter is known by."""

    def is_on(self, parameter: torch.Tensor | None) -> bool:
        """Whether nobody has written, by identity alone; a parameter that was only moved may need the verdict."""

    def verdict(self, parameter: torch.Tensor | None, thoroughly: bool) -> Verdict:
        """What became of the parameter.

        Args:
            parameter: as it is now.
            thoroughly: whether values that were written in place count as replaced. Those of a plain parameter are
                looked at only then, since torch does not tell what was written into it.
        """


@dataclass(frozen=True)
class QuantWeightMark:
    """Attributes:
    contents: what it holds.
    branches: how many it has.
    pending: what it is known by while it is being written, which may break off.
    """

    contents: Contents
    branches: int
    pending: Contents | None = None

    def is_on(self, parameter: torch.Tensor | None) -> bool:
        return (
            isinstance(parameter, QuantWeight)
            and parameter.contents is self.contents
            and len(parameter.branches) == self.branches
        )

    def verdict(self, parameter: torch.Tensor | None, thoroughly: bool) -> Verdict:
        if not isinstance(parameter, QuantWeight):
            return Verdict.REPLACED
        if self.is_on(parameter) or parameter.contents is self.pending:
            return Verdict.SAME
        built_on = parameter.contents is not self.contents and parameter.contents.derives_from(self.contents)
        return Verdict.BUILT_ON if built_on and not thoroughly else Verdict.REPLACED


@dataclass(frozen=True)
class _PlainMark:
    """Attributes:
    storage: the memory it lies in, which is not kept for that.
    sums: of its values, the same on every device and in every dtype that holds them.
    """

    storage: StorageWeakRef
    sums: tuple[int, ...]

    def is_on(self, parameter: torch.Tensor | None) -> bool:
        return (
            parameter is not None
            and not isinstance(parameter, QuantWeight)
            and parameter.untyped_storage()._cdata == self.storage.cdata
        )

    def verdict(self, parameter: torch.Tensor | None, thoroughly: bool) -> Verdict:
        if parameter is None or isinstance(parameter, QuantWeight):
            return Verdict.REPLACED
        if parameter.is_meta or (self.is_on(parameter) and not thoroughly):
            return Verdict.SAME
        return Verdict.SAME if _sums(parameter) == self.sums else Verdict.REPLACED

    def __deepcopy__(self, memo: object) -> _PlainMark:
        return self  # a weak reference to memory cannot be copied by value


@dataclass(frozen=True)
class _NoneMark:
    def is_on(self, parameter: torch.Tensor | None) -> bool:
        return parameter is None

    def verdict(self, parameter: torch.Tensor | None, thoroughly: bool) -> Verdict:
        return Verdict.SAME if parameter is None else Verdict.REPLACED


def mark_of(parameter: torch.Tensor | None, pending: Contents | None = None) -> Mark:
    """The mark of a parameter as it is now.

    Args:
        parameter: None where a layer has none.
        pending: what a weight in 8 bits will be known by while it is being written.
    """
    if parameter is None:
        return _NoneMark()
    if isinstance(parameter, QuantWeight):
        return QuantWeightMark(parameter.contents, len(parameter.branches), pending)
    return _PlainMark(StorageWeakRef(parameter.untyped_storage()), _sums(parameter))


def _sums(parameter: torch.Tensor) -> tuple[int, ...]:
    """Sums over the bits of all values in float16, weighted by row and by column; integers are exact everywhere.

    Half precision is what a parameter may pass through and come back from (``manual_cast``).
    """
    values = parameter.detach()
    if values.device.type not in ("cpu", "cuda"):
        values = values.cpu()  # others lack integers of 64 bits
    bits = values.to(torch.float16).contiguous().view(torch.int16).reshape(len(values), -1)
    return tuple(int(_weighted(bits.sum(axis, dtype=torch.int64))) for axis in (0, 1))


def _weighted(sums: torch.Tensor) -> torch.Tensor:
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()
