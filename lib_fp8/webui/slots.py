"""The parameters of a layer that networks change: finding their originals, adding to them, bringing them back."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from modules import devices

from lib_fp8.branch import Branch
from lib_fp8.merge import DeltaSum, write_rounded_once
from lib_fp8.qweight import Contents, QuantWeight
from lib_fp8.source import Originals
from lib_fp8.webui.marks import Mark, mark_of

WEIGHT, IN_PROJ, OUT_PROJ = "weight", "in_proj_weight", "out_proj.weight"
"""Names of weights in their layers: of most layers; of attention, q, k and v stacked; of attention, what follows."""
BACKUP = "copy of the parameter"
"""Where the original of a parameter is that has no other one."""


class OriginalGoneError(RuntimeError):
    """Networks cannot be taken out of a layer, since its original cannot be read any more."""


_NOTHING_KNOWN = "what the weight was before something was written into it in place is not known"


@dataclass(frozen=True)
class Changes:
    """Which parameters of a layer hold other values than those that were loaded.

    Attributes:
        sources: each of them to where its original came from.
        backups: those that have no other original to a copy on the CPU, None for a bias that was not there.
        contents: those in 8 bits to what they are known by without networks.
    """

    sources: dict[str, str] = field(default_factory=dict)
    backups: dict[str, torch.Tensor | None] = field(default_factory=dict)
    contents: dict[str, Contents] = field(default_factory=dict)

    def __contains__(self, key: str) -> bool:
        return key in self.sources

    def and_also(self, other: Changes) -> Changes:
        """What may be changed while a layer goes from one state to the other."""
        return Changes(
            {**self.sources, **other.sources},
            {**other.backups, **self.backups},
            {**self.contents, **other.contents},
        )

    def without(self, keys: Collection[str]) -> Changes:
        """The same without these parameters."""
        return Changes(*({key: value for key, value in part.items() if key not in keys} for part in self._parts()))

    def _parts(self) -> tuple[dict[str, Any], ...]:
        return self.sources, self.backups, self.contents


@dataclass
class WeightSlot:
    """A weight of a layer, and what networks add to it.

    Attributes:
        owner: the module whose parameter it is.
        name: its name there.
        key: its name in the layer.
        original: the weight without networks, on its device, once it was found.
        source: where that came from.
        sum: the differences to merge.
        branches: what is to be added at run time.
        pending: what a weight in 8 bits is known by while it is being written, and with networks in it afterwards.
    """

    owner: torch.nn.Module
    name: str
    key: str
    original: torch.Tensor | None = None
    source: str = ""
    sum: DeltaSum = field(default_factory=DeltaSum)
    branches: list[Branch] = field(default_factory=list)
    pending: Contents = field(default_factory=Contents)

    @property
    def parameter(self) -> torch.Tensor:
        """The parameter as it is now."""
        return getattr(self.owner, self.name)

    @property
    def in_8_bits(self) -> bool:
        """Whether it is a QuantWeight."""
        return isinstance(self.parameter, QuantWeight)

    def find_original(self, originals: Originals, changes: Changes) -> None:
        """Look for the original; a plain weight that has none nowhere is its own.

        Raises:
            OriginalGoneError: the weight was changed, and what it was before cannot be had.
        """
        if (backup := changes.backups.get(self.key)) is not None:
            self.original, self.source = backup.to(self.parameter.device), BACKUP
        elif self.key in changes:
            found = originals.find_again(self.owner, self.parameter, changes.contents.get(self.key))
            if found is None:
                raise OriginalGoneError(originals.file.problem() or _NOTHING_KNOWN)
            self.original, self.source = found
        elif found := originals.find(self.owner, self.parameter):
            self.original, self.source = found
        elif not self.in_8_bits:
            self.original, self.source = self.parameter.clone(), BACKUP

    @functools.cached_property
    def base(self) -> torch.Tensor:
        """The weight without networks in float32."""
        if self.original is not None:
            return self.original.float()
        weight = self.parameter
        return weight.without_branches(torch.float32) if isinstance(weight, QuantWeight) else weight.float()

    def write(self, changes: Changes) -> None:
        """Bring the weight to its original plus what was added, rounded once; or back, if it was changed before."""
        weight = self.parameter
        if self.sum or self.key in changes:
            write_rounded_once(weight, self.sum.onto(self.base), self.pending)
            if isinstance(weight, QuantWeight) and not self.sum:
                weight.set_contents(changes.contents[self.key])
        if isinstance(weight, QuantWeight) and (self.branches or weight.branches):
            weight.set_branches(tuple(self.branches))

    def without_networks(self, changes: Changes) -> torch.Tensor:
        """A copy of the weight as it is without networks, of its kind and on its device.

        Args:
            changes: as for ``find_original``, which was called if this weight is among them.
        """
        copy = self.parameter.detach().clone()
        if isinstance(copy, QuantWeight):
            copy.set_branches(())
        if self.key in changes:
            write_rounded_once(copy, self.base, changes.contents.get(self.key))
        return copy


@dataclass
class BiasSlot:
    """The bias of a layer, which networks may change, or add where there is none.

    Attributes:
        owner: the module whose bias it is.
        key: its name in the layer.
        sum: the differences.
    """

    owner: torch.nn.Module
    key: str
    sum: DeltaSum = field(default_factory=DeltaSum)

    @property
    def parameter(self) -> torch.Tensor | None:
        """The bias as it is now."""
        return getattr(self.owner, "bias", None)

    def copy(self) -> torch.Tensor | None:
        """A copy on the CPU; None if there is no bias."""
        return None if self.parameter is None else self.parameter.to(devices.cpu, copy=True)

    def write(self, changes: Changes, like: torch.Tensor) -> None:
        """Bring the bias to what it was plus what was added, or back.

        Args:
            changes: what is changed now, and the copies.
            like: gives dtype and device to a bias that was not there.
        """
        before = changes.backups.get(self.key)
        if self.sum:
            base = torch.zeros(like.shape[:1], device=like.device) if before is None else before.to(like.device)
            self.put(self.sum.onto(base), like)
        elif self.key in changes:
            if before is None:
                self.drop()
            else:
                assert self.parameter is not None
                self.parameter.copy_(before)

    def put(self, value: torch.Tensor, like: torch.Tensor) -> None:
        """Write a bias, or bring one; it gets its dtype and device from the weight then."""
        if self.parameter is None:
            self.owner.bias = torch.nn.Parameter(value.to(like.device, like.dtype), requires_grad=False)
        else:
            self.parameter.copy_(value)

    def without_networks(self, changes: Changes) -> torch.Tensor | None:
        """A copy of the bias as it is without networks, on its device; None if there is none."""
        bias = self.parameter
        if self.key not in changes:
            return None if bias is None else bias.detach().clone()
        before = changes.backups[self.key]
        return None if before is None or bias is None else before.to(bias.device, bias.dtype, copy=True)

    def drop(self) -> None:
        """Take away a bias that a network brought."""
        self.owner.bias = None  # type: ignore[assignment]  # stubs know no module without a bias


@dataclass
class Slots:
    """The weights of a layer, and the one bias."""

    weights: tuple[WeightSlot, ...]
    bias: BiasSlot

    def changes(self, before: Changes) -> Changes:
        """What will be changed once all is written, with the copies that nothing else can stand for; makes those."""
        sources = {slot.key: slot.source for slot in self.weights if slot.sum}
        backups = {key: copy for key, copy in before.backups.items() if key in sources}
        for slot in self.weights:
            if sources.get(slot.key) == BACKUP and slot.key not in backups:
                assert slot.original is not None
                backups[slot.key] = slot.original.to(devices.cpu)
        contents = {
            slot.key: before.contents.get(slot.key, weight.contents)
            for slot in self.weights
            if slot.key in sources and isinstance(weight := slot.parameter, QuantWeight)
        }
        if self.bias.sum:
            sources[self.bias.key] = BACKUP
            has_copy = self.bias.key in before
            backups[self.bias.key] = before.backups[self.bias.key] if has_copy else self.bias.copy()
        return Changes(sources, backups, contents)

    def write(self, changes: Changes, marks: dict[str, Mark]) -> None:
        """Write all parameters.

        Args:
            changes: what is changed now, or was before, and the copies.
            marks: of all that networks are in, by key; takes the new ones as parameter after parameter is written.
        """
        for slot in self.weights:
            if slot.in_8_bits and (slot.sum or slot.key in changes):
                marks[slot.key] = mark_of(slot.parameter, slot.pending)
            slot.write(changes)
            _note(marks, slot.key, slot.parameter, slot.sum or slot.branches)
        self.bias.write(changes, self.weights[-1].parameter)
        _note(marks, self.bias.key, self.bias.parameter, self.bias.sum)

    def leave_to_loading(self, changes: Changes) -> None:
        """Take away what whoever is about to load the layer does not know of: a bias that a network brought."""
        if self.bias.key in changes and changes.backups[self.bias.key] is None:
            self.bias.drop()

    def put_back(self, weights: Any, bias: torch.Tensor | None) -> None:
        """Copy what the Lora extension keeps as backups into the parameters.

        Args:
            weights: one tensor, or of attention a pair.
            bias: None where there was none.
        """
        for slot, value in zip(self.weights, weights if isinstance(weights, tuple) else (weights,)):
            slot.parameter.copy_(value)
        if bias is None:
            self.bias.drop()
        else:
            self.bias.put(bias, self.weights[-1].parameter)


def _note(marks: dict[str, Mark], key: str, parameter: torch.Tensor | None, holds_networks: object) -> None:
    if holds_networks:
        marks[key] = mark_of(parameter)
    else:
        marks.pop(key, None)


_LAYERS = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.GroupNorm, torch.nn.LayerNorm)
LAYER_CLASSES = (*_LAYERS, torch.nn.MultiheadAttention)
"""The classes of layers that the Lora extension changes."""


_PLACES = {key: key.rpartition(".")[::2] for key in (WEIGHT, IN_PROJ, OUT_PROJ, "bias", "out_proj.bias")}


def parameter_at(layer: torch.nn.Module, key: str) -> torch.Tensor | None:
    """The parameter of that key in a layer; None if there is none."""
    child, name = _PLACES[key]
    owner = layer._modules[child] if child else layer
    return None if owner is None else owner._parameters.get(name)


def weight_name(module: torch.nn.Module) -> str | None:
    """Name of the weight that a module holds itself and that networks may change, None if there is none."""
    if isinstance(module, torch.nn.MultiheadAttention):
        return IN_PROJ
    return WEIGHT if isinstance(module, _LAYERS) else None


def slots_of(layer: Any) -> Slots | None:
    """What networks change in a layer; None where there is nothing to change."""
    if isinstance(layer, torch.nn.MultiheadAttention):
        if layer.in_proj_weight is None:
            return None
        out = layer.out_proj
        return Slots(
            (WeightSlot(layer, IN_PROJ, IN_PROJ), WeightSlot(out, WEIGHT, OUT_PROJ)), BiasSlot(out, "out_proj.bias")
        )
    if isinstance(layer, _LAYERS) and layer.weight is not None:
        return Slots((WeightSlot(layer, WEIGHT, WEIGHT),), BiasSlot(layer, "bias"))
    return None
