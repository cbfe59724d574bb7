"""Every family of networks, on every kind of layer, in every format, alone and with others, against float64.

The networks are made and judged by ``families``, in float64 and from the files alone; the stand-in Lora extension
turns the files into its modules, with the dtypes and the weaknesses of its generation.
"""

from __future__ import annotations

import contextlib
import itertools

import families
import numpy as np
import pytest
import safetensors.torch
import torch
from helpers import FORMAT_NAMES, decoded, need_format, reference_decode, reference_pack, to_numpy

from lib_fp8 import QuantWeight
from webui.nets import KEPT, ON, TO_OUT, TO_Q, key_of

CONV = "diffusion_model_input_blocks_1_0_in_layers_2"
CONV_1X1 = "diffusion_model_input_blocks_1_0_skip_connection"
NORM = "diffusion_model_input_blocks_1_0_in_layers_0"
LAYERS = {TO_Q: "no bias", TO_OUT: "bias", CONV_1X1: "1x1", CONV: "3x3", NORM: "norm", KEPT: "kept"}
OTHERS = ("lora", "full", "ia3-input")
"""What else is in the prompt, where there are several networks."""
RUN_TIME = "Add at run time"


class Library:
    """Makes networks for one host, and knows from their files alone what they must add."""

    def __init__(self, host, seed=0):
        self.host = host
        self.random = np.random.default_rng(seed)
        self.files = {}

    def original(self, layer_name):
        """What the checkpoint holds, as the WebUI loads it, in float64."""
        return to_numpy(self.host.values()[key_of(layer_name, self.host)].half())

    def fits(self, family, layer_name):
        kind = families.kind_of(self.original(layer_name).shape)
        if family == "ia3-output" and kind != families.LINEAR:
            return False  # the WebUI's code raises an error for these, in full precision too
        return kind in families.FAMILIES[family].kinds

    def make(self, name, family, layer_names, size=0.05, dtype=torch.float16, unet=1.0, te=1.0, dyn_dim=None):
        """A network of one family for those of the layers that the family is for; its file is remembered."""
        net = self.host.networks.Network(name)
        net.unet_multiplier, net.te_multiplier, net.dyn_dim = unet, te, dyn_dim
        for layer_name in layer_names:
            if not self.fits(family, layer_name):
                continue
            weight = self.original(layer_name)
            made = families.make(family, weight.shape, self.random, size * weight.std(), weight, rank=4)
            tensors = {part: torch.from_numpy(np.asarray(value)) for part, value in made.items()}
            tensors = {part: t.to(dtype) if t.is_floating_point() else t for part, t in tensors.items()}
            layer = self.host.layers[layer_name]
            net.modules[layer_name] = self.host.networks.create_module(net, layer_name, tensors, layer)
            # The WebUI rounds the factors of a LoRA to float16 when it loads them, those of other families not.
            held = {part: tensor.half() if part.startswith("lora_") else tensor for part, tensor in tensors.items()}
            self.files[net, layer_name] = {part: to_numpy(tensor.float()) for part, tensor in held.items()}
        return net

    def deltas(self, layer_name, networks, base):
        """The sums of what networks add to a weight and to its bias, in float64."""
        total, bias = np.zeros(base.shape), np.zeros(len(base))
        for net in networks:
            if (tensors := self.files.get((net, layer_name))) is None:
                continue
            strength = net.te_multiplier if "transformer" in layer_name[:20] else net.unet_multiplier
            delta, bias_delta = families.added(tensors, base, strength, net.dyn_dim)
            total += delta
            bias += 0 if bias_delta is None else bias_delta
        return total, bias

    def assert_merged(self, layer_name, networks):
        """The sum over the original, rounded once: never a step away from where float64 puts it, and rarely that."""
        base = self.original(layer_name)
        delta, _ = self.deltas(layer_name, networks, base)
        exact, weight = base + delta, self.host.layers[layer_name].weight
        if not isinstance(weight, QuantWeight):
            np.testing.assert_allclose(to_numpy(weight), exact, rtol=2**-10, atol=2**-20)
            return
        codes, scale = reference_pack(torch.from_numpy(exact), weight.format.name)
        rounded = reference_decode(codes, scale, weight.format.name)
        found = to_numpy(decoded(weight, torch.float64))
        assert np.linalg.norm(found - exact) <= 1.05 * np.linalg.norm(rounded - exact)
        close = np.isclose(found, rounded, rtol=2**-15, atol=0)  # a sum in float32 may move the scale of a row by a bit
        assert np.mean(~close) < 0.02

    def assert_added(self, layer_name, networks):
        """The 8-bit values, which are as they were loaded, plus everything."""
        weight = self.host.layers[layer_name].weight
        base = to_numpy(decoded(weight, torch.float64))
        codes, scale = reference_pack(torch.from_numpy(self.original(layer_name)), weight.format.name)
        np.testing.assert_array_equal(base, reference_decode(codes, scale, weight.format.name))
        delta, _ = self.deltas(layer_name, networks, base)
        found = to_numpy(weight.dequantize(torch.float32)) - base
        np.testing.assert_allclose(found, delta, rtol=1e-4, atol=1e-5 * np.abs(base).max())


