"""What the loaded networks add to a layer: their own code is asked, in float32; those that do not fit are told of.

Networks are those of the built-in Lora extension, and of a1111-sd-webui-lycoris where it is installed: both merge
into the same layers and keep their books in the same attributes.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from modules import shared
from torch.utils._pytree import tree_map

from lib_fp8.branch import LowRank
from lib_fp8.capability import is_out_of_memory, without_autocast
from lib_fp8.webui.slots import OUT_PROJ

_HOSTS = {"networks": "lora_functional", "l_networks": "lyco_functional"}
"""Module that holds networks to the option by which its networks act beside the layers instead of in their weights."""


def hosts() -> list[Any]:
    """The modules that hold loaded networks and merge them."""
    return [sys.modules[name] for name in _HOSTS if hasattr(sys.modules.get(name), "network_apply_weights")]


def _loaded(layer: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    """(host, network) for all that are to act in the weights of a layer; nothing acts beside attention."""
    beside = not isinstance(layer, torch.nn.MultiheadAttention)
    for host in hosts():
        if not (beside and shared.opts.data.get(_HOSTS[host.__name__], False)):
            for net in host.loaded_networks:
                yield host, net


_TOKEN = "fp8_token"
"""Attribute of a network: what it is known by; a file that is loaded again is another network of the same name."""


def wanted(layer: torch.nn.Module) -> list[Any]:
    """(token, strengths ...) of every network that is to act in the weights of a layer."""
    return [(_token(net), net.te_multiplier, net.unet_multiplier, net.dyn_dim) for _, net in _loaded(layer)]


def _token(net: Any) -> object:
    token = vars(net).get(_TOKEN)
    if token is None:
        token = vars(net)[_TOKEN] = object()
    return token


def wanted_names(layer: torch.nn.Module) -> tuple[Any, ...]:
    """What the Lora extension itself compares to see whether anything has changed."""
    return tuple((net.name, net.te_multiplier, net.unet_multiplier, net.dyn_dim) for _, net in _loaded(layer))


def strengths_are_computed() -> bool:
    """Whether strengths are made anew each time they are asked for (sd-webui-loractl)."""
    nets = (net for host in hosts() for net in host.loaded_networks)
    return any(isinstance(getattr(type(net), "unet_multiplier", None), property) for net in nets)


_Entry = tuple[dict[str, Any], str, Any, int]
"""Attributes of a module, the name of one, its value, and the version of a tensor (-1 for all else)."""


@dataclass(frozen=True)
class Use:
    """One network at one layer.

    Attributes:
        network: the network.
        parts: its modules: one, or those of the projections q, k, v and, for attention, out.
        strength: multipliers of the parts, and the rank to which the network is cut.
        contents: every attribute of the parts: (attributes, name, value, version of a tensor).
        errors: where the Lora extension counts the layers that a network does not fit.
    """

    network: Any
    parts: tuple[Any, ...]
    strength: tuple[Any, ...]
    contents: tuple[_Entry, ...]
    errors: dict[str, int]

    def is_current(self) -> bool:
        """Whether the contents are what they were (sd-webui-lora-block-weight changes them in place)."""
        for holder, name, value, version in self.contents:
            found: Any = holder.get(name)
            if found is not value or (version >= 0 and found._version != version):
                return False
        return True

    def same_as(self, other: Use) -> bool:
        """Whether this is the same network, as strong, with the same contents."""
        return self.strength == other.strength and self.same_tensors(other)

    def same_tensors(self, other: Use) -> bool:
        """Whether this is the same network with the same contents, cut to the same rank."""
        return (
            self.strength[-1] == other.strength[-1]
            and len(self.parts) == len(other.parts)
            and all(mine is theirs for mine, theirs in zip(self.parts, other.parts))
            and self.is_current()
        )

    def factor(self) -> float:
        """What the product of a plain LoRA's factors is multiplied by. Raises MisfitError."""
        with _asking():
            return self.parts[0].calc_scale() * self.parts[0].multiplier()


def uses_of(layer: torch.nn.Module, layer_name: str) -> tuple[Use, ...]:
    """All networks that act on a layer, in an order that does not depend on that in the prompt.

    Networks that are made for this layer, but not for all of it, are told of and left out.
    """
    uses = []
    for host, net in sorted(_loaded(layer), key=lambda pair: pair[1].name):
        errors = host.extra_network_lora.errors if host.extra_network_lora is not None else {}
        try:
            parts = _parts_for(net, layer, layer_name)
        except MisfitError as error:
            tell_misfit(net.name, errors, layer_name, error)
            continue
        multipliers = tuple(part.multiplier() for part in parts)
        if any(multipliers):
            contents = tuple(entry for part in parts for entry in _contents(part))
            uses.append(Use(net, parts, (*multipliers, net.dyn_dim), contents, errors))
    return tuple(uses)


