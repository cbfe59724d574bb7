"""Axes for the X/Y/Z plot script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modules import scripts

from lib_fp8 import format_names
from lib_fp8.webui.settings import FORMAT, SWITCH, SWITCH_CHOICES, TEXT_ENCODER_KEYS

_RELOAD_COST = 0.9  # as the WebUI's own "FP8 mode": the X/Y/Z plot changes costly axes least often
_NONE = "None"


def add_axes() -> None:
    """Add the axes to the plot script; does nothing where it is missing.

    The WebUI's own "FP8 mode", from 1.8 on, is replaced: it takes any text, and the plot ends in an error of Python's.
    """
    module = next((data.module for data in scripts.scripts_data if data.script_class.__module__ == "xyz_grid.py"), None)
    if module is None:
        return
    options = module.axis_options
    for axis in (
        _choice(module, "FP8 mode", SWITCH, SWITCH_CHOICES),
        _choice(module, "FP8 format", FORMAT, format_names()),
        module.AxisOption(
            "FP8 text encoders",
            str,
            _apply_text_encoders,
            cost=_RELOAD_COST,
            confirm=_confirm_text_encoders,
            choices=lambda: [_NONE, *TEXT_ENCODER_KEYS, "+".join(TEXT_ENCODER_KEYS)],
        ),
    ):
        position = next((place for place, other in enumerate(options) if other.label == axis.label), len(options))
        options[position : position + 1] = [axis]


def _choice(module: Any, label: str, key: str, choices: Sequence[str]) -> Any:
    """An axis over the choices of an option."""

    def apply(p: Any, value: str, values: list[str]) -> None:
        p.override_settings[key] = _found(value, choices)

    def confirm(p: Any, values: list[str]) -> None:
        for value in values:
            if _found(value, choices) is None:
                raise RuntimeError(f"Unknown {label}: {value}. Choose one or more of: {', '.join(choices)}")

    return module.AxisOption(label, str, apply, cost=_RELOAD_COST, confirm=confirm, choices=lambda: list(choices))


def _found(text: str, choices: Sequence[str]) -> str | None:
    """The choice that is meant, in capitals or not, as on the WebUI's own axes; None if there is none."""
    return next((choice for choice in choices if choice.lower() == text.strip().lower()), None)


def _chosen(value: str) -> dict[str, str | None]:
    """The parts of a text such as ``CLIP-L + t5``, to the text encoder that each means."""
    if _found(value, [_NONE]):
        return {}
    return {part: _found(part, list(TEXT_ENCODER_KEYS)) for part in value.split("+")}


def _apply_text_encoders(p: Any, value: str, values: list[str]) -> None:
    chosen = _chosen(value).values()
    for kind, key in TEXT_ENCODER_KEYS.items():
        p.override_settings[key] = kind in chosen


def _confirm_text_encoders(p: Any, values: list[str]) -> None:
    for value in values:
        if unknown := [part.strip() for part, kind in _chosen(value).items() if kind is None]:
            raise RuntimeError(
                f"Unknown FP8 text encoders: {', '.join(unknown)}. "
                f"Choose {_NONE}, or one or more of {', '.join(TEXT_ENCODER_KEYS)} joined by +"
            )
