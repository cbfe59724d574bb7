"""The options in Settings > Optimizations: their names, words and defaults, and reading them."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import gradio as gr
import torch
from modules import devices, shared
from modules.call_queue import wrap_queued_call

from lib_fp8 import DEFAULT_KEEP, Policy, format_names
from lib_fp8.convert import usable_format
from lib_fp8.patterns import PatternError, check_patterns
from lib_fp8.webui.patching import Patches
from lib_fp8.webui.storage import FULL_PRECISION, Storage
from lib_fp8.webui.targets import CLIP_L, OPEN_CLIP, T5, TEXT_ENCODERS, UNET, is_sdxl

SECTION = ("optimizations", "Optimizations")

SWITCH = "fp8_storage"
DISABLE, ENABLE_FOR_SDXL, ENABLE = SWITCH_CHOICES = ("Disable", "Enable for SDXL", "Enable")
FORMAT = "fp8_format"
KEEP = "fp8_keep_layers"
TEXT_ENCODER_KEYS = {CLIP_L: "fp8_clip_l", OPEN_CLIP: "fp8_open_clip", T5: "fp8_t5"}
LORA = "fp8_lora"
LORA_CHOICES = ("Merge from checkpoint file", "Merge from copy in RAM", "Add at run time")
LORA_FROM_FILE, LORA_FROM_COPY, LORA_AT_RUN_TIME = LORA_CHOICES
MOTION_MODULES = "fp8_motion_modules"
CONTROL_MODELS = "fp8_control_models"
STATUS = "fp8_status"

INFOTEXT = {
    SWITCH: "FP8 weight",
    FORMAT: "FP8 format",
    KEEP: "FP8 kept layers",
    **{key: f"FP8 {kind}" for kind, key in TEXT_ENCODER_KEYS.items()},
    LORA: "FP8 LoRA",
    MOTION_MODULES: "FP8 motion modules",
    CONTROL_MODELS: "FP8 control models",
}
"""Option to its name in the infotext; the first is the WebUI's own."""

BUILT_IN_LORA_CACHE = "cache_fp16_weight"


class SettingError(ValueError):
    """A setting has a value that cannot be used; the message says which, why, and what to do."""


def _option(default: Any, label: str, *args: Any, key: str, **kwargs: Any) -> Any:
    return shared.OptionInfo(default, label, *args, section=SECTION, infotext=INFOTEXT[key], **kwargs)


def _own_options() -> dict[str, Any]:
    options = {
        FORMAT: _option(
            format_names()[0], "FP8: storage format", gr.Dropdown, {"choices": list(format_names())}, key=FORMAT
        ).info(
            "float8_e4m3fn fits most models; int8 is closest to full precision at the same size and works on every"
            " device; unscaled repeats the WebUI's own conversion"
        )
    }
    for kind, key in TEXT_ENCODER_KEYS.items():
        options[key] = _option(False, f"FP8: store text encoder {kind} in 8 bits too", key=key).info(
            _TEXT_ENCODER_INFO[kind]
        )
    options[KEEP] = _option(
        " ".join(DEFAULT_KEEP), "FP8: layers kept in full precision", gr.Textbox, {"lines": 2}, key=KEEP
    ).info("regular expressions, separated by spaces; a layer is kept if one is found in its name")
    options[LORA] = _option(
        LORA_FROM_FILE,
        "FP8: how LoRA is applied",
        gr.Radio,
        {"choices": list(LORA_CHOICES)},
        key=LORA,
    ).info(
        "merged: all LoRAs are summed over the original weights and rounded once; the checkpoint file is read layer by"
        " layer and takes no memory, a copy in RAM takes as much as the model in 16 bits; at run time: nothing is read"
        " or rounded, each step takes longer"
    )
    options[MOTION_MODULES] = _option(
        True, "FP8: store AnimateDiff motion modules in 8 bits too", key=MOTION_MODULES
    ).info("saves about 0.4 GB with SD1")
    options[CONTROL_MODELS] = _option(False, "FP8: store ControlNet models in 8 bits too", key=CONTROL_MODELS).info(
        "saves about 0.35 GB each with SD1, 1.2 GB with SDXL"
    )
    return options


_TEXT_ENCODER_INFO = {
    CLIP_L: "SD1, SDXL, SD3",
    OPEN_CLIP: "SD2, SDXL, SDXL refiner, SD3",
    T5: "SD3",
}


def _switch_option() -> Any:
    return _option(DISABLE, "FP8 weight", gr.Radio, {"choices": list(SWITCH_CHOICES)}, key=SWITCH).info(
        "store the weights of Linear and Conv layers in 8 bits to save memory; by the FP8 weight extension, see below"
    )


