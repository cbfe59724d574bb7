"""QuantWeight, the truthful tensor: 8-bit data inside; shape, dtype and values of an ordinary weight outside.

Whoever touches it sees a float16, bfloat16 or float32 weight. Computation is intercepted at the level of
``__torch_function__`` (the compute module registers there); at the level of ``__torch_dispatch__`` a few ops act
on the inner tensors, an op that writes into a QuantWeight unpacks, runs and packs in place, and every other op is
given the decoded weight.

What it cannot do: a view (``w.view(-1)``, ``w[0]``, ``w.t()``) is a decoded copy, so writing through a view does
not reach the weight. ``w[index] = value``, ``w[index] += value`` and all whole-tensor in-place ops do. Nor can it
stand behind a plain tensor: ``plain.data = w.data`` and ``torch.utils.dlpack.to_dlpack(w)`` do not ask it and are left
without memory; ``plain.copy_(w)`` and ``torch.from_dlpack(w)`` give values.

Whoever asks for memory wants plain values in it, and keeps a pointer that nobody can take back. So only the values of
a state dict lend memory, for as long as they live: that is how ``safetensors`` reads what it saves. A weight in a
layer lives as long as the model, and would keep its decoded copy as long; it refuses.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from lib_fp8.branch import Branch, with_branches, working_dtype
from lib_fp8.formats import Format
from lib_fp8.quantize import Packed, pack, unpack

LOGICAL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What a QuantWeight can show itself as."""
_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
_OPS: dict[Any, Callable[..., Any]] = {}


