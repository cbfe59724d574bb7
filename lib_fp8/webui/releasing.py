"""Giving models back to the WebUI when the extension goes."""

from __future__ import annotations

import sys
from typing import Any

from modules import sd_models

from lib_fp8.webui import animatediff
from lib_fp8.webui.following import (
    converted_models,
    drop_from_memory,
    forget_networks,
    is_of_its_file,
    reload_from_file,
    renew_empty_prompt,
    tell_decoded,
)
from lib_fp8.webui.in_memory import convert_in_memory
from lib_fp8.webui.loading import streaming
from lib_fp8.webui.storage import FULL_PRECISION, drop_record, record_of
from lib_fp8.webui.targets import UNET, find_targets


def take_networks_out() -> None:
    """Leave no network merged by this extension; whoever merges next starts from whole layers."""
    for model in converted_models():
        try:
            forget_networks(model)
        except Exception as error:
            print(error, file=sys.stderr)


def release_all() -> None:
    """Give the models back to the WebUI in full precision, after ``install`` was undone.

    The model in use is loaded again from its file, or decoded where the file is gone. Those that wait in memory are
    dropped; the WebUI loads them again when they are chosen. Models that were made in memory are decoded.
    """
    data = sd_models.model_data
    for model in [model for model in data.loaded_sd_models if model is not data.sd_model]:
        if record_of(model).applied != FULL_PRECISION and not _is_kept(model):
            data.loaded_sd_models.remove(model)
            sd_models.send_model_to_trash(model)
    if data.sd_model is not None and record_of(data.sd_model).applied != FULL_PRECISION:
        with animatediff.taken_out(data.sd_model):
            _release(data.sd_model)
    animatediff.release(data.sd_model)


def _is_kept(model: Any) -> bool:
    """Decode a model that waits in memory if its weights are nowhere else."""
    try:
        if is_of_its_file(model):
            return False
    except Exception:  # whoever chooses it is told
        return False
    tell_decoded(model, convert_in_memory(model, FULL_PRECISION))
    drop_record(model)
    return True


def _release(model: Any) -> None:
    parts = record_of(model).applied.parts
    try:
        with streaming(find_targets(model), FULL_PRECISION):
            is_read = reload_from_file(model)
    except Exception as error:
        if record_of(model).is_stale:  # some layers are loaded, others not
            drop_from_memory(model)
            print(f"FP8 weight: {error}. The checkpoint is loaded again for the next picture.", file=sys.stderr)
            return
        layers = convert_in_memory(model, FULL_PRECISION)
        print(f"FP8 weight: {error}. {layers} layers were decoded from 8 bits instead.", file=sys.stderr)
    else:
        if not is_read:
            tell_decoded(model, convert_in_memory(model, FULL_PRECISION))
    drop_record(model)
    if parts != {UNET}:
        renew_empty_prompt(model)