class Options:
    """The extension's entries in the WebUI's options, put in and taken out again.

    Args:
        on_change: called, inside the WebUI's queue, after a setting was changed; an exception reverts the setting.
        status: gives the HTML of the panel.
        component: builds the panel.
    """

    def __init__(self, on_change: Callable[[], None], status: Callable[[], str], component: Any):
        self._on_change = wrap_queued_call(self._validated(on_change))
        self._status = status
        self._component = component
        self._added: list[str] = []
        self._switch_before: dict[str, Any] | None = None
        self._cache_before: dict[str, Any] | None = None

    @staticmethod
    def _validated(on_change: Callable[[], None]) -> Callable[[], None]:
        def validate_first() -> None:
            end_job()
            try:
                read_policy()
                on_change()
            except Exception as error:
                gr.Warning(f"FP8 weight: not changed. {error}")  # the page itself only says that nothing changed
                raise

        return validate_first

    def add(self, patches: Patches) -> None:
        """Enter all options. They come directly below the switch when the WebUI brings the options into order."""
        patches.replace(type(shared.opts), "reorder", _own_below_the_switch)
        labels = shared.opts.data_labels
        entries = {} if SWITCH in labels else {SWITCH: _switch_option()}
        entries |= _own_options()
        for option in entries.values():
            option.onchange = self._on_change
        entries[STATUS] = _StatusInfo(self._status, self._component)
        for key, option in entries.items():
            if not option.do_not_save:
                shared.opts.data.setdefault(key, option.default)  # 1.6.1 looks overrides up here and knows no default
        self._added = list(entries)
        if SWITCH in labels:
            switch = labels[SWITCH]
            self._switch_before = {name: getattr(switch, name) for name in ("onchange", "infotext", "comment_after")}
            switch.comment_after = _switch_option().comment_after  # the WebUI's own asks for a newer torch
            switch.onchange, switch.infotext = self._on_change, INFOTEXT[SWITCH]
        if BUILT_IN_LORA_CACHE in labels:
            cache = labels[BUILT_IN_LORA_CACHE]
            self._cache_before = {"onchange": cache.onchange, "comment_after": cache.comment_after}
            cache.onchange = None  # it would load the checkpoint again, for nothing
            cache.comment_after += " "
            cache.info("not used while the FP8 weight extension is on")
        if _is_first_start():
            labels.update(entries)
        else:
            shared.opts.data_labels = {**labels, **entries}

    def remove(self) -> None:
        """Take all options out again; saved values stay in the configuration for the next time."""
        labels = shared.opts.data_labels
        if self._switch_before is not None:
            vars(labels[SWITCH]).update(self._switch_before)
            self._switch_before = None
        if self._cache_before is not None:
            vars(labels[BUILT_IN_LORA_CACHE]).update(self._cache_before)
            self._cache_before = None
        if _is_first_start():
            for key in self._added:
                labels.pop(key, None)
        else:
            shared.opts.data_labels = {key: info for key, info in labels.items() if key not in self._added}
        self._added.clear()


def _is_first_start() -> bool:
    """Whether scripts still add their options to the very dictionary that is in use, which nobody else reads yet.

    Later on others read it in threads of their own, at any moment: then another one takes its place.
    """
    return shared.opts.data_labels is shared.options_templates


def _own_below_the_switch(original: Callable[..., None]) -> Callable[..., None]:
    """As the WebUI's own it makes a new dictionary: another thread may be reading the former one."""

    def reorder(self: Any) -> None:
        original(self)
        labels = self.data_labels
        own = [key for key in (*_own_options(), STATUS) if key in labels]
        others = [key for key in labels if key not in own]
        position = others.index(SWITCH) + 1
        self.data_labels = {key: labels[key] for key in (*others[:position], *own, *others[position:])}

    return reorder


class _StatusInfo(shared.OptionInfo):
    """An entry of the settings page that is never saved and whose "default" is whatever is true now."""

    def __init__(self, status: Callable[[], str], component: Any):
        self._status = status
        super().__init__("", "", component, section=SECTION)
        self.do_not_save = True

    @property
    def default(self) -> str:
        return _Now(self._status)

    @default.setter
    def default(self, value: str) -> None:
        pass


class _Now(str):
    """A text that is made anew when it is copied.

    The WebUI's API reads the defaults of all options once, when it starts, and copies them into its answers.
    """

    _make: Callable[[], str]

    def __new__(cls, make: Callable[[], str]) -> _Now:
        made = super().__new__(cls, make())
        made._make = make
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return str(self._make())


class _Job(threading.local):
    """The job of a thread; each thread has its own.

    Attributes:
        p: gives the WebUI's object for it; None without a job, or after one of which the end was not seen.
        values: what the options of the extension are for it, once they were asked for.
        overrides: whether some of them are not as they are saved.
    """

    p: Callable[[], Any] = staticmethod(lambda: None)
    values: Mapping[str, Any] | None = None
    overrides = False


_job = _Job()


