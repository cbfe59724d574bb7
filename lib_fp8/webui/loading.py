"""Converting a model while the WebUI loads it: packed leaf by leaf, and what was done is recorded and told."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from modules import devices, sd_disable_initialization, sd_hijack, sd_models, shared
from tqdm import tqdm

from lib_fp8 import ConversionError, StreamingConversion, plan
from lib_fp8.capability import can_make_zeros
from lib_fp8.peak import LoadPeak
from lib_fp8.policy import LayerPlan, quantized_layers
from lib_fp8.report import mebibytes
from lib_fp8.source import CheckpointFile, Copies, Originals
from lib_fp8.webui import lora, provenance
from lib_fp8.webui.patching import Patches
from lib_fp8.webui.settings import (
    LORA_FROM_COPY,
    SettingError,
    lora_choice,
    packing_dtype,
    wanted_storage,
)
from lib_fp8.webui.shortage import stop_at_shortage
from lib_fp8.webui.slots import OriginalGoneError, weight_name
from lib_fp8.webui.storage import FULL_PRECISION, Record, Storage, record_of, set_record
from lib_fp8.webui.targets import Target, find_targets


def install(patches: Patches) -> None:
    """Put the extension between the WebUI and its loading of weights."""
    patches.replace(sd_models, "load_model_weights", _converting_load)
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
def progress(targets: list[Target], storage: Storage) -> Iterator[Callable[[LayerPlan], None]]:
    """A bar on the console, one step for each layer that is to be converted."""
    layers = sum(
        layer.kept_because is None
        for target in targets
        if (policy := storage.policy_for(target.kind)) is not None
        for layer in plan(target.module, policy)
    )
    with tqdm(
        total=layers,
        desc="FP8 weight",
        unit="layer",
        disable=shared.cmd_opts.disable_console_progressbars or layers == 0,
    ) as bar:
        yield lambda _: bar.update()
        bar.total = bar.n  # layers with NaN, or taken out of the model while it was loaded, did not come
        bar.refresh()


def summarise(record: Record, peak: int | None = None) -> None:
    """Say on the console what was measured; ``peak``: bytes that the whole model took at most while it was loaded."""
    if record.applied.note is not None:
        _say(record.applied.note)
    for part, report in record.reports.items():
        for note in report.notes:
            _say(f"{part}: {note}")
    if record.reports:
        line = "; ".join(f"{part} {report.summary()}" for part, report in record.reports.items())
        while_loading = "" if peak is None else f"; the whole model never took more than {mebibytes(peak)}"
        _say(line + while_loading)


def new_record(targets: list[Target], storage: Storage, filename: str, copies: Copies | None) -> Record:
    """The record of a model that was brought into a storage, with the way to its originals."""
    if storage == FULL_PRECISION:
        return Record()
    mapped = not getattr(shared.opts, "disable_mmap_load_safetensors", False)
    file = CheckpointFile(filename, sd_models.get_state_dict_from_checkpoint, mapped)
    originals = Originals(file, packing_dtype(), copies)
    for target in targets:
        for name, module in target.module.named_modules():
            if (weight := weight_name(module)) is not None:
                originals.names[module] = f"{target.key_prefix}{name}.{weight}"
    return Record(applied=storage, originals=originals, lora=lora_choice())


def new_copies() -> Copies | None:
    """Where originals are to be copied to while they are packed; None if the settings want no copies."""
    return Copies() if lora_choice() == LORA_FROM_COPY else None


def _converting_load(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_model_weights(model: Any, checkpoint_info: Any, state_dict: Any, timer: Any) -> Any:
        if getattr(devices, "fp8", False):
            _undo_built_in(model)
        if state_dict is None and _would_bring_another(model, checkpoint_info):
            raise provenance.lost(model)
        origin = provenance.origin_of(checkpoint_info, state_dict)
        result = load(model, checkpoint_info, state_dict, timer, origin.in_memory)
        record = record_of(model)
        record.origin = origin
        record.note = provenance.note_for_user(model)
        return result

    def load(model: Any, checkpoint_info: Any, state_dict: Any, timer: Any, in_memory: bool) -> Any:
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
            record = Record(applied=wanted, refused=refused, problem=problem, origin=record_of(model).origin)
            set_record(model, record)
            summarise(record)
            with whole_or_stale(model):
                return original(model, checkpoint_info, state_dict, timer)
        if state_dict is not None and _is_new(model):
            _make_loadable(state_dict)
        with contextlib.suppress(OriginalGoneError):  # whatever is not loaded stays as it is
            lora.forget(model) if state_dict is None else lora.take_out_of_layers_not_in(model, state_dict)
        try:
            copies = new_copies()
            with contextlib.ExitStack() as stack:
                stack.enter_context(whole_or_stale(model))
                told = stack.enter_context(progress(targets, wanted))
                followed = stack.enter_context(LoadPeak(model))
                stream = stack.enter_context(streaming(targets, wanted, told, copies))
                stack.enter_context(_emptying(state_dict, model))
                result = original(model, checkpoint_info, state_dict, timer)
        except ConversionError as error:
            stop_at_shortage(error)
            if in_memory:
                raise  # the values were taken out of the state dict, and the file holds those of another model
            print(
                f"FP8 weight: {error}. The model is loaded again in full precision; change a setting under "
                "FP8 weight to try again.",
                file=sys.stderr,
            )
            with whole_or_stale(model), streaming(targets, FULL_PRECISION):
                result = original(model, checkpoint_info, None, timer)
            set_record(model, Record(refused=(wanted, lora_choice()), problem=str(error)))
            return result
        record = new_record(targets, wanted, checkpoint_info.filename, copies)
        record.refused, record.problem = refused if wanted == FULL_PRECISION else None, problem
        record.reports = {
            target.kind: report for target, report in zip(targets, stream.reports()) if report is not None
        }
        set_record(model, record)
        summarise(record, followed.peak)
        return result

    return load_model_weights


def _would_bring_another(model: Any, checkpoint_info: Any) -> bool:
    """Whether the WebUI, after a load broke off, would fill a model that was made in memory with a parent's weights."""
    if not record_of(model).is_stale or provenance.has_own_file(model):
        return False
    return checkpoint_info is model.sd_checkpoint_info and checkpoint_info not in sd_models.checkpoints_loaded


