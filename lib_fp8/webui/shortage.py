"""Memory that runs out while layers are packed: nothing is done then that would take more of it."""

from __future__ import annotations

from lib_fp8 import ConversionError
from lib_fp8.capability import is_out_of_memory

_ADVICE = (
    "Nothing is loaded in full precision instead, which would take more memory. Free some (close other programs, keep "
    "fewer models in memory, start with --medvram or --lowvram) and try again"
)


def is_shortage(error: ConversionError) -> bool:
    """Whether a conversion failed for want of memory."""
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def stop_at_shortage(error: ConversionError) -> None:
    """Raise a conversion that failed for want of memory again, with advice; do nothing about any other."""
    if is_shortage(error):
        raise ConversionError(f"{error}. {_ADVICE}", whole=error.whole) from error.__cause__
