"""What a storage format is, and the registry in which each format file enters its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lib_fp8.formats.probe import format_problem


class UnknownFormatError(ValueError):
    """A storage format that is not in the registry was asked for."""


@dataclass(frozen=True)
class Format:
    """How a weight is held in 8 bits. The functions have no other effects than those named.

    Attributes:
        name: what users choose, such as ``float8_e4m3fn``.
        storage_dtype_name: dtype of ``qdata`` by its name in torch; an old torch may lack it.
        largest: greatest magnitude that ``qdata`` can hold.
        scale_of: ``(absmax) -> scale``; both (out, 1, ...), absmax finite, both float32.
            None for a format without scales.
        encode: ``(weight, scale) -> qdata`` of the weight's shape; weight is float32 scratch and is overwritten.
        decode: ``(qdata, scale, dtype) -> weight`` of that floating dtype, a new tensor, rounded at most once.
        significant_bits: of the values of a floating format; None for one whose values are evenly spaced.
    """

    name: str
    storage_dtype_name: str
    largest: float
    scale_of: Callable[[torch.Tensor], torch.Tensor] | None
    encode: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    decode: Callable[[torch.Tensor, torch.Tensor | None, torch.dtype], torch.Tensor]
    significant_bits: int | None = None

    @property
    def storage_dtype(self) -> torch.dtype:
        """The dtype of ``qdata``; AttributeError where this torch lacks it (ask ``problem`` first)."""
        return getattr(torch, self.storage_dtype_name)

    def top(self, dtype: torch.dtype) -> float:
        """The greatest magnitude that a scaled weight may have, so that its decoded value is finite in a dtype.

        Of float16 that is 65504, but a float8 would round values above 61440 (or 57344) up to 65536.
        """
        largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        if self.significant_bits is None:
            return largest
        mantissa, exponent = math.frexp(largest)
        return math.ldexp(math.floor(math.ldexp(mantissa, self.significant_bits)), exponent - self.significant_bits)

    def problem(self, device: torch.device | str) -> str | None:
        """One line that says why this format cannot be used on a device, or None if it can; found out by trying."""
        return format_problem(self, torch.device(device).type)


_registry: dict[str, Format] = {}


def register(storage_format: Format) -> Format:
    """Enter a format under its name; a second one of the same name is a programming error (ValueError)."""
    if storage_format.name in _registry:
        raise ValueError(f"format {storage_format.name} is registered twice")
    _registry[storage_format.name] = storage_format
    return storage_format


def get_format(name: str) -> Format:
    """Return the format of that name; UnknownFormatError names the ones that exist."""
    try:
        return _registry[name]
    except (KeyError, TypeError):
        raise UnknownFormatError(f"unknown format {name!r}; choose one of: {', '.join(_registry)}") from None


def format_names() -> tuple[str, ...]:
    """Names of all registered formats, in the order in which they are offered."""
    return tuple(_registry)
