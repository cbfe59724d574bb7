"""The parameters of a layer that networks change: finding their originals, adding to them, bringing them back."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from modules import devices

from lib_fp8.branch import Branch
from lib_fp8.merge import DeltaSum, write_rounded_once
from lib_fp8.qweight import QuantWeight
from lib_fp8.source import Originals

WEIGHT, IN_PROJ, OUT_PROJ = "weight", "in_proj_weight", "out_proj.weight"
"""Names of weights in their layers: of most layers; of attention, q, k and v stacked; of attention, what follows."""
BACKUP = "copy of the parameter"
"""Where the original of a parameter is that has no other one."""


class OriginalGoneError(RuntimeError):
    """Networks cannot be taken out of a layer, since its original cannot be read any more."""


@dataclass(frozen=True)
class Changes:
    """Which parameters of a layer hold other values than those that were loaded.

    Attributes:
        sources: each of them to where its original came from.
        backups: those that have no other original to a copy on the CPU, None for a bias that was not there.
    """

    sources: dict[str, str] = field(default_factory=dict)
    backups: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def __contains__(self, key: str) -> bool:
        return key in self.sources

    def and_also(self, other: Changes) -> Changes:
        """What may be changed while a layer goes from one state to the other."""
        return Changes({**self.sources, **other.sources}, {**other.backups, **self.backups})


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
    """

    owner: torch.nn.Module
    name: str
    key: str
    original: torch.Tensor | None = None
    source: str = ""
    sum: DeltaSum = field(default_factory=DeltaSum)
    branches: list[Branch] = field(default_factory=list)

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
        elif found := originals.find(self.owner, self.parameter, untouched=self.key not in changes):
            self.original, self.source = found
        elif self.key in changes:
            raise OriginalGoneError(originals.file.problem() or f"{originals.file.path.name} cannot be read")
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
            write_rounded_once(weight, self.sum.onto(self.base))
        if isinstance(weight, QuantWeight) and (self.branches or weight.branches):
            weight.set_branches(tuple(self.branches))


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
            value = self.sum.onto(base)
            if self.parameter is None:
                self.owner.bias = torch.nn.Parameter(value.to(like.dtype), requires_grad=False)
            else:
                self.parameter.copy_(value)
        elif self.key in changes:
            if before is None:
                self.drop()
            else:
                assert self.parameter is not None
                self.parameter.copy_(before)

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
        if self.bias.sum:
            sources[self.bias.key] = BACKUP
            has_copy = self.bias.key in before
            backups[self.bias.key] = before.backups[self.bias.key] if has_copy else self.bias.copy()
        return Changes(sources, backups)

    def write(self, changes: Changes) -> None:
        """Write all parameters.

        Args:
            changes: what is changed now, and the copies.
        """
        for slot in self.weights:
            slot.write(changes)
        self.bias.write(changes, self.weights[-1].parameter)

    def abandon(self, changes: Changes) -> None:
        """Leave the weights to whoever is about to load them; what loading does not replace goes."""
        if self.bias.key in changes and changes.backups[self.bias.key] is None:
            self.bias.drop()
        for slot in self.weights:
            if isinstance(weight := slot.parameter, QuantWeight) and weight.branches:
                weight.set_branches(())


_LAYERS = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.GroupNorm, torch.nn.LayerNorm)


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
