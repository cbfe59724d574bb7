"""LoRA and LyCORIS on 8-bit weights: merged over the originals and rounded once, or added beside them at run time.

At every call of every layer the Lora extension asks that the loaded networks be in its weights. For a model in 8 bits
this module answers. What it did to a layer is noted on the layer. Nothing is kept of a weight whose original can be
read again.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import torch
from modules import shared

from lib_fp8.branch import Branch, Computed, LowRank
from lib_fp8.source import COPY, FILE, Originals
from lib_fp8.webui import backups
from lib_fp8.webui.backups import Backup
from lib_fp8.webui.deltas import (
    MisfitError,
    Use,
    delta_of,
    hosts,
    low_rank,
    strengths_are_computed,
    tell_misfit,
    uses_of,
    wanted,
    wanted_names,
)
from lib_fp8.webui.marks import Mark, QuantWeightMark, Verdict, mark_of
from lib_fp8.webui.pace import Pace
from lib_fp8.webui.patching import Patches
from lib_fp8.webui.settings import LORA_AT_RUN_TIME, LORA_FROM_COPY, lora_choice
from lib_fp8.webui.slots import (
    LAYER_CLASSES,
    Changes,
    OriginalGoneError,
    Slots,
    WeightSlot,
    parameter_at,
    slots_of,
)
from lib_fp8.webui.storage import Record, record_of

RUN_TIME = "run time"
"""What stands for a source where networks are added beside the 8-bit weight, which is not changed."""
_NOTE = "fp8_networks"
"""Attribute of a layer: the note of what was done to it."""
_IS_READY = "fp8_is_ready"
"""Attribute of a layer while networks act beside it: its weights are as they have to be."""
_NAMES = "network_current_names"
"""Attribute of a layer: the Lora extension's own; whoever resets it wants the networks to be merged anew."""


def install(patches: Patches) -> None:
    """Take over the merging of networks, from every Lora extension that is loaded and was not there before.

    One that lacks a function keeps its own code, which is right on 8-bit weights too, if less exact. One whose
    function others have replaced since, without calling what they replaced, is taken over again.
    """
    for host in hosts():
        if not all(hasattr(host, name) for name in _FUNCTIONS):
            continue
        for name, make in _FUNCTIONS.items():
            if not (patches.replaces(host, name) and _is_reached(host, name)):
                patches.replace(host, name, make)
    for cls in LAYER_CLASSES if hosts() else ():
        for name, make_backup in _BACKUPS.items():
            if not hasattr(cls, name):
                patches.define(cls, name, Backup(name, make_backup, _forget_backups))


class _Probe(torch.nn.Module):
    """A layer without a name, which no Lora extension touches; it shows whether a call comes through."""

    was_seen = False


def _is_reached(host: Any, name: str) -> bool:
    """Whether calling a function of a Lora extension, or what others have put around it, ends here."""
    probe = _Probe()
    arguments = (probe,) if name == "network_apply_weights" else (probe, torch.zeros(1, 1), lambda _, x: x)
    with contextlib.suppress(Exception):  # the function of somebody else
        getattr(host, name)(*arguments)
    return probe.was_seen


_pace = Pace()


def _applying(original: Callable[..., None]) -> Callable[..., None]:
    def network_apply_weights(self: torch.nn.Module) -> None:
        if isinstance(self, _Probe):
            self.was_seen = True
        elif not _bring_up_to_date(self):
            original(self)

    return network_apply_weights


