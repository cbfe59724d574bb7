"""Tensors of a safetensors file by ordinary reads, for disks that cannot be mapped into memory."""

from __future__ import annotations

import functools
import json
from typing import BinaryIO

import torch
from safetensors import SafetensorError, deserialize

from lib_fp8.checkpoint.header import BITS, TORCH_DTYPES, Header


def read_tensor(file: BinaryIO, header: Header, name: str) -> torch.Tensor:
    """One tensor; the file is read where its bytes are, and nowhere else.

    Args:
        file: a safetensors file.
        header: of that file.
        name: one that the header has.

    Returns:
        A tensor on the CPU with the dtype and shape that the header gives, in memory of its own.

    Raises:
        TypeError: this torch does not have the dtype.
        OSError: the file cannot be read, or has become shorter.
    """
    info, (begin, end) = header.tensors[name], header.spans[name]
    dtype = TORCH_DTYPES.get(info.dtype)
    if dtype is None:
        raise TypeError(f"{name} holds {info.dtype} values, which this torch does not have")
    if begin == end:
        return torch.empty(info.shape, dtype=dtype)
    values = bytearray(end - begin)
    file.seek(begin)
    if file.readinto(values) < len(values):  # type: ignore[attr-defined]
        raise OSError(f"the file ends within {name}")
    return torch.frombuffer(values, dtype=torch.uint8).view(dtype).reshape(info.shape)


@functools.lru_cache(maxsize=None)
def can_be_read(dtype: str) -> bool:
    """Whether the torch and the safetensors that are installed know a dtype, by its name in safetensors."""
    if dtype not in TORCH_DTYPES:
        return False
    header = json.dumps({"eight": {"dtype": dtype, "shape": [8], "data_offsets": [0, BITS[dtype]]}}).encode()
    try:
        deserialize(len(header).to_bytes(8, "little") + header + bytes(BITS[dtype]))
    except SafetensorError:
        return False
    return True
