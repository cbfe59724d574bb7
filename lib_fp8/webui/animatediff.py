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
from modules import sd_models, shared

from lib_fp8 import ConversionError, StreamingConversion
from lib_fp8.webui import guests
from lib_fp8.webui.guests import Guest
from lib_fp8.webui.patching import Patches
from lib_fp8.webui.settings import MOTION_MODULES, packing_dtype, wanted_guest_policy
from lib_fp8.webui.shortage import stop_at_shortage
from lib_fp8.webui.targets import is_sdxl


def _extension() -> Any:
    """The extension; None where it is missing, or older than 1.11.1, which does not tell what is in the UNet."""
    module = sys.modules.get("scripts.animatediff_mm")
    manager = getattr(module, "mm_animatediff", None)
    tells = hasattr(type(manager), "mm_injected") and hasattr(module, "MotionWrapper")
    return module if tells else None


def install(patches: Patches) -> None:
    """Be there when motion modules are loaded; does nothing without the extension, or a second time."""
    module = _extension()
    if module is not None and not patches.replaces(module.MotionWrapper, "load_state_dict"):
        patches.replace(module.MotionWrapper, "load_state_dict", _converting)


def _converting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Pack the layers on the CPU, before the extension moves the motion module to the device."""

    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        # One without a name is being made by ControlNet, as a part of SparseCtrl.
        policy = guests.policy_while_loading(MOTION_MODULES, shared.sd_model) if self.mm_name else None
        if policy is None:
            return original(self, state_dict, *args, **kwargs)
        name = f"AnimateDiff {self.mm_name}"
        with _dropped_if_broken(self):
            try:
                with StreamingConversion([(self, policy)], dtype=packing_dtype()) as stream:
                    result = original(self, state_dict, *args, **kwargs)
            except ConversionError as error:
                stop_at_shortage(error)
                with StreamingConversion([(self, None)]):
                    result = original(self, state_dict, *args, **kwargs)
                guests.enter_failure(self, Guest(name, policy), error)
                return result
        guests.enter(self, Guest(name, policy, stream.reports()[0]))
        return result

    return load_state_dict


@contextlib.contextmanager
def _dropped_if_broken(motion: torch.nn.Module) -> Iterator[None]:
    """A motion module that was not loaded whole is not kept: the extension would go on with what was loaded of it."""
    try:
        yield
    except BaseException:
        if motion in kept():
            _extension().mm_animatediff.remove()
        raise


def kept() -> list[torch.nn.Module]:
    """The motion module that the extension keeps, in the UNet or not; none where there is none."""
    module = _extension()
    motion = None if module is None else module.mm_animatediff.mm
    return [] if motion is None else [motion]


def _injected_into(model: Any) -> Any:
    """The extension's manager if its motion module is in the UNet of a model now."""
    if model is None or not kept() or not type(_extension().mm_animatediff).mm_injected:
        return None
    motion = set(kept()[0].modules())
    found = any(layer in motion for layer in model.model.diffusion_model.modules())
    return _extension().mm_animatediff if found else None


@contextlib.contextmanager
def taken_out(model: Any) -> Iterator[None]:
    """Within, the UNet is as its checkpoint knows it; motion modules change the names of some of its layers.

    Afterwards the motion module is in the model that is in use then, unless it is of another kind.
    """
    manager = _injected_into(model)
    if manager is None:
        yield
        return
    name = manager.mm.mm_name
    manager.restore(model)
    try:
        yield
    finally:
        used = sd_models.model_data.sd_model
        if used is not None and not any(parameter.is_meta for parameter in used.parameters()):
            try:
                manager.inject(used, name)
            except Exception as error:  # of another kind, or its file is gone; what happened within matters more
                print(f"FP8 weight: {name} is left out. {error}", file=sys.stderr)


def _let_go(model: Any) -> None:
    """Let the extension load its motion module again, and the Lora extension forget the layers of this one."""
    gone = set(kept()[0].modules())
    layers = getattr(model, "network_layer_mapping", {})
    for name in [name for name, layer in layers.items() if layer in gone]:
        del layers[name]
    _extension().mm_animatediff.remove()


def follow_settings(model: torch.nn.Module) -> None:
    """Bring the motion module that the extension keeps into the storage that the settings want.

    One that is in the UNet is loaded anew: it is put in before the overrides of a job are known. One that waits for
    its next use is let go, unless it waits for a model of another kind.
    """
    wanted = wanted_guest_policy(MOTION_MODULES, model)
    if all(guests.has_policy(motion, wanted) for motion in kept()):
        return
    manager = _extension().mm_animatediff
    if _injected_into(model) is not None:
        name = manager.mm.mm_name
        manager.restore(model)
        _let_go(model)
        manager.inject(model, name)
    elif not type(manager).mm_injected and getattr(manager.mm, "is_xl", False) == is_sdxl(model):
        _let_go(model)


def release(model: torch.nn.Module | None) -> None:
    """Let the extension load its motion module again when it needs it.

    Args:
        model: the model in use.
    """
    if all(guests.has_policy(motion, None) for motion in kept()):
        return
    manager = _extension().mm_animatediff
    if _injected_into(model) is not None:
        manager.restore(model)
    _let_go(model)