def implements_function(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a handler ``(*args, **kwargs)`` for torch functions that receive a QuantWeight."""

    def decorate(handler: Callable[..., Any]) -> Callable[..., Any]:
        _FUNCTIONS.update(dict.fromkeys(functions, handler))
        return handler

    return decorate


def _implements_op(*ops: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(handler: Callable[..., Any]) -> Callable[..., Any]:
        _OPS.update(dict.fromkeys(ops, handler))
        return handler

    return decorate


class Contents:
    """What 8-bit values are known by: copies of a weight share it, another write makes another.

    Args:
        before: what the values were made from by a write in place; None where the write replaced them as a whole.
    """

    __slots__ = ("_origin",)

    def __init__(self, before: Contents | None = None):
        self._origin: object = object() if before is None else before._origin

    def derives_from(self, other: Contents) -> bool:
        """Whether nothing but writes in place lies between these values and the others, whichever came first."""
        return self._origin is other._origin

    def __copy__(self) -> Contents:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Contents:
        return self


class _Shared:
    """What the handles of one weight (detached, aliased) have in common besides the inner tensors."""

    __slots__ = ("branches", "contents", "writes")

    def __init__(self) -> None:
        self.writes = 0
        self.branches: tuple[Branch, ...] = ()
        self.contents = Contents()


_OWN = frozenset(("qdata", "scale", "format", "lends", "_shared", "_lent", "_lent_at", "_is_param"))
"""Attributes of a QuantWeight that belong to its value; others were set by strangers."""


class QuantWeight(torch.Tensor):
    """A weight held in 8 bits, and what is added to it whenever it is decoded.

    ``QuantWeight(packed, storage_format, dtype)`` takes over inner tensors. ``QuantWeight(data, requires_grad, ...)``
    is a Parameter of that data, as those expect who rebuild a parameter by its class, with the attributes it had: an
    8-bit one of a QuantWeight, or where the attributes name a format; a plain one else.

    Attributes:
        qdata: 8-bit data in the storage dtype of the format.
        scale: (out, 1, ...) float32, or None for an unscaled format.
        format: the storage format.
        dtype: the logical dtype: what readers see and what ``dequantize()`` gives.
        lends: whether this handle gives memory with decoded values to whoever asks for it; those of a state dict do.
    """

    qdata: torch.Tensor
    scale: torch.Tensor | None
    format: Format
    lends: bool
    _lent: torch.Tensor | None
    _lent_at: int

    @staticmethod
    def __new__(cls, data: Any, *args: Any, **attributes: Any) -> Any:
        if isinstance(data, torch.Tensor):
            return _parameter(data, *args, **attributes)
        _, dtype = args
        return torch.Tensor._make_wrapper_subclass(
            cls,
            data.qdata.shape,
            strides=data.qdata.stride(),
            dtype=dtype,
            device=data.qdata.device,
            requires_grad=False,
        )

    def __init__(self, data: Packed | torch.Tensor, *args: Any, **attributes: Any):
        if isinstance(data, torch.Tensor):
            return  # a Parameter, which is complete
        self.qdata, self.scale = data
        self.format = args[0]
        self.lends = False
        self._lent, self._lent_at = None, 0
        self._shared = _Shared()

    @classmethod
    def from_weight(
        cls, weight: torch.Tensor, storage_format: Format, absmax: torch.Tensor | None = None
    ) -> QuantWeight:
        """Pack a plain weight; its dtype becomes the logical dtype. Raises what ``pack`` raises.

        Usable with autograd later even when called in inference mode.
        """
        with torch.inference_mode(False):
            return cls(pack(weight, storage_format, absmax), storage_format, weight.dtype)

    @property
    def writes(self) -> int:
        """How often the values were changed, through this tensor or one that shares its inner tensors."""
        return self._shared.writes

    @property
    def contents(self) -> Contents:
        """What the 8-bit values, without branches, are known by."""
        return self._shared.contents

    def set_contents(self, contents: Contents) -> None:
        """Say that the 8-bit values are those that are known by this already."""
        self._shared.contents = contents

    @property
    def branches(self) -> tuple[Branch, ...]:
        """What is added to the 8-bit values whenever they are decoded; in every sense part of the weight's value."""
        return self._shared.branches

    def set_branches(self, branches: tuple[Branch, ...]) -> None:
        """Replace all branches; the 8-bit values stay as they are."""
        self._shared.writes += 1
        self._shared.branches = branches

    @property
    def packed(self) -> Packed:
        """The inner tensors themselves, no copies."""
        return Packed(self.qdata, self.scale)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Decode into a new plain tensor of the logical dtype, or of the floating dtype asked for."""
        dtype = dtype or self.dtype
        if not self.branches:
            return self.without_branches(dtype)
        base = self.without_branches(working_dtype(dtype, self.device))
        return with_branches(base, self.branches).to(dtype)

    def without_branches(self, dtype: torch.dtype) -> torch.Tensor:
        """Decode the 8-bit values alone into a new plain tensor of a floating dtype."""
        return unpack(self.packed, self.format, dtype)

    def store_(self, weight: torch.Tensor, contents: Contents | None = None) -> QuantWeight:
        """Pack a plain weight of the same shape into this tensor, in place, rounding once from the dtype given.

        It is the whole value from then on: the branches are gone. What the logical dtype cannot hold becomes its
        largest value.

        Args:
            weight: the value.
            contents: what it is to be known by.
        """
        packed = pack(weight.detach().to(self.device).expand(self.shape), self.format, dtype=self.dtype)
        self._write(packed, (), Contents() if contents is None else contents)
        return self

    def same_bits(self, packed: Packed) -> bool:
        """Whether the inner tensors hold exactly these bits."""
        if not torch.equal(self.qdata.view(torch.uint8), packed.qdata.to(self.device).view(torch.uint8)):
            return False
        if self.scale is None or packed.scale is None:
            return self.scale is packed.scale
        return torch.equal(self.scale.view(torch.int32), packed.scale.to(self.device).view(torch.int32))

    def _write(self, packed: Packed, branches: tuple[Branch, ...], contents: Contents) -> None:
        # Copied rather than assigned: detached and aliased handles share the inner tensors.
        # Counted here, since torch does not count writes to inner tensors from within a dispatch.
        self.set_branches(branches)
        self.set_contents(contents)
        self.qdata.copy_(packed.qdata)
        if self.scale is not None and packed.scale is not None:
            self.scale.copy_(packed.scale)

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None) -> QuantWeight:
        scale = None if self.scale is None else change(self.scale)
        result = QuantWeight(Packed(change(self.qdata), scale), self.format, dtype or self.dtype)
        result._shared.branches = _on(result.device, self.branches)
        result._shared.contents = self.contents
        result.lends = self.lends
        return result

    # What would otherwise read the wrapper's memory, of which there is none.

    def numpy(self, *, force: bool = False) -> Any:
        return self.dequantize().numpy(force=force)

    def tolist(self) -> Any:
        return self.dequantize().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.dequantize().__array__(dtype)  # always a copy

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.dequantize().__dlpack__(*args, **kwargs)

    def share_memory_(self) -> QuantWeight:
        for inner in self.packed:
            if inner is not None:
                inner.share_memory_()
        return self

    def data_ptr(self) -> int:
        return 0 if self.is_meta else self._lend().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._lend().untyped_storage() if self._may_lend() else super().untyped_storage()

    def storage(self) -> Any:
        return super().storage() if self.is_meta else self._lend().storage()

    def is_shared(self) -> bool:
        return self.qdata.is_shared()

    def _may_lend(self) -> bool:
        return self.lends and not self.is_meta and not getattr(self, "_is_param", False)

    def _lend(self) -> torch.Tensor:
        """The decoded weight as it is now, at an address that stays the same while this handle lives."""
        if not self._may_lend():
            raise RuntimeError(
                f"This weight is stored as {self.format.name}; its memory holds no {self.dtype} values. "
                "Call .dequantize() on it first. For a file, save the model's state_dict(), or dequantized tensors."
            )
        if self._lent is None:
            self._lent = self.dequantize()
        elif self._lent_at != self.writes:
            self._lent.copy_(self.dequantize())
        self._lent_at = self.writes
        return self._lent

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickles are read where this library may be missing, and torch 2.1 cannot pickle float8: write plain values.
        plain = self.dequantize()
        if getattr(self, "_is_param", False):
            plain = torch.nn.Parameter(plain, requires_grad=False)
        return plain.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantWeight:
        if id(self) not in memo:
            result = self._map(torch.clone)
            result.__dict__.update(
                {k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k == "_is_param" or k not in _OWN}
            )
            memo[id(self)] = result
        return memo[id(self)]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"QuantWeight({self.format.name}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})\n"
            f"{self.dequantize()!r}"
        )

    # Frozen by nature: rounding has no gradient. A stranger's model.requires_grad_(True) must not fail on it.

    def requires_grad_(self, requires_grad: bool = True) -> QuantWeight:
        return self

    @property
    def requires_grad(self) -> bool:
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        pass

    def __setitem__(self, index: Any, value: Any) -> None:
        plain = self.dequantize()
        plain[index] = value.dequantize() if isinstance(value, QuantWeight) else value
        self.store_(plain, Contents(before=self.contents))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _FUNCTIONS.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _OPS.get(func)
        if handler is not None:
            return handler(func, *args, **kwargs)
        # In inference mode composite ops (``to`` among them) arrive whole; taken apart they come back as handled ops.
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        if func._schema.is_mutable:
            return _run_mutating(func, args, kwargs)
        return func(*tree_map(_decoded, args), **tree_map(_decoded, kwargs))


def _parameter(data: torch.Tensor, requires_grad: bool = False, **attributes: Any) -> torch.nn.Parameter:
    """What a Parameter's constructor makes of data, with the attributes of the one whose place it takes."""
    storage_format = attributes.get("format")
    if isinstance(storage_format, Format) and not isinstance(data, QuantWeight) and not data.is_meta:
        data = QuantWeight.from_weight(data, storage_format)
    parameter = torch.nn.Parameter(data, requires_grad=requires_grad and not isinstance(data, QuantWeight))
    for name in attributes.keys() - _OWN:
        setattr(parameter, name, attributes[name])
    return parameter


def _on(device: torch.device, branches: tuple[Branch, ...]) -> tuple[Branch, ...]:
    return tuple(branch.to(device) for branch in branches)


def _decoded(value: Any) -> Any:
    return value.dequantize() if isinstance(value, QuantWeight) else value


@functools.lru_cache(maxsize=None)
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an op writes into."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _run_mutating(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that writes: on decoded stand-ins, which are then packed back into the QuantWeights written to."""
    stand_ins: dict[int, tuple[QuantWeight, torch.Tensor]] = {}

    def stand_in(value: Any) -> Any:
        if not isinstance(value, QuantWeight):
            return value
        if id(value) not in stand_ins:
            stand_ins[id(value)] = value, value.dequantize()
        return stand_ins[id(value)][1]

    plain_args, plain_kwargs = tree_map(stand_in, args), tree_map(stand_in, kwargs)
    result = func(*plain_args, **plain_kwargs)

    def store(value: Any) -> Any:
        if isinstance(value, QuantWeight):
            value.store_(stand_ins[id(value)][1], Contents(before=value.contents))
        return value

    for position, name in _written_arguments(func):
        tree_map(store, args[position] if position < len(args) else kwargs.get(name))
    originals = {id(plain): original for original, plain in stand_ins.values()}
    return tree_map(lambda value: originals.get(id(value), value), result)


@implements_function(torch._has_compatible_shallow_copy_type)
def _has_compatible_shallow_copy_type(old: torch.Tensor, new: torch.Tensor) -> bool:
    # nn.Module asks this before ``param.data = new``: a change of dtype keeps the Parameter, a move makes a new one.
    return isinstance(old, QuantWeight) and isinstance(new, QuantWeight) and old.device == new.device


@implements_function(torch.detach, torch.Tensor.data.__get__)  # type: ignore[attr-defined]
def _detach(weight: QuantWeight, *_: Any) -> QuantWeight:
    with torch.inference_mode(False):  # torch cannot detach a wrapper in inference mode by itself
        result = QuantWeight(weight.packed, weight.format, weight.dtype)
    result._shared, result.lends = weight._shared, weight.lends
    return result


@implements_function(torch.Tensor.detach)
def _detach_for_state_dict(weight: QuantWeight) -> QuantWeight:
    result = _detach(weight)
    # Nothing else tells the value of a state dict, which its dictionary keeps alive, from a handle that is gone before
    # a pointer to its memory is used. The frames above are that of __torch_function__ and that of the caller.
    result.lends |= sys._getframe(2).f_code is torch.nn.Module._save_to_state_dict.__code__
    return result


@implements_function(torch.Tensor.data.__set__)  # type: ignore[attr-defined]
def _set_data(target: torch.Tensor, value: torch.Tensor) -> None:
    assert isinstance(target, QuantWeight)  # torch does not ask when only the value is one
    if not isinstance(value, QuantWeight):
        value = QuantWeight.from_weight(value, target.format)
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.data.__set__(target, value)  # type: ignore[attr-defined]  # takes over shape, dtype and device
    target.qdata, target.scale, target.format = value.qdata, value.scale, value.format
    target._shared, target._lent = value._shared, None


_aten = torch.ops.aten


@_implements_op(_aten.detach.default, _aten.alias.default)
def _alias(func: Any, weight: QuantWeight) -> QuantWeight:
    return _detach(weight)


@_implements_op(_aten.clone.default)
def _clone(func: Any, weight: QuantWeight, *, memory_format: torch.memory_format | None = None) -> QuantWeight:
    return weight._map(lambda inner: _with_memory_format(func, inner, memory_format))


@_implements_op(_aten._to_copy.default)
def _to_copy(
    func: Any,
    weight: QuantWeight,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    if dtype is not None and not dtype.is_floating_point:
        return func(
            weight.dequantize(), dtype=dtype, device=device, non_blocking=non_blocking, memory_format=memory_format
        )
    # A cast to a float8 dtype (the WebUI's own conversion) keeps the logical dtype: the weight is in 8 bits already.
    logical = dtype if dtype in LOGICAL_DTYPES else weight.dtype
    return weight._map(
        lambda inner: _with_memory_format(func, inner, memory_format, device=device, non_blocking=non_blocking),
        logical,
    )


def _with_memory_format(
    func: Any, inner: torch.Tensor, memory_format: torch.memory_format | None, **kwargs: Any
) -> torch.Tensor:
    return func(inner, memory_format=torch.preserve_format if memory_format is None else memory_format, **kwargs)


@_implements_op(_aten._pin_memory.default)
def _pin_memory(func: Any, weight: QuantWeight, device: torch.device | None = None) -> QuantWeight:
    return weight._map(lambda inner: func(inner, device))


@_implements_op(_aten.is_pinned.default)
def _is_pinned(func: Any, weight: QuantWeight, device: torch.device | None = None) -> bool:
    return func(weight.qdata, device)


@_implements_op(_aten.record_stream.default)
def _record_stream(func: Any, weight: QuantWeight, stream: Any) -> None:
    weight._map(lambda inner: (func(inner, stream), inner)[1])


@_implements_op(_aten.copy_.default)
def _copy_(func: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not isinstance(target, QuantWeight):
        return func(target, _decoded(source), non_blocking)
    if isinstance(source, QuantWeight) and source.format == target.format and source.shape == target.shape:
        target._write(source.packed, _on(target.device, source.branches), source.contents)
        return target
    # What an ordinary weight of this dtype would hold after the copy, packed.
    return target.store_(_decoded(source).to(target.dtype))
