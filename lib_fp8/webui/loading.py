"""Converting a WebUI model while it is loaded, when the settings change, and when the model changes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from modules import devices, script_callbacks, sd_disable_initialization, sd_hijack, sd_models, sd_unet, shared
from modules.timer import Timer
from tqdm import tqdm

from lib_fp8 import ConversionError, StreamingConversion, convert_models, plan, restore_model
from lib_fp8.capability import can_make_zeros
from lib_fp8.peak import LoadPeak
from lib_fp8.policy import LayerPlan, quantized_layers
from lib_fp8.report import mebibytes
from lib_fp8.source import CheckpointFile, Copies, Originals, checkpoint_damage
from lib_fp8.webui import animatediff, controlnet, lora
from lib_fp8.webui.patching import Patches
from lib_fp8.webui.settings import (
    LORA_FROM_COPY,
    SettingError,
    lora_choice,
    overrides_are_announced,
    overrides_are_in_force,
    packing_dtype,
    wanted_storage,
)
from lib_fp8.webui.slots import OriginalGoneError, weight_name
from lib_fp8.webui.storage import FULL_PRECISION, Record, Storage, drop_record, record_of, set_record
from lib_fp8.webui.targets import TEXT_ENCODERS, UNET, Target, find_targets


def install(patches: Patches) -> None:
    """Put the extension between the WebUI and its loading functions."""
    patches.replace(sd_models, "load_model_weights", _converting_load)
    patches.replace(sd_models, "reload_model_weights", _following_settings)
    if hasattr(type(sd_hijack.model_hijack), "convert_sdxl_to_ssd"):
        patches.replace(type(sd_hijack.model_hijack), "convert_sdxl_to_ssd", _once_only)
    if hasattr(sd_models, "check_fp8"):
        # The built-in conversion never runs while the extension is on, and devices.fp8 stays False.
        patches.replace(sd_models, "check_fp8", _never_built_in)


def _once_only(original: Callable[..., None]) -> Callable[..., None]:
    """The WebUI cuts an SDXL model down to SSD-1B at every load, which fails on a model that is cut down already."""

    def convert_sdxl_to_ssd(self: Any, model: Any) -> None:
        if hasattr(model.model.diffusion_model.middle_block, "1"):
            original(self, model)

    return convert_sdxl_to_ssd


def _never_built_in(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda model: None if model is None else False


def _say(text: str) -> None:
    print(f"FP8 weight: {text}")


@contextlib.contextmanager
def _progress(targets: list[Target], storage: Storage) -> Iterator[Callable[[LayerPlan], None]]:
    """A bar on the console, one step for each layer that is to be converted."""
    layers = sum(
        layer.kept_because is None
        for target in targets
        if (policy := storage.policy_for(target.kind)) is not None
        for layer in plan(target.module, policy)
    )
    with tqdm(
        total=layers, desc="FP8 weight", unit="layer", disable=shared.cmd_opts.disable_console_progressbars
    ) as bar:
        yield lambda _: bar.update()
        bar.total = bar.n  # layers with NaN, or taken out of the model while it was loaded, did not come
        bar.refresh()


def _summarise(record: Record, peak: int | None = None) -> None:
    if record.applied.note is not None:
        _say(record.applied.note)
    for part, report in record.reports.items():
        for note in report.notes:
            _say(f"{part}: {note}")
    if record.reports:
        line = "; ".join(f"{part} {report.summary()}" for part, report in record.reports.items())
        while_loading = "" if peak is None else f"; the whole model never took more than {mebibytes(peak)}"
        _say(line + while_loading)


def _new_record(targets: list[Target], storage: Storage, filename: str, copies: Copies | None) -> Record:
    if storage == FULL_PRECISION:
        return Record()
    file = CheckpointFile(filename, sd_models.get_state_dict_from_checkpoint)
    originals = Originals(file, packing_dtype(), copies)
    for target in targets:
        for name, module in target.module.named_modules():
            if (weight := weight_name(module)) is not None:
                originals.names[module] = f"{target.key_prefix}{name}.{weight}"
    return Record(applied=storage, originals=originals, lora=lora_choice())


def _new_copies() -> Copies | None:
    return Copies() if lora_choice() == LORA_FROM_COPY else None


def _converting_load(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_model_weights(model: Any, checkpoint_info: Any, state_dict: Any, timer: Any) -> Any:
        targets = find_targets(model)
        try:
            wanted, problem = wanted_storage(model), None
        except SettingError as error:
            wanted, problem = FULL_PRECISION, str(error)
            print(f"FP8 weight: {error}. The model is loaded in full precision.", file=sys.stderr)
        refused = record_of(model).refused
        if refused == (wanted, lora_choice()) and checkpoint_info.filename == model.sd_checkpoint_info.filename:
            wanted, problem = FULL_PRECISION, record_of(model).problem
        if wanted == FULL_PRECISION and not any(quantized_layers(target.module) for target in targets):
            set_record(model, Record(refused=refused, problem=problem))
            with _whole_or_stale(model):
                return original(model, checkpoint_info, state_dict, timer)
        if state_dict is not None:
            _make_loadable(state_dict)
        with contextlib.suppress(OriginalGoneError):  # whatever is not loaded stays as it is
            lora.forget(model) if state_dict is None else lora.take_out_of_layers_not_in(model, state_dict)
        try:
            copies = _new_copies()
            with contextlib.ExitStack() as stack:
                stack.enter_context(_whole_or_stale(model))
                progress = stack.enter_context(_progress(targets, wanted))
                load = stack.enter_context(LoadPeak(model))
                stream = stack.enter_context(_streaming(targets, wanted, progress, copies))
                stack.enter_context(_emptying(state_dict, model))
                result = original(model, checkpoint_info, state_dict, timer)
        except ConversionError as error:
            print(
                f"FP8 weight: {error}. The model is loaded again in full precision; change a setting under "
                "FP8 weight to try again.",
                file=sys.stderr,
            )
            with _whole_or_stale(model), _streaming(targets, FULL_PRECISION):
                result = original(model, checkpoint_info, None, timer)
            set_record(model, Record(refused=(wanted, lora_choice()), problem=str(error)))
            return result
        record = _new_record(targets, wanted, checkpoint_info.filename, copies)
        record.refused, record.problem = refused if wanted == FULL_PRECISION else None, problem
        record.reports = {
            target.kind: report for target, report in zip(targets, stream.reports()) if report is not None
        }
        set_record(model, record)
        _summarise(record, load.peak)
        return result

    return load_model_weights


def _make_loadable(state_dict: dict[str, Any]) -> None:
    """Cast float8 values where torch cannot make room for them and the WebUI's loading would fail."""
    kinds = {"cpu", devices.device.type}
    for name, value in state_dict.items():
        is_float8 = value.is_floating_point() and value.element_size() == 1
        if is_float8 and not all(can_make_zeros(value.dtype, kind) for kind in kinds):
            state_dict[name] = value.to(packing_dtype())