def _bring_up_to_date(layer: torch.nn.Module) -> bool:
    """Bring a layer to the loaded networks; False where that is left to the Lora extension."""
    layer_name = getattr(layer, "network_layer_name", None)
    if layer_name is None:
        return True
    note = _note_on(layer)
    record = record_of(shared.sd_model) if note is None or note.record.is_void else note.record
    if record.originals is None:
        return False
    now = wanted(layer)
    changing = _pace.is_fast(now, shared.state.sampling_step, strengths_are_computed)
    if note is not None and note.serves(layer, now, changing):
        return True
    slots = slots_of(layer)
    if slots is None:
        return False
    uses = uses_of(layer, layer_name)
    with torch.no_grad():
        _heed_others(record, layer, slots)
        note = _put_assigned_back(layer, slots)
        if not note.holds(uses, changing):
            note = _change(layer, slots, uses, changing)
    names = wanted_names(layer)
    vars(layer).update({_NAMES: names, _NOTE: replace(note, wanted=now, names=names)})
    return True


def _acting_beside(original: Callable[..., Any]) -> Callable[..., Any]:
    """With lora_functional the Lora extension restores the layer at each call, and adds what its networks give."""

    def network_forward(layer: torch.nn.Module, *args: Any) -> Any:
        if isinstance(layer, _Probe):
            layer.was_seen = True
            return None
        if not _bring_up_to_date(layer):
            return original(layer, *args)
        names = vars(layer).get(_NAMES)
        vars(layer)[_IS_READY] = True
        try:
            return original(layer, *args)
        finally:
            for name in (_IS_READY, *_BACKUPS):
                vars(layer).pop(name, None)
            if names is not None:
                vars(layer)[_NAMES] = names

    return network_forward


_FUNCTIONS = {"network_apply_weights": _applying, "network_forward": _acting_beside}
"""What is replaced in a Lora extension. All else that it does to a layer goes through ``_BACKUPS``."""


def _weights_backup(layer: torch.nn.Module) -> Any:
    slots, note = _networks_in(layer)
    with torch.inference_mode(False), torch.no_grad():
        for slot in slots.weights:
            if slot.key in note.changes:
                _find_original(note.record, layer, slot, note.changes)
        values = tuple(slot.without_networks(note.changes) for slot in slots.weights)
    return values if len(values) > 1 else values[0]


def _bias_backup(layer: torch.nn.Module) -> torch.Tensor | None:
    slots, note = _networks_in(layer)
    return slots.bias.without_networks(note.changes)


def _networks_in(layer: torch.nn.Module) -> tuple[Slots, _Note]:
    """What networks did to a layer. Raises AttributeError where there are none in it, or where they act beside it."""
    note, slots = _note_on(layer), slots_of(layer)
    if note is not None and slots is not None and _IS_READY not in vars(layer):
        note = _heed_others(note.record, layer, slots)
        if note.marks:
            return slots, note
    raise AttributeError("no networks are in this layer")


def _forget_backups(layer: torch.nn.Module) -> None:
    """What the layer holds from now on is what it is without networks; others say so before they load its weights."""
    note, slots = _note_on(layer), slots_of(layer)
    if note is None or slots is None or _IS_READY in vars(layer):
        return
    slots.leave_to_loading(note.changes)
    vars(layer)[_NOTE] = replace(note, was_reset=True)


_BACKUPS = {backups.WEIGHTS: _weights_backup, backups.BIAS: _bias_backup}


@dataclass(frozen=True)
class _Note:
    """What was done to a layer.

    Attributes:
        record: that of the model which the layer belongs to.
        uses: the networks that act on it.
        changing: whether their strengths were found to change from step to step.
        changes: which parameters are not as they were loaded.
        marks: what each parameter that networks are in, merged or at run time, is known by.
        parts: for each branch of the first weight, the network module that it was made of.
        is_whole: False while parameters are being written; if that fails, they are written anew at the next call.
        was_reset: others said that what the layer holds from then on is what it is without networks.
        wanted: all networks that the layer was brought to, whether or not they act on it.
        names: what was put down for them in the Lora extension's books.
    """

    record: Record
    uses: tuple[Use, ...] = ()
    changing: bool = False
    changes: Changes = field(default_factory=Changes)
    marks: dict[str, Mark] = field(default_factory=dict)
    parts: tuple[Any, ...] = ()
    is_whole: bool = True
    was_reset: bool = False
    wanted: list[Any] | None = None
    names: tuple[Any, ...] | None = None

    def serves(self, layer: torch.nn.Module, wanted: list[Any], changing: bool) -> bool:
        """Whether nothing has changed since the last call."""
        return (
            self.wanted == wanted
            and self.names is vars(layer).get(_NAMES)
            and self.changing == changing
            and self.is_whole
            and not (self.was_reset or self.record.is_void)
            and all(mark.is_on(parameter_at(layer, key)) for key, mark in self.marks.items())
            and all(use.is_current() for use in self.uses)
        )

    def holds(self, uses: tuple[Use, ...], changing: bool) -> bool:
        """Whether the layer is as it has to be for these networks."""
        same = len(uses) == len(self.uses) and all(mine.same_as(other) for mine, other in zip(self.uses, uses))
        return self.is_whole and same and (self.changing == changing or not uses)


