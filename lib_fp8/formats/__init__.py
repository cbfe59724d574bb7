"""The storage formats: each in a file that registers it. A new format is one new file and its import here."""

from lib_fp8.formats.base import Format, UnknownFormatError, format_names, get_format, register
from lib_fp8.formats.float8 import E4M3FN, E4M3FN_UNSCALED, E5M2
from lib_fp8.formats.int8 import INT8

DEFAULT = E4M3FN
FALLBACKS = (INT8, E4M3FN, E5M2)
"""What takes over where a format cannot be used, the first that can."""

__all__ = [
    "DEFAULT",
    "E4M3FN",
    "E4M3FN_UNSCALED",
    "E5M2",
    "FALLBACKS",
    "INT8",
    "Format",
    "UnknownFormatError",
    "format_names",
    "get_format",
    "register",
]
