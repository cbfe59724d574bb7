"""Telling the WebUI's cache of encoded prompts that a text encoder is stored differently, or is another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modules import processing, shared

from lib_fp8.webui.patching import Patches
from lib_fp8.webui.storage import record_of
from lib_fp8.webui.targets import TEXT_ENCODERS


def install(patches: Patches) -> None:
    """Make the storage of the text encoders part of the cache's key."""
    patches.replace(processing.StableDiffusionProcessing, "cached_params", _with_text_encoders)


def _with_text_encoders(original: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    def cached_params(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        record = record_of(shared.sd_model)
        policies = tuple(record.applied.policy_for(kind) for kind in TEXT_ENCODERS)
        return (*original(self, *args, **kwargs), policies, record.lora if any(policies) else None, record.origin)

    return cached_params
