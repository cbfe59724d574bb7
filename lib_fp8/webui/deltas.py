"""What the loaded networks add to a layer: their own code is asked, in float32; those that do not fit are told of.

Networks are those of the built-in Lora extension, and of a1111-sd-webui-lycoris where it is installed: both merge
into the same layers and keep their books in the same attributes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from modules import shared
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lib_fp8.branch import LowRank
from lib_fp8.capability import without_autocast
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
        """What the product of a plain LoRA's factors is multiplied by."""
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
        except ValueError as error:
            tell_misfit(net.name, errors, layer_name, error)
            continue
        multipliers = tuple(part.multiplier() for part in parts)
        if any(multipliers):
            contents = tuple(entry for part in parts for entry in _contents(part))
            uses.append(Use(net, parts, (*multipliers, net.dyn_dim), contents, errors))
    return tuple(uses)


_STRUCTURE = ("network", "sd_module", "org_module")
"""Attributes of network modules that lead to the network and to the layer."""


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
    """A network's modules for a layer, () if it has none. Raises ValueError for a set that cannot be applied."""
    attention = isinstance(layer, torch.nn.MultiheadAttention)
    single = net.modules.get(layer_name)
    if single is not None and not attention:
        return (single,)
    names = _PROJECTIONS if attention else _PROJECTIONS[:3]
    parts = [net.modules.get(layer_name + name) for name in names]
    if single is not None:
        raise ValueError("it is made for attention as a whole, and the WebUI adds to the projections by themselves")
    if any(parts) != all(parts):
        raise ValueError(f"it is made for some of the projections, and the WebUI adds to all {len(names)} or none")
    return tuple(parts) if all(parts) else ()


def delta_of(use: Use, key: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a network adds to one of the weights of a layer, and to the bias that belongs to it.

    Args:
        use: the network at the layer.
        key: name of the weight in the layer, as in ``slots``.
        weight: that weight in float32.

    Returns:
        The difference of the weight, of its shape, and that of the bias or None; float32.

    Raises:
        Exception: whatever the network's own code raises, or ValueError for a shape that does not fit.
    """
    bias_delta = None
    with without_autocast(weight.device.type), _InFloat32(), _truthful_magnitudes(use.parts):
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
        raise ValueError(f"it is made for a {what} of {tuple(delta.shape)}, not {tuple(shape)}")


def _pad_inpainting(delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Networks made for 4 input channels act on the first four of an inpainting model's 9."""
    if weight.dim() == 4 and weight.shape[1] == 9 and delta.dim() == 4 and delta.shape[1] == 4:
        return torch.nn.functional.pad(delta, (0, 0, 0, 0, 0, 5))
    return delta


def low_rank(use: Use, weight: torch.Tensor) -> LowRank | None:
    """A plain LoRA that fits a weight, as a branch with its factors on the device of the weight; None for all else."""
    part = use.parts[0]
    # By the name of the class: each host has one of its own.
    plain = len(use.parts) == 1 and type(part).__name__ == "NetworkModuleLora" and part.mid_model is None
    if not plain or part.bias is not None or getattr(part, "dora_scale", None) is not None:
        return None
    up, down = (model.weight.detach().flatten(1).to(weight.device) for model in (part.up_model, part.down_model))
    if part.network.dyn_dim is not None:
        up, down = up[:, : part.network.dyn_dim], down[: part.network.dyn_dim]
    if up.shape[1] != len(down) or (len(up), down.shape[1]) != (len(weight), weight.numel() // len(weight)):
        return None
    return LowRank(up, down, use.factor())


def tell_misfit(name: str, errors: dict[str, int], layer_name: str, error: Exception) -> None:
    """Count an error as the Lora extension does, and say which network, which layer, why; once for each network."""
    errors[name] = errors.get(name, 0) + 1
    if errors[name] == 1:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        print(
            f"FP8 weight: network {name} does not fit layer {layer_name} and is left out there: {reason} "
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


_NARROW = {torch.float16, torch.bfloat16} | {
    getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)
}


_QUESTIONS = {"__get__", "__len__", "size", "dim", "numel", "stride", "is_floating_point"}
"""Functions that do not look at values."""


class _InFloat32(TorchFunctionMode):
    """Networks keep their factors in fewer bits; this computes with them in float32.

    Functions that write keep their first argument, which they would otherwise not reach. ``to`` gives copies, because
    the Lora extension goes on to write into what it gets; they are widened after they were moved.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _QUESTIONS:
            return func(*args, **kwargs)
        if name == "to":
            result = _up(func(*args, **kwargs))
            return result.clone() if result is args[0] else result
        kept = 1 if name.endswith("_") and not name.endswith("__") else 0
        return func(*args[:kept], *tree_map(_up, tuple(args[kept:])), **tree_map(_up, kwargs))


def _up(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _NARROW else value
