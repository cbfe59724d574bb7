"""The built-in Lora extension: networks, merging into the weights, and the patches that make layers merge."""

from types import SimpleNamespace

import torch
from modules import at_least, devices, patches, shared, tiny_models
from network_families import create_module  # noqa: F401  # how files become modules

_FUNCTIONAL = {"networks": "lora_functional", "l_networks": "lyco_functional"}[__name__]
loaded_networks = []
extra_network_lora = SimpleNamespace(errors={})


class Network:
    def __init__(self, name):
        self.name = name
        self.te_multiplier = self.unet_multiplier = 1.0
        self.dyn_dim = None
        self.modules = {}


class NetworkModule:
    """``up @ down``, or a full delta; with a bias for those that bring one."""

    def __init__(self, network, up=None, down=None, diff=None, bias=None):
        self.network, self.up, self.down, self.diff, self.bias = network, up, down, diff, bias

    def calc_updown(self, orig_weight):
        # Up to 1.7 the factors follow the weight's dtype; since then they stay as they were loaded.
        dtype = None if at_least(8) else orig_weight.dtype
        if self.diff is not None:
            updown = self.diff.to(orig_weight.device, dtype=dtype)
        else:
            up, down = (factor.to(orig_weight.device, dtype=dtype) for factor in (self.up, self.down))
            updown = up @ down
        if orig_weight.numel() == updown.numel():
            updown = updown.reshape(orig_weight.shape)
        multiplier = self.network.unet_multiplier
        return updown * multiplier, None if self.bias is None else self.bias * multiplier

    def multiplier(self):
        return self.network.unet_multiplier

    def forward(self, x, y):
        return y + torch.nn.functional.linear(x.float(), self.calc_updown(torch.zeros(1))[0].float()).to(y.dtype)


def _is_attention(layer):
    return isinstance(layer, torch.nn.MultiheadAttention)


def _owners(layer):
    return (layer, layer.out_proj) if _is_attention(layer) else (layer, layer)


def _copy(tensor):
    return None if tensor is None else tensor.to(devices.cpu, copy=True)


def network_restore_weights_from_backup(self):
    weights, bias = getattr(self, "network_weights_backup", None), getattr(self, "network_bias_backup", None)
    if weights is None and bias is None:
        return
    if weights is not None and _is_attention(self):
        self.in_proj_weight.copy_(weights[0])
        self.out_proj.weight.copy_(weights[1])
    elif weights is not None:
        self.weight.copy_(weights)
    owner = _owners(self)[1]
    if bias is None:
        owner.bias = None
    else:
        owner.bias.copy_(bias)


def network_apply_weights(self):
    layer_name = getattr(self, "network_layer_name", None)
    if layer_name is None:
        return
    current = getattr(self, "network_current_names", ())
    wanted = tuple((net.name, net.te_multiplier, net.unet_multiplier, net.dyn_dim) for net in loaded_networks)
    if getattr(self, "network_weights_backup", None) is None and wanted:
        if current:
            raise RuntimeError("no backup weights found and current weights are not unchanged")
        attention = _is_attention(self)
        self.network_weights_backup = (
            (_copy(self.in_proj_weight), _copy(self.out_proj.weight)) if attention else _copy(self.weight)
        )
    if getattr(self, "network_bias_backup", None) is None and (wanted or not at_least(10)):
        self.network_bias_backup = _copy(getattr(_owners(self)[1], "bias", None))
    if current == wanted:
        return
    network_restore_weights_from_backup(self)
    for net in loaded_networks:
        try:
            with torch.no_grad():
                _merge(self, net, layer_name)
        except RuntimeError:
            extra_network_lora.errors[net.name] = extra_network_lora.errors.get(net.name, 0) + 1
    self.network_current_names = wanted


