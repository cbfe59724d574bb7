"""ControlNet's models: packed after they are built on the CPU, before they are moved to the device.

The extension (Mikubill/sd-webui-controlnet) keeps the last ones in a cache of its own, until the UI is reloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from modules import devices, scripts, shared

from lib_fp8 import ConversionError, Policy, convert_model
from lib_fp8.webui import guests
from lib_fp8.webui.guests import Guest
from lib_fp8.webui.patching import Patches
from lib_fp8.webui.settings import CONTROL_MODELS, wanted_guest_policy
from lib_fp8.webui.shortage import stop_at_shortage

_KEEP = (
    r"(^|\.)input_blocks\.0\.0$",
    r"(^|\.)conv_in$",
    r"conditioning1",
    r"input_hint_block",
    r"zero_convs",
    r"middle_block_out",
    r"image_proj",
)
"""Where the control picture enters and the control leaves: few bytes that everything passes through."""


_BUILD = "build_model_by_guess"


def _scripts() -> list[Any]:
    found = [data for data in scripts.scripts_data if hasattr(data.script_class, "clear_control_model_cache")]
    return [data for data in found if hasattr(data.module, _BUILD)]


def install(patches: Patches) -> None:
    """Be there when control models are built; does nothing without the extension, or a second time.

    When the UI is reloaded, the extension's script is executed again, as another module with another cache.
    """
    modules = [script.module for script in _scripts()]
    patches.undo_elsewhere(modules, _BUILD)
    for module in modules:
        if not patches.replaces(module, _BUILD):
            patches.replace(module, _BUILD, _converting)


def _module(built: Any) -> torch.nn.Module:
    """What is built is a module with its type; before 2024 the module alone."""
    return getattr(built, "model", built)


def _and_keep(policy: Policy | None) -> Policy | None:
    return None if policy is None else replace(policy, keep=(*policy.keep, *_KEEP))


def _converting(original: Callable[..., Any]) -> Callable[..., Any]:
    def build_model_by_guess(state_dict: Any, unet: Any, model_path: str) -> Any:
        built = original(state_dict, unet, model_path)
        policy = _and_keep(guests.policy_while_loading(CONTROL_MODELS, shared.sd_model))
        if policy is not None:
            name, module = f"ControlNet {Path(model_path).name}", _module(built)
            try:
                guests.enter(module, Guest(name, policy, convert_model(module, policy)))
            except ConversionError as error:
                stop_at_shortage(error)
                guests.enter_failure(module, Guest(name, policy), error)
        return built

    return build_model_by_guess


def follow_settings(model: Any) -> None:
    """Let go of cached models in another storage than the settings want; the extension builds them anew."""
    policy = _and_keep(wanted_guest_policy(CONTROL_MODELS, model))
    for script in _scripts():
        cache = script.script_class.model_cache
        stale = [name for name, built in cache.items() if not guests.has_policy(_module(built), policy)]
        for name in stale:
            del cache[name]
        if stale:
            devices.torch_gc()
