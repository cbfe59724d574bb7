"""What a checkpoint file says about itself, read by ordinary reads: no memory map, no unpickling, no values."""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch

LONGEST_HEADER = 100_000_000
"""Bytes; the limit that safetensors has itself."""

BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""Bits of one value, by the dtype names of safetensors."""

_IN_TORCH = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, in_torch) for name, in_torch in _IN_TORCH.items() if hasattr(torch, in_torch)
}
"""The dtypes that this torch has, by the dtype names of safetensors."""
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_LONGEST_ZIP_END = 22 + 65535 + 20 + 56  # end record, comment, and the two records of a large archive


class DamagedError(Exception):
    """A file was read and found wrong; one line says how."""


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor without its values.

    Attributes:
        dtype: its name in safetensors, such as ``F8_E4M3``.
        shape: its shape.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Header:
    """What a checkpoint says about itself.

    Attributes:
        tensors: by name; empty where only the values would tell.
        metadata: the texts that a safetensors file carries.
        spans: where in the file the bytes of each tensor begin and end.
        is_gguf: whether it is a GGUF file; nothing else is known of it then.
    """

    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    is_gguf: bool = False


def header_of_file(path: str | os.PathLike[str]) -> Header:
    """The header of a checkpoint of any kind. That of a pickled one is empty: it names its tensors as it is unpickled.

    Raises:
        DamagedError: the file is not what its name says, or not whole.
        OSError: it cannot be opened or read.
    """
    with Path(path).open("rb") as file:
        head = file.read(4)
        if head == b"GGUF":
            return Header(is_gguf=True)
        if Path(path).suffix.lower() == ".safetensors":
            return read_header(file)
        if head == b"PK\x03\x04" and not zipfile.is_zipfile(io.BytesIO(_end(file))):
            raise DamagedError("the zip archive has no index")
        if not head.startswith((b"PK\x03\x04", b"\x80")):
            raise DamagedError("it is neither a zip archive nor a pickle")
        return Header()


def header_of_tensors(state_dict: Mapping[str, Any]) -> Header:
    """The header that a file with these tensors would have; what is no tensor is passed over."""
    return Header(
        {
            name: TensorInfo(_NAMES.get(value.dtype, str(value.dtype)), tuple(value.shape))
            for name, value in state_dict.items()
            if isinstance(name, str) and torch.is_tensor(value)
        }
    )


def read_header(file: BinaryIO) -> Header:
    """The header of a safetensors file, after the checks that safetensors makes: every byte belongs to one tensor.

    A dtype that is not known passes: a later safetensors may know it.

    Raises:
        DamagedError: the file is not whole, or no safetensors file.
        OSError: it cannot be read.
    """
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    if length < 8 or size > min(length - 8, LONGEST_HEADER):
        raise DamagedError(f"its header should take {size} bytes, the file has {length}")
    entries = _parse(file.read(size))
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise DamagedError("its metadata are not texts")
    tensors, spans = {}, {}
    for name, entry in entries.items():
        tensors[name], (begin, end) = _tensor(name, entry)
        spans[name] = 8 + size + begin, 8 + size + end
    position = 8 + size
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != position:
            raise DamagedError(f"{name} begins at byte {begin}, not at {position} where the tensor before it ends")
        position = end
    if position != length:
        raise DamagedError(f"it should have {position} bytes and has {length}")
    return Header(tensors, metadata, spans)


def _end(file: BinaryIO) -> bytes:
    length = file.seek(0, os.SEEK_END)
    file.seek(max(0, length - _LONGEST_ZIP_END))
    return file.read()


def _parse(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise DamagedError("it is no safetensors file")
    try:
        return json.loads(text, object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"its header cannot be read: {error}") from None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise DamagedError(f"its header names {next(name for name in names if names.count(name) > 1)} twice")
    return found


def _tensor(name: str, entry: Any) -> tuple[TensorInfo, tuple[int, int]]:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]}:
            pass
        case _:
            raise DamagedError(f"its header does not say what {name} is")
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)) or begin > end:
        raise DamagedError(f"its header gives {name} an impossible shape or place")
    bits = BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits != (end - begin) * 8:
        raise DamagedError(f"{name} has {end - begin} bytes, which do not hold {dtype} values of shape {shape}")
    return TensorInfo(dtype, tuple(shape)), (begin, end)
