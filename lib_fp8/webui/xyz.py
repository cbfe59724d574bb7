"""Axes for the X/Y/Z plot script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from modules import scripts

from lib_fp8 import format_names
from lib_fp8.webui.settings import FORMAT, SWITCH, SWITCH_CHOICES, TEXT_ENCODER_KEYS

_RELOAD_COST = 0.9  # as the WebUI's own "FP8 mode": the X/Y/Z plot changes costly axes least often
_NONE = "None"
_MODE = "FP8 mode"


def add_axes() -> None:
    """Add the axes that the plot script does not have yet; does nothing where it is missing."""
    module = next((data.module for data in scripts.scripts_data if data.script_class.__module__ == "xyz_grid.py"), None)
    if module is None:
        return
    present = {axis.label for axis in module.axis_options}
    axes = [
        *(
            module.AxisOption(
                label,
                str,
                module.apply_override(key),
                cost=_RELOAD_COST,
                confirm=_confirm_one_of(label, choices),
                choices=lambda choices=choices: list(choices),
            )
            for label, key, choices in ((_MODE, SWITCH, SWITCH_CHOICES), ("FP8 format", FORMAT, format_names()))
        ),
        module.AxisOption(
            "FP8 text encoders",
            str,
            _apply_text_encoders,
            cost=_RELOAD_COST,
            confirm=_confirm_text_encoders,
            choices=lambda: [_NONE, *TEXT_ENCODER_KEYS, "+".join(TEXT_ENCODER_KEYS)],
        ),
    ]
    module.axis_options.extend(axis for axis in axes if axis.label not in present)
    for axis in module.axis_options:
        if axis.label == _MODE and axis.confirm is None:  # the WebUI's own takes any text
            axis.confirm = _confirm_one_of(_MODE, SWITCH_CHOICES)


def _confirm_one_of(label: str, choices: Sequence[str]) -> Callable[[Any, list[str]], None]:
    """A check before the plot: a bad value would end it in the middle, or not at all."""

    def confirm(p: Any, values: list[str]) -> None:
        if unknown := [value for value in values if value not in choices]:
            raise RuntimeError(f"Unknown {label}: {', '.join(unknown)}. Choose one of: {', '.join(choices)}")

    return confirm


def _chosen(value: str) -> set[str]:
    return set() if value == _NONE else {kind.strip() for kind in value.split("+")}


def _apply_text_encoders(p: Any, value: str, values: list[str]) -> None:
    chosen = _chosen(value)
    for kind, key in TEXT_ENCODER_KEYS.items():
        p.override_settings[key] = kind in chosen


def _confirm_text_encoders(p: Any, values: list[str]) -> None:
    for value in values:
        if unknown := _chosen(value) - set(TEXT_ENCODER_KEYS):
            raise RuntimeError(
                f"Unknown text encoder: {', '.join(sorted(unknown))}. "
                f"Choose {_NONE}, or one or more of {', '.join(TEXT_ENCODER_KEYS)} joined by +"
            )