def _note_on(layer: torch.nn.Module) -> _Note | None:
    return vars(layer).get(_NOTE)


def _heed_others(record: Record, layer: torch.nn.Module, slots: Slots) -> _Note:
    """Bring the note on a layer up to what others did to its parameters since, and put it down.

    What they replaced as a whole, by loading or assigning, is from then on what the layer holds without networks: the
    file, or the copy, is no original of it any more unless it proves to be, and networks are brought to it anew.
    What they wrote in place while networks were in it (``weight += x``, ``weight[:4] = x``) goes when the networks
    change, as it does where the Lora extension merges by itself: nobody can tell it from the networks then. Into
    a plain parameter even ``copy_`` is such a write, unless the backups were reset before it.

    Args:
        record: that of the model which the layer belongs to.
        layer: the layer.
        slots: those of the layer.
    """
    note = _note_on(layer) or _Note(record)
    is_void, changes, marks, replaced = note.record.is_void, note.changes, dict(note.marks), set()
    for key, mark in note.marks.items():
        parameter = parameter_at(layer, key)
        verdict = mark.verdict(parameter, thoroughly=note.was_reset or is_void)
        if verdict is Verdict.REPLACED:
            replaced.add(key)
            del marks[key]
        elif not mark.is_on(parameter) and note.is_whole:
            marks[key] = mark_of(parameter)
            if isinstance(mark, QuantWeightMark) and verdict is Verdict.BUILT_ON and key not in changes:
                changes = changes.and_also(Changes({key: FILE}, contents={key: mark.contents}))
    if is_void:  # of what was not loaded since, nothing but a copy can be had
        replaced |= {key for key in changes.sources if key not in changes.backups}
    is_whole = note.is_whole and not replaced and not is_void
    changes = changes.without(replaced)
    note = replace(note, record=record, changes=changes, marks=marks, is_whole=is_whole, was_reset=False)
    vars(layer)[_NOTE] = note
    return note


def _put_assigned_back(layer: torch.nn.Module, slots: Slots) -> _Note:
    """If others have assigned a backup, do what the Lora extension does: it is what the layer is without networks."""
    weights, bias = (vars(layer).pop(name, None) for name in _BACKUPS)
    if weights is not None:
        slots.put_back(weights, bias)
        vars(layer)[_NOTE] = replace(vars(layer)[_NOTE], changes=Changes(), marks={}, is_whole=False)
    return vars(layer)[_NOTE]


def _change(layer: torch.nn.Module, slots: Slots, uses: tuple[Use, ...], changing: bool) -> _Note:
    """Bring the parameters of a layer to these networks; if that fails, the next call begins from the originals."""
    note: _Note = vars(layer)[_NOTE]
    record = note.record
    at_run_time = changing or record.lora == LORA_AT_RUN_TIME
    for slot in slots.weights:
        if slot.key in note.changes or (uses and not (at_run_time and slot.in_8_bits)):
            _find_original(record, layer, slot, note.changes)
    at_run_time |= any(slot.in_8_bits and slot.original is None for slot in slots.weights)
    known = _known_branches(note, slots, uses) if at_run_time else {}
    parts = _collect(layer, slots, uses, at_run_time, known)
    changes = slots.changes(note.changes)
    between, marks = changes.and_also(note.changes), dict(note.marks)
    vars(layer)[_NOTE] = replace(note, changes=between, marks=marks, is_whole=False)
    slots.write(between, marks)
    vars(layer)[_NOTE] = note = _Note(record, uses, changing, changes, marks, parts)
    return note


