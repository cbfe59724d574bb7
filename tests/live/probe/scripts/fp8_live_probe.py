"""A route for the live tests: calls the functions of this file by name, inside the WebUI. Part of no release.

It knows the product by its attributes only (``qdata``, ``scale``, ``format``), so that its answers do not come from
the code that is tested.
"""

import contextlib
import copy
import gc
import hashlib
import inspect
import random
import re
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from fastapi import Body, HTTPException
from modules import devices, extras, lowvram, patches, script_callbacks, scripts, sd_models, sd_models_config, shared
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

try:
    from modules import infotext_utils
except ImportError:  # before 1.8
    from modules import generation_parameters_copypaste as infotext_utils

_LORA_TARGETS = r"attn\d\.to_|ff\.net|proj_in|proj_out"
_LEAVES = (
    torch.nn.Linear,
    torch.nn.Conv2d,
    torch.nn.MultiheadAttention,
    torch.nn.LayerNorm,
    torch.nn.GroupNorm,
    torch.nn.Embedding,
)


def _inner(tensor):
    return [tensor] if getattr(tensor, "qdata", None) is None else [t for t in tensor.packed if t is not None]


def _bytes(tensors):
    storages = {}
    for tensor in tensors:
        for inner in _inner(tensor):
            if inner.device.type != "meta":
                storages[inner.untyped_storage().data_ptr()] = inner.untyped_storage().nbytes()
    return sum(storages.values())


def _tensors(module):
    """Name to parameter or buffer, tied ones under each name."""
    return {
        f"{prefix}.{name}": tensor
        for prefix, child in module.named_modules(remove_duplicate=False)
        for name, tensor in (*child._parameters.items(), *child._buffers.items())
        if tensor is not None
    }


def _raw(tensor):
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


# Watching loads: state survives "Reload UI", and the watchers sit below whatever the WebUI and extensions replace.

state = sys.modules.setdefault(
    "fp8_live_probe_state", types.SimpleNamespace(loads=0, reads=0, census=None, lora_errors={}, pictures={})
)


