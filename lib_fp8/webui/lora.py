"""LoRA and LyCORIS through the built-in Lora extension: deltas summed over the original weight, rounded once.

The Lora extension's own bookkeeping is used (``network_current_names``, ``network_weights_backup``,
``network_bias_backup``), so that its other functions, a reload and an uninstall find what they expect.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from modules import devices, shared
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lib_fp8.merge import merged_weight, write_rounded_once
from lib_fp8.quantize import pack
from lib_fp8.qweight import QuantWeight
from lib_fp8.webui import settings
from lib_fp8.webui.patching import Patches
from lib_fp8.webui.storage import FULL_PRECISION, Record, record_of


def install(patches: Patches) -> None:
    """Take over the merging of networks; does nothing where the Lora extension is switched off."""
    networks = sys.modules.get("networks")
    if networks is not None and hasattr(networks, "network_apply_weights"):
        patches.replace(networks, "network_apply_weights", _applying)


def _wanted_names(networks: Any) -> tuple[Any, ...]:
    return tuple((net.name, net.te_multiplier, net.unet_multiplier, net.dyn_dim) for net in networks.loaded_networks)


def _applying(original: Callable[..., None]) -> Callable[..., None]:
    networks = sys.modules["networks"]

    def network_apply_weights(self: torch.nn.Module) -> None:
        layer_name = getattr(self, "network_layer_name", None)
        if layer_name is None:
            return
        if getattr(self, "network_current_names", ()) == _wanted_names(networks) and _as_merged(self):
            return
        record = record_of(shared.sd_model)
        slots = _slots(self)
        if record.applied == FULL_PRECISION or slots is None:
            original(self)
            return
        with torch.no_grad():
            _apply(networks, record, self, layer_name, slots)

    return network_apply_weights


_MERGED = "fp8_merged_networks"
"""Attribute of a layer: the network modules merged into it, and the state of their tensors at that moment."""


def _state_of(modules: Iterable[Any]) -> list[tuple[int, int]]:
    """Identity and version of every tensor of network modules: changes when one is replaced or written in place."""
    state = []
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                state.append((id(value), value._version))
            elif isinstance(value, torch.nn.Module) and name != "sd_module":
                state += [(id(tensor), tensor._version) for tensor in value._parameters.values() if tensor is not None]
    return state


def _as_merged(layer: Any) -> bool:
    """Whether the networks in a layer still hold what was merged (sd-webui-lora-block-weight changes them)."""
    merged = layer.__dict__.get(_MERGED)
    return merged is None or merged[1] == _state_of(merged[0])


@dataclass
class _Slot:
    """A parameter of a layer that networks change, with the deltas collected for it."""

    owner: torch.nn.Module
    name: str
    deltas: list[torch.Tensor] = field(default_factory=list)

    @property
    def parameter(self) -> torch.Tensor:
        return getattr(self.owner, self.name)


@dataclass
class _Slots:
    """The weights of a layer, and the one bias that networks may change or add."""

    weights: tuple[_Slot, ...]
    bias: _Slot


def _slots(layer: Any) -> _Slots | None:
    """What networks change in a layer; None for kinds of layers that are left to the Lora extension."""
    if isinstance(layer, torch.nn.MultiheadAttention):
        if layer.in_proj_weight is None:
            return None
        weights = (_Slot(layer, "in_proj_weight"), _Slot(layer.out_proj, "weight"))
        return _Slots(weights, _Slot(layer.out_proj, "bias"))
    if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d)):
        return _Slots((_Slot(layer, "weight"),), _Slot(layer, "bias"))
    return None


def _back_up(layer: Any, slots: _Slots) -> None:
    """Copy the weights to the CPU where the Lora extension looks for them: packed weights stay packed."""
    if getattr(layer, "network_weights_backup", None) is not None:
        return
    copies = tuple(slot.parameter.to(devices.cpu, copy=True) for slot in slots.weights)
    layer.network_weights_backup = copies if len(copies) > 1 else copies[0]
    bias = slots.bias.parameter
    layer.network_bias_backup = None if bias is None else bias.to(devices.cpu, copy=True)


def _restore(layer: Any, slots: _Slots) -> tuple[torch.Tensor, ...]:
    """Put the copies back, bit for bit, and return those of the weights; () if there are none."""
    backup = getattr(layer, "network_weights_backup", None)
    if backup is None:
        return ()
    copies = backup if isinstance(backup, tuple) else (backup,)
    for slot, copy in zip(slots.weights, copies):
        slot.parameter.copy_(copy)
    bias = layer.network_bias_backup
    if bias is None:
        setattr(slots.bias.owner, slots.bias.name, None)
    else:
        slots.bias.parameter.copy_(bias)
    return copies


def _reset(layer: Any) -> None:
    layer.__dict__.pop(_MERGED, None)
    layer.network_current_names = ()
    layer.network_weights_backup = None
    layer.network_bias_backup = None


def forget(model: torch.nn.Module) -> None:
    """Take all networks out of a model's layers and drop the copies; the next use merges anew."""
    with torch.no_grad():
        for layer in model.modules():
            if getattr(layer, "network_weights_backup", None) is not None:
                slots = _slots(layer)
                if slots is not None:
                    _restore(layer, slots)
                else:
                    sys.modules["networks"].network_restore_weights_from_backup(layer)
            if getattr(layer, "network_current_names", ()) != ():
                _reset(layer)
    record_of(model).merged.clear()


