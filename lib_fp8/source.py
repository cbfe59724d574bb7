"""Where the original of a layer comes from: the checkpoint file, read tensor by tensor when it is needed."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open


def checkpoint_damage(path: str | os.PathLike[str]) -> str | None:
    """One line that says why a checkpoint cannot be read as a whole, or None; reads its index only.

    A safetensors file states its own length, and a zip archive (what torch.save writes) ends with its index, so a
    download that broke off shows in both.
    """
    try:
        if Path(path).suffix.lower() == ".safetensors":
            with safe_open(path, framework="pt"):
                return None
        with Path(path).open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        return "the zip archive has no index" if is_zip and not zipfile.is_zipfile(path) else None
    except (OSError, SafetensorError) as error:
        return str(error)


class CheckpointFile:
    """A safetensors checkpoint from which single tensors are read through a memory map.

    Nothing is read before the first tensor is asked for, and nothing is kept. Once the file on disk has changed,
    no tensor is given any more.

    Args:
        path: the file. Any other kind of checkpoint gives no tensors.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._signature = self._read_signature()
        self._file: Any = None
        self._keys: frozenset[str] = frozenset()

    def _read_signature(self) -> tuple[int, int] | None:
        try:
            stat = self.path.stat()
        except OSError:
            return None
        return stat.st_size, stat.st_mtime_ns

    def problem(self) -> str | None:
        """One line that says why no originals can be read, or None."""
        if self.path.suffix.lower() != ".safetensors":
            return f"{self.path.name} is no safetensors file"
        if self._signature is None or self._read_signature() != self._signature:
            return f"{self.path.name} has changed on disk or cannot be read"
        return None

    def tensor(self, key: str) -> torch.Tensor | None:
        """The tensor of that name, on the CPU; None if the file does not have it or cannot be trusted."""
        if self.problem() is not None:
            return None
        try:
            if self._file is None:
                self._file = safe_open(self.path, framework="pt", device="cpu")
                self._keys = frozenset(self._file.keys())
            return self._file.get_tensor(key) if key in self._keys else None
        except (OSError, SafetensorError):
            return None

    def close(self) -> None:
        """Let go of the memory map; the next tensor opens it again."""
        self._file = None
