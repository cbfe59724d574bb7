"""Bringing a loaded model into the storage that the settings want: in place, or again from its file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from modules import devices, script_callbacks, sd_hijack, sd_models, sd_unet, shared
from modules.timer import Timer

from lib_fp8 import ConversionError, convert_models
from lib_fp8.webui import animatediff, controlnet, lora, provenance, snapshot
from lib_fp8.webui.in_memory import convert_in_memory
from lib_fp8.webui.loading import new_copies, new_record, progress, summarise, whole_or_stale
from lib_fp8.webui.patching import Patches
from lib_fp8.webui.reading import check_usable, is_usable
from lib_fp8.webui.settings import (
    LORA_FROM_COPY,
    SettingError,
    end_job,
    job_has_overrides,
    lora_choice,
    wanted_storage,
)
from lib_fp8.webui.shortage import is_shortage
from lib_fp8.webui.slots import OriginalGoneError
from lib_fp8.webui.storage import FULL_PRECISION, Storage, record_of, set_record
from lib_fp8.webui.targets import TEXT_ENCODERS, Target, find_targets


def install(patches: Patches) -> None:
    """Be there when the WebUI looks after its model, as it does for each job, and when it takes it away."""
    patches.replace(sd_models, "reload_model_weights", _following_settings)
    patches.replace(sd_models, "unload_model_weights", _telling)


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    def unload_model_weights(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if sd_models.model_data.sd_model is None:  # from 1.7 on it is only put aside
            snapshot.publish()
        return result

    return unload_model_weights


def _following_settings(original: Callable[..., Any]) -> Callable[..., Any]:
    def reload_model_weights(sd_model: Any = None, info: Any = None, *args: Any, **kwargs: Any) -> Any:
        before: Any = _what_is_told()
        try:
            current, checkpoint = sd_model or sd_models.model_data.sd_model, info or sd_models.select_checkpoint()
            _check_readable(current, checkpoint)
            with contextlib.ExitStack() as stack:
                if not _is_from(current, checkpoint):
                    stack.enter_context(animatediff.taken_out(current))
                model = original(sd_model, info, *args, **kwargs)
            if model is not None:
                _follow_for_job(model)
            return model
        except BaseException:
            before = None
            end_job()
            _put_together_again()
            raise
        finally:
            if _what_is_told() != before:
                snapshot.publish()

    return reload_model_weights


def _what_is_told() -> tuple[Any, ...]:
    """What changes when a model does; measuring it is too much for a look that finds all as it has to be."""
    model = sd_models.model_data.sd_model
    if model is None:
        return ()
    record, checkpoint = record_of(model), model.sd_checkpoint_info.name
    notes = record.applied.note, record.note, record.problem
    return id(model), checkpoint, id(record), record.applied, record.lora, notes


def _put_together_again() -> None:
    """Make the former model usable after a failed load: the WebUI takes it apart before it reads a file."""
    model = sd_models.model_data.sd_model
    if model is None:
        return
    if sd_hijack.model_hijack.clip is None:
        sd_hijack.model_hijack.hijack(model)
    sd_models.model_data.set_sd_model(model)
    if not model.lowvram:
        try:
            with _whole_or_unfinished(model):
                model.to(devices.device)
        except NotImplementedError:  # it was being thrown away
            drop_from_memory(model)


def _follow_for_job(model: Any) -> None:
    try:
        follow_settings(model)
    except SettingError as error:
        if job_has_overrides():
            raise
        # A setting that is being refused while pictures are made; whoever set it hears of it, and the pictures go on.
        print(f"FP8 weight: {error}. The model stays as it is.", file=sys.stderr)


def _is_from(model: Any, checkpoint: Any) -> bool:
    return model is not None and model.sd_checkpoint_info.filename == checkpoint.filename


def _check_readable(model: Any, checkpoint: Any) -> None:
    """Refuse a checkpoint that cannot be used before the WebUI takes the loaded model apart to make room for it."""
    if not any(_is_from(loaded, checkpoint) for loaded in [model, *sd_models.model_data.loaded_sd_models]):
        stays = "" if model is None else "The model that was loaded before stays in use."
        check_usable(checkpoint.filename, stays)


def follow_settings(model: Any) -> None:
    """Bring a loaded model, and what other extensions add to it, into the storage that the settings want.

    Does nothing where it is so already. A conversion that fails leaves the model as it was, and is not tried again
    until the settings change.

    Raises:
        SettingError: a setting has an impossible value.
        Exception: whatever reading the checkpoint again raises; the model is as it was.
    """
    animatediff.follow_settings(model)  # first, since it may fail: then nothing else has changed
    _follow_with_model(model)
    controlnet.follow_settings(model)


def _follow_with_model(model: Any) -> None:
    wanted = wanted_storage(model)
    record = record_of(model)
    if (wanted, lora_choice()) != record.refused:
        record.refused = record.problem = None
    elif not (record.is_stale or record.is_unfinished):
        return
    before = record.applied
    targets = find_targets(model)
    changed = [t for t in targets if wanted.policy_for(t.kind) != record.applied.policy_for(t.kind)]
    needs_copies = wanted.policy is not None and lora_choice() == LORA_FROM_COPY != record.lora
    is_amiss = record.is_stale or record.is_unfinished
    if not changed and not needs_copies and not is_amiss:
        record.applied = wanted
        lora.follow_settings(model)
        return
    with contextlib.suppress(OriginalGoneError):  # then it is stale, and loaded again
        forget_networks(model)
    converts = changed and all(record.applied.policy_for(target.kind) is None for target in changed)
    has_all = (
        record.applied == FULL_PRECISION or lora_choice() != LORA_FROM_COPY
    )  # copies are made of all parts at once
    reloads = not (converts and has_all) or is_amiss or record.is_stale  # networks may be stuck in it by now
    with animatediff.taken_out(model):
        if reloads:
            _renew(model, wanted)
        else:
            _convert_in_place(model, changed, wanted)
    now = record_of(model).applied
    if reloads or any(before.policy_for(kind) != now.policy_for(kind) for kind in TEXT_ENCODERS):
        with _whole_or_unfinished(model):
            renew_empty_prompt(model)


@contextlib.contextmanager
def _whole_or_unfinished(model: Any) -> Iterator[None]:
    """What breaks off within leaves every layer its weight, but the model is not ready to be used."""
    try:
        yield
    except BaseException:
        record_of(model).is_unfinished = True
        raise


def converted_models() -> list[Any]:
    """The models in memory that have parts in 8 bits."""
    models = {id(model): model for model in [sd_models.model_data.sd_model, *sd_models.model_data.loaded_sd_models]}
    return [model for model in models.values() if model is not None and record_of(model).applied != FULL_PRECISION]


def forget_networks(model: Any) -> None:
    """Take networks out of a model and out of the motion module that is to act in it, wherever it is now."""
    for module in (*animatediff.kept(), model):
        lora.forget(module)


def _convert_in_place(model: Any, targets: list[Target], wanted: Storage) -> None:
    before = record_of(model)
    pairs = [(target.module, policy) for target in targets if (policy := wanted.policy_for(target.kind)) is not None]
    try:
        with _whole_or_unfinished(model), progress(targets, wanted) as told:
            copies = new_copies()
            reports = convert_models(pairs, told, None if copies is None else copies.keep)
    except ConversionError as error:
        print(f"FP8 weight: {error}. The model stays as it was.", file=sys.stderr)
        before.problem, before.is_unfinished = str(error), not error.whole
        if not is_shortage(error):  # memory may be there for the next picture
            before.refused = wanted, lora_choice()
        if not error.whole:
            _renew(model, before.applied)
        return
    record = new_record(find_targets(model), wanted, model.sd_checkpoint_info.filename, copies)
    record.origin = before.origin
    record.reports = {**before.reports, **{target.kind: report for target, report in zip(targets, reports)}}
    set_record(model, record)
    record.note = provenance.note_for_user(model)
    devices.torch_gc()
    summarise(record)


def _check_same_kind(model: Any, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Refuse a file that was replaced by a checkpoint of another kind; only the WebUI can make a model for that."""
    unet = find_targets(model)[0]
    names = {unet.key_prefix + name: parameter.shape for name, parameter in unet.module.named_parameters()}
    found = [state_dict[name].shape == shape for name, shape in names.items() if name in state_dict]
    if not found or not all(found):
        raise RuntimeError(
            f"{model.sd_checkpoint_info.filename} was replaced by a checkpoint of another kind. Choose another "
            "checkpoint, then this one again."
        )


