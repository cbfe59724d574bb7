"""Checkpoints and models: first load on the meta device, reload into a model of the same kind, several kept."""

import collections
import contextlib
import sys
from pathlib import Path

import safetensors.torch
import torch

from modules import (
    at_least,
    devices,
    errors,
    script_callbacks,
    sd_disable_initialization,
    sd_hijack,
    sd_unet,
    shared,
    tiny_models,
)
from modules.timer import Timer

files_read = []
checkpoints_loaded = collections.OrderedDict()
"""State dicts kept in memory."""
conversions = []
"""Names of the checkpoints that the WebUI's own conversion was run on."""
checkpoints_list = {}
checkpoint_aliases = {}


class CheckpointInfo:
    def __init__(self, filename):
        self.filename = str(filename)
        self.name = self.title = Path(filename).name
        checkpoints_list[self.title] = checkpoint_aliases[self.title] = self


class SdModelData:
    def __init__(self):
        self.sd_model = None
        self.loaded_sd_models = []

    def set_sd_model(self, v):
        self.sd_model = v
        self.loaded_sd_models = [v, *(other for other in self.loaded_sd_models if other is not v)]


model_data = SdModelData()


class SkipWritingToConfig:
    skip = False

    def __enter__(self):
        SkipWritingToConfig.skip = True

    def __exit__(self, *_):
        SkipWritingToConfig.skip = False


def select_checkpoint():
    found = checkpoint_aliases.get(shared.opts.sd_model_checkpoint)
    if found is None and not checkpoints_list:
        raise FileNotFoundError("No checkpoints found.")
    return found or next(iter(checkpoints_list.values()))


_OLD_NAMES = {"cond_stage_model.transformer.encoder.": "cond_stage_model.transformer.text_model.encoder."}


def _new_name(name):
    old = next((old for old in _OLD_NAMES if name.startswith(old)), None)
    return name if old is None else _OLD_NAMES[old] + name.removeprefix(old)


def get_state_dict_from_checkpoint(pl_sd):
    pl_sd = pl_sd.pop("state_dict", pl_sd)
    renamed = {_new_name(name): value for name, value in pl_sd.items()}
    pl_sd.clear()
    pl_sd.update(renamed)
    return pl_sd


def read_state_dict(checkpoint_file, print_global_state=False, map_location=None):
    files_read.append(Path(checkpoint_file).name)
    if Path(checkpoint_file).suffix.lower() != ".safetensors":
        return get_state_dict_from_checkpoint(torch.load(checkpoint_file, map_location=map_location or "cpu"))
    if shared.opts.disable_mmap_load_safetensors:
        return get_state_dict_from_checkpoint(safetensors.torch.load(Path(checkpoint_file).read_bytes()))
    return get_state_dict_from_checkpoint(safetensors.torch.load_file(checkpoint_file, device="cpu"))


def get_checkpoint_state_dict(checkpoint_info, timer):
    if checkpoint_info in checkpoints_loaded:
        return checkpoints_loaded[checkpoint_info]
    return read_state_dict(checkpoint_info.filename)


def _kind_of(state_dict):
    if "model.diffusion_model.x_embedder.proj.weight" in state_dict:
        return "sd3"
    if any(key.startswith("conditioner.") for key in state_dict):
        return "sdxl"
    if any(key.startswith("cond_stage_model.model.") for key in state_dict):
        return "sd2"
    return "inpaint" if state_dict["model.diffusion_model.input_blocks.0.0.weight"].shape[1] == 9 else "sd1"


if at_least(8):

    def check_fp8(model):
        if model is None:
            return None
        choice = shared.opts.fp8_storage
        return choice == "Enable" or (choice == "Enable for SDXL" and getattr(model, "is_sdxl", False))


def load_model_weights(model, checkpoint_info, state_dict, timer):
    if at_least(8) and devices.fp8:
        model.half()
    if not SkipWritingToConfig.skip:
        shared.opts.data["sd_model_checkpoint"] = checkpoint_info.title
    if state_dict is None:
        state_dict = get_checkpoint_state_dict(checkpoint_info, timer)
    model.is_sdxl = hasattr(model, "conditioner")
    if at_least(8) and shared.opts.sd_checkpoint_cache > 0:
        checkpoints_loaded[checkpoint_info] = state_dict.copy()
    model.load_state_dict(state_dict, strict=False)
    if not at_least(8) and shared.opts.sd_checkpoint_cache > 0:
        checkpoints_loaded[checkpoint_info] = state_dict
    if shared.cmd_opts.no_half:
        model.float()
    else:
        vae, model.first_stage_model = model.first_stage_model, None
        schedule, model.alphas_cumprod = model.alphas_cumprod, None
        model.half()
        model.first_stage_model, model.alphas_cumprod = vae, schedule
    if at_least(8):
        for module in model.modules():
            vars(module).pop("fp16_weight", None)
        devices.fp8 = bool(check_fp8(model))
        if devices.fp8:
            _convert(model)
    model.first_stage_model.to(devices.dtype_vae)
    while len(checkpoints_loaded) > shared.opts.sd_checkpoint_cache:
        checkpoints_loaded.popitem(last=False)
    model.sd_model_checkpoint = checkpoint_info.filename
    model.sd_checkpoint_info = checkpoint_info