def follow_settings(model: torch.nn.Module) -> None:
    """Merge anew if another base for networks was chosen."""
    record = record_of(model)
    if record.lora_from_file != settings.lora_from_file():
        record.lora_from_file = settings.lora_from_file()
        forget(model)


def _apply(networks: Any, record: Record, layer: Any, layer_name: str, slots: _Slots) -> None:
    wanted = _wanted_names(networks)
    modules = [module for net in networks.loaded_networks for module in _modules_for(net, layer, layer_name)]
    if not modules:
        # Not touched by these networks: whole again, and no copy is kept.
        _restore(layer, slots)
        _reset(layer)
        record.merged.pop(layer, None)
        layer.network_current_names = wanted
        return
    _back_up(layer, slots)
    backups = _restore(layer, slots)
    layer.network_current_names = ()
    origins = [_original(record, slot.owner, stored) for slot, stored in zip(slots.weights, backups)]
    originals = tuple(original for original, _ in origins)
    _collect(networks, layer, layer_name, slots, originals)
    try:
        _write(slots, originals)
    except Exception:
        _restore(layer, slots)
        _reset(layer)
        raise
    packed = [exact for slot, (_, exact) in zip(slots.weights, origins) if slot.deltas and exact is not None]
    if packed:
        record.merged[layer] = all(packed)
    else:
        record.merged.pop(layer, None)
    layer.__dict__[_MERGED] = modules, _state_of(modules)
    layer.network_current_names = wanted


def _original(record: Record, layer: Any, stored: torch.Tensor) -> tuple[torch.Tensor, bool | None]:
    """The unrounded weight of a layer in float32 on the layer's device, and whether it was found in the checkpoint.

    What is found there must pack to the very bits stored; otherwise the stored weight is decoded. A weight in full
    precision is its own original (None).
    """
    device = layer.weight.device if hasattr(layer, "weight") else layer.in_proj_weight.device
    stored = stored.to(device)
    if not isinstance(stored, QuantWeight):
        return stored.float(), None
    if record.lora_from_file and record.checkpoint is not None and layer in record.keys:
        found = record.checkpoint.tensor(record.keys[layer])
        if found is not None and found.shape == stored.shape and found.is_floating_point():
            value = found.to(device, record.packing_dtype)
            if layer in record.trusted or stored.same_bits(pack(value, stored.format)):
                record.trusted.add(layer)
                return value.float(), True
    record.trusted.discard(layer)
    return stored.dequantize(torch.float32), False


def _modules_for(net: Any, layer: Any, layer_name: str) -> tuple[Any, ...]:
    """A network's modules for a layer: one, or those of its projections (q, k, v and, for attention, out)."""
    single = net.modules.get(layer_name)
    if single is not None and hasattr(layer, "weight"):
        return (single,)
    names = ["_q_proj", "_k_proj", "_v_proj"]
    if isinstance(layer, torch.nn.MultiheadAttention):
        names.append("_out_proj")
    parts = tuple(net.modules.get(layer_name + name) for name in names)
    return parts if all(part is not None for part in parts) else ()