def _load_again(model: Any, state_dict: Any, timer: Timer) -> None:
    sd_unet.apply_unet("None")
    sd_models.send_model_to_cpu(model)
    sd_hijack.model_hijack.undo_hijack(model)
    chosen_hash = shared.opts.data.get("sd_checkpoint_hash")
    try:
        # A refiner may be in memory while another checkpoint is the chosen one; the choice stays.
        with sd_models.SkipWritingToConfig():
            sd_models.load_model_weights(model, model.sd_checkpoint_info, state_dict, timer)
    finally:
        shared.opts.data["sd_checkpoint_hash"] = chosen_hash
        sd_hijack.model_hijack.hijack(model)
        if not model.lowvram:
            model.to(devices.device)
        script_callbacks.model_loaded_callback(model)
        sd_unet.apply_unet()


def _renew(model: Any, storage: Storage) -> None:
    """Bring a model into a storage by way of its file; by what it holds if its weights are not the file's.

    Args:
        model: no networks are in it, unless it is stale.
        storage: what the settings want, or what is left if they cannot be had.
    """
    if reload_from_file(model):
        return
    tell_decoded(model, convert_in_memory(model, storage))
    devices.torch_gc()
    if not model.lowvram:
        with _whole_or_unfinished(model):
            model.to(devices.device)