def known(host):
    """The families that a generation reads."""
    return [name for name, family in families.FAMILIES.items() if family.since <= (1, host.minor)]


@pytest.fixture
def library(request):
    """For the one host of the test."""
    return Library(request.getfixturevalue(next(n for n in request.fixturenames if n in ("host", "newest"))))


def assert_all(library, networks, layer_names=LAYERS):
    for layer_name in layer_names:
        library.assert_merged(layer_name, networks)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("format_name", FORMAT_NAMES)
def test_merged(host, library, format_name, count):
    """Each family with ``count - 1`` others, in both orders, on all layers it is for."""
    need_format(format_name)
    host.checkpoint()
    host.start(fp8_format=format_name, **ON)
    base = host.fingerprint()
    others = [library.make(f"m{i}", family, LAYERS, unet=0.7) for i, family in enumerate(OTHERS[: count - 1])]
    for family in known(host):
        net = library.make("net", family, LAYERS)
        assert net.modules
        for networks in ([net, *others], [*others, net]):
            host.run_networks(*networks)
            assert host.networks.extra_network_lora.errors == {}, family
            assert_all(library, networks)
    host.run_networks()
    assert host.fingerprint() == base


@pytest.mark.parametrize("format_name", FORMAT_NAMES)
def test_at_run_time(host, library, format_name):
    """The same without any rounding; layers that are not in 8 bits merge as always."""
    need_format(format_name)
    host.checkpoint()
    host.start(fp8_format=format_name, fp8_lora=RUN_TIME, **ON)
    base, other = host.fingerprint(), library.make("other", "lora", LAYERS, unet=0.7)
    for family, networks in itertools.product(known(host), ([], [other])):
        networks = [library.make("net", family, LAYERS), *networks]
        host.run_networks(*networks)
        assert host.networks.extra_network_lora.errors == {}, family
        for layer_name in LAYERS:
            in_8_bits = isinstance(host.layers[layer_name].weight, QuantWeight)
            (library.assert_added if in_8_bits else library.assert_merged)(layer_name, networks)
    host.run_networks()
    assert host.fingerprint() == base


@pytest.mark.parametrize("at_run_time", [False, True], ids=["merged", "at run time"])
def test_states(host, library, at_run_time):
    """None, A, A at half strength, A and B, B, none: for each family what a fresh start gives, and no trace."""
    host.checkpoint()
    host.start(fp8_lora=RUN_TIME if at_run_time else "Merge from checkpoint file", **ON)
    base, b = host.fingerprint(), library.make("b", "lora", LAYERS)
    for family in known(host):
        a = library.make("a", family, LAYERS)
        seen = {}
        for strength, used in ((1, [a]), (0.5, [a]), (0.5, [a, b]), (1, [b, a]), (1, [b]), (0, [a]), (1, []), (1, [a])):
            a.unet_multiplier = strength
            host.run_networks(*used)
            key = strength, *sorted(net.name for net in used)
            found = values(host)
            assert seen.setdefault(key, found) == found
        assert len({repr(v) for v in seen.values()}) == len(seen) - 1, "strength 0 is none"
        host.run_networks()
        assert host.fingerprint() == base, family


def values(host):
    """Of all weights and biases as layers compute with them."""
    return {
        name: tensor.dequantize().numpy().tobytes() if isinstance(tensor, QuantWeight) else tensor.numpy().tobytes()
        for name, tensor in host.model.state_dict().items()
    }


FUSED = {
    "sd2": ("model_transformer_resblocks_0_attn", ("_q_proj", "_k_proj", "_v_proj", "_out_proj")),
    "sd3": ("diffusion_model_joint_blocks_0_attn_qkv", ("_q_proj", "_k_proj", "_v_proj")),
}
"""Layers whose weight holds several projections, each with a module of its own."""


