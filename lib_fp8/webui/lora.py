"""LoRA and LyCORIS on 8-bit weights: merged over the originals and rounded once, or added beside them at run time.

At every call of every layer the Lora extension asks that the loaded networks be in its weights. For a model in 8 bits
this module answers. What it did to a layer is noted on the layer. Nothing is kept of a weight whose original can be
read again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from modules import shared

from lib_fp8.branch import Branch, Computed, LowRank
from lib_fp8.capability import is_out_of_memory
from lib_fp8.source import COPY, FILE
from lib_fp8.webui.deltas import (
    Use,
    change_by_themselves,
    delta_of,
    hosts,
    low_rank,
    tell_misfit,
    uses_of,
    wanted,
    wanted_names,
)
from lib_fp8.webui.pace import Pace
from lib_fp8.webui.patching import Patches
from lib_fp8.webui.settings import LORA_AT_RUN_TIME, LORA_FROM_COPY, lora_choice
from lib_fp8.webui.slots import RUN_TIME, Changes, OriginalGoneError, Slots, WeightSlot, slots_of
from lib_fp8.webui.storage import Record, record_of

_NOTE = "fp8_networks"
"""Attribute of a layer: the note of what was done to it."""
_SEEN = "fp8_networks_seen"
"""Attribute of a layer: the networks it was brought to."""
_IS_READY = "fp8_is_ready"
"""Attribute of a layer while networks act beside it: its weights are as they have to be."""
_NAMES = "network_current_names"
"""Attribute of a layer: the Lora extension's own; whoever resets it wants the networks to be merged anew."""


def install(patches: Patches) -> None:
    """Take over the merging of networks, from every Lora extension that is loaded and was not there before."""
    for host in hosts():
        if patches.replaces(host, "network_apply_weights"):
            continue
        patches.replace(host, "network_apply_weights", _applying)
        patches.replace(host, "network_forward", _acting_beside)
        patches.replace(host, "network_restore_weights_from_backup", _restoring)
        patches.replace(host, "network_reset_cached_weight", _resetting)


_pace = Pace()


def _applying(original: Callable[..., None]) -> Callable[..., None]:
    def network_apply_weights(self: torch.nn.Module) -> None:
        if not _bring_up_to_date(self):
            original(self)

    return network_apply_weights


def _bring_up_to_date(layer: torch.nn.Module) -> bool:
    """Bring a layer to the loaded networks; False where that is left to the Lora extension."""
    layer_name = getattr(layer, "network_layer_name", None)
    if layer_name is None:
        return True
    seen, note = vars(layer).get(_SEEN), _note_on(layer)
    if seen is None and record_of(shared.sd_model).originals is None:
        return False
    now = wanted()
    changing = _pace.is_fast(now, shared.state.sampling_step)
    if seen is not None and seen.serves(layer, now) and (note is None or note.is_current(changing)):
        return True
    record, slots = record_of(shared.sd_model), slots_of(layer)
    if record.originals is None or slots is None:
        return False
    with torch.no_grad():
        _apply(record, layer, layer_name, slots, changing)
    names = wanted_names()
    vars(layer).update({_NAMES: names, _SEEN: _Seen(now, names)})
    return True


def _acting_beside(original: Callable[..., Any]) -> Callable[..., Any]:
    """With lora_functional the Lora extension restores the layer at each call, and adds what its networks give."""

    def network_forward(layer: torch.nn.Module, *args: Any) -> Any:
        if not _bring_up_to_date(layer):
            return original(layer, *args)
        vars(layer)[_IS_READY] = True
        try:
            return original(layer, *args)
        finally:
            vars(layer).pop(_IS_READY, None)

    return network_forward


def _restoring(original: Callable[..., None]) -> Callable[..., None]:
    def network_restore_weights_from_backup(self: torch.nn.Module) -> None:
        if _IS_READY in vars(self):
            return
        if _note_on(self) is not None:
            with torch.no_grad():
                _take_out(record_of(shared.sd_model), self)
        original(self)

    return network_restore_weights_from_backup


def _resetting(original: Callable[..., None]) -> Callable[..., None]:
    """The weights are about to be loaded, so nothing is in them any more; only an added bias would stay."""

    def network_reset_cached_weight(self: torch.nn.Module) -> None:
        if _IS_READY in vars(self):
            return
        note, slots = _note_on(self), slots_of(self)
        if note is not None and slots is not None:
            if note.changes.written(slots.bias.key) and note.changes.backups.get(slots.bias.key) is None:
                slots.bias.drop()
            vars(self).pop(_NOTE)
        vars(self).pop(_SEEN, None)
        original(self)

    return network_reset_cached_weight