def begin_job(p: Any) -> None:
    """Let the options be, for a job of this thread and up to its end, what they are when it begins.

    Its overrides count from the start: the WebUI looks after its model before it puts them in force, and would bring it
    into the saved storage first. What others set meanwhile, from their threads, is for the jobs after it.
    """
    end_job()
    _job.p = weakref.ref(p)


def _values_of_job() -> Mapping[str, Any]:
    if (p := _job.p()) is None:
        return {}
    if _job.values is None:  # not earlier: other scripts may add overrides when a job begins
        values = _values_with(p.override_settings)
        _job.values = {key: values[key] for key in INFOTEXT if key in values}
        _job.overrides = any(value != shared.opts.data.get(key) for key, value in _job.values.items())
    return _job.values


def _values_with(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the options while a job's overrides are in force: what the WebUI's own code makes of a copy.

    It passes over some options in silence. Others are frozen: then it refuses the job, and nothing is overridden.
    """
    trial = object.__new__(type(shared.opts))
    vars(trial).update(vars(shared.opts), data=dict(shared.opts.data))
    try:
        for key, value in overrides.items():
            trial.set(key, value, is_api=True, run_callbacks=False)
    except Exception:  # it will be raised again, and told, when the WebUI does the same to the options themselves
        return shared.opts.data
    return trial.data


def end_job() -> None:
    """The options speak for themselves again."""
    vars(_job).clear()


def job_has_overrides() -> bool:
    """Whether the values read now are those of a job that overrides some, rather than the saved ones."""
    return bool(_values_of_job()) and _job.overrides


def value_of(key: str) -> Any:
    """What an option is for the job of this thread; without one, what it is now."""
    values = _values_of_job()
    return values[key] if key in values else getattr(shared.opts, key)


_FLAGS = (*TEXT_ENCODER_KEYS.values(), MOTION_MODULES, CONTROL_MODELS)
_CHOICES = {SWITCH: SWITCH_CHOICES, FORMAT: format_names(), LORA: LORA_CHOICES}


def _problem(key: str, value: Any) -> str | None:
    """What is wrong with the value of an option, and what to give instead; None if it can be used."""
    if key in _CHOICES:
        return None if value in _CHOICES[key] else f"is not one of: {', '.join(_CHOICES[key])}"
    if key in _FLAGS:
        return None if isinstance(value, bool) else "is neither true nor false"
    if not isinstance(value, str):
        return "is no text of patterns separated by spaces"
    try:
        check_patterns(value.split())
    except PatternError as error:
        return f"has a pattern that is of no use: {error}"
    return None


def _check(key: str) -> None:
    value = value_of(key)
    if (problem := _problem(key, value)) is not None:
        raise SettingError(f"{INFOTEXT[key]} ({key}): {value!r} {problem}")


def repair_saved_values() -> None:
    """Replace values in the loaded configuration that cannot be used by their defaults, and say so."""
    for key in INFOTEXT:
        try:
            _check(key)
        except SettingError as error:
            default = shared.opts.get_default(key)
            print(f"FP8 weight: bad value in the settings. {error}. {default!r} is used instead.", file=sys.stderr)
            shared.opts.data[key] = default


def read_policy() -> Policy:
    """The policy that the options describe, whatever the switch says. Raises SettingError."""
    for key in INFOTEXT:
        _check(key)
    return Policy(format=value_of(FORMAT), keep=tuple(value_of(KEEP).split()))


def wanted_storage(model: torch.nn.Module) -> Storage:
    """How the options want a model to be stored. Raises SettingError."""
    policy = read_policy()
    switch = value_of(SWITCH)
    if switch == DISABLE or (switch == ENABLE_FOR_SDXL and not is_sdxl(model)):
        return FULL_PRECISION
    chosen = (kind for kind in TEXT_ENCODERS if value_of(TEXT_ENCODER_KEYS[kind]))
    # Asked of the device that computes: with --medvram the weights wait on the CPU, which can hold more formats.
    storage_format, note = usable_format(policy, devices.device)
    if storage_format is None:
        return replace(FULL_PRECISION, note=note)
    return Storage(replace(policy, format=storage_format.name), frozenset((UNET, *chosen)), note)


def wanted_guest_policy(key: str, model: torch.nn.Module) -> Policy | None:
    """How a module of another extension is to be held while a model is in use; None for full precision.

    Args:
        key: the option for modules of this kind.

    Raises:
        SettingError: a setting has an impossible value.
    """
    return wanted_storage(model).policy if value_of(key) else None


def packing_dtype() -> torch.dtype:
    """The dtype that the WebUI gives models after loading, whatever their files hold."""
    return torch.float32 if shared.cmd_opts.no_half else torch.float16


def lora_choice() -> str:
    """How networks are to be applied: one of ``LORA_CHOICES``."""
    return value_of(LORA)
