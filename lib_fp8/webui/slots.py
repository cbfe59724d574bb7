"""The parameters of a layer that networks change: finding their originals, adding to them, bringing them back."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from modules import devices

from lib_fp8.branch import Branch
from lib_fp8.merge import merged_weight, write_rounded_once
from lib_fp8.qweight import QuantWeight
from lib_fp8.source import Originals

RUN_TIME = "run time"
"""What stands for a source where networks are added beside the 8-bit weight, which is not changed."""
BACKUP = "copy of the parameter"


class OriginalGoneError(RuntimeError):
    """Networks cannot be taken out of a layer, since its original cannot be read any more."""


@dataclass(frozen=True)
class Changes:
    """What was done to the parameters of a layer.

    Attributes:
        sources: parameter to where its original came from, or ``RUN_TIME``; parameters as they were loaded are missing.
        backups: parameter to a copy on the CPU, None for a bias that was not there; only where nothing else has it.
    """

    sources: dict[str, str] = field(default_factory=dict)
    backups: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def written(self, key: str) -> bool:
        """Whether a parameter holds other values than those that were loaded."""
        return self.sources.get(key, RUN_TIME) != RUN_TIME


@dataclass
class WeightSlot:
    """A weight of a layer, and what networks add to it.

    Attributes:
        owner: the module whose parameter it is.
        name: its name there.
        key: its name in the layer.
        original: the weight without networks, on its device, once it was found.
        source: where that came from.
        total: the sum of all differences in float32.
        branches: what is to be added at run time.
    """

    owner: torch.nn.Module
    name: str
    key: str
    original: torch.Tensor | None = None
    source: str = ""
    total: torch.Tensor | None = None
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
        elif found := originals.find(self.owner, self.parameter, untouched=not changes.written(self.key)):
            self.original, self.source = found
        elif changes.written(self.key):
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

    def add(self, delta: torch.Tensor) -> None:
        """Add a difference; the sum is kept in float32."""
        self.total = _sum(self.total, delta, self.parameter.device)

    def noted_source(self) -> str | None:
        """What is to be noted as the source, None if nothing is added."""
        if self.total is not None:
            return self.source
        return RUN_TIME if self.branches else None

    def write(self, changes: Changes) -> None:
        """Bring the weight to its original plus what was added, rounded once; or back, if it was changed before."""
        weight = self.parameter
        if self.total is not None or changes.written(self.key):
            assert self.original is not None
            deltas = () if self.total is None else (self.total,)
            write_rounded_once(weight, merged_weight(self.base, deltas))
        if isinstance(weight, QuantWeight) and (self.branches or weight.branches):
            weight.set_branches(tuple(self.branches))


@dataclass
class BiasSlot:
    """The bias of a layer, which networks may change, or add where there is none.

    Attributes:
        owner: the module whose bias it is.
        key: its name in the layer.
        total: the sum of all differences in float32.
    """

    owner: torch.nn.Module
    key: str
    total: torch.Tensor | None = None

    @property
    def parameter(self) -> torch.Tensor | None:
        """The bias as it is now."""
        return getattr(self.owner, "bias", None)

    def add(self, delta: torch.Tensor, device: torch.device) -> None:
        """Add a difference; the sum is kept in float32."""
        self.total = _sum(self.total, delta, device)

    def noted_source(self) -> str | None:
        """What is to be noted as the source, None if nothing is added."""
        return None if self.total is None else BACKUP

    def copy(self) -> torch.Tensor | None:
        """A copy on the CPU; None if there is no bias."""
        return None if self.parameter is None else self.parameter.to(devices.cpu, copy=True)

    def write(self, changes: Changes, dtype: torch.dtype) -> None:
        """Bring the bias to what it was plus what was added, or back; ``dtype`` is for one that was not there."""
        before = changes.backups.get(self.key)
        if self.total is not None:
            base = torch.zeros_like(self.total) if before is None else before.to(self.total.device)
            value = merged_weight(base, (self.total,))
            if self.parameter is None:
                self.owner.bias = torch.nn.Parameter(value.to(dtype), requires_grad=False)
            else:
                self.parameter.copy_(value)
        elif changes.written(self.key):
            if before is None:
                self.drop()
            else:
                assert self.parameter is not None
                self.parameter.copy_(before)

    def drop(self) -> None:
        """Take away a bias that a network brought."""
        self.owner.bias = None  # type: ignore[assignment]  # stubs know no module without a bias


def _sum(total: torch.Tensor | None, delta: torch.Tensor, device: torch.device) -> torch.Tensor:
    return delta.to(device, torch.float32, copy=True) if total is None else total.add_(delta.to(device))


@dataclass
class Slots:
    """The weights of a layer, and the one bias."""

    weights: tuple[WeightSlot, ...]
    bias: BiasSlot

    def sources(self) -> dict[str, str]:
        """Parameter to where its original came from, for those to which something is added."""
        found = {slot.key: slot.noted_source() for slot in self.weights}
        found[self.bias.key] = self.bias.noted_source()
        return {key: source for key, source in found.items() if source is not None}

    def changes(self, before: Changes) -> Changes:
        """What is to be noted, with the copies that nothing else can stand for; call before writing."""
        sources = self.sources()
        backups = {key: copy for key, copy in before.backups.items() if key in sources}
        for slot in self.weights:
            if sources.get(slot.key) == BACKUP and slot.key not in backups:
                assert slot.original is not None
                backups[slot.key] = slot.original.to(devices.cpu)
        if self.bias.key in sources and self.bias.key not in backups:
            backups[self.bias.key] = self.bias.copy()
        return Changes(sources, backups)

    def write(self, changes: Changes) -> None:
        """Write all parameters.

        Args:
            changes: what was done to them before, and the copies made now.
        """
        for slot in self.weights:
            slot.write(changes)
        self.bias.write(changes, self.weights[-1].parameter.dtype)


def weight_name(module: torch.nn.Module) -> str | None:
    """Name of the weight that a module holds itself and that networks may change, None if there is none."""
    if isinstance(module, torch.nn.MultiheadAttention):
        return "in_proj_weight"
    return "weight" if isinstance(module, _LAYERS) else None


_LAYERS = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.GroupNorm, torch.nn.LayerNorm)


def slots_of(layer: Any) -> Slots | None:
    """What networks change in a layer; None where there is nothing to change."""
    if isinstance(layer, torch.nn.MultiheadAttention):
        if layer.in_proj_weight is None:
            return None
        out = layer.out_proj
        in_proj = WeightSlot(layer, "in_proj_weight", "in_proj_weight")
        return Slots((in_proj, WeightSlot(out, "weight", "out_proj.weight")), BiasSlot(out, "out_proj.bias"))
    if isinstance(layer, _LAYERS) and layer.weight is not None:
        return Slots((WeightSlot(layer, "weight", "weight"),), BiasSlot(layer, "bias"))
    return None