@contextlib.contextmanager
def _whole_or_stale(model: Any) -> Iterator[None]:
    """What breaks off within, for want of memory or by an interrupt, lets the model be loaded anew before its use."""
    try:
        yield
    except BaseException:
        record_of(model).is_stale = True
        raise


def _emptying(state_dict: Any, model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Let the values of a state dict go as they are taken.

    The WebUI does so itself where it fills a new model, but not where it fills one again. A state dict that it caches
    must stay.
    """
    is_new = any(parameter.is_meta for parameter in model.parameters())
    if state_dict is None or is_new or shared.opts.sd_checkpoint_cache > 0:
        return contextlib.nullcontext()
    return sd_disable_initialization.LoadStateDictOnMeta(state_dict, device=devices.cpu)


def _streaming(
    targets: list[Target],
    storage: Storage,
    progress: Callable[[LayerPlan], None] | None = None,
    copies: Copies | None = None,
) -> StreamingConversion:
    pairs = [(target.module, storage.policy_for(target.kind)) for target in targets]
    keep = None if copies is None else copies.keep
    return StreamingConversion(pairs, dtype=packing_dtype(), progress=progress, keep=keep)


def _following_settings(original: Callable[..., Any]) -> Callable[..., Any]:
    def reload_model_weights(sd_model: Any = None, info: Any = None, *args: Any, **kwargs: Any) -> Any:
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
            _put_together_again()
            raise
        finally:
            overrides_are_in_force()  # announced for the one look after the model that comes before they are

    return reload_model_weights


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
            with _whole_or_stale(model):
                model.to(devices.device)
        except NotImplementedError:  # it was being thrown away
            _drop_from_memory(model)


def _follow_for_job(model: Any) -> None:
    try:
        follow_settings(model)
    except SettingError as error:
        if overrides_are_announced():
            raise
        # A setting that is being refused while pictures are made; whoever set it hears of it, and the pictures go on.
        print(f"FP8 weight: {error}. The model stays as it is.", file=sys.stderr)


def _is_from(model: Any, checkpoint: Any) -> bool:
    return model is not None and model.sd_checkpoint_info.filename == checkpoint.filename


def _check_readable(model: Any, checkpoint: Any) -> None:
    """Refuse a broken checkpoint before the WebUI takes the loaded model apart to make room for it."""
    if not any(_is_from(loaded, checkpoint) for loaded in [model, *sd_models.model_data.loaded_sd_models]):
        _check_whole(checkpoint.filename, "The model that was loaded before stays in use.")


def _check_whole(filename: str, consequence: str = "") -> None:
    if (damage := checkpoint_damage(filename)) is not None:
        raise RuntimeError(
            f"{filename} is missing, damaged or incomplete and cannot be loaded ({damage}). "
            f"Put it back, download it again, or choose another checkpoint. {consequence}".rstrip()
        )


def follow_settings(model: Any) -> None:
    """Bring a loaded model, and what other extensions add to it, into the storage that the settings want.

    Does nothing where it is so already. A conversion that fails leaves the model as it was, and is not tried again
    until the settings change.

    Raises:
        SettingError: a setting has an impossible value.
        Exception: whatever reading the checkpoint again raises; the model is as it was.
    """
    _follow_with_model(model)
    animatediff.follow_settings(model)
    controlnet.follow_settings(model)


def _follow_with_model(model: Any) -> None:
    wanted = wanted_storage(model)
    record = record_of(model)
    if (wanted, lora_choice()) != record.refused:
        record.refused = record.problem = None
    elif not record.is_stale:
        return
    before, is_stale = record.applied, record.is_stale
    targets = find_targets(model)
    changed = [t for t in targets if wanted.policy_for(t.kind) != record.applied.policy_for(t.kind)]
    needs_copies = wanted.policy is not None and lora_choice() == LORA_FROM_COPY != record.lora
    if not changed and not needs_copies and not record.is_stale:
        record.applied = wanted
        lora.follow_settings(model)
        return
    with contextlib.suppress(OriginalGoneError):  # then it is stale, and loaded again
        _forget_networks(model)
    converts = changed and all(record.applied.policy_for(target.kind) is None for target in changed)
    has_all = (
        record.applied == FULL_PRECISION or lora_choice() != LORA_FROM_COPY
    )  # copies are made of all parts at once
    with animatediff.taken_out(model):
        if converts and has_all and not record.is_stale:
            _convert_in_place(model, changed, wanted)
        else:
            reload_from_file(model)
    now = record_of(model).applied
    if is_stale or any(before.policy_for(kind) != now.policy_for(kind) for kind in TEXT_ENCODERS):
        with _whole_or_stale(model):
            _renew_empty_prompt(model)


def _forget_networks(model: Any) -> None:
    """Take networks out of a model and out of the motion module that is to act in it, wherever it is now."""
    for module in (*animatediff.kept(), model):
        lora.forget(module)


def _convert_in_place(model: Any, targets: list[Target], wanted: Storage) -> None:
    before = record_of(model)
    pairs = [(target.module, policy) for target in targets if (policy := wanted.policy_for(target.kind)) is not None]
    try:
        with _progress(targets, wanted) as progress:
            copies = _new_copies()
            reports = convert_models(pairs, progress, None if copies is None else copies.keep)
    except ConversionError as error:
        print(f"FP8 weight: {error}. The model stays as it was.", file=sys.stderr)
        before.refused, before.problem = (wanted, lora_choice()), str(error)
        if not error.whole:
            before.is_stale = True
            reload_from_file(model)
        return
    except BaseException:
        before.is_stale = True
        raise
    record = _new_record(find_targets(model), wanted, model.sd_checkpoint_info.filename, copies)
    record.reports = {**before.reports, **{target.kind: report for target, report in zip(targets, reports)}}
    set_record(model, record)
    devices.torch_gc()
    _summarise(record)


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


def reload_from_file(model: Any) -> None:
    """Load the weights of a model again from its own checkpoint, in the storage that the settings want.

    What the WebUI's ``reload_model_weights`` does for another checkpoint, on every version. The file is read before
    anything is taken apart.
    """
    timer = Timer()
    _check_whole(model.sd_checkpoint_info.filename)
    state_dict = sd_models.get_checkpoint_state_dict(model.sd_checkpoint_info, timer)
    _check_same_kind(model, state_dict)
    with _whole_or_stale(model):
        _load_again(model, state_dict, timer)
    timer.record("FP8 weight")
    print(f"Weights loaded in {timer.summary()}.")


def _renew_empty_prompt(model: Any) -> None:
    """The WebUI encodes the empty prompt once per load; a text encoder in other storage encodes it otherwise."""
    with devices.autocast(), torch.no_grad():
        model.cond_stage_model_empty_prompt = sd_models.get_empty_cond(model)


def converted_models() -> list[Any]:
    """The models in memory that have parts in 8 bits."""
    models = {id(model): model for model in [sd_models.model_data.sd_model, *sd_models.model_data.loaded_sd_models]}
    return [model for model in models.values() if model is not None and record_of(model).applied != FULL_PRECISION]


def take_networks_out() -> None:
    """Leave no network merged by this extension; whoever merges next starts from whole layers."""
    for model in converted_models():
        try:
            _forget_networks(model)
        except Exception as error:
            print(error, file=sys.stderr)


def release_all() -> None:
    """Give the models back to the WebUI in full precision, after ``install`` was undone.

    The model in use is loaded again from its file, or decoded where the file is gone. Those that wait in memory are
    dropped; the WebUI loads them again when they are chosen.
    """
    data = sd_models.model_data
    for model in [model for model in data.loaded_sd_models if model is not data.sd_model]:
        if record_of(model).applied != FULL_PRECISION:
            data.loaded_sd_models.remove(model)
            sd_models.send_model_to_trash(model)
    if data.sd_model is not None and record_of(data.sd_model).applied != FULL_PRECISION:
        with animatediff.taken_out(data.sd_model):
            _release(data.sd_model)
    animatediff.release(data.sd_model)


def _drop_from_memory(model: Any) -> None:
    data = sd_models.model_data
    data.loaded_sd_models = [other for other in data.loaded_sd_models if other is not model]
    data.sd_model = None
    sd_models.send_model_to_trash(model)


def _release(model: Any) -> None:
    parts = record_of(model).applied.parts
    targets = find_targets(model)
    try:
        with _streaming(targets, FULL_PRECISION):
            reload_from_file(model)
    except Exception as error:
        if record_of(model).is_stale:  # some layers are loaded, others not
            _drop_from_memory(model)
            print(f"FP8 weight: {error}. The checkpoint is loaded again for the next picture.", file=sys.stderr)
            return
        layers = sum(restore_model(target.module) for target in targets)
        print(f"FP8 weight: {error}. {layers} layers were decoded from 8 bits instead.", file=sys.stderr)
    drop_record(model)
    if parts != {UNET}:
        _renew_empty_prompt(model)
