"""The extension inside the WebUI: the only package that imports ``modules``. Installed and taken out as a whole."""

from __future__ import annotations

from typing import Any

from modules import script_callbacks, sd_models, shared

from lib_fp8.webui import (
    animatediff,
    conditioning,
    controlnet,
    following,
    infotext,
    loading,
    lora,
    panel,
    provenance,
    reading,
    releasing,
    settings,
    xyz,
)
from lib_fp8.webui.patching import Patches

_patches = Patches()
_options = settings.Options(on_change=lambda: _follow_settings(), status=panel.status_html, component=panel.component)


def _follow_settings() -> None:
    model = sd_models.model_data.sd_model
    if model is not None:
        following.follow_settings(model)


def install() -> None:
    """Put everything in place, or nothing; calling it again does no harm."""
    _patches.undo()
    try:
        _options.add()
        settings.repair_saved_values()
        provenance.install(_patches)
        reading.install(_patches)
        loading.install(_patches)
        following.install(_patches)
        lora.install(_patches)
        conditioning.install(_patches)
    except Exception:
        _patches.undo()
        _options.remove()
        raise


def register_callbacks(extension_name: str) -> None:
    """Register with the WebUI; it forgets all callbacks when the UI is reloaded."""
    script_callbacks.on_ui_settings(_options.arrange)
    script_callbacks.on_before_ui(_all_scripts_are_loaded)
    script_callbacks.on_infotext_pasted(infotext.complete_pasted)
    script_callbacks.on_app_started(panel.add_route)
    script_callbacks.on_script_unloaded(lambda: uninstall(extension_name))


def _all_scripts_are_loaded() -> None:
    xyz.add_axes()
    for part in (lora, animatediff, controlnet):  # for extensions that were loaded after this one
        part.install(_patches)


def uninstall(extension_name: str) -> None:
    """Take everything out. Models stay as they are if the extension comes back at once (Reload UI); if it was
    switched off, they are given back in full precision."""
    _patches.undo()
    _options.remove()
    releasing.take_networks_out()
    if _is_switched_off(extension_name):
        releasing.release_all()


def _is_switched_off(extension_name: str) -> bool:
    everything_off = getattr(shared.opts, "disable_all_extensions", "none") != "none"
    return everything_off or extension_name in shared.opts.disabled_extensions


def before_process(p: Any) -> None:
    """A job begins: its overrides are known, but not yet in force."""
    settings.announce_overrides(p.override_settings)


def process(p: Any) -> None:
    """A job's overrides are in force."""
    settings.overrides_are_in_force()


def before_process_batch(p: Any) -> None:
    """The model is in the storage in which the next pictures are made."""
    infotext.write(p)


def postprocess(p: Any) -> None:
    """A job is done."""
    lora.after_job(following.converted_models(), animatediff.kept())


__all__ = [
    "before_process",
    "before_process_batch",
    "install",
    "postprocess",
    "process",
    "register_callbacks",
    "uninstall",
]