def _merge(layer, net, layer_name):
    module = net.modules.get(layer_name)
    if module is not None and hasattr(layer, "weight"):
        weight = layer.weight if getattr(layer, "fp16_weight", None) is None else layer.fp16_weight.clone()
        updown, ex_bias = module.calc_updown(weight)
        if weight.dim() == 4 and weight.shape[1] == 9:
            updown = torch.nn.functional.pad(updown, (0, 0, 0, 0, 0, 5))
        if at_least(8):
            layer.weight.copy_((weight.to(updown.dtype) + updown).to(layer.weight.dtype))
        else:
            layer.weight += updown
        _add_bias(layer, ex_bias)
        return
    parts = [net.modules.get(layer_name + part) for part in ("_q_proj", "_k_proj", "_v_proj", "_out_proj")]
    if _is_attention(layer) and all(parts):
        chunks = layer.in_proj_weight.chunk(3, 0)
        in_proj = torch.vstack([part.calc_updown(chunk)[0] for part, chunk in zip(parts, chunks)])
        out, ex_bias = parts[3].calc_updown(layer.out_proj.weight)
        layer.in_proj_weight += in_proj
        layer.out_proj.weight += out
        _add_bias(layer.out_proj, ex_bias)
    elif at_least(10) and isinstance(layer, tiny_models.QkvLinear) and all(parts[:3]):
        chunks = layer.weight.chunk(3, 0)
        layer.weight += torch.vstack([part.calc_updown(chunk)[0] for part, chunk in zip(parts, chunks)])


def _add_bias(layer, ex_bias):
    if ex_bias is None or not hasattr(layer, "bias"):
        return
    if layer.bias is None:
        parameter = torch.nn.Parameter(ex_bias, requires_grad=False)
        layer.bias = parameter.to(layer.weight.dtype) if at_least(8) else parameter
    else:
        layer.bias.copy_((layer.bias + ex_bias).to(layer.bias.dtype))


def network_forward(org_module, input, original_forward):
    """What lora_functional does: the networks act beside the layer, which is whole."""
    if not loaded_networks:
        return original_forward(org_module, input)
    network_restore_weights_from_backup(org_module)
    network_reset_cached_weight(org_module)
    y = original_forward(org_module, input)
    for net in loaded_networks:
        if (module := net.modules.get(org_module.network_layer_name)) is not None:
            y = module.forward(input, y)
    return y


def network_reset_cached_weight(self):
    self.network_current_names = ()
    self.network_weights_backup = None
    if at_least(7):
        self.network_bias_backup = None


_LAYERS = (
    torch.nn.Linear,
    torch.nn.Conv2d,
    torch.nn.GroupNorm,
    torch.nn.LayerNorm,
    torch.nn.MultiheadAttention,
)


class LoraPatches:
    def __init__(self):
        for cls in _LAYERS:
            patches.patch(__name__, cls, "forward", self._merging(cls.forward))
            patches.patch(__name__, cls, "_load_from_state_dict", self._resetting(cls._load_from_state_dict))

    @staticmethod
    def _merging(original):
        def forward(self, *args, **kwargs):
            if shared.opts.data.get(_FUNCTIONAL, False) and not isinstance(self, torch.nn.MultiheadAttention):
                return network_forward(self, *args, original)
            network_apply_weights(self)
            return original(self, *args, **kwargs)

        return forward

    @staticmethod
    def _resetting(original):
        def _load_from_state_dict(self, *args, **kwargs):
            network_reset_cached_weight(self)
            return original(self, *args, **kwargs)

        return _load_from_state_dict

    def undo(self):
        for cls in _LAYERS:
            patches.undo(__name__, cls, "forward")
            patches.undo(__name__, cls, "_load_from_state_dict")


def assign_network_names_to_compvis_modules(sd_model):
    """Names the layers of the model in use, whichever model was loaded: so does the Lora extension."""
    used, mapping = shared.sd_model, {}
    if used.is_sdxl:
        roots = [(f"{i}_", embedder.wrapped) for i, embedder in enumerate(used.conditioner.embedders[:2])]
    else:
        encoder = getattr(used, "text_encoders", None) or used.cond_stage_model
        roots = [("", getattr(encoder, "wrapped", encoder))]
    for prefix, root in [*roots, ("", used.model)]:
        for name, module in root.named_modules():
            module.network_layer_name = prefix + name.replace(".", "_")
            mapping[module.network_layer_name] = module
    sd_model.network_layer_mapping = mapping
