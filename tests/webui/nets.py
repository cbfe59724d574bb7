"""Networks of the simple kind for the stand-in WebUI, and what they must add."""

from __future__ import annotations

import torch
from helpers import FORMAT_BY_DEFAULT, assert_packed_like, need_format, reference_pack

from lib_fp8 import QuantWeight

BLOCK = "diffusion_model_input_blocks_1_0_in_layers_2"  # 3x3 convolution, has a bias
TO_Q = "diffusion_model_middle_block_0_to_q"  # has no bias
TO_OUT = "diffusion_model_middle_block_0_to_out_0"  # has a bias
KEPT = "diffusion_model_time_embed_0"  # stays in full precision
CLIP = "transformer_text_model_encoder_layers_0_mlp_fc1"
ATTENTION = "model_transformer_resblocks_0_attn"
PARTS = tuple(ATTENTION + part for part in ("_q_proj", "_k_proj", "_v_proj", "_out_proj"))
QKV = "diffusion_model_joint_blocks_0_attn_qkv"
IN_8_BITS = (BLOCK, TO_Q, TO_OUT, CLIP)
LINEAR_AND_CONV = (*IN_8_BITS, KEPT)
ON = {"fp8_storage": "Enable", "fp8_clip_l": True, "fp8_open_clip": True}
INT8_ANEW = {"fp8_format": "int8"} if FORMAT_BY_DEFAULT != "int8" else {"fp8_keep_layers": ""}
"""With this a model in the default format is packed anew, into int8: on a torch before 2.1 it is in int8 already."""


def need_format_of_the_webui(host):
    """For tests in which the WebUI converts by itself, since the extension is gone."""
    if host.minor >= 8:
        need_format("float8_e4m3fn unscaled")


def key_of(layer_name, host):
    """The name of a layer's weight in the checkpoint."""
    layer = host.layers[layer_name]
    name = next(name for name, module in host.model.named_modules() if module is layer)
    return name.replace("wrapped.", "") + ".weight"


def coarse(*shape, rng):
    """Factors of which products and sums, over float16 weights, are exact in float32: all orders give the same."""
    return torch.randint(-8, 9, shape, generator=rng) / 64


def fine(*shape, rng):
    """Factors of the ordinary kind."""
    return torch.randn(shape, generator=rng) * 0.1


class Nets:
    """Makes networks, and knows by float64 what they must add."""

    def __init__(self, host, rng):
        self.host, self.rng = host, rng

    def make(self, name, layers=LINEAR_AND_CONV, factors=coarse, dtype=torch.float32, bias=False, multiplier=1.0):
        net = self.host.networks.Network(name)
        net.unet_multiplier = multiplier
        for layer_name in layers:
            rows, columns = self.shape(layer_name)
            net.modules[layer_name] = self.host.networks.NetworkModule(
                net,
                up=factors(rows, 2, rng=self.rng).to(dtype),
                down=factors(2, columns, rng=self.rng).to(dtype),
                bias=factors(rows, rng=self.rng).to(dtype) if bias else None,
            )
        return net

    def full(self, name, layer_name):
        """A network with a full delta, which needs no arithmetic in half precision of torch on the CPU."""
        net = self.host.networks.Network(name)
        net.modules[layer_name] = self.host.networks.NetworkModule(
            net, diff=coarse(*self.shape(layer_name), rng=self.rng)
        )
        return net

    def shape(self, layer_name):
        for ending in ("_q_proj", "_k_proj", "_v_proj"):
            if layer_name.endswith(ending):
                weight = self.weight(layer_name.removesuffix(ending))
                return weight.shape[0] // 3, weight.shape[1]
        if layer_name.endswith("_out_proj"):
            return self.host.layers[layer_name.removesuffix("_out_proj")].out_proj.weight.shape
        weight = self.weight(layer_name)
        return weight.shape[0], weight.shape[1:].numel()

    def weight(self, layer_name):
        layer = self.host.layers[layer_name]
        return getattr(layer, "in_proj_weight", None) if hasattr(layer, "in_proj_weight") else layer.weight

    def original(self, layer_name):
        """What the file holds, as the WebUI loads it."""
        return self.host.values()[key_of(layer_name, self.host)].half()

    def expected(self, layer_name, networks, base=None):
        """The weight with networks merged, unrounded, in float64."""
        total = (self.original(layer_name) if base is None else base).double()
        for net in networks:
            if (module := net.modules.get(layer_name)) is not None:
                total = total + (module.up.double() @ module.down.double()).reshape(total.shape) * net.unet_multiplier
        return total

    def assert_merged(self, *networks, layers=LINEAR_AND_CONV, base=None):
        """Every layer holds the sum over the original (or over ``base(layer_name)``), rounded once."""
        for layer_name in layers:
            start = None if base is None else base(layer_name)
            assert_rounded_once(self.weight(layer_name), self.expected(layer_name, networks, start))


def assert_rounded_once(weight, exact):
    if isinstance(weight, QuantWeight):
        assert weight.branches == ()
        name = weight.format.name
        assert_packed_like(weight.qdata, weight.scale, reference_pack(exact.float(), name), name)
    else:
        assert torch.equal(weight, exact.to(weight.dtype))
