"""Where the weights of a model came from, and whether reading its file again would give what is in memory.

Other extensions merge models in memory and load the result under the file name of a parent, or of no file; or they
write into a loaded model block by block.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from modules import sd_models

from lib_fp8.quantize import Packed, pack
from lib_fp8.qweight import QuantWeight
from lib_fp8.source import signature_of
from lib_fp8.webui.patching import Patches
from lib_fp8.webui.settings import LORA_FROM_COPY, packing_dtype
from lib_fp8.webui.storage import FULL_PRECISION, Origin, record_of
from lib_fp8.webui.targets import find_targets

_ROWS = 64
"""How many rows of a weight are compared: in every format they are independent, and a merge changes all of them."""


def install(patches: Patches) -> None:
    """Be there when the WebUI reads a checkpoint."""
    patches.replace(sd_models, "get_checkpoint_state_dict", _noting)


_last_read: tuple[int, weakref.ref[torch.Tensor]] | None = None
"""The id of the state dict that the WebUI read last, and one of its tensors: it holds none of them."""


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_checkpoint_state_dict(*args: Any, **kwargs: Any) -> Any:
        global _last_read
        state_dict = original(*args, **kwargs)
        tensor = _a_tensor(state_dict)
        _last_read = None if tensor is None else (id(state_dict), weakref.ref(tensor))
        return state_dict

    return get_checkpoint_state_dict


def _a_tensor(state_dict: Mapping[str, Any]) -> torch.Tensor | None:
    return next((value for value in state_dict.values() if torch.is_tensor(value)), None)


_given: weakref.WeakSet[Any] = weakref.WeakSet()
"""Checkpoints of which the weights were given in memory; the WebUI may keep these in its cache."""


def origin_of(checkpoint_info: Any, state_dict: Mapping[str, Any] | None) -> Origin:
    """Where the weights come from that are about to be loaded.

    Args:
        checkpoint_info: what they are loaded as.
        state_dict: as it is given to the loading of weights; the WebUI reads it first, or does so now if it is None.
    """
    is_read = state_dict is None or (
        _last_read is not None and _last_read[0] == id(state_dict) and _last_read[1]() is _a_tensor(state_dict)
    )
    if not is_read:
        _given.add(checkpoint_info)
    elif checkpoint_info not in sd_models.checkpoints_loaded:
        _given.discard(checkpoint_info)
    filename = checkpoint_info.filename
    return Origin(filename, signature_of(filename), in_memory=checkpoint_info in _given)


def has_own_file(model: Any) -> bool:
    """Whether the weights were read from the file that a model names; true of a model of which nothing is known."""
    origin = record_of(model).origin
    return origin is None or not (origin.in_memory or origin.filename != model.sd_checkpoint_info.filename)


def file_was_replaced(model: Any) -> bool:
    """Whether the file that a model was read from has other contents now."""
    origin = record_of(model).origin
    return origin is not None and origin.contents not in (None, signature_of(origin.filename))


def note_in_memory(model: Any) -> None:
    """Note that the weights of a model are not those of the file it names."""
    record = record_of(model)
    origin = record.origin or Origin(model.sd_checkpoint_info.filename, None)
    record.origin = replace(origin, in_memory=True)


def is_what_was_read(model: Any, state_dict: Mapping[str, Any]) -> bool:
    """Whether loading a state dict would give a model the weights that it has, as far as a sample of rows tells.

    Args:
        model: no networks are in it.
        state_dict: by the names that the checkpoint gives.
    """
    pairs = [
        (parameter, state_dict[target.key_prefix + name])
        for target in find_targets(model)
        for name, parameter in target.module.named_parameters()
        if torch.is_tensor(state_dict.get(target.key_prefix + name))
    ]
    with torch.no_grad():
        return bool(pairs) and all(_holds(parameter, value) for parameter, value in pairs)


def _holds(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    if parameter.shape != value.shape:
        return False
    if isinstance(parameter, QuantWeight):
        packed = _sample(parameter)
        if isinstance(value, QuantWeight) and value.format == parameter.format:
            return packed.same_bits(_sample(value).packed)
        return packed.same_bits(pack(_rows(value).to(parameter.device, packing_dtype()), parameter.format))
    mine, other = _rows(parameter), _rows(value).to(parameter.device, parameter.dtype)
    return bool(((mine == other) | ((mine != mine) & (other != other))).all())  # NaN is no other than NaN


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, QuantWeight):
        return _sample(tensor).dequantize()
    tensor = torch.atleast_1d(tensor.detach())
    return tensor[:: max(1, len(tensor) // _ROWS)]


def _sample(weight: QuantWeight) -> QuantWeight:
    qdata, scale = weight.packed
    return QuantWeight(Packed(_rows(qdata), None if scale is None else _rows(scale)), weight.format, weight.dtype)


def note_for_user(model: Any, decoded: int = 0) -> str | None:
    """What the user should know of a model that is not its file's; None where there is nothing to know.

    Args:
        model: in the storage that was wanted.
        decoded: how many of its layers were decoded for that.
    """
    record = record_of(model)
    if record.origin is None or not record.origin.in_memory:
        return None
    if record.applied == FULL_PRECISION:
        return f"{_IN_MEMORY}. {decoded} layers are as they were rounded to 8 bits" if decoded else None
    if record.lora == LORA_FROM_COPY and not decoded:
        return None
    return (
        f"{_IN_MEMORY}. There are no originals of its weights: another format rounds them once more, full precision "
        "gives back what they are in 8 bits, and LoRA is added at run time"
    )


_IN_MEMORY = "This model was made or changed in memory by another extension, so its file is not read for it"


def lost(model: Any) -> RuntimeError:
    """The error for a model whose weights are broken, and which no file can bring back."""
    info = model.sd_checkpoint_info
    return RuntimeError(
        f"{info.name} was made or changed in memory by another extension, and loading something into it broke off. "
        f"{info.filename} is not where its weights came from, so they cannot be read again. Choose another checkpoint, "
        "or have the model made again."
    )