def _undo_built_in(model: torch.nn.Module) -> None:
    """Make room for values in a model that the WebUI's own conversion was run on, before the extension came.

    The WebUI would cast all of the model for that, and round the noise schedule, which no checkpoint brings back.
    """
    devices.fp8 = False
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and parameter.element_size() == 1:
                module._parameters[name] = torch.nn.Parameter(parameter.half(), requires_grad=False)


def _is_new(model: torch.nn.Module) -> bool:
    """Whether the WebUI has yet to make room for the values of a model."""
    return any(parameter.is_meta for parameter in model.parameters())


def _make_loadable(state_dict: dict[str, Any]) -> None:
    """Cast float8 values where torch cannot make room for them and the WebUI's loading would fail."""
    kinds = {"cpu", devices.device.type}
    for name, value in state_dict.items():
        is_float8 = torch.is_tensor(value) and value.is_floating_point() and value.element_size() == 1
        if is_float8 and not all(can_make_zeros(value.dtype, kind) for kind in kinds):
            state_dict[name] = value.to(packing_dtype())


@contextlib.contextmanager
def whole_or_stale(model: Any) -> Iterator[None]:
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
    is_cached = any(state_dict is held for held in sd_models.checkpoints_loaded.values())
    keeps_this_one = shared.opts.sd_checkpoint_cache > 0  # WebUI 1.6 puts the very dictionary into its cache afterwards
    if state_dict is None or is_cached or keeps_this_one or _is_new(model):
        return contextlib.nullcontext()
    if not all(torch.is_tensor(value) for value in state_dict.values()):
        return contextlib.nullcontext()  # the WebUI's loading passes over what is none, its emptying would not
    return sd_disable_initialization.LoadStateDictOnMeta(state_dict, device=devices.cpu)


def streaming(
    targets: list[Target],
    storage: Storage,
    told: Callable[[LayerPlan], None] | None = None,
    copies: Copies | None = None,
) -> StreamingConversion:
    """The conversion of these parts while their weights are loaded.

    Args:
        targets: parts of one model.
        storage: what they are brought into.
        told: called after each converted layer.
        copies: takes the originals.
    """
    pairs = [(target.module, storage.policy_for(target.kind)) for target in targets]
    keep = None if copies is None else copies.keep
    return StreamingConversion(pairs, dtype=packing_dtype(), progress=told, keep=keep)
