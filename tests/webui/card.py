"""A graphics card that is none: its tensors are wrappers around tensors of the CPU, with a device of their own.

The device is called "meta", since that is the only one besides the CPU that every torch has. Values survive there,
what crosses over is counted, and memory runs out. Nothing can be built on torch's real meta device meanwhile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from lib_fp8 import QuantWeight

CARD = torch.device("meta")
_CROSSES_OVER = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class OnCard(torch.Tensor):
    """A tensor on the card; ``inner`` is on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, card: Card) -> OnCard:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CARD,
        )

    def __init__(self, inner: torch.Tensor, card: Card):
        self.inner, self.card = inner, card

    def __repr__(self, **_: Any) -> str:
        return f"OnCard({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        card = next(value.card for value in tree_flatten((args, kwargs))[0] if isinstance(value, cls))
        return card.run(func, args, kwargs or {})


class Card(TorchDispatchMode):
    """The card, as a context; ``.to(CARD)`` works inside.

    Attributes:
        capacity: bytes at which nothing more can be moved there, None for any number; computing needs none.
        crossed: ``(number of bytes, name of the device they came to)`` of everything that was moved.
    """

    def __init__(self, capacity: int | None = None):
        super().__init__()
        self.capacity = capacity
        self.crossed: list[tuple[int, str]] = []
        self._storages: dict[StorageWeakRef, int] = {}

    @property
    def used(self) -> int:
        """Bytes that are held now."""
        self._storages = {ref: size for ref, size in self._storages.items() if not ref.expired()}
        return sum(self._storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        values = tree_flatten((args, kwargs))[0]
        if any(isinstance(value, QuantWeight) for value in values):
            with self:
                return QuantWeight.__torch_dispatch__(func, types, args, kwargs)
        if func.overloadpacket is torch.ops.aten.to:  # arrives whole if it was called from within an op
            with self:
                return func.decompose(*args, **kwargs)
        if any(isinstance(value, OnCard) for value in values) or kwargs.get("device") == CARD:
            return self.run(func, args, kwargs)
        return func(*args, **kwargs)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op of which something is on the card, or comes to it."""
        tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
        on_card = [tensor for tensor in tensors if isinstance(tensor, OnCard)]
        device = kwargs.get("device")
        stays = bool(on_card) if device is None else device == CARD
        if func in _CROSSES_OVER:
            source, target = tensors[-1], CARD if isinstance(tensors[0], OnCard) and device is None else device
            if isinstance(source, OnCard) != (target == CARD):
                size = source.numel() * source.element_size()
                if target == CARD and self.capacity is not None and self.used + size > self.capacity:
                    raise torch.cuda.OutOfMemoryError(f"CUDA out of memory, said the card of {self.capacity} bytes")
                self.crossed.append((size, str(target)))
        elif any(tensor.dim() > 0 and not isinstance(tensor, OnCard) for tensor in tensors):
            raise RuntimeError("Expected all tensors to be on the same device, but some are on the CPU")
        wrappers = {id(tensor.inner): tensor for tensor in on_card}
        if device is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        result = _compute(func, *tree_map(_inner, (args, kwargs)))
        return (
            tree_map(lambda value: self._place(value) if id(value) not in wrappers else wrappers[id(value)], result)
            if stays
            else result
        )

    def _place(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        self._storages[StorageWeakRef(storage)] = storage.nbytes()
        return OnCard(value, self)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnCard) else value


def _compute(func: Any, args: Any, kwargs: Any) -> Any:
    """In half precision too, for which an old torch has no kernels on the CPU."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if "'Half'" not in str(error):
            raise
    wide = tree_map(lambda value: _cast(value, torch.float16, torch.float32), (args, kwargs))
    return tree_map(lambda value: _cast(value, torch.float32, torch.float16), func(*wide[0], **wide[1]))


def _cast(value: Any, before: torch.dtype, after: torch.dtype) -> Any:
    return value.to(after) if isinstance(value, torch.Tensor) and value.dtype == before else value
