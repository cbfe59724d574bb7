"""A route for the live tests: calls the functions of this file by name, inside the WebUI. Part of no release.

It knows the product by its attributes only (``qdata``, ``scale``, ``format``), so that its answers do not come from
the code that is tested.
"""

import copy
import hashlib
import inspect
import re
import sys
import time
import types

import numpy as np
import safetensors.torch
import torch
from fastapi import Body, HTTPException
from modules import patches, script_callbacks, sd_models, shared

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
    "fp8_live_probe_state", types.SimpleNamespace(loads=0, reads=0, census=None, lora_errors={})
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
    hashes = {}
    for name, tensor in _tensors(shared.sd_model).items():
        if name.startswith(prefix):
            kind = getattr(getattr(tensor, "format", None), "name", "plain")
            digest = hashlib.sha256(f"{kind} {tensor.dtype} {tuple(tensor.shape)}".encode())
            for inner in _inner(tensor):
                digest.update(_raw(inner))
            hashes[name] = f"{kind}:{digest.hexdigest()[:16]}"
    return hashes


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


def loaded_checkpoints():
    """Names of the checkpoints that are kept loaded."""
    return [model.sd_checkpoint_info.name for model in sd_models.model_data.loaded_sd_models]


def fp8_flag():
    """``devices.fp8``, False where the WebUI has no such thing."""
    from modules import devices

    return bool(getattr(devices, "fp8", False))


def request_restart():
    """Press "Reload UI"."""
    shared.state.request_restart()


class _RememberedErrors(dict):
    """The Lora extension clears its errors before and after every picture; this keeps the last ones."""

    def clear(self):
        state.lora_errors = dict(self)
        super().clear()


def _add_route(_, app):
    sys.modules["networks"].extra_network_lora.errors = _RememberedErrors()

    def call(name: str = Body(...), arguments: dict = Body({})):  # noqa: B008
        function = globals().get(name)
        if name.startswith("_") or not inspect.isfunction(function):
            raise HTTPException(404, f"the probe has no {name}")
        with torch.no_grad():
            return function(**arguments)

    app.add_api_route("/fp8-live-probe", call, methods=["POST"])


script_callbacks.on_app_started(_add_route)
