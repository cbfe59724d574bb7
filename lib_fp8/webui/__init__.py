"""The extension inside the WebUI: the only package that imports ``modules``. Installed and taken out as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modules import call_queue, script_callbacks, sd_models, shared

from lib_fp8.webui import (
    animatediff,
    conditioning,
    controlnet,
    following,
    infotext,
    jobs,
    loading,
    lora,
    panel,
    provenance,
    reading,
    releasing,
    settings,
    snapshot,
    xyz,
)
from lib_fp8.webui.deltas import hosts
from lib_fp8.webui.jobs import before_process_batch
from lib_fp8.webui.patching import Patches

_patches = Patches()
_options = settings.Options(on_change=lambda: _follow_settings(), status=panel.status_html, component=panel.component)
_is_installed = False


def _follow_settings() -> None:
    model = sd_models.model_data.sd_model
    if model is not None:
        try:
            following.follow_settings(model)
        finally:
            snapshot.publish()


def install() -> None:
    """Put everything in place, or nothing; calling it again does no harm, not even while a job is running."""
    global _is_installed
    if _is_installed:
        jobs.install(_patches)
        return
    with call_queue.queue_lock:
        try:
            _options.add(_patches)
            settings.repair_saved_values()
            provenance.install(_patches)
            reading.install(_patches)
            loading.install(_patches)
            following.install(_patches)
            lora.install(_patches)
            conditioning.install(_patches)
            jobs.install(_patches)
        except Exception:
            _patches.undo()
            _options.remove()
            raise
        snapshot.publish()
    _is_installed = True


def register_callbacks(folder: Path) -> None:
    """Register with the WebUI; it forgets all callbacks when the UI is reloaded.

    Args:
        folder: of the extension.
    """
    script_callbacks.on_model_loaded(lambda _: snapshot.publish())
    script_callbacks.on_before_ui(_all_scripts_are_loaded)
    script_callbacks.on_infotext_pasted(infotext.complete_pasted)
    script_callbacks.on_app_started(panel.add_route)
    script_callbacks.on_script_unloaded(lambda: _scripts_are_unloaded(folder))


def _all_scripts_are_loaded() -> None:
    xyz.add_axes()
    for part in (lora, animatediff, controlnet):  # for extensions that were loaded after this one
        part.install(_patches)


def _scripts_are_unloaded(folder: Path) -> None:
    """The UI is being reloaded, while a job may be running, and others wait for their turn.

    If the extension comes back, everything stays in force for them. If it does not, it is taken out between two jobs.
    """
    if _is_leaving(folder):
        with call_queue.queue_lock:
            uninstall()
    elif any(_is_leaving(Path(host.__file__).parent) for host in hosts()):
        with call_queue.queue_lock:
            releasing.take_networks_out()  # nobody would afterwards


def _is_leaving(folder: Path) -> bool:
    """Whether an extension was switched off or deleted."""
    if getattr(shared.opts, "disable_all_extensions", "none") != "none":
        return True
    return folder.name in shared.opts.disabled_extensions or not folder.is_dir()


def uninstall() -> None:
    """Take everything out, and give the models back to the WebUI in full precision."""
    global _is_installed
    _is_installed = False
    _patches.undo()
    _options.remove()
    releasing.take_networks_out()
    releasing.release_all()


def before_process(p: Any) -> None:
    """A job begins: its overrides are known, but not yet in force."""
    lora.install(_patches)  # others may have replaced functions since
    jobs.before_process(p)


__all__ = [
    "before_process",
    "before_process_batch",
    "install",
    "register_callbacks",
    "uninstall",
]
