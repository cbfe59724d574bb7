"""Modules that other extensions bring along: which of them are held in 8 bits, and what was done to each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakSet

import torch

from lib_fp8 import ConversionError, Policy, Report
from lib_fp8.webui.settings import SettingError, wanted_guest_policy

_ATTRIBUTE = "fp8_weight_guest"


@dataclass(frozen=True)
class Guest:
    """What was done to one module of another extension.

    Attributes:
        name: what the user knows it by.
        policy: how it was asked to be held; None for full precision.
        report: what its conversion did; None if it was not converted.
    """

    name: str
    policy: Policy | None
    report: Report | None = None


_modules: WeakSet[torch.nn.Module] = WeakSet()


def policy_while_loading(key: str, model: torch.nn.Module) -> Policy | None:
    """How a module that is being loaded is to be held; in full precision if a setting has an impossible value.

    Whoever set it hears of it; the other extension goes on.

    Args:
        key: the option for modules of this kind.
        model: the model in use.
    """
    try:
        return wanted_guest_policy(key, model)
    except SettingError as error:
        print(f"FP8 weight: {error}. {_FULL_PRECISION}", file=sys.stderr)
        return None


_FULL_PRECISION = "It stays in full precision."


def enter(module: torch.nn.Module, guest: Guest) -> None:
    """Note what was done to a module, and say it on the console if it was converted."""
    module.__dict__[_ATTRIBUTE] = guest
    _modules.add(module)
    if guest.report is not None and guest.report.converted:
        for note in guest.report.notes:
            print(f"FP8 weight: {guest.name}: {note}")
        print(f"FP8 weight: {guest.name} {guest.report.summary()}")


def enter_failure(module: torch.nn.Module, guest: Guest, error: ConversionError) -> None:
    """Note that a module could not be converted; it is not tried again until something else is wanted."""
    enter(module, guest)
    print(f"FP8 weight: {guest.name}: {error}. {_FULL_PRECISION}", file=sys.stderr)


def has_policy(module: torch.nn.Module, policy: Policy | None) -> bool:
    """Whether a module was asked to be held in this way; one that was never seen is in full precision."""
    guest = module.__dict__.get(_ATTRIBUTE)
    return (None if guest is None else guest.policy) == policy


def converted() -> Iterator[tuple[torch.nn.Module, Guest, Report]]:
    """The modules in memory that have layers in 8 bits, by name."""
    known = [(module, module.__dict__[_ATTRIBUTE]) for module in list(_modules)]
    for module, guest in sorted(known, key=lambda pair: pair[1].name):
        if guest.report is not None and guest.report.converted:
            yield module, guest, guest.report
