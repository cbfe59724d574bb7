"""ControlNet's models: packed after they are built on the CPU, before they are moved to the device.

The extension (Mikubill/sd-webui-controlnet) keeps the last ones in a cache of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from modules import scripts, shared

from lib_fp8 import ConversionError, Policy, convert_model
from lib_fp8.webui import guests
from lib_fp8.webui.guests import Guest
from lib_fp8.webui.patching import Patches
from lib_fp8.webui.settings import CONTROL_MODELS, wanted_guest_policy

_KEEP = (
    r"(^|\.)input_blocks\.0\.0$",
    r"input_hint_block",
    r"zero_convs",
    r"middle_block_out",
    r"image_proj",
)
"""Where the control picture enters and the control leaves: few bytes that everything passes through."""


def _scripts() -> list[Any]:
    return [data for data in scripts.scripts_data if hasattr(data.script_class, "clear_control_model_cache")]


def install(patches: Patches) -> None:
    """Be there when control models are built; does nothing without the extension, or a second time."""
    for script in _scripts():
        if hasattr(script.module, _BUILD) and not patches.replaces(script.module, _BUILD):
            patches.replace(script.module, _BUILD, _converting)


_BUILD = "build_model_by_guess"


def _policy(model: Any) -> Policy | None:
    policy = wanted_guest_policy(CONTROL_MODELS, model)
    return None if policy is None else replace(policy, keep=(*policy.keep, *_KEEP))


def _converting(original: Callable[..., Any]) -> Callable[..., Any]:
    def build_model_by_guess(state_dict: Any, unet: Any, model_path: str) -> Any:
        built = original(state_dict, unet, model_path)
        policy = _policy(shared.sd_model)
        if policy is not None:
            name = f"ControlNet {Path(model_path).name}"
            try:
                guests.enter(built.model, Guest(name, policy, convert_model(built.model, policy)))
            except ConversionError as error:
                guests.enter_failure(built.model, Guest(name, policy), error)
        return built

    return build_model_by_guess


def _drop(is_wanted: Callable[[torch.nn.Module], bool]) -> None:
    for script in _scripts():
        cache = script.script_class.model_cache
        for name in [name for name, built in cache.items() if not is_wanted(built.model)]:
            del cache[name]


def follow_settings(model: Any) -> None:
    """Let go of cached models in another storage than the settings want; the extension builds them anew."""
    policy = _policy(model)
    _drop(lambda module: guests.has_policy(module, policy))


def release() -> None:
    """Let go of cached models in 8 bits."""
    _drop(lambda module: guests.has_policy(module, None))
