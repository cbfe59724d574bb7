"""Filling models that have no values yet, on the meta device, and emptying the state dict on the way."""

import contextlib

import torch

from modules import shared


@contextlib.contextmanager
def LoadStateDictOnMeta(state_dict, device, weight_dtype_conversion=None):
    """Leaves of a model on the meta device become real one by one, right before their values arrive.

    The values are taken out of the one dictionary that holds them, so that each is freed after its use.
    """
    if shared.cmd_opts.disable_model_loading_ram_optimization:
        yield
        return
    leaves = (torch.nn.Module, torch.nn.Linear, torch.nn.Conv2d, torch.nn.MultiheadAttention)
    leaves += (torch.nn.LayerNorm, torch.nn.GroupNorm)
    dtypes = weight_dtype_conversion or {}
    before = [(cls, cls._load_from_state_dict) for cls in leaves]
    whole = torch.nn.Module.load_state_dict

    def filling(original):
        def _load_from_state_dict(module, partial, prefix, *args):
            used = []
            for name, param in module._parameters.items():
                if param is None:
                    continue
                key = prefix + name
                value = state_dict.pop(key, None)
                if value is not None:
                    partial[key] = value.to(dtype=dtypes.get(key.split(".")[0], dtypes.get("")))
                    used.append(key)
                if param.is_meta:
                    kind = param.dtype if value is None else value.dtype
                    module._parameters[name] = torch.nn.Parameter(
                        torch.zeros_like(param, device=device, dtype=kind), requires_grad=False
                    )
            original(module, partial, prefix, *args)
            for key in used:
                partial.pop(key, None)

        return _load_from_state_dict

    def load_state_dict(module, given, strict=True):
        if given is state_dict:
            given = {key: value.to("meta") for key, value in given.items()}
        return whole(module, given, strict=strict)

    torch.nn.Module.load_state_dict = load_state_dict
    for cls, original in before:
        cls._load_from_state_dict = filling(original)
    try:
        yield
    finally:
        torch.nn.Module.load_state_dict = whole
        for cls, original in before:
            cls._load_from_state_dict = original