def stacked(host, layer_name):
    """The weights of such a layer: q, k and v stacked, and what follows if there is one."""
    layer = host.layers[layer_name]
    return [layer.in_proj_weight, layer.out_proj.weight] if hasattr(layer, "out_proj") else [layer.weight]


def originals(host, layer_name):
    """What the checkpoint holds for them."""
    key, values = key_of(layer_name, host).removesuffix(".weight"), host.values()
    names = ["in_proj_weight", "out_proj.weight"] if f"{key}.in_proj_weight" in values else ["weight"]
    return [to_numpy(values[f"{key}.{name}"].half()) for name in names]


@pytest.mark.parametrize("at_run_time", [False, True], ids=["merged", "at run time"])
def test_projections_of_attention(host, library, at_run_time):
    check_projections(host, library, "sd2", at_run_time)


@pytest.mark.parametrize("at_run_time", [False, True], ids=["merged", "at run time"])
def test_projections_of_sd3(newest, library, at_run_time):
    check_projections(newest, library, "sd3", at_run_time)


def check_projections(host, library, kind, at_run_time):
    """Each family on such a layer, with another one beside it; or told, and nothing done."""
    host.checkpoint(kind=kind)
    host.start(fp8_lora=RUN_TIME if at_run_time else "Merge from checkpoint file", **ON)
    layer_name, parts = FUSED[kind]
    bits, before = host.fingerprint(), [plain(weight) for weight in stacked(host, layer_name)]
    if not at_run_time:
        before = originals(host, layer_name)
    chunks = [*np.split(before[0], 3), *before[1:]]
    acted = set()
    for family in known(host):
        if families.LINEAR not in families.FAMILIES[family].kinds:
            continue
        nets = []
        for name, made_of in (("a", family), ("b", "lora")):
            net, wanted = host.networks.Network(name), []
            for part, chunk in zip(parts, chunks):
                made = families.make(made_of, chunk.shape, library.random, 0.2 * chunk.std(), chunk, rank=4)
                tensors = {key: torch.from_numpy(np.asarray(value)) for key, value in made.items()}
                tensors = {key: t.half() if t.is_floating_point() else t for key, t in tensors.items()}
                layer = host.layers[layer_name]
                with contextlib.suppress(Exception):  # some families refuse attention, in full precision too
                    key = layer_name + part
                    net.modules[key] = host.networks.create_module(net, key, tensors, layer)
                exact = {key: to_numpy(t.float()) if t.is_floating_point() else t.numpy() for key, t in tensors.items()}
                wanted.append(families.added(exact, chunk)[0])
            nets.append((net, wanted))
        host.networks.extra_network_lora.errors.clear()
        host.run_networks(*(net for net, _ in nets))
        errors = host.networks.extra_network_lora.errors
        assert not errors.get("b")
        if len(nets[0][0].modules) == len(parts) and not errors:
            acted.add(family)
            total = [sum(wanted) for wanted in zip(*(wanted for _, wanted in nets))]
        else:
            total = nets[1][1]
        deltas = [np.concatenate(total[:3]), *total[3:]]
        for weight, base, delta in zip(stacked(host, layer_name), before, deltas):
            error = np.abs(plain(weight) - base - delta).max()
            allowed = 0.07 * np.abs(base + delta).max() if isinstance(weight, QuantWeight) and not at_run_time else 1e-3
            assert error <= allowed, family
    assert acted >= {"lora", "loha", "lokr", "full", "ia3-input"}
    host.run_networks()
    assert host.fingerprint() == bits


def plain(weight):
    """Its values in float64, with whatever is added at run time."""
    return to_numpy(weight.dequantize(torch.float32) if isinstance(weight, QuantWeight) else weight)


