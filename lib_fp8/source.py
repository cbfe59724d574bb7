"""Where the original of a layer comes from: the checkpoint file, read tensor by tensor when it is needed, or a copy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from safetensors import SafetensorError, safe_open

from lib_fp8.checkpoint.header import DamagedError, Header, read_header
from lib_fp8.checkpoint.tensors import read_tensor
from lib_fp8.quantize import pack
from lib_fp8.qweight import Contents, QuantWeight

Signature = tuple[int, ...]
"""What tells one file from another, and from itself after it was written to."""


def signature_of(file: str | os.PathLike[str] | int) -> Signature | None:
    """The signature of a file, by its path or its descriptor; None if there is none."""
    try:
        stat = os.fstat(file) if isinstance(file, int) else Path(file).stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns, stat.st_dev, stat.st_ino


Tensors = dict[str, torch.Tensor]


class CheckpointFile:
    """A safetensors checkpoint from which single tensors are read: through a memory map, or where the disk cannot be
    mapped by ordinary reads.

    Nothing is read before the first tensor is asked for, and nothing is kept. While the file is open, it stays
    readable even if it is deleted or another is put in its place (Windows lets nobody do that). Once its content was
    written to, or another file had taken its place before it was opened, no tensor is given any more.

    Args:
        path: the file. Any other kind of checkpoint gives no tensors.
        rename: ``(tensors by the file's names) -> tensors by the model's names``; told shapes only, no values.
        mapped: whether a memory map is wanted.
    """

    def __init__(self, path: str | os.PathLike[str], rename: Callable[[Tensors], Tensors] = dict, mapped: bool = True):
        self.path = Path(path)
        self._rename = rename
        self._wants_map = mapped
        self._held: BinaryIO | None = None
        self._signature = self._read_signature()
        self._header = Header()
        self._map: Any = None
        self._names: dict[str, str] = {}
        self._failure: str | None = None

    def _read_signature(self) -> Signature | None:
        """Of the file that is held, else of the one that lies there now."""
        return signature_of(self.path if self._held is None else self._held.fileno())

    @property
    def is_open(self) -> bool:
        """Whether the file is held."""
        return self._held is not None

    def problem(self) -> str | None:
        """One line that says why no originals can be read, or None."""
        if self.path.suffix.lower() != ".safetensors":
            return f"{self.path.name} is no safetensors file"
        if self._signature is None or self._read_signature() != self._signature:
            return f"{self.path.name} has changed on disk or cannot be read"
        return self._failure

    def tensor(self, name: str) -> torch.Tensor | None:
        """The tensor of that name in the model, on the CPU; None if the file does not have it or cannot be trusted."""
        if self.problem() is not None:
            return None
        try:
            if self._held is None:
                self._open()
            key = self._names.get(name)
            return None if key is None or self.problem() is not None else self._read(key)
        except (OSError, DamagedError, SafetensorError, TypeError) as error:
            self.close()
            self._failure = f"{self.path.name} cannot be read ({error})"
            return None

    def _open(self) -> None:
        memory_map = self._try_map() if self._wants_map else None
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(self.path.open("rb"))
            header = read_header(file)
            shapes = {key: torch.empty(info.shape, device="meta") for key, info in header.tensors.items()}
            key_of = {id(shape): key for key, shape in shapes.items()}
            renamed = self._rename(dict(shapes))
            self._names = {name: key_of[id(shape)] for name, shape in renamed.items() if id(shape) in key_of}
            stack.pop_all()
        self._held, self._header, self._map = file, header, memory_map

    def _try_map(self) -> Any:
        """None where it cannot be mapped, whatever the reason: reading the file shows whether it is the file."""
        try:
            return safe_open(self.path, framework="pt", device="cpu")
        except (OSError, MemoryError, RuntimeError, SafetensorError):
            return None

    def _read(self, key: str) -> torch.Tensor:
        if self._map is not None:
            return self._map.get_tensor(key)
        assert self._held is not None
        return read_tensor(self._held, self._header, key)

    def try_again(self) -> None:
        """Forget that reading has failed."""
        self._failure = None

    def close(self) -> None:
        """Let go of the file; the next tensor opens it again."""
        if self._held is not None:
            self._held.close()
        self._held = self._map = None
        self._header, self._names = Header(), {}


class Original(NamedTuple):
    """The weight of a layer as it was loaded, before it was rounded to 8 bits.

    Attributes:
        value: in the dtype that was packed, on the device of the layer.
        source: ``FILE`` or ``COPY``.
    """

    value: torch.Tensor
    source: str


FILE = "checkpoint file"
COPY = "copy in RAM"


class Copies:
    """Weights as they were before packing, on the CPU."""

    def __init__(self) -> None:
        self._weights: WeakKeyDictionary[torch.nn.Module, torch.Tensor] = WeakKeyDictionary()

    def keep(self, layer: torch.nn.Module, weight: torch.Tensor) -> None:
        """Copy the weight of a layer."""
        self._weights[layer] = weight.detach().to("cpu", copy=True)

    def get(self, layer: torch.nn.Module) -> torch.Tensor | None:
        """The weight of a layer; None if it was not kept."""
        return self._weights.get(layer)


class Originals:
    """The originals of the layers of one model.

    Args:
        file: the checkpoint that the weights came from.
        dtype: dtype to which they were rounded before packing, None if they were not.
        copies: where to look first.

    Attributes:
        names: layer to the name of its weight in the model.
        file: as given.
    """

    def __init__(self, file: CheckpointFile, dtype: torch.dtype | None, copies: Copies | None = None):
        self.file = file
        self.names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._dtype = dtype
        self._copies = copies or Copies()
        self._trusted: WeakKeyDictionary[torch.nn.Module, Contents | None] = WeakKeyDictionary()
        self._strangers: WeakSet[torch.nn.Module] = WeakSet()

    def problem(self) -> str | None:
        """One line that says why 8-bit weights have no original, as far as they were looked for, or None."""
        if (problem := self.file.problem()) is not None or not self._strangers:
            return problem
        return f"{self.file.path.name} does not hold the weights of {len(self._strangers)} layers as they are in memory"

    def drop_copies(self) -> None:
        """Look in the file alone from now on."""
        self._copies = Copies()
        self._trusted.clear()

    def release(self) -> None:
        """Let go of the file; what it gives after that must prove itself again. Copies are as good as before."""
        if self.file.is_open:
            self.file.close()
            for layer in list(self._trusted):
                if self._copies.get(layer) is None:
                    del self._trusted[layer]

    def find(self, layer: torch.nn.Module, parameter: torch.Tensor) -> Original | None:
        """The original of a weight in which nothing is merged, None if there is none that can be trusted.

        A source is trusted as long as a weight has the contents that it gave, once, to the bit. A plain weight cannot
        be told from itself after others wrote to it, and is compared each time.

        Args:
            layer: the layer.
            parameter: its weight.
        """
        original = self._look_up(layer, parameter)
        contents = parameter.contents if isinstance(parameter, QuantWeight) else None
        if original is not None and not (contents is not None and self._trusts(layer, contents)):
            if _holds(parameter, original.value):
                self._trusted[layer] = contents
            else:
                self._trusted.pop(layer, None)
                original = None
        if original is not None:
            self._strangers.discard(layer)
        elif contents is not None and self.file.problem() is None:
            self._strangers.add(layer)
        return original

    def find_again(self, layer: torch.nn.Module, parameter: torch.Tensor, contents: Contents | None) -> Original | None:
        """The original of a weight that was changed after ``find`` had found it, None if it cannot be had any more.

        Args:
            layer: the layer.
            parameter: its weight.
            contents: what it held before it was changed; None for a plain weight.
        """
        return self._look_up(layer, parameter) if self._trusts(layer, contents) else None

    def _trusts(self, layer: torch.nn.Module, contents: Contents | None) -> bool:
        return layer in self._trusted and self._trusted[layer] is contents

    def _look_up(self, layer: torch.nn.Module, parameter: torch.Tensor) -> Original | None:
        value, source = self._copies.get(layer), COPY
        if value is None:
            value, source = self._from_file(layer), FILE
        if value is None or value.shape != parameter.shape or not value.is_floating_point():
            return None
        return Original(value.to(parameter.device, self._dtype), source)

    def _from_file(self, layer: torch.nn.Module) -> torch.Tensor | None:
        name = self.names.get(layer)
        return None if name is None else self.file.tensor(name)


def _holds(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    if isinstance(parameter, QuantWeight):
        return parameter.same_bits(pack(value, parameter.format))
    return torch.equal(parameter, value.to(parameter.dtype))