def _find_original(record: Record, layer: torch.nn.Module, slot: WeightSlot, changes: Changes) -> None:
    assert record.originals is not None
    _holding.add(record.originals)
    try:
        slot.find_original(record.originals, changes)
    except OriginalGoneError as error:
        record.is_stale = True
        raise OriginalGoneError(
            f"FP8 weight: {error}, so the LoRAs merged into the model cannot be taken out. Generate again: the "
            "checkpoint is then loaded anew. If the file is gone, put it back or choose another checkpoint. "
            f"(Layer {getattr(layer, 'network_layer_name', 'unknown')})"
        ) from None


def _known_branches(note: _Note, slots: Slots, uses: tuple[Use, ...]) -> dict[Any, Branch]:
    """Branches of a layer by network module, of which nothing but the strength may have changed.

    The tensors of a plain LoRA are on the device already, and other networks were seen to fit.
    """
    slot = slots.weights[0]
    if len(slots.weights) > 1 or slots.bias.key in note.changes or not note.is_whole:
        return {}
    branches = dict(zip(note.parts, getattr(slot.parameter, "branches", ())))
    before = {use.parts[0]: use for use in note.uses}
    now = [use.parts[0] for use in uses if use.parts[0] in branches and before[use.parts[0]].same_tensors(use)]
    return {part: branches[part] for part in now}


def _collect(
    layer: torch.nn.Module, slots: Slots, uses: tuple[Use, ...], at_run_time: bool, known: dict[Any, Branch]
) -> tuple[Any, ...]:
    """Gather in the slots what all networks add; one that does not fit is told of and left out, whole.

    Returns:
        For each branch of the first weight the network module that it was made of.
    """
    parts = []
    for use in uses:
        try:
            branch = _whole_branch(use, slots, known) if at_run_time else None
            found = [] if branch else [delta_of(use, slot.key, slot.base) for slot in slots.weights]
        except MisfitError as error:
            tell_misfit(use.network.name, use.errors, getattr(layer, "network_layer_name", ""), error)
            continue
        parts.append(use.parts[0])
        if branch is not None:
            slots.weights[0].branches.append(branch)
        for slot, (delta, bias_delta) in zip(slots.weights, found):
            if at_run_time and slot.in_8_bits:
                slot.branches.append(_computed(use, slot.key))
            else:
                slot.sum.add(delta, slot.parameter.device)
            if bias_delta is not None:
                slots.bias.sum.add(bias_delta, slot.parameter.device)
    return tuple(parts)


def _whole_branch(use: Use, slots: Slots, known: dict[Any, Branch]) -> Branch | None:
    """All that a network does to a layer as one branch, if that can be told without computing what it adds."""
    slot = slots.weights[0]
    if len(slots.weights) > 1 or not slot.in_8_bits:
        return None
    branch = known.get(use.parts[0])
    if isinstance(branch, LowRank):
        return replace(branch, factor=use.factor())
    return low_rank(use, slot.parameter) if branch is None else _computed(use, slot.key)


def _computed(use: Use, key: str) -> Computed:
    return Computed(lambda weight: delta_of(use, key, weight)[0])


def _take_out(layer: torch.nn.Module) -> None:
    """Bring a layer to the very bits that were loaded, if anything was done to it. Raises OriginalGoneError."""
    note, slots = _note_on(layer), slots_of(layer)
    if note is not None and slots is not None:
        with torch.no_grad():
            _heed_others(note.record, layer, slots)
            _put_assigned_back(layer, slots)
            _change(layer, slots, (), False)
        vars(layer).pop(_NOTE)
        vars(layer)[_NAMES] = ()