def test_nine_channels(host, library):
    """An inpainting model's first convolution: networks for four channels act on the first four."""
    host.checkpoint(kind="inpaint")
    host.start(fp8_keep_layers="", **ON)
    name = "diffusion_model_input_blocks_0_0"
    base = library.original(name)
    for family in known(host):
        if families.CONV not in families.FAMILIES[family].kinds or family.startswith(("ia3", "oft", "boft")):
            continue  # these multiply all nine
        if "dora" in family:
            continue  # their magnitudes are those of a weight of four
        net = host.networks.Network("a")
        four = base[:, :4]
        made = families.make(family, four.shape, library.random, 0.2 * four.std(), four, rank=4)
        tensors = {key: torch.from_numpy(np.asarray(value)).half() for key, value in made.items()}
        net.modules[name] = host.networks.create_module(net, name, tensors, host.layers[name])
        delta = families.added({key: to_numpy(t.float()) for key, t in tensors.items()}, four)[0]
        host.networks.extra_network_lora.errors.clear()
        host.run_networks(net)
        if host.networks.extra_network_lora.errors:  # the WebUI's own code cannot give it the shape of four channels
            assert family not in ("lora", "locon", "full")
            delta = 0
        exact = np.concatenate([four + delta, base[:, 4:]], axis=1)
        assert np.abs(plain(host.layers[name].weight) - exact).max() <= 0.07 * np.abs(exact).max(), family


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_networks_in_other_dtypes(host, library, dtype):
    """The factors are multiplied as they are in the file, in float32."""
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    host.checkpoint()
    host.start(**ON)
    for family in known(host):
        if dtype.startswith("float8") and family.startswith(("oft", "boft")):
            continue  # a rotation in 8 bits is none
        net = library.make("net", family, LAYERS, dtype=getattr(torch, dtype))
        host.run_networks(net)
        assert host.networks.extra_network_lora.errors == {}, family
        assert_all(library, [net])


def test_cut_rank(host, library):
    """dyn_dim, in both ways."""
    host.checkpoint()
    host.start(**ON)
    for ranks in (1, 3, 4):
        net = library.make("net", "lora", LAYERS, dyn_dim=ranks)
        host.run_networks(net)
        assert_all(library, [net])
    host.set(fp8_lora=RUN_TIME)
    for ranks in (3, 2):
        net.dyn_dim = ranks
        host.run_networks(net)
        library.assert_added(TO_Q, [net])


def test_text_encoder_and_unet_have_their_own_strength(host, library):
    clip = "transformer_text_model_encoder_layers_0_mlp_fc1"
    host.checkpoint()
    host.start(**ON)
    net = library.make("net", "lora", [TO_Q, clip], unet=0.5, te=-1.25)
    host.run_networks(net)
    assert_all(library, [net], [TO_Q, clip])


def test_biases(host, library):
    """A layer gains a bias, has it changed, and loses it again, or gets its own one back."""
    host.checkpoint()
    host.start(**ON)
    before = host.layers[TO_OUT].bias.clone()
    a, b = library.make("a", "full-bias", [TO_Q, TO_OUT]), library.make("b", "full-bias", [TO_Q, TO_OUT], unet=0.5)
    for used in ([a], [a, b], [b]):
        host.run_networks(*used)
        for layer_name, base in ((TO_Q, 0), (TO_OUT, to_numpy(before))):
            expected = base + library.deltas(layer_name, used, library.original(layer_name))[1]
            np.testing.assert_allclose(to_numpy(host.layers[layer_name].bias), expected, rtol=2**-10, atol=2**-20)
    host.run_networks()
    assert host.layers[TO_Q].bias is None
    assert torch.equal(host.layers[TO_OUT].bias, before)


@pytest.mark.parametrize("spread", [0.03, 0.01, 0.005])
@pytest.mark.parametrize("share", [0.02, 0.05])
@pytest.mark.parametrize("format_name", FORMAT_NAMES)
def test_effect_kept(newest, library, format_name, spread, share, monkeypatch):
    """The projection of what is added onto what is wanted; no more error than rounding the exact sum makes."""
    need_format(format_name)
    monkeypatch.setattr(newest.tiny_models, "WIDTH", 512)
    file = newest.folder / "wide.safetensors"
    values = newest.tiny_models.state_dict("sd1", 1, torch.float32)
    key = "model.diffusion_model.middle_block.0.to_q.weight"
    values[key] *= spread / values[key].std()
    safetensors.torch.save_file({name: value.half().contiguous() for name, value in values.items()}, file)
    newest.sd_models.CheckpointInfo(file)
    monkeypatch.setattr(newest, "values", lambda: values)
    newest.start(fp8_format=format_name, **ON)
    base = library.original(TO_Q)
    for count in (1, 2, 3, 4):
        networks = [library.make(f"n{i}", "lora", [TO_Q], size=share / count**0.5) for i in range(count)]
        newest.run_networks(*networks)
        wanted, _ = library.deltas(TO_Q, networks, base)
        found = to_numpy(decoded(newest.layers[TO_Q].weight, torch.float64)) - base
        gain = (found * wanted).sum() / (wanted**2).sum()
        if not format_name.endswith("unscaled"):
            assert 0.98 <= gain <= 1.02
        library.assert_merged(TO_Q, networks)