def tell_decoded(model: Any, layers: int) -> None:
    """Say on the console that a model was converted without its file, and how many layers were decoded for that."""
    info = model.sd_checkpoint_info
    rounded = f" {layers} layers were decoded from 8 bits, since they have no originals." if layers else ""
    print(
        f"FP8 weight: {info.name} was made or changed in memory by another extension, and {info.filename} holds other "
        f"weights. It was converted as it is in memory.{rounded}"
    )


def reload_from_file(model: Any) -> bool:
    """Load the weights of a model again from its own checkpoint, in the storage that the settings want.

    What the WebUI's ``reload_model_weights`` does for another checkpoint, on every version. The file is read before
    anything is taken apart.

    Args:
        model: no networks are in it, unless it is stale.

    Returns:
        False if the weights of the model were made or changed in memory; nothing was done then.

    Raises:
        RuntimeError: there is no file that the weights can be read from; nothing was done.
    """
    timer = Timer()
    state_dict = _read_again(model, timer)
    if state_dict is None:
        return False
    with whole_or_stale(model):
        _load_again(model, state_dict, timer)
    timer.record("FP8 weight")
    print(f"Weights loaded in {timer.summary()}.")
    return True


def is_of_its_file(model: Any) -> bool:
    """Whether the weights of a model can be read again. Raises RuntimeError where the file is gone."""
    return _read_again(model, Timer()) is not None


def _read_again(model: Any, timer: Timer) -> Any:
    """The state dict of a model's own checkpoint; None if the weights in memory are not the file's."""
    record, info = record_of(model), model.sd_checkpoint_info
    if provenance.has_own_file(model):
        check_usable(info.filename)
    elif record.is_stale and info not in sd_models.checkpoints_loaded:
        raise provenance.lost(model)
    elif not is_usable(info.filename):
        provenance.note_in_memory(model)
        return None
    state_dict = sd_models.get_checkpoint_state_dict(info, timer)
    if not record.is_stale and provenance.is_what_was_read(model, state_dict):
        return state_dict
    if record.is_stale or (provenance.has_own_file(model) and provenance.file_was_replaced(model)):
        _check_same_kind(model, state_dict)
        if not record.is_stale:
            print(f"FP8 weight: {info.filename} has changed since it was loaded, and is loaded as it is now.")
        return state_dict
    provenance.note_in_memory(model)
    return None


def renew_empty_prompt(model: Any) -> None:
    """The WebUI encodes the empty prompt once per load; a text encoder in other storage encodes it otherwise."""
    with devices.autocast(), torch.no_grad():
        model.cond_stage_model_empty_prompt = sd_models.get_empty_cond(model)


def drop_from_memory(model: Any) -> None:
    """Throw a model away; the WebUI loads its checkpoint again when it needs one."""
    data = sd_models.model_data
    data.loaded_sd_models = [other for other in data.loaded_sd_models if other is not model]
    data.sd_model = None
    sd_models.send_model_to_trash(model)
