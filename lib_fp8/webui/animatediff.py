"""AnimateDiff's motion modules: packed while they are loaded, and out of the way while a model changes its storage.

The extension (continue-revolution/sd-webui-animatediff) loads a motion module, keeps it, and puts its parts between the
layers of the UNet for the time of a job.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from modules import shared

from lib_fp8 import ConversionError, StreamingConversion
from lib_fp8.webui import guests
from lib_fp8.webui.guests import Guest
from lib_fp8.webui.patching import Patches
from lib_fp8.webui.settings import MOTION_MODULES, packing_dtype, wanted_guest_policy


def _extension() -> Any:
    return sys.modules.get("scripts.animatediff_mm")


def install(patches: Patches) -> None:
    """Be there when motion modules are loaded; does nothing without the extension, or a second time."""
    module = _extension()
    if module is not None and not patches.replaces(module.MotionWrapper, "load_state_dict"):
        patches.replace(module.MotionWrapper, "load_state_dict", _converting)


def _converting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Pack the layers on the CPU, before the extension moves the motion module to the device."""

    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        policy = wanted_guest_policy(MOTION_MODULES, shared.sd_model)
        if policy is None:
            return original(self, state_dict, *args, **kwargs)
        name = f"AnimateDiff {self.mm_name}"
        try:
            with StreamingConversion([(self, policy)], dtype=packing_dtype()) as stream:
                result = original(self, state_dict, *args, **kwargs)
        except ConversionError as error:
            with StreamingConversion([(self, None)]):
                result = original(self, state_dict, *args, **kwargs)
            guests.enter_failure(self, Guest(name, policy), error)
            return result
        guests.enter(self, Guest(name, policy, stream.reports()[0]))
        return result

    return load_state_dict


def _injected_into(model: Any) -> Any:
    """The extension's manager if its motion module is in the UNet of a model now."""
    module = _extension()
    manager = None if module is None else module.mm_animatediff
    if manager is None or manager.mm is None or not type(manager).mm_injected:
        return None
    motion = set(manager.mm.modules())
    return manager if any(layer in motion for layer in model.model.diffusion_model.modules()) else None


@contextlib.contextmanager
def taken_out(model: Any) -> Iterator[None]:
    """Within, the UNet is as its checkpoint knows it; motion modules change the names of some of its layers."""
    manager = _injected_into(model)
    if manager is None:
        yield
        return
    name = manager.mm.mm_name
    manager.restore(model)
    try:
        yield
    finally:
        manager.inject(model, name)


def follow_settings(model: torch.nn.Module) -> None:
    """Bring a motion module that is in use into the storage that the settings want.

    The extension keeps that of the last job, and puts it in before the overrides of a job are known.
    """
    manager = _injected_into(model)
    if manager is not None and not guests.has_policy(manager.mm, wanted_guest_policy(MOTION_MODULES, model)):
        name = manager.mm.mm_name
        manager.restore(model)
        manager.remove()
        manager.inject(model, name)


def release() -> None:
    """Let the extension load its motion module again when it needs it."""
    module = _extension()
    kept = None if module is None else module.mm_animatediff.mm
    if kept is not None and not guests.has_policy(kept, None):
        module.mm_animatediff.remove()
