"""Axes for the X/Y/Z plot script."""

from __future__ import annotations

from typing import Any

from modules import scripts

from lib_fp8 import format_names
from lib_fp8.webui.settings import FORMAT, SWITCH, SWITCH_CHOICES, TEXT_ENCODER_KEYS

_RELOAD_COST = 0.9  # as the WebUI's own "FP8 mode": the X/Y/Z plot changes costly axes least often
_NONE = "None"


def add_axes() -> None:
    """Add the axes that the plot script does not have yet; does nothing where it is missing."""
    module = next((data.module for data in scripts.scripts_data if data.script_class.__module__ == "xyz_grid.py"), None)
    if module is None:
        return
    present = {axis.label for axis in module.axis_options}
    axes = [
        module.AxisOption(
            "FP8 mode", str, module.apply_override(SWITCH), cost=_RELOAD_COST, choices=lambda: list(SWITCH_CHOICES)
        ),
        module.AxisOption(
            "FP8 format", str, module.apply_override(FORMAT), cost=_RELOAD_COST, choices=lambda: list(format_names())
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
