"""What is true of the model in use, measured and told by whoever works on it, for whoever asks meanwhile.

Jobs change the model in their own threads, one after the other. The page and programs ask from other threads, at any
moment: they read the last snapshot, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from modules import sd_models

from lib_fp8 import Report, measure
from lib_fp8.webui import guests, lora
from lib_fp8.webui.storage import FULL_PRECISION, Record, record_of
from lib_fp8.webui.targets import find_targets


@dataclass(frozen=True)
class Part:
    """A part of the model, or a module of another extension, that has layers in 8 bits.

    Attributes:
        name: what the user knows it by.
        report: what its conversion did.
        bytes_full_precision: bytes of all parameters and buffers if none of them were in 8 bits.
        bytes: their bytes as they are.
    """

    name: str
    report: Report
    bytes_full_precision: int
    bytes: int


@dataclass(frozen=True)
class Snapshot:
    """What was true of the model in use at one moment.

    Attributes:
        checkpoint: its name; None if no model was loaded, and then there is nothing else to tell.
        enabled: whether it is stored otherwise than in full precision.
        parts: what is in 8 bits.
        note: what the user should know of the storage.
        problem: why the last conversion failed.
        lora: how networks are applied.
        lora_layers: how many layers they act on, by where the originals came from.
        lora_problem: why no originals can be read.
    """

    checkpoint: str | None = None
    enabled: bool = False
    parts: tuple[Part, ...] = ()
    note: str | None = None
    problem: str | None = None
    lora: str = ""
    lora_layers: tuple[tuple[str, int], ...] = ()
    lora_problem: str | None = None


_NOTHING_LOADED = Snapshot()
_latest = _NOTHING_LOADED


def latest() -> Snapshot:
    """The last one; from any thread, at once."""
    return _latest


def publish() -> None:
    """Make a new one; only for a thread that nobody else works on the model beside."""
    global _latest
    model = sd_models.model_data.sd_model
    _latest = _NOTHING_LOADED if model is None else _of(model)


def _of(model: Any) -> Snapshot:
    record = record_of(model)
    return Snapshot(
        checkpoint=model.sd_checkpoint_info.name,
        enabled=record.applied != FULL_PRECISION,
        parts=_parts(model, record),
        note=". ".join(note for note in (record.applied.note, record.note) if note) or None,
        problem=record.problem,
        lora=record.lora,
        lora_layers=tuple(lora.layers_by_source(model).items()),
        lora_problem=None if record.originals is None else record.originals.problem(),
    )


def _parts(model: Any, record: Record) -> tuple[Part, ...]:
    own = [
        (target.kind, target.module, record.reports[target.kind])
        for target in find_targets(model)
        if target.kind in record.reports and record.applied.policy_for(target.kind) is not None
    ]
    others = [(guest.name, module, report) for module, guest, report in guests.converted()]
    return tuple(Part(name, report, *measure(module)) for name, module, report in own + others)