def _convert(model):
    conversions.append(model.kind)
    vae, model.first_stage_model = model.first_stage_model, None
    for module in model.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.Linear)):
            if shared.opts.cache_fp16_weight:
                module.fp16_weight = module.weight.data.clone().cpu().half()
            module.to(torch.float8_e4m3fn)
    model.first_stage_model = vae


def get_empty_cond(sd_model):
    if (networks := sys.modules.get("networks")) is not None:
        networks.loaded_networks.clear()  # extra networks are activated for a prompt that names none
    return sd_model.get_learned_conditioning([""])


def send_model_to_cpu(m):
    if m is not None or not at_least(10):
        m.to(devices.cpu)
    devices.torch_gc()


def send_model_to_device(m):
    m.to(devices.device)


def send_model_to_trash(m):
    m.to(device="meta")
    devices.torch_gc()


def load_model(checkpoint_info=None, already_loaded_state_dict=None):
    checkpoint_info = checkpoint_info or select_checkpoint()
    timer = Timer()
    if model_data.sd_model:
        send_model_to_trash(model_data.sd_model)
        model_data.sd_model = None
    state_dict = already_loaded_state_dict or get_checkpoint_state_dict(checkpoint_info, timer)
    kind = _kind_of(state_dict)
    with contextlib.nullcontext() if shared.cmd_opts.disable_model_loading_ram_optimization else torch.device("meta"):
        sd_model = tiny_models.StableDiffusion(kind)
    dtypes = None if shared.cmd_opts.no_half else {"first_stage_model": None, "": torch.float16}
    filling = sd_disable_initialization.LoadStateDictOnMeta(state_dict, devices.device, dtypes)
    sd_model.requires_grad_(False)
    sd_model.used_config = kind
    with filling:
        load_model_weights(sd_model, checkpoint_info, state_dict, timer)
    send_model_to_device(sd_model)
    sd_hijack.model_hijack.hijack(sd_model)
    sd_model.eval()
    model_data.set_sd_model(sd_model)
    script_callbacks.model_loaded_callback(sd_model)
    with devices.autocast(), torch.no_grad():
        sd_model.cond_stage_model_empty_prompt = get_empty_cond(sd_model)
    return sd_model


def _reuse_loaded(sd_model, checkpoint_info):
    if at_least(9) and sd_model is not None and sd_model.sd_checkpoint_info.filename == checkpoint_info.filename:
        return sd_model
    if at_least(9) and shared.opts.sd_checkpoints_keep_in_cpu:
        send_model_to_cpu(sd_model)
    loaded = model_data.loaded_sd_models
    found = next((m for m in loaded if m.sd_checkpoint_info.filename == checkpoint_info.filename), None)
    limit = shared.opts.sd_checkpoints_limit
    if found is not None:
        model_data.set_sd_model(found)
        if not SkipWritingToConfig.skip:
            shared.opts.data["sd_model_checkpoint"] = found.sd_checkpoint_info.title
        return found
    if limit > 1 and len(loaded) < limit:
        model_data.sd_model = None
        load_model(checkpoint_info)
        return model_data.sd_model
    if loaded:
        model_data.sd_model = loaded.pop()
        return model_data.sd_model
    return None


def _reload(sd_model, info, forced_reload):
    checkpoint_info = info or select_checkpoint()
    timer = Timer()
    sd_model = sd_model or model_data.sd_model
    current = None if sd_model is None else sd_model.sd_checkpoint_info
    if sd_model is not None:
        if at_least(8) and check_fp8(sd_model) != devices.fp8:
            forced_reload = True
        elif sd_model.sd_model_checkpoint == checkpoint_info.filename and not forced_reload:
            return sd_model
    sd_model = _reuse_loaded(sd_model, checkpoint_info)
    if not forced_reload and sd_model is not None and sd_model.sd_checkpoint_info.filename == checkpoint_info.filename:
        return sd_model
    if sd_model is not None:
        sd_unet.apply_unet("None")
        send_model_to_cpu(sd_model)
        sd_hijack.model_hijack.undo_hijack(sd_model)
    state_dict = get_checkpoint_state_dict(checkpoint_info, timer)
    if sd_model is None or _kind_of(state_dict) != sd_model.used_config:
        if sd_model is not None:
            send_model_to_trash(sd_model)
        load_model(checkpoint_info, already_loaded_state_dict=state_dict)
        return model_data.sd_model
    try:
        load_model_weights(sd_model, checkpoint_info, state_dict, timer)
    except Exception:
        errors.report("Failed to load checkpoint, restoring previous")
        load_model_weights(sd_model, current, None, timer)
        raise
    finally:
        sd_hijack.model_hijack.hijack(sd_model)
        sd_model.to(devices.device)
        script_callbacks.model_loaded_callback(sd_model)
    model_data.set_sd_model(sd_model)
    sd_unet.apply_unet()
    return sd_model


if at_least(8):

    def reload_model_weights(sd_model=None, info=None, forced_reload=False):
        return _reload(sd_model, info, forced_reload)
else:

    def reload_model_weights(sd_model=None, info=None):
        return _reload(sd_model, info, False)


def unload_model_weights(sd_model=None, info=None):
    if at_least(7):
        send_model_to_cpu(sd_model or shared.sd_model)
    elif model_data.sd_model:
        model_data.sd_model.to(devices.cpu)
        sd_hijack.model_hijack.undo_hijack(model_data.sd_model)
        model_data.sd_model = None
    return sd_model