class _Seen(NamedTuple):
    """The networks that a layer was brought to last, whether or not they act on it, and the names put down for them."""

    wanted: list[Any]
    names: tuple[Any, ...]

    def serves(self, layer: torch.nn.Module, wanted: list[Any]) -> bool:
        """Whether the same is wanted, and nobody has reset the Lora extension's books."""
        return self.wanted == wanted and self.names is vars(layer).get(_NAMES)


@dataclass(frozen=True)
class _Note:
    """What was done to a layer.

    Attributes:
        uses: the networks that act on it.
        changing: whether their strengths were found to change from step to step.
        changes: what was done to its parameters.
        parts: for each branch of the weight, the network module that it is a plain LoRA of, or None.
        is_whole: False while parameters are being written; if that fails, they are written anew at the next call.
    """

    uses: tuple[Use, ...]
    changing: bool
    changes: Changes
    parts: tuple[Any, ...] = ()
    is_whole: bool = True

    def is_current(self, changing: bool) -> bool:
        """Whether the layer is as it has to be, given that the same networks are wanted."""
        return self.is_whole and self.changing == changing and all(use.is_current() for use in self.uses)

    def serves(self, uses: tuple[Use, ...], changing: bool) -> bool:
        """Whether the layer is as it has to be for these networks."""
        same = len(uses) == len(self.uses) and all(mine.same_as(other) for mine, other in zip(self.uses, uses))
        return self.is_whole and same and self.changing == changing


_UNTOUCHED = _Note((), False, Changes())


def _note_on(layer: torch.nn.Module) -> _Note | None:
    return vars(layer).get(_NOTE)


def _apply(record: Record, layer: torch.nn.Module, layer_name: str, slots: Slots, changing: bool) -> None:
    uses, note = uses_of(layer, layer_name), _note_on(layer)
    if not uses:
        if note is not None:
            _take_out(record, layer)
    elif note is None or not note.serves(uses, changing):
        _put_in(record, layer, layer_name, slots, uses, changing)


def _put_in(
    record: Record, layer: torch.nn.Module, layer_name: str, slots: Slots, uses: tuple[Use, ...], changing: bool
) -> None:
    note = _note_on(layer) or _UNTOUCHED
    at_run_time = changing or change_by_themselves() or record.lora == LORA_AT_RUN_TIME
    for slot in slots.weights:
        if not at_run_time or not slot.in_8_bits or note.changes.written(slot.key):
            _find_original(record, slot, layer_name, note.changes)
    at_run_time |= any(slot.in_8_bits and slot.original is None for slot in slots.weights)
    known = _known_branches(note, slots.weights[0], uses) if at_run_time else {}
    parts = _collect(layer_name, slots, uses, at_run_time, known)
    _write(layer, slots, note.changes, _Note(uses, changing, slots.changes(note.changes), parts))


def _find_original(record: Record, slot: WeightSlot, layer_name: str, changes: Changes) -> None:
    assert record.originals is not None
    try:
        slot.find_original(record.originals, changes)
    except OriginalGoneError as error:
        record.is_stale = True
        raise OriginalGoneError(
            f"FP8 weight: {error}, so the networks merged into {layer_name} cannot be taken out. The checkpoint is "
            "loaded again for the next picture: put the file back, or choose another checkpoint."
        ) from None


def _known_branches(note: _Note, slot: WeightSlot, uses: tuple[Use, ...]) -> dict[Any, Branch]:
    """Branches, by network module, that need nothing but another factor: their tensors are where the weight is."""
    branches = dict(zip(note.parts, getattr(slot.parameter, "branches", ())))
    before = {use.parts[0]: use for use in note.uses}
    now = [use.parts[0] for use in uses if use.parts[0] in branches and before[use.parts[0]].same_tensors(use)]
    return {part: branches[part] for part in now}


def _collect(
    layer_name: str, slots: Slots, uses: tuple[Use, ...], at_run_time: bool, known: dict[Any, Branch]
) -> tuple[Any, ...]:
    """Gather in the slots what all networks add; one that does not fit is told of and left out, whole.

    Returns:
        For each branch of the (first) weight the network module that it is a plain LoRA of, or None.
    """
    parts = []
    for use in uses:
        try:
            branch = _low_rank(use, slots, known) if at_run_time else None
            found = [] if branch else [delta_of(use, index, slot.base) for index, slot in enumerate(slots.weights)]
        except Exception as error:  # another's code on a file from anywhere: whatever it raises, the picture goes on
            if is_out_of_memory(error):
                raise
            tell_misfit(use, layer_name, error)
            continue
        if branch is not None:
            slots.weights[0].branches.append(branch)
        for index, (slot, (delta, bias_delta)) in enumerate(zip(slots.weights, found)):
            if at_run_time and slot.in_8_bits:
                slot.branches.append(Computed(partial(_weight_delta, use, index)))
            else:
                slot.add(delta)
            if bias_delta is not None:
                slots.bias.add(bias_delta, slot.parameter.device)
        parts.append(use.parts[0] if branch is not None else None)
    return tuple(parts)


