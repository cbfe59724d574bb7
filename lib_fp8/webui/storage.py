"""How a model is to be stored, how it is stored, and the record of that, which lives on the model itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from lib_fp8 import Policy, Report
from lib_fp8.source import Originals, Signature
from lib_fp8.webui.targets import UNET

_ATTRIBUTE = "fp8_weight_record"
_HYPERNETWORKS = r"\.hyper_[kv]\."
"""The WebUI hangs the layers of a hypernetwork into the attention of the UNet; they are none of its own."""


@dataclass(frozen=True)
class Storage:
    """A policy for some parts of a model; the parts that are not named stay in full precision.

    Attributes:
        policy: the policy for all of them, None if there are none.
        parts: kinds of ``Target``.
        note: what the user should know of the choice, such as a format that was replaced.
    """

    policy: Policy | None = None
    parts: frozenset[str] = frozenset()
    note: str | None = field(default=None, compare=False)

    def policy_for(self, kind: str) -> Policy | None:
        """The policy for one part, None if it stays in full precision."""
        if self.policy is None or kind not in self.parts:
            return None
        return replace(self.policy, keep=(*self.policy.keep, _HYPERNETWORKS)) if kind == UNET else self.policy


FULL_PRECISION = Storage()


@dataclass(frozen=True)
class Origin:
    """Where the weights of a model came from.

    Attributes:
        filename: of the checkpoint that they were loaded as.
        contents: what tells its file from another under the same name; None if there was no file.
        in_memory: whether they are not that file's: another extension gave them, or changed them afterwards.
    """

    filename: str
    contents: Signature | None
    in_memory: bool = False


@dataclass
class Record:
    """What was done to one model.

    Attributes:
        applied: how it is stored now.
        refused: storage and way to apply networks that were tried and failed; not tried again until others are wanted.
        reports: part to what its conversion did.
        problem: why the last conversion failed, for the panel.
        originals: the weights as they were before rounding; None in full precision.
        lora: how networks are applied; follows the setting.
        lora_said: what the console said last of the layers that networks act on.
        is_stale: it must be loaded again before it is used: something broke off while it was loaded, or networks are
            in it that cannot be taken out.
        is_unfinished: it must be brought into its storage again before it is used: something broke off while it was
            converted or moved. Every layer holds its weight, if not as ``applied`` says.
        origin: where its weights came from; None if that was not seen.
        note: what the user should know of its weights.
        is_void: it is the record of no model any more; what is noted of layers under it was of another load.
    """

    applied: Storage = FULL_PRECISION
    refused: tuple[Storage, str] | None = None
    reports: dict[str, Report] = field(default_factory=dict)
    problem: str | None = None
    originals: Originals | None = None
    lora: str = ""
    lora_said: dict[str, int] = field(default_factory=dict)
    is_stale: bool = False
    is_unfinished: bool = False
    origin: Origin | None = None
    note: str | None = None
    is_void: bool = False


def record_of(model: torch.nn.Module) -> Record:
    """The record of a model; a model that nothing was done to has an empty one."""
    found = model.__dict__.get(_ATTRIBUTE)
    if found is None:
        found = Record()
        model.__dict__[_ATTRIBUTE] = found
    return found


def set_record(model: torch.nn.Module, record: Record) -> None:
    """Replace the record of a model; a checkpoint that the former one holds is let go."""
    drop_record(model)
    model.__dict__[_ATTRIBUTE] = record


def drop_record(model: torch.nn.Module) -> None:
    """Forget everything about a model."""
    former = model.__dict__.pop(_ATTRIBUTE, None)
    if former is None:
        return
    former.is_void = True
    if former.originals is not None:
        former.originals.release()