def forget(model: torch.nn.Module) -> None:
    """Take all networks out of a model's layers; the next use merges anew.

    Raises:
        OriginalGoneError: some layers cannot be brought back; all others are.
    """
    problem = None
    for layer in model.modules():
        try:
            if _note_on(layer) is not None:
                _take_out(layer)
            elif vars(layer).get(backups.WEIGHTS) is not None:
                _take_out_as_the_host_does(layer)
        except OriginalGoneError as error:
            problem = error
    if problem is not None:
        raise problem
    originals = record_of(model).originals
    if originals is not None:
        originals.release()
        originals.file.try_again()


def _take_out_as_the_host_does(layer: torch.nn.Module) -> None:
    host = hosts()[0]
    with torch.no_grad():
        host.network_restore_weights_from_backup(layer)
    host.network_reset_cached_weight(layer)


def take_out_of_layers_not_in(model: torch.nn.Module, names: Container[str]) -> None:
    """Take networks out of the layers that a state dict does not name, before it is loaded."""
    for layer in model.modules():
        note, slots = _note_on(layer), slots_of(layer)
        if note is None or slots is None or note.record.is_void or note.record.originals is None:
            continue
        named = [note.record.originals.names.get(slot.owner) for slot in slots.weights]
        if any(name not in names for name in named):
            with contextlib.suppress(OriginalGoneError):  # it is all that is known of this layer
                _take_out(layer)


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
    """Every weight that networks act on now, with where its original came from, or ``RUN_TIME``."""
    for layer in model.modules():
        note, slots = _note_on(layer), slots_of(layer)
        if note is None or slots is None or note.record.is_void:
            continue
        for slot in slots.weights:
            if getattr(slot.parameter, "branches", ()):
                yield slot, RUN_TIME
            elif slot.key in note.changes:
                yield slot, note.changes.sources[slot.key]


def layers_by_source(model: torch.nn.Module) -> dict[str, int]:
    """How many 8-bit weights networks act on now, by where their originals came from (``RUN_TIME``: not merged)."""
    return dict(Counter(source for slot, source in _sources(model) if slot.in_8_bits))


_holding: WeakSet[Originals] = WeakSet()
"""Those whose file is held, until a job is done without need of it."""


def after_job(models: list[torch.nn.Module], guests: list[torch.nn.Module]) -> None:
    """Say on the console what became of networks if that is new, and let go of checkpoints that are not needed.

    A mapped file can be neither replaced nor deleted on Windows.

    Args:
        models: all that are in memory and have parts in 8 bits.
        guests: modules that were in one of them for the job; networks are brought to them again at the next one.
    """
    for guest in guests if models else ():
        forget(guest)
    for model in models:
        if not any(host.loaded_networks for host in hosts()):
            with contextlib.suppress(OriginalGoneError):  # said when the layer is used
                forget(model)  # also of a text encoder that did not run, since the WebUI remembers what it gave
        record, found = record_of(model), layers_by_source(model)
        if found and found != record.lora_said:
            print(f"FP8 weight: {described(found)}")
        record.lora_said = found
        if record.originals is not None and all(source != FILE for _, source in _sources(model)):
            record.originals.release()
    in_memory = [record_of(model).originals for model in models]
    for originals in [held for held in _holding if held not in in_memory]:
        originals.release()
        _holding.discard(originals)


_WORDS = {
    FILE: "merged in {} layers (originals read from the checkpoint file)",
    COPY: "merged in {} layers (originals read from the copy in RAM)",
    RUN_TIME: "added at run time in {} layers",
}


def described(layers: dict[str, int]) -> str:
    """How networks are applied, in one line."""
    return "LoRA " + ", ".join(_WORDS[source].format(count) for source, count in sorted(layers.items()))