def _collect(networks: Any, layer: Any, layer_name: str, slots: _Slots, originals: tuple[torch.Tensor, ...]) -> None:
    """Gather the deltas of all networks; one that does not fit is told and left out, whole."""
    for net in sorted(networks.loaded_networks, key=lambda net: net.name):
        parts = _modules_for(net, layer, layer_name)
        if not parts:
            continue
        try:
            deltas, bias_delta = _deltas(parts, layer, originals)
            for original, delta in zip(originals, deltas):
                _check_shape("weight", delta, original.shape)
            if bias_delta is not None:
                _check_shape("bias", bias_delta, originals[-1].shape[:1])
        except Exception as error:  # another's code on a file from anywhere: whatever it raises, the picture goes on
            _tell(networks, net, layer_name, error)
            continue
        for slot, delta in zip(slots.weights, deltas):
            slot.deltas.append(delta)
        if bias_delta is not None:
            slots.bias.deltas.append(bias_delta)


def _check_shape(what: str, delta: torch.Tensor, shape: torch.Size) -> None:
    if delta.shape != shape:
        raise ValueError(f"it is made for a {what} of {tuple(delta.shape)}, not {tuple(shape)}")


def _deltas(
    parts: tuple[Any, ...], layer: Any, originals: tuple[torch.Tensor, ...]
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """What one network adds to each weight of a layer and to its bias, computed in float32."""
    with torch.autocast(originals[0].device.type, enabled=False), _InFloat32():
        if len(parts) == 1:
            delta, bias_delta = parts[0].calc_updown(originals[0])
            return [_pad_inpainting(delta, originals[0])], bias_delta
        chunks = originals[0].chunk(3, 0)
        deltas = [torch.vstack([part.calc_updown(chunk)[0] for part, chunk in zip(parts, chunks)])]
        bias_delta = None
        if isinstance(layer, torch.nn.MultiheadAttention):
            out, bias_delta = parts[3].calc_updown(originals[1])
            deltas.append(out)
        return deltas, bias_delta


def _pad_inpainting(delta: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Networks made for 4 input channels act on the first four of an inpainting model's 9."""
    if original.dim() == 4 and original.shape[1] == 9 and delta.dim() == 4 and delta.shape[1] == 4:
        return torch.nn.functional.pad(delta, (0, 0, 0, 0, 0, 5))
    return delta


def _write(slots: _Slots, originals: Iterable[torch.Tensor]) -> None:
    for slot, original in zip(slots.weights, originals):
        if slot.deltas:
            write_rounded_once(slot.parameter, merged_weight(original, slot.deltas))
    if slots.bias.deltas:
        weight, bias = slots.weights[-1].parameter, slots.bias.parameter
        base = torch.zeros_like(slots.bias.deltas[0], device=weight.device) if bias is None else bias
        total = merged_weight(base, slots.bias.deltas)
        if bias is None:
            parameter = torch.nn.Parameter(total.to(weight.dtype), requires_grad=False)
            setattr(slots.bias.owner, slots.bias.name, parameter)
        else:
            write_rounded_once(bias, total)


def _tell(networks: Any, net: Any, layer_name: str, error: Exception) -> None:
    errors = networks.extra_network_lora.errors
    errors[net.name] = errors.get(net.name, 0) + 1
    if errors[net.name] == 1:
        print(
            f"FP8 weight: network {net.name} does not fit layer {layer_name} and is left out there: {error} "
            "(further layers are only counted)",
            file=sys.stderr,
        )


class _InFloat32(TorchFunctionMode):
    """Networks keep their factors in half precision; this computes with them in float32.

    In-place functions are left alone in their first argument, which they would otherwise not reach.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kept = 1 if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") else 0
        args = (*args[:kept], *tree_map(_up, tuple(args[kept:])))
        return func(*args, **tree_map(_up, kwargs or {}))


def _up(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value