_CONTENTS = (torch.Tensor, torch.nn.Module, int, float, type(None))


def _contents(part: Any) -> Iterator[_Entry]:
    for name, value in vars(part).items():
        if name in _STRUCTURE or not isinstance(value, _CONTENTS):
            continue
        yield vars(part), name, value, _version(value)
        if isinstance(value, torch.nn.Module):
            for inner, tensor in value._parameters.items():
                yield value._parameters, inner, tensor, _version(tensor)


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else -1


_PROJECTIONS = ("_q_proj", "_k_proj", "_v_proj", "_out_proj")


def _parts_for(net: Any, layer: torch.nn.Module, layer_name: str) -> tuple[Any, ...]:
    """A network's modules for a layer, () if it has none. Raises MisfitError for a set that cannot be applied."""
    attention = isinstance(layer, torch.nn.MultiheadAttention)
    single = net.modules.get(layer_name)
    if single is not None and not attention:
        return (single,)
    names = _PROJECTIONS if attention else _PROJECTIONS[:3]
    parts = [net.modules.get(layer_name + name) for name in names]
    if single is not None:
        raise MisfitError("it is made for attention as a whole, and the WebUI adds to the projections by themselves")
    if any(parts) != all(parts):
        raise MisfitError(f"it is made for some of the projections, and the WebUI adds to all {len(names)} or none")
    return tuple(parts) if all(parts) else ()


class MisfitError(Exception):
    """A network cannot be applied to a layer: the fault is its own. The cause is what its code raised."""


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """What a network's own code raises, on a file from anywhere, is a misfit; what a device raises meanwhile is not."""
    try:
        yield
    except MisfitError:
        raise
    except Exception as error:
        if is_out_of_memory(error) or _is_of_the_device(error):
            raise
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise MisfitError(reason) from error


_DEVICE_ERRORS = ("CUDA error", "HIP error", "CUDA driver error", "cuDNN error", "device-side assert")
"""What torch says of work that failed on a device; it may be told of any work that was given before."""


def _is_of_the_device(error: Exception) -> bool:
    accelerator_error = getattr(torch, "AcceleratorError", None)  # since torch 2.8
    if accelerator_error is not None and isinstance(error, accelerator_error):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _DEVICE_ERRORS)


_one_at_a_time = threading.RLock()
"""A network is changed while it is asked."""