def _watch():
    state.watching = True
    load_state_dict, load_file = torch.nn.Module.load_state_dict, safetensors.torch.load_file

    def watched_load(module, *args, **kwargs):
        state.loads += 1
        if not hasattr(module, "first_stage_model") or state.census is not None:
            return load_state_dict(module, *args, **kwargs)
        census = state.census = {"peak": 0, "largest": 0, "leaves": 0}
        handles = []

        def after_leaf(leaf, _):
            census["leaves"] += 1
            parameters = list(module.parameters())
            census["peak"] = max(census["peak"], _bytes(parameters))
            census["largest"] = max(census["largest"], _bytes(leaf.parameters()))

        for leaf in module.modules():
            if isinstance(leaf, _LEAVES):
                handles.append(leaf.register_load_state_dict_post_hook(after_leaf))
                leaf._load_state_dict_post_hooks.move_to_end(handles[-1].id, last=False)  # before all others
        try:
            return load_state_dict(module, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    def watched_read(*args, **kwargs):
        state.reads += 1
        return load_file(*args, **kwargs)

    torch.nn.Module.load_state_dict, safetensors.torch.load_file = watched_load, watched_read


if not hasattr(state, "watching"):
    _watch()


# What the tests can ask


def checkpoint():
    """Name of the checkpoint in use; loads it if need be."""
    return shared.sd_model.sd_checkpoint_info.name


def counters():
    """Loads of state dicts and reads of whole checkpoint files since the start."""
    return {"loads": state.loads, "reads": state.reads}


def census():
    """Bytes of parameters during the first load of a model: the most, the largest leaf, and those of the model now."""
    return {**state.census, "final": _bytes(shared.sd_model.parameters())}


def module_bytes(path):
    """Bytes of the parameters and buffers below a module of the model."""
    module = shared.sd_model.get_submodule(path)
    return _bytes([*module.parameters(), *module.buffers()])


def parameters(prefix=""):
    """Name to a hash over kind, dtype and bits of every parameter and buffer."""
    return {name: _hash(tensor) for name, tensor in _tensors(shared.sd_model).items() if name.startswith(prefix)}


def _hash(tensor):
    kind = getattr(getattr(tensor, "format", None), "name", "plain")
    digest = hashlib.sha256(f"{kind} {tensor.dtype} {tuple(tensor.shape)}".encode())
    for inner in _inner(tensor):
        digest.update(_raw(inner))
    return f"{kind}:{digest.hexdigest()[:16]}"


def dtypes():
    """Name to the dtype of every parameter and buffer, as a reader sees it."""
    return {name: str(tensor.dtype) for name, tensor in _tensors(shared.sd_model).items()}


def save_weights(names, path):
    """Write weights into an npz file: NAME|qdata (uint8) and NAME|scale of packed ones, NAME of plain ones."""
    tensors, found = _tensors(shared.sd_model), {}
    for name in names:
        tensor = tensors[name]
        if getattr(tensor, "qdata", None) is None:
            found[name] = tensor.detach().cpu().double().numpy()
        else:
            found[name + "|qdata"] = tensor.qdata.detach().cpu().contiguous().view(torch.uint8).numpy()
            if tensor.scale is not None:
                found[name + "|scale"] = tensor.scale.detach().cpu().double().numpy()
    np.savez(path, **found)


def save_values(names, path):
    """Write weights into an npz file as a reader sees them: in float32, with whatever is added to them."""
    tensors = _tensors(shared.sd_model)
    np.savez(path, **{name: tensors[name].float().detach().cpu().double().numpy() for name in names})


def patched():
    """The functions that the product has replaced, and those that are still its own."""
    owners = {name: module for name, module in sys.modules.items() if name.startswith("lib_fp8.webui")}
    places = ((sd_models, "load_model_weights"), (sd_models, "reload_model_weights"))
    networks = sys.modules.get("networks")
    return {
        "recorded": sorted(f"{owner.__name__}.{field}" for owner, field in patches.originals["lib_fp8"]),
        "in_force": [field for owner, field in places if getattr(owner, field).__module__ in owners],
        "lora": networks is not None and networks.network_apply_weights.__module__ in owners,
    }


def function_depth(owner, field):
    """How many functions of the product lie one above the other in a place; follows the closures."""
    function, depth = getattr(sys.modules[owner], field), 0
    while function is not None and getattr(function, "__module__", "").startswith("lib_fp8"):
        depth += 1
        function = inspect.getclosurevars(function).nonlocals.get("original")
    return depth


def lora_layers():
    """Every (network, module of it, layer of the model) that belongs together, by the WebUI's own mapping."""
    names = {id(module): name for name, module in shared.sd_model.named_modules()}
    result = []
    for net in sys.modules["networks"].loaded_networks:
        for module in net.modules.values():
            part = next((p for p in ("q_proj", "k_proj", "v_proj", "out_proj") if module.sd_key.endswith("_" + p)), "")
            attention = isinstance(module.sd_module, torch.nn.MultiheadAttention)
            result.append(
                {
                    "file": net.network_on_disk.filename,
                    "multiplier": net.unet_multiplier,
                    "key": module.network_key.split(".")[0],
                    "layer": names[id(module.sd_module)],
                    "part": part if attention else "",
                    "applied": bool(module.sd_module.network_current_names),
                }
            )
    return result


def lora_errors():
    """Network to the number of layers that it failed in, of the last picture with networks."""
    return state.lora_errors


def paste(text):
    """What pasting generation parameters gives: the parsed fields, and the override settings."""
    params = infotext_utils.parse_generation_parameters(text)
    script_callbacks.infotext_pasted_callback(text, params)
    if hasattr(infotext_utils, "get_override_settings"):
        found = [(label, value) for label, _, value in infotext_utils.get_override_settings(params)]
    else:  # before 1.8 it is an inner function of connect_paste; this repeats it
        labels = [(info.infotext, key) for key, info in shared.opts.data_labels.items() if info.infotext]
        found = [
            (label, shared.opts.cast_value(key, params[label]))
            for label, key in labels + infotext_utils.infotext_to_setting_name_mapping
            if params.get(label) is not None
            and shared.opts.cast_value(key, params[label]) != getattr(shared.opts, key, None)
        ]
    return infotext_utils.create_override_settings_dict([f"{label}: {value}" for label, value in found])


def script_arguments(title):
    """Label, value and choices of each argument of a txt2img script, which 1.6 does not tell beside newer gradio."""
    runner = scripts.scripts_txt2img
    script = next(script for script in runner.scripts if script.title().lower() == title)
    return [
        {
            "label": control.label,
            "value": control.value,
            "choices": [c[0] if isinstance(c, tuple) else c for c in getattr(control, "choices", None) or ()],
        }
        for control in runner.inputs[script.args_from : script.args_to]
    ]


def unequal_to_plain_cast():
    """Names of the packed weights whose bits are not those of a plain cast of the checkpoint to float8_e4m3fn."""
    originals = safetensors.torch.load_file(shared.sd_model.sd_checkpoint_info.filename)
    return [
        name
        for name, tensor in _tensors(shared.sd_model).items()
        if getattr(tensor, "qdata", None) is not None
        and _raw(tensor.qdata) != _raw(originals[name.replace(".wrapped.", ".")].half().to(torch.float8_e4m3fn))
    ]


def write_lora(path, rank, seed):
    """A LoRA in kohya's layout for every Linear and Conv2d of the UNet's attention blocks; the number of layers."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in shared.sd_model.model.diffusion_model.named_modules():
        if not isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)) or not re.search(_LORA_TARGETS, name):
            continue
        key, inner = "lora_unet_" + name.replace(".", "_"), (1, 1) * isinstance(module, torch.nn.Conv2d)
        out, width = module.weight.shape[:2]
        tensors[f"{key}.lora_up.weight"] = torch.randn(out, rank, *inner, generator=generator).half() * 0.01
        tensors[f"{key}.lora_down.weight"] = torch.randn(rank, width, *inner, generator=generator).half() * 0.01
        tensors[f"{key}.alpha"] = torch.tensor(rank / 2)
    safetensors.torch.save_file(tensors, path)
    return len(tensors) // 3


def time_networks(names, way, rounds):
    """Seconds for switching networks: of the WebUI's own code on float16 weights, and of one way of the product.

    The float16 twin of the UNet lies beside the model; both are timed in turns, in the same process. A switch is what
    the forwards of all layers of the UNet do when other networks are in the prompt.
    """
    networks = sys.modules["networks"]
    own = patches.original("lib_fp8", networks, "network_apply_weights")
    unet = shared.sd_model.model
    twin = _float16_twin(unet)
    networks.load_networks(names, dyn_dims=[None] * len(names))
    files = dict(zip(names, list(networks.loaded_networks)))

    def switch(root, apply, wanted):
        networks.loaded_networks[:] = [files[name] for name in wanted]
        start = time.perf_counter()
        for module in root.modules():
            if isinstance(module, _LEAVES[:-1]):
                apply(module)
        return time.perf_counter() - start

    a, b = [names[0]], [names[1]]
    steps = {"first": a, "another": b, "two": [*a, *b], "none": [], "a": a, "nothing changed": a}
    found = {}
    shared.opts.set("fp8_lora", way)
    for _ in range(rounds):
        for what, wanted in steps.items():
            for label, root, apply in (("float16", twin, own), (way, unet, networks.network_apply_weights)):
                found.setdefault((label, what), []).append(switch(root, apply, wanted))
        for root, apply in ((twin, own), (unet, networks.network_apply_weights)):
            switch(root, apply, [])
    networks.loaded_networks.clear()
    return [{"way": way, "step": step, "seconds": times} for (way, step), times in found.items()]


def _float16_twin(module):
    twin = copy.copy(module)
    twin._modules, twin._parameters = {}, {}
    for name, parameter in module._parameters.items():
        value = None if parameter is None else parameter.detach().float().half()
        twin._parameters[name] = None if value is None else torch.nn.Parameter(value, requires_grad=False)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _float16_twin(child)
    return twin


class _LiveBytes(TorchDispatchMode):
    """Follows the storages that operations make beside those given, and remembers the most that lived at a time.

    Views of others, such as of a mapped file, are no storages of their own.
    """

    def __init__(self, existing):
        super().__init__()
        self._storages, self.peak = {}, 0
        self._note(_real_storages(existing))

    def _note(self, storages):
        self._storages.update((StorageWeakRef(storage), storage.nbytes()) for storage in storages)
        if sum(self._storages.values()) > self.peak:
            self._storages = {ref: size for ref, size in self._storages.items() if not ref.expired()}
            self.peak = max(self.peak, sum(self._storages.values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        wrapped = [kind for kind in types if kind not in (torch.Tensor, torch.nn.Parameter)]
        if wrapped:
            with self:
                return wrapped[0].__torch_dispatch__(func, types, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        known = {storage._cdata for storage in _real_storages((args, kwargs))}
        self._note(storage for storage in _real_storages(result) if storage._cdata not in known)
        return result


def _real_storages(values):
    plain = (torch.Tensor, torch.nn.Parameter)
    tensors = (value for value in tree_flatten(values)[0] if type(value) in plain and value.device.type != "meta")
    return [tensor.untyped_storage() for tensor in tensors]


def _resident():
    """Bytes of this process in memory (Linux): its own, and mapped pages of files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")]


def measured(option, value, count_tensors):
    """What it takes to change an option, or to load the model as at the start if ``option`` is None.

    Returns:
        seconds; bytes of the model after; at the worst moment: bytes of its tensors and of those that operations make
        (None unless asked for: counting takes time), and what the process held more than before, of its own and of
        mapped files.
    """
    if option is None:
        sd_models.model_data.__init__()
    existing = [] if option is None else [t for w in shared.sd_model.state_dict().values() for t in _inner(w)]
    gc.collect()
    before, most, done = _resident(), [0, 0], threading.Event()

    def sample():
        while not done.wait(0.005):
            most[:] = map(max, most, _resident())

    sampler = threading.Thread(target=sample)
    live = _LiveBytes(existing)
    del existing
    sampler.start()
    start = time.perf_counter()
    with live if count_tensors else contextlib.nullcontext():
        if option is None:
            sd_models.load_model()
        else:
            shared.opts.set(option, value)
    seconds = time.perf_counter() - start
    done.set()
    sampler.join()
    return {
        "seconds": seconds,
        "final": _bytes(_tensors(shared.sd_model).values()),
        "tensors": live.peak if count_tensors else None,
        "anonymous": most[0] - before[0],
        "mapped": most[1] - before[1],
    }


_own_configuration = sd_models_config.find_checkpoint_config_near_filename


def share_configuration(path):
    """Let all checkpoints have one configuration, so that a change fills the model that is there; None ends it."""
    sd_models_config.find_checkpoint_config_near_filename = _own_configuration if path is None else lambda info: path


def skip_the_empty_prompt():
    """Let loading end without a pass of the text encoder, in which the WebUI's own FP8 fails on a CPU."""
    sd_models.get_empty_cond = lambda model: None


def moved_bytes(steps):
    """Bytes that --medvram or --lowvram asks for on the device in one forward of the UNet, for each of some steps.

    The first may have to bring more: whatever was on the device before, the UNet was not.
    """
    moved, to = [], torch.nn.Module.to
    lowvram.send_everything_to_cpu()

    def counted(module, *args, **kwargs):
        callers = [frame.function for frame in inspect.stack(0)[1:4]]  # Lightning's modules have a ``to`` of their own
        if "send_me_to_gpu" in callers and args == (devices.device,):
            moved[-1] += _bytes([*module.parameters(), *module.buffers()])
        return to(module, *args, **kwargs)

    torch.nn.Module.to = counted
    try:
        for _ in range(steps):
            moved.append(0)
            x = torch.zeros(1, 4, 8, 8, device=devices.device, dtype=devices.dtype_unet)
            cond = {"c_crossattn": [x.new_zeros(1, 77, 768)]}
            shared.sd_model.apply_model(x, torch.zeros(1, device=devices.device), cond)
    finally:
        torch.nn.Module.to = to
    return moved


def loaded_checkpoints():
    """Names of the checkpoints that are kept loaded."""
    return [model.sd_checkpoint_info.name for model in sd_models.model_data.loaded_sd_models]


# Modules of AnimateDiff and ControlNet


def _remember_latent(params):
    state.latent = params.x.float().cpu().numpy()


def save_latent(path):
    """Write what the UNet made of the last step of the last picture, guidance applied, into an npy file."""
    np.save(path, state.latent)


def _guests():
    motion = getattr(sys.modules.get("scripts.animatediff_mm"), "mm_animatediff", None)
    found = {} if motion is None or motion.mm is None else {"motion module": motion.mm}
    for cache in (getattr(data.script_class, "model_cache", {}) for data in scripts.scripts_data):
        found.update((name.split()[0], built.model) for name, built in cache.items())
    return found


def guests():
    """Each module that the other extensions keep: its identity, and its tensors as ``parameters`` tells them."""
    return {
        name: {"id": id(module), "tensors": {key: _hash(tensor) for key, tensor in _tensors(module).items()}}
        for name, module in _guests().items()
    }


def unet_layout():
    """Name, class and identity of every module of the UNet."""
    named = shared.sd_model.model.diffusion_model.named_modules()
    return [(name, type(module).__name__, id(module)) for name, module in named]


def alive(class_name):
    """How many objects of a class are in memory."""
    gc.collect()
    return sum(type(thing).__name__ == class_name for thing in gc.get_objects())


def control_lora_weight(model, layer, path):
    """Write into an npz file what a control-LoRA computes with at a layer of the UNet, and of what it is made."""
    lora, unet = _guests()[model].control_model, shared.sd_model.model.diffusion_model
    hooks = sys.modules["scripts.controlnet_lora"]
    hooks.bind_control_lora(unet, lora)
    try:
        module, base = lora.get_submodule(layer), unet.get_submodule(layer).weight
        used = module(torch.eye(base.shape[1], dtype=base.dtype)) - (0 if module.bias is None else module.bias)
    finally:
        hooks.unbind_control_lora(lora)
    save_weights([f"model.diffusion_model.{layer}.weight"], path)
    parts = {"used": used.T, "up": module.up, "down": module.down}
    np.savez(path, **np.load(path), **{key: value.detach().double().numpy() for key, value in parts.items()})


def merge_checkpoints(names, file, multiplier, half):
    """Write the weighted sum of two checkpoints as the Checkpoint Merger does; the path of the file."""
    titles = [sd_models.get_closet_checkpoint_match(each).title for each in names]
    merge = ("Weighted sum", multiplier, half, file, "safetensors", 0, "None", "", False, False, False, "{}")
    extras.run_modelmerger("", *titles, "", *merge)
    return sd_models.get_closet_checkpoint_match(f"{file}.safetensors").filename


def refresh_hypernetworks():
    """Look for the files again."""
    shared.reload_hypernetworks()


def forget_hypernetworks():
    """Take those in use out of memory."""
    shared.loaded_hypernetworks.clear()


def take_hypernetworks_off():
    """Take off the model what the WebUI hung into it; it never does so itself."""
    for module in shared.sd_model.modules():
        for name in ("hyper_k", "hyper_v"):
            module._modules.pop(name, None)


def hypernetwork_bits():
    """Hashes over kind, dtype and bits of the weights of the hypernetworks in use."""
    modules = [module for net in shared.loaded_hypernetworks for pair in net.layers.values() for module in pair]
    return [_hash(tensor) for module in modules for tensor in _tensors(module).values()]


def mend_training():
    """The WebUI hands torch's Sampler the data, which newer versions of torch refuse."""
    torch.utils.data.Sampler.__init__ = lambda self, data_source=None: None


def seed(number):
    """Make what is drawn from now on known."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def fp8_flag():
    """``devices.fp8``, False where the WebUI has no such thing."""
    return bool(getattr(devices, "fp8", False))


def request_restart():
    """Press "Reload UI"."""
    shared.state.request_restart()


def request_restart_beside_jobs():
    """Press "Reload UI" without the interrupt of the running job that goes with it."""
    shared.state.server_command = "restart"


def begin_picture(number, fields):
    """Begin a txt2img in a thread that the server does not wait for when it closes, as for those of the page."""
    api = state.txt2img
    (request,) = inspect.signature(api).parameters.values()
    request = request.annotation(**fields)
    state.pictures[number] = None

    def make():
        try:
            answer = api(request)
            state.pictures[number] = {"images": answer.images, "info": answer.info}
        except Exception as error:
            state.pictures[number] = {"error": repr(error)}

    threading.Thread(target=make).start()


def begun_picture(number):
    """What became of it; None if it is not done."""
    return state.pictures[number]


class _RememberedErrors(dict):
    """The Lora extension clears its errors before and after every picture; this keeps the last ones."""

    def clear(self):
        state.lora_errors = dict(self)
        super().clear()


def _add_route(_, app):
    sys.modules["networks"].extra_network_lora.errors = _RememberedErrors()
    state.txt2img = next(route.endpoint for route in app.routes if getattr(route, "path", "") == "/sdapi/v1/txt2img")

    def call(name: str = Body(...), arguments: dict = Body({})):  # noqa: B008
        function = globals().get(name)
        if name.startswith("_") or not inspect.isfunction(function):
            raise HTTPException(404, f"the probe has no {name}")
        with torch.no_grad():
            return function(**arguments)

    app.add_api_route("/fp8-live-probe", call, methods=["POST"])


script_callbacks.on_app_started(_add_route)
script_callbacks.on_cfg_after_cfg(_remember_latent)
