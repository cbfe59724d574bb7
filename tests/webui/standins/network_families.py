"""The Lora extension's network modules: every family that a generation knows, with its dtypes and its weaknesses."""

import itertools

import torch
from modules import at_least, devices, tiny_models
from torch import nn

_LINEAR = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
_LINEAR_TO_LORA = (*_LINEAR, nn.MultiheadAttention, *([tiny_models.QkvLinear] if at_least(10) else []))


class NetworkModule:
    needs, takes = {}, {}  # attributes, by their names in a file
    forms = ()  # the sets of names by which a layer is known to be of this family, where those are not what it needs
    ranked = ()  # attributes whose rows are the dim
    third = True  # for SD3's layers of queries, keys and values, the shape is that of one of the three

    def __init__(self, network, sd_key, tensors, sd_module):
        self.network, self.sd_key, self.sd_module = network, sd_key, sd_module
        self.network_key = f"{sd_key}.{next(iter(tensors))}"
        if at_least(10) and self.third and isinstance(sd_module, tiny_models.QkvLinear):
            self.shape = (sd_module.weight.shape[0] // 3, sd_module.weight.shape[1])
        elif hasattr(sd_module, "weight"):
            self.shape = sd_module.weight.shape
        elif at_least(9):
            self.shape = sd_module.out_proj.weight.shape if isinstance(sd_module, nn.MultiheadAttention) else None
        self.dim, self.bias = None, tensors.get("bias")
        self.alpha, self.scale = (tensors[part].item() if part in tensors else None for part in ("alpha", "scale"))
        if at_least(9):
            self.dora_scale, self.dora_norm_dims = tensors.get("dora_scale"), len(self.shape) - 1
        for part, attribute in {**self.needs, **self.takes}.items():
            setattr(self, attribute, tensors.get(part))
            if attribute in self.ranked and part in tensors:
                self.dim = tensors[part].shape[0]

    def multiplier(self):
        of_text_encoder = "transformer" in self.sd_key[:20]
        return self.network.te_multiplier if of_text_encoder else self.network.unet_multiplier

    def calc_scale(self):
        if self.scale is not None:
            return self.scale
        return 1.0 if self.dim is None or self.alpha is None else self.alpha / self.dim

    def apply_weight_decompose(self, updown, orig_weight):
        """DoRA. The norms are those of the input columns, even where the file's scales belong to output rows."""
        orig_weight = orig_weight.to(updown.dtype)
        dora_scale = self.dora_scale.to(device=orig_weight.device, dtype=updown.dtype)
        merged = updown.to(orig_weight.device) + orig_weight
        norm = merged.transpose(0, 1).reshape(merged.shape[1], -1).norm(dim=1, keepdim=True)
        norm = norm.reshape(merged.shape[1], *[1] * self.dora_norm_dims).transpose(0, 1)
        return merged * (dora_scale / norm) - orig_weight

    def finalize_updown(self, updown, orig_weight, output_shape, ex_bias=None):
        if self.bias is not None:
            updown = updown.reshape(self.bias.shape)
            # In place: where this still is the tensor from the file, each call adds the bias once more.
            updown += self.bias.to(orig_weight.device, dtype=updown.dtype if at_least(8) else orig_weight.dtype)
            updown = updown.reshape(output_shape)
        if len(output_shape) == 4:
            updown = updown.reshape(output_shape)
        if orig_weight.size().numel() == updown.size().numel():
            updown = updown.reshape(orig_weight.shape)
        if ex_bias is not None:
            ex_bias = ex_bias * self.multiplier()
        if at_least(10):
            updown = updown * self.calc_scale()
        if at_least(9) and self.dora_scale is not None:
            updown = self.apply_weight_decompose(updown, orig_weight)
        if not at_least(10):
            updown = updown * self.calc_scale()
        return updown * self.multiplier(), ex_bias


def _to(orig_weight, *tensors):
    """Up to 1.7 what a file holds follows the weight's dtype; since then it keeps its own."""
    dtype = None if at_least(8) else orig_weight.dtype
    return [None if tensor is None else tensor.to(orig_weight.device, dtype=dtype) for tensor in tensors]


def _product(up, down, shape, dyn_dim=None):
    up, down = (factor.reshape(factor.size(0), -1) for factor in (up, down))
    if dyn_dim is not None:
        up, down = up[:, :dyn_dim], down[:dyn_dim, :]
    return (up @ down).reshape(shape)


def _tucker(core, out_factor, in_factor):
    half = torch.einsum("r s h w, s i -> r i h w", core, in_factor)
    return torch.einsum("r i h w, r o -> o i h w", half, out_factor)


class NetworkModuleLora(NetworkModule):
    needs = {"lora_up.weight": "up_model", "lora_down.weight": "down_model"}
    takes = {"lora_mid.weight": "mid_model"}
    forms = [tuple(needs)] + [("lora_A.weight", "lora_B.weight")] * at_least(10)
    ranked = ("down_model",)

    def __init__(self, network, sd_key, tensors, sd_module):
        if not all(part in tensors for part in self.needs):  # as diffusers calls them: the alpha and all else is lost
            tensors = {"lora_up.weight": tensors["lora_B.weight"], "lora_down.weight": tensors["lora_A.weight"]}
        super().__init__(network, sd_key, tensors, sd_module)
        for attribute in ("up_model", "down_model", "mid_model"):
            if (weight := getattr(self, attribute)) is not None:
                setattr(self, attribute, self._layer(weight, attribute))

    def _layer(self, weight, attribute):
        like = self.sd_module
        if type(like) in _LINEAR_TO_LORA:
            weight = weight.reshape(weight.shape[0], -1)
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        elif type(like) is nn.Conv2d:
            if attribute == "down_model" and weight.dim() == 2:
                weight = weight.reshape(weight.shape[0], -1, 1, 1)
            pointwise = attribute == "up_model" or (attribute == "down_model" and weight.shape[2:] == (1, 1))
            how = (1,) if pointwise else (like.kernel_size, like.stride, like.padding)
            layer = nn.Conv2d(weight.shape[1], weight.shape[0], *how, bias=False)
        else:
            raise AssertionError(f"{self.network_key} is for a layer of unsupported type: {type(like).__name__}")
        with torch.no_grad():
            layer.weight.copy_(weight.reshape(layer.weight.shape))
        return layer.to(device=devices.cpu, dtype=devices.dtype).requires_grad_(False)

    def calc_updown(self, orig_weight):
        up, down = _to(orig_weight, self.up_model.weight, self.down_model.weight)
        if self.mid_model is None:
            shape = [up.size(0), *down.shape[1:]]
            updown = _product(up, down, shape, self.network.dyn_dim)
        else:
            (mid,) = _to(orig_weight, self.mid_model.weight)
            shape = [up.size(0), down.size(1), *mid.shape[2:]]
            up, down = (factor.reshape(factor.size(0), -1) for factor in (up, down))
            updown = torch.einsum("s r h w, o s, r i -> o i h w", mid, up, down)
        return self.finalize_updown(updown, orig_weight, shape)


class NetworkModuleHada(NetworkModule):
    needs = {"hada_w1_a": "w1a", "hada_w1_b": "w1b", "hada_w2_a": "w2a", "hada_w2_b": "w2b"}
    takes = {"hada_t1": "t1", "hada_t2": "t2"}
    ranked, third = ("w1b",), False

    def calc_updown(self, orig_weight):
        w1a, w1b, w2a, w2b, t1, t2 = _to(orig_weight, self.w1a, self.w1b, self.w2a, self.w2b, self.t1, self.t2)
        if t1 is None:
            shape = [w1a.size(0), w1b.size(1), *(w1b.shape[2:] if w1b.dim() == 4 else ())]
        else:
            shape = [w1a.size(1), w1b.size(1), *t1.shape[2:]]
        updown = _product(w1a, w1b, shape) if t1 is None else _tucker(t1, w1a, w1b)
        updown = updown * (_product(w2a, w2b, shape) if t2 is None else _tucker(t2, w2a, w2b))
        return self.finalize_updown(updown, orig_weight, shape)


class NetworkModuleIa3(NetworkModule):
    needs = {"weight": "w"}

    def __init__(self, network, sd_key, tensors, sd_module):
        super().__init__(network, sd_key, tensors, sd_module)
        self.on_input = tensors["on_input"].item()

    def calc_updown(self, orig_weight):
        (w,) = _to(orig_weight, self.w)
        shape = [w.size(0), orig_weight.size(1)]
        shape, w = (shape[::-1], w) if self.on_input else (shape, w.reshape(-1, 1))
        return self.finalize_updown(orig_weight * w, orig_weight, shape)


class NetworkModuleLokr(NetworkModule):
    takes = {f"lokr_w{n}{suffix}": f"w{n}{suffix[1:]}" for n in (1, 2) for suffix in ("", "_a", "_b")}
    takes["lokr_t2"] = "t2"
    _either = ([("lokr_w1",), ("lokr_w1_a", "lokr_w1_b")], [("lokr_w2",), ("lokr_w2_a", "lokr_w2_b")])
    forms = [first + second for first, second in itertools.product(*_either)]
    ranked = ("w1b", "w2b")

    def calc_updown(self, orig_weight):
        w1, w1a, w1b = _to(orig_weight, self.w1, self.w1a, self.w1b)
        w2, w2a, w2b, t2 = _to(orig_weight, self.w2, self.w2a, self.w2b, self.t2)
        if w1 is None:
            w1 = w1a @ w1b
        if w2 is None:
            w2 = w2a @ w2b if t2 is None else _tucker(t2, w2a, w2b)
        shape = [w1.size(0) * w2.size(0), w1.size(1) * w2.size(1)]
        if orig_weight.dim() == 4:
            shape = orig_weight.shape
        if w2.dim() == 4:
            w1 = w1.unsqueeze(2).unsqueeze(2)
        return self.finalize_updown(torch.kron(w1, w2.contiguous()).reshape(shape), orig_weight, shape)


class NetworkModuleFull(NetworkModule):
    needs, takes = {"diff": "weight"}, {"diff_b": "ex_bias"}

    def calc_updown(self, orig_weight):
        updown, ex_bias = _to(orig_weight, self.weight, self.ex_bias)
        return self.finalize_updown(updown, orig_weight, self.weight.shape, ex_bias)


class NetworkModuleNorm(NetworkModule):
    needs = {"w_norm": "w_norm", "b_norm": "b_norm"}

    def calc_updown(self, orig_weight):
        updown, ex_bias = _to(orig_weight, self.w_norm, self.b_norm)
        return self.finalize_updown(updown, orig_weight, self.w_norm.shape, ex_bias)


class NetworkModuleGLora(NetworkModule):
    needs = {"a1.weight": "w1a", "b1.weight": "w1b", "a2.weight": "w2a", "b2.weight": "w2b"}
    forms, third = [(*needs, "alpha")], False

    def calc_updown(self, orig_weight):
        w1a, w1b, w2a, w2b = _to(orig_weight, self.w1a, self.w1b, self.w2a, self.w2b)
        updown = w2b @ w1b + (orig_weight.to(w1a.dtype) @ w2a) @ w1a
        return self.finalize_updown(updown, orig_weight, [w1a.size(0), w1b.size(1)])


class NetworkModuleOFT(NetworkModule):
    """``oft_diag`` holds rotations; ``oft_blocks`` what rotations are made of, in four dimensions those of BOFT."""

    forms = [("oft_blocks",), ("oft_diag",)]

    def __init__(self, network, sd_key, tensors, sd_module):
        super().__init__(network, sd_key, tensors, sd_module)
        self.scale = 1.0
        rotations, layer = "oft_blocks" not in tensors, type(sd_module)
        self.oft_blocks = tensors["oft_diag" if rotations else "oft_blocks"]
        self.dim = self.oft_blocks.shape[1 if rotations else 0]
        if not rotations:
            self.alpha = tensors.get("alpha")
        if layer in _LINEAR:
            self.out_dim = sd_module.out_features
        elif layer in (nn.Conv2d, nn.MultiheadAttention):
            self.out_dim = sd_module.out_channels if layer is nn.Conv2d else sd_module.embed_dim
        self.constraint = None if rotations else (0 if self.alpha is None else self.alpha) * self.out_dim
        self.num_blocks, self.block_size = self.dim, self.out_dim // self.dim
        self.is_R, self.is_boft, self.rescale = rotations, self.oft_blocks.dim() == 4, tensors.get("rescale")
        if self.rescale is not None and not (at_least(9) and layer is nn.MultiheadAttention):
            self.rescale = self.rescale.reshape(-1, *[1] * (sd_module.weight.dim() - 1))
        if rotations:
            self.num_blocks, self.block_size = self.block_size, self.num_blocks
        elif self.is_boft:
            self.boft_m, self.num_blocks, self.block_size = self.oft_blocks.shape[:3]
            self.boft_b = self.block_size

    def _rotations(self, orig_weight):
        (blocks,) = _to(orig_weight, self.oft_blocks)
        if self.constraint is None:
            return blocks
        eye = torch.eye(self.block_size, device=blocks.device)
        skew = blocks - blocks.transpose(-1, -2)
        if self.constraint != 0:
            norm = torch.norm(skew.flatten())
            skew = skew * ((torch.clamp(norm, max=self.constraint.to(blocks.device)) + 1e-8) / (norm + 1e-8))
        return _to(orig_weight, torch.matmul(eye + skew, (eye - skew).float().inverse()))[0]

    def calc_updown(self, orig_weight):
        # Rotations and weight are multiplied as they are: their dtypes may differ, which torch refuses.
        rotations, rest = self._rotations(orig_weight), orig_weight.shape[1:]
        if self.is_boft:
            merged = orig_weight
            for i in range(self.boft_m):
                half = 2**i * (self.boft_b // 2)
                merged = _swapped(merged, 2, half).reshape(-1, self.boft_b, *rest)
                merged = torch.einsum("b i j, b j ... -> b i ...", rotations[i], merged)
                merged = _swapped(merged.reshape(-1, *rest), half, 2)
        else:
            merged = orig_weight.reshape(self.num_blocks, self.block_size, *rest)
            merged = torch.einsum("b i j, b i ... -> b j ...", rotations, merged).reshape(-1, *rest)
        if self.rescale is not None:
            merged = self.rescale.to(merged) * merged
        (merged,) = _to(orig_weight, merged)
        return self.finalize_updown(merged - orig_weight.to(merged.dtype), orig_weight, orig_weight.shape)


def _swapped(tensor, outer, inner):
    """The rows in groups of ``outer * inner``, each group transposed."""
    grouped = tensor.reshape(-1, outer, inner, *tensor.shape[1:])
    return grouped.permute(0, 2, 1, *range(3, grouped.dim())).reshape(tensor.shape)


_FAMILIES = [
    *(NetworkModuleLora, NetworkModuleHada, NetworkModuleIa3, NetworkModuleLokr, NetworkModuleFull, NetworkModuleNorm),
    *((NetworkModuleGLora, NetworkModuleOFT) if at_least(8) else ()),  # in truth since 1.7, which is not played
]


def create_module(network, sd_key, tensors, sd_module):
    """The network module for what a file holds for one layer (`lora_up.weight`, `alpha`, ...), as the WebUI does."""
    for family in _FAMILIES:
        if any(all(part in tensors for part in form) for form in family.forms or [family.needs]):
            return family(network, sd_key, tensors, sd_module)
    raise AssertionError(f"Could not find a module type that would accept those keys: {', '.join(tensors)}")
