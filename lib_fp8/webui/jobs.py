"""What the extension does at the stations of a job, up to its end, however it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modules import errors, processing

from lib_fp8.webui import animatediff, infotext, lora, settings, snapshot
from lib_fp8.webui.following import converted_models
from lib_fp8.webui.patching import Patches


def install(patches: Patches) -> None:
    """Be there when a job ends; the WebUI tells scripts only of the end of one that brings pictures.

    Other extensions replace that function too, and take theirs off when the UI is reloaded, with what lies above it.
    """
    if not patches.is_outermost(processing, "process_images_inner"):
        patches.replace(processing, "process_images_inner", _ending)


def _ending(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_images_inner(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            settings.end_job()
            _is_done()

    return process_images_inner


def _is_done() -> None:
    try:
        lora.after_job(converted_models(), animatediff.kept())
        snapshot.publish()
    except Exception:  # the pictures are made, or it has failed for a reason of its own
        errors.report("FP8 weight: error at the end of a job", exc_info=True)


def before_process(p: Any) -> None:
    """A job begins: its overrides are known, but not yet in force."""
    settings.begin_job(p)


def before_process_batch(p: Any) -> None:
    """The model is in the storage in which the next pictures are made."""
    infotext.write(p)