def delta_of(use: Use, key: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a network adds to one of the weights of a layer, and to the bias that belongs to it.

    Args:
        use: the network at the layer.
        key: name of the weight in the layer, as in ``slots``.
        weight: that weight in float32.

    Returns:
        The difference of the weight, of its shape, and that of the bias or None; float32.

    Raises:
        MisfitError: the network's own code failed, or what it gave does not fit.
    """
    bias_delta = None
    with contextlib.ExitStack() as stack:
        stack.enter_context(_one_at_a_time)
        stack.enter_context(without_autocast(weight.device.type))
        stack.enter_context(_in_float32(use.parts, weight.device))
        stack.enter_context(_truthful_magnitudes(use.parts))
        stack.enter_context(_asking())
        if len(use.parts) == 1:
            delta, bias_delta = use.parts[0].calc_updown(weight)
            delta = _pad_inpainting(delta, weight)
        elif key == OUT_PROJ:
            delta, bias_delta = use.parts[3].calc_updown(weight)
        else:
            projections = zip(use.parts, weight.chunk(3, 0))
            delta = torch.vstack([part.calc_updown(chunk)[0] for part, chunk in projections])
    _check_shape("weight", delta, weight.shape)
    if bias_delta is not None:
        _check_shape("bias", bias_delta, weight.shape[:1])
    return delta, bias_delta


def _check_shape(what: str, delta: torch.Tensor, shape: torch.Size) -> None:
    if delta.shape != shape:
        raise MisfitError(f"it is made for a {what} of {tuple(delta.shape)}, not {tuple(shape)}")


def _pad_inpainting(delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Networks made for 4 input channels act on the first four of an inpainting model's 9."""
    if weight.dim() == 4 and weight.shape[1] == 9 and delta.dim() == 4 and delta.shape[1] == 4:
        return torch.nn.functional.pad(delta, (0, 0, 0, 0, 0, 5))
    return delta


def low_rank(use: Use, weight: torch.Tensor) -> LowRank | None:
    """A plain LoRA that fits a weight, as a branch with its factors on the device of the weight; None for all else."""
    part = use.parts[0]
    # By the name of the class: each host has one of its own.
    plain = len(use.parts) == 1 and type(part).__name__ == "NetworkModuleLora"
    if not plain or any(getattr(part, name, None) is not None for name in ("mid_model", "bias", "dora_scale")):
        return None
    models = (getattr(part, name, None) for name in ("up_model", "down_model"))
    factors = [getattr(model, "weight", None) for model in models]
    up, down = (
        factor.detach().flatten(1).to(weight.device) if isinstance(factor, torch.Tensor) and factor.dim() > 1 else None
        for factor in factors
    )
    if up is None or down is None:
        return None
    if part.network.dyn_dim is not None:
        up, down = up[:, : part.network.dyn_dim], down[: part.network.dyn_dim]
    if up.shape[1] != len(down) or (len(up), down.shape[1]) != (len(weight), weight.numel() // len(weight)):
        return None
    return LowRank(up, down, use.factor())


def tell_misfit(name: str, errors: dict[str, int], layer_name: str, error: MisfitError) -> None:
    """Count an error as the Lora extension does, and say which network, which layer, why; once for each network."""
    errors[name] = errors.get(name, 0) + 1
    if errors[name] == 1:
        print(
            f"FP8 weight: network {name} does not fit layer {layer_name} and is left out there: {error} "
            "(the WebUI counts further layers below the picture)",
            file=sys.stderr,
        )


@contextlib.contextmanager
def _truthful_magnitudes(parts: Iterable[Any]) -> Iterator[None]:
    """DoRA files hold one magnitude for each input channel or one for each output channel; the WebUI knows the first.

    The other ones broadcast without an error, into nonsense.
    """
    decomposed = [part for part in parts if getattr(part, "dora_scale", None) is not None]
    decomposed = [part for part in decomposed if hasattr(part, "apply_weight_decompose")]
    for part in decomposed:
        vars(part)["apply_weight_decompose"] = _decomposition(part.dora_scale)
    try:
        yield
    finally:
        for part in decomposed:
            vars(part).pop("apply_weight_decompose", None)


def _decomposition(magnitude: torch.Tensor) -> Any:
    def apply_weight_decompose(updown: torch.Tensor, orig_weight: torch.Tensor) -> torch.Tensor:
        return weight_decomposed(orig_weight + updown, magnitude) - orig_weight

    return apply_weight_decompose


def weight_decomposed(merged: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """Give a weight new magnitudes (DoRA, arXiv 2402.09353, equation 5).

    Args:
        merged: (out, in, ...), the weight with the whole difference.
        magnitude: (1, in, 1, ...) one for each input channel, as LyCORIS trains by default; or (out, 1, ...) or
            (out,), one for each output channel, as PEFT and LyCORIS with ``wd_on_out`` do.

    Returns:
        ``merged * magnitude / norm``, the norm taken over all other axes.

    Raises:
        ValueError: the magnitudes are for a weight of another shape.
    """
    by_output = len(magnitude) == magnitude.numel() == len(merged)
    if not by_output and magnitude.numel() != merged.shape[1]:
        raise ValueError(f"its magnitudes {tuple(magnitude.shape)} are for no weight of {tuple(merged.shape)}")
    axis = 0 if by_output else 1
    others = [other for other in range(merged.dim()) if other != axis]
    norm = torch.linalg.vector_norm(merged, dim=others, keepdim=True)
    return merged * (magnitude.to(merged).reshape(norm.shape) / norm)


_STRUCTURE = ("network", "sd_module", "org_module")
"""Attributes of network modules that lead to the network and to the layer."""


@contextlib.contextmanager
def _in_float32(parts: Iterable[Any], device: torch.device) -> Iterator[None]:
    """Networks keep their factors in fewer bits; within, they have copies in float32, on a device.

    The copies are also there to be written into: the Lora extension adds to what a network holds as if it were a
    result. All is put back afterwards, but for what a network has put in the place of a copy itself.
    """
    given: list[tuple[dict[str, Any], str, Any, Any]] = []
    try:
        for part in parts:
            for holder, name in list(_places(part)):
                value = holder[name]
                copy = tree_map(lambda leaf: _widened(leaf, device), value)
                given.append((holder, name, value, copy))
                holder[name] = copy
        yield
    finally:
        for holder, name, value, copy in reversed(given):
            if holder.get(name) is copy:
                holder[name] = value


def _places(part: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Where a network module holds tensors: attributes, collections, parameters and buffers of modules within."""
    for name, value in vars(part).items():
        if name in _STRUCTURE:
            continue
        if isinstance(value, torch.nn.Module):
            for module in value.modules():
                for store in (module._parameters, module._buffers):
                    yield from ((store, inner) for inner in store)
        elif isinstance(value, (torch.Tensor, list, tuple, dict)):
            yield vars(part), name


def _widened(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    dtype = torch.float32 if value.element_size() < 4 else value.dtype
    moved = value.detach().to(device)  # first, while it is short
    return moved.to(dtype, copy=moved.device == value.device)