def _low_rank(use: Use, slots: Slots, known: dict[Any, Branch]) -> LowRank | None:
    slot = slots.weights[0]
    if len(slots.weights) > 1 or not slot.in_8_bits:
        return None
    branch = known.get(use.parts[0])
    return replace(branch, factor=use.factor()) if isinstance(branch, LowRank) else low_rank(use, slot.parameter)


def _weight_delta(use: Use, index: int, weight: torch.Tensor) -> torch.Tensor:
    return delta_of(use, index, weight)[0]


def _write(layer: torch.nn.Module, slots: Slots, before: Changes, note: _Note) -> None:
    vars(layer)[_NOTE] = replace(note, is_whole=False)
    slots.write(Changes(before.sources, {**before.backups, **note.changes.backups}))
    vars(layer)[_NOTE] = note


def _take_out(record: Record, layer: torch.nn.Module) -> None:
    """Bring a layer to the very bits that were loaded. Raises OriginalGoneError."""
    note, slots = _note_on(layer), slots_of(layer)
    assert note is not None
    assert slots is not None
    for slot in slots.weights:
        if note.changes.written(slot.key):
            _find_original(record, slot, getattr(layer, "network_layer_name", slot.key), note.changes)
    _write(layer, slots, note.changes, replace(_UNTOUCHED, changes=note.changes))
    vars(layer).pop(_NOTE)
    vars(layer).pop(_SEEN, None)
    vars(layer)[_NAMES] = ()


def forget(model: torch.nn.Module) -> None:
    """Take all networks out of a model's layers; the next use merges anew.

    Raises:
        OriginalGoneError: some layers cannot be brought back; all others are.
    """
    record, problem = record_of(model), None
    with torch.no_grad():
        for layer in model.modules():
            try:
                if _note_on(layer) is not None:
                    _take_out(record, layer)
                elif vars(layer).get("network_weights_backup") is not None:
                    _take_out_as_the_host_does(layer)
            except OriginalGoneError as error:
                problem = error
    if problem is not None:
        raise problem


def _take_out_as_the_host_does(layer: torch.nn.Module) -> None:
    host = hosts()[0]
    host.network_restore_weights_from_backup(layer)
    host.network_reset_cached_weight(layer)


def follow_settings(model: torch.nn.Module) -> None:
    """Begin anew if another way of applying networks was chosen. Raises OriginalGoneError."""
    record = record_of(model)
    if record.originals is None or record.lora == lora_choice():
        return
    forget(model)
    record.lora = lora_choice()
    if record.lora != LORA_FROM_COPY:
        record.originals.drop_copies()


def _sources(model: torch.nn.Module) -> Iterator[tuple[WeightSlot, str]]:
    """Every weight that networks act on now, with where its original came from."""
    for layer in model.modules():
        note, slots = _note_on(layer), slots_of(layer)
        if note is not None and slots is not None:
            for slot in slots.weights:
                if slot.key in note.changes.sources:
                    yield slot, note.changes.sources[slot.key]


def layers_by_source(model: torch.nn.Module) -> dict[str, int]:
    """How many 8-bit weights networks act on now, by where their originals came from (``RUN_TIME``: not merged)."""
    return dict(Counter(source for slot, source in _sources(model) if slot.in_8_bits))


def after_job(model: torch.nn.Module) -> None:
    """Say on the console what became of networks if that is new, and let go of a checkpoint that is not needed."""
    record = record_of(model)
    if record.originals is None:
        return
    found = layers_by_source(model)
    if found != record.lora_said:
        record.lora_said = found
        if found:
            print(f"FP8 weight: {described(found)}")
    if all(source != FILE for _, source in _sources(model)):
        record.originals.file.close()  # a mapped file can be neither replaced nor deleted on Windows


_WORDS = {
    FILE: "merged over the originals in the checkpoint file in {} layers",
    COPY: "merged over the originals in RAM in {} layers",
    RUN_TIME: "added at run time in {} layers",
}


def described(layers: dict[str, int]) -> str:
    """How networks are applied, in one line."""
    return "LoRA " + ", ".join(_WORDS[source].format(count) for source, count in sorted(layers.items()))
