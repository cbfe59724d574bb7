"""Networks through the Lora extension: summed over the original, rounded once, and taken out without a trace."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from helpers import FORMAT_BY_DEFAULT, FORMAT_NAMES, need_format

from lib_fp8 import QuantWeight
from webui.nets import (
    ATTENTION,
    KEPT,
    LINEAR_AND_CONV,
    ON,
    PARTS,
    QKV,
    TO_OUT,
    TO_Q,
    assert_rounded_once,
    coarse,
    fine,
)


class TestAnyOrderOfUse:
    """None, A, weaker A, A and B, B, none, A: each as if nothing had been there before."""

    def walk(self, host, nets):
        base = host.fingerprint()
        a, b = nets.make("a"), nets.make("b")
        for multiplier, used in ((1, [a]), (0.5, [a]), (1, [a, b]), (1, [b]), (1, []), (1, [a]), (2, [b, a]), (1, [])):
            a.unet_multiplier = multiplier
            host.run_networks(*used)
            nets.assert_merged(*used)
        assert host.fingerprint() == base
        assert host.networks.extra_network_lora.errors == {}

    def test_each_generation(self, sd1, nets):
        self.walk(sd1, nets)

    @pytest.mark.parametrize("format_name", FORMAT_NAMES)
    def test_each_format(self, newest, nets, format_name):
        need_format(format_name)
        newest.checkpoint()
        newest.start(fp8_format=format_name, **ON)
        self.walk(newest, nets)

    def test_no_drift(self, sd1, nets):
        base, a = sd1.fingerprint(), nets.make("a", factors=fine)
        sd1.run_networks(a)
        merged = sd1.fingerprint()
        for _ in range(10):
            sd1.run_networks()
            assert sd1.fingerprint() == base
            sd1.run_networks(a)
            assert sd1.fingerprint() == merged

    def test_nothing_is_merged_twice(self, sd1, nets, monkeypatch):
        a = nets.make("a")
        sd1.run_networks(a)
        monkeypatch.setattr(a.modules[TO_Q], "calc_updown", lambda weight: pytest.fail("merged again"))
        sd1.run_networks(a)
        nets.assert_merged(a)

    def test_a_network_changed_in_place(self, sd1, nets):
        a = nets.make("a")
        sd1.run_networks(a)
        a.modules[TO_Q].up *= 2
        sd1.run_networks(a)
        nets.assert_merged(a)

    def test_pictures(self, sd1, nets):
        """Through the forward of the layers, as the WebUI merges."""
        before = sd1.job().pictures[0]
        sd1.networks.loaded_networks[:] = [nets.make("a", multiplier=8)]
        assert not torch.equal(sd1.job().pictures[0], before)
        sd1.networks.loaded_networks.clear()
        assert torch.equal(sd1.job().pictures[0], before)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_order_of_networks_does_not_matter(host, nets, count):
    """A sum has no last one that wins. In float32 the layers that are kept show the last bit."""
    host.shared.cmd_opts.no_half = True
    host.checkpoint()
    host.start(**ON)
    networks = [nets.make(name, factors=fine) for name in "abcd"[:count]]
    seen = []
    for order in list(itertools.permutations(networks))[:: max(1, count - 2)]:
        host.run_networks(*order)
        seen.append(host.fingerprint())
    assert all(other == seen[0] for other in seen)


def test_small_deltas_are_not_rounded_away(sd1, nets):
    """As much of the delta is left as rounding the exact sum leaves of it, at any strength."""
    for multiplier in (1 / 64, 1 / 8, 1):
        a = nets.make("a", multiplier=multiplier)
        sd1.run_networks(a)
        nets.assert_merged(a)


class TestKindsOfLayers:
    def attention_exact(self, host, nets, networks):
        prefix = "cond_stage_model.model.transformer.resblocks.0.attn."
        values = host.values()
        in_proj, out = (values[prefix + name].half().double() for name in ("in_proj_weight", "out_proj.weight"))
        for net in networks:
            q, k, v, o = (net.modules[part].up.double() @ net.modules[part].down.double() for part in PARTS)
            in_proj, out = in_proj + torch.cat([q, k, v]), out + o
        return in_proj, out

    def test_attention_whole(self, host, nets):
        """All four projections, the fused ones too, and no error counted."""
        host.checkpoint(kind="sd2")
        host.start(**ON)
        base, attention = host.fingerprint(), host.layers[ATTENTION]
        assert isinstance(attention.out_proj.weight, QuantWeight)
        a, b = (nets.make(name, PARTS, bias=True) for name in "ab")
        bias = attention.out_proj.bias.clone()
        for used in ([a], [b, a], [b]):
            host.run_networks(*used)
            in_proj, out = self.attention_exact(host, nets, used)
            assert_rounded_once(attention.in_proj_weight, in_proj)
            assert_rounded_once(attention.out_proj.weight, out)
            added = sum(net.modules[PARTS[3]].bias for net in used)
            assert torch.equal(attention.out_proj.bias, (bias.double() + added.double()).half())
        assert host.networks.extra_network_lora.errors == {}
        host.run_networks()
        assert host.fingerprint() == base

    @pytest.mark.parametrize("part", PARTS)
    def test_attention_or_nothing_of_it(self, host, nets, part, monkeypatch):
        """One projection that fails leaves none of the others behind."""
        host.checkpoint(kind="sd2")
        host.start(**ON)
        attention, bad, good = host.layers[ATTENTION], nets.make("bad", PARTS), nets.make("good", PARTS)
        monkeypatch.setattr(bad.modules[part], "calc_updown", raising(RuntimeError))
        host.run_networks(bad, good)
        in_proj, out = self.attention_exact(host, nets, [good])
        assert_rounded_once(attention.in_proj_weight, in_proj)
        assert_rounded_once(attention.out_proj.weight, out)

    def test_fused_query_key_value(self, newest, nets):
        """SD3's Linear subclass."""
        newest.checkpoint(kind="sd3")
        newest.start(**ON)
        base, layer = newest.fingerprint(), newest.layers[QKV]
        assert isinstance(layer.weight, QuantWeight)
        parts = [QKV + part for part in ("_q_proj", "_k_proj", "_v_proj")]
        a, b = nets.make("a", parts), nets.make("b", parts)
        newest.run_networks(a, b)
        exact = nets.original(QKV).double()
        for net in (a, b):
            exact += torch.cat([net.modules[part].up.double() @ net.modules[part].down.double() for part in parts])
        assert_rounded_once(layer.weight, exact)
        newest.run_networks()
        assert newest.fingerprint() == base

    @pytest.mark.parametrize("keep", ["", "input_blocks"], ids=["in 8 bits", "kept"])
    def test_nine_channels_and_a_network_for_four(self, host, nets, keep):
        """Inpainting models."""
        host.checkpoint(kind="inpaint")
        host.start(fp8_keep_layers=keep, **ON)
        name, base = "diffusion_model_input_blocks_0_0", host.fingerprint()
        weight = host.layers[name].weight
        assert isinstance(weight, QuantWeight) == (keep == "")
        net = host.networks.Network("a")
        delta = coarse(16, 4, 3, 3, rng=nets.rng)
        net.modules[name] = host.networks.NetworkModule(net, diff=delta)
        host.run_networks(net)
        exact = nets.original(name).double()
        exact[:, :4] += delta
        assert_rounded_once(weight, exact)
        host.run_networks()
        assert host.fingerprint() == base

    def test_norms_are_left_to_the_host(self, sd1, nets):
        name, base = "diffusion_model_out_0", sd1.fingerprint()
        net = nets.make("a")
        delta = coarse(16, rng=nets.rng)
        net.modules[name] = sd1.networks.NetworkModule(net, diff=delta)
        before = sd1.layers[name].weight.clone()
        sd1.run_networks(net)
        assert torch.allclose(sd1.layers[name].weight.float(), before.float() + delta, atol=2e-3)
        nets.assert_merged(net)
        sd1.lora.forget(sd1.model)
        assert sd1.fingerprint() == base

    def test_full_precision_is_left_to_the_host(self, host, nets, monkeypatch):
        host.checkpoint()
        host.start()
        monkeypatch.setattr(host.lora, "_change", lambda *_: pytest.fail("not ours"))
        host.run_networks(nets.full("a", TO_Q))
        assert not torch.equal(host.layers[TO_Q].weight, nets.original(TO_Q))


class TestKindsOfLayersAtRunTime:
    """The 8-bit values stay; what is read is their sum with the networks. What is not in 8 bits merges as always."""

    @pytest.fixture
    def started(self, host):
        def start(kind, **options):
            host.checkpoint(kind=kind)
            host.start(fp8_lora="Add at run time", **{**ON, **options})
            return host.fingerprint()

        return start

    def assert_added(self, weight, delta):
        base = weight.without_branches(torch.float32).double()
        torch.testing.assert_close(weight.dequantize(torch.float32).double(), base + delta, rtol=1e-5, atol=1e-6)

    def test_attention(self, host, nets, started):
        base, attention = started("sd2"), host.layers[ATTENTION]
        a, b = (nets.make(name, PARTS, bias=True) for name in "ab")
        before = attention.in_proj_weight.clone()
        bias = attention.out_proj.bias.clone()
        for used in ([a], [b, a], [b]):
            host.run_networks(*used)
            products = [
                [net.modules[part].up.double() @ net.modules[part].down.double() for part in PARTS] for net in used
            ]
            assert_rounded_once(
                attention.in_proj_weight, before.double() + sum(torch.cat(parts[:3]) for parts in products)
            )
            self.assert_added(attention.out_proj.weight, sum(parts[3] for parts in products))
            added = sum(net.modules[PARTS[3]].bias for net in used)
            assert torch.equal(attention.out_proj.bias, (bias.double() + added.double()).half())
        assert host.networks.extra_network_lora.errors == {}
        host.run_networks()
        assert host.fingerprint() == base

    def test_fused_query_key_value(self, newest, nets):
        newest.checkpoint(kind="sd3")
        newest.start(fp8_lora="Add at run time", **ON)
        base, parts = newest.fingerprint(), [QKV + part for part in ("_q_proj", "_k_proj", "_v_proj")]
        a = nets.make("a", parts)
        newest.run_networks(a)
        delta = torch.cat([a.modules[part].up.double() @ a.modules[part].down.double() for part in parts])
        self.assert_added(newest.layers[QKV].weight, delta)
        newest.run_networks()
        assert newest.fingerprint() == base

    def test_nine_channels_and_a_network_for_four(self, host, nets, started):
        name, base = "diffusion_model_input_blocks_0_0", started("inpaint", fp8_keep_layers="")
        net = host.networks.Network("a")
        delta = coarse(16, 4, 3, 3, rng=nets.rng)
        net.modules[name] = host.networks.NetworkModule(net, diff=delta)
        host.run_networks(net)
        self.assert_added(host.layers[name].weight, torch.nn.functional.pad(delta.double(), (0, 0, 0, 0, 0, 5)))
        host.run_networks()
        assert host.fingerprint() == base

    def test_pictures_are_those_of_merged_networks(self, host, nets, started):
        started("sd1")
        before = host.job().pictures[0]
        host.networks.loaded_networks[:] = [nets.make("a", multiplier=4)]
        added = host.job().pictures[0]
        host.set(fp8_lora="Merge from checkpoint file")
        merged = host.job().pictures[0]
        change = (merged - before).norm()
        assert 0 < (merged - added).norm() < 0.2 * change


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
class TestBiases:
    """A bias delta, to a layer that has a bias or has none, whatever the dtype of the network."""

    def test_added_and_taken_out(self, sd1, nets, dtype):
        base, a = sd1.fingerprint(), nets.make("a", dtype=dtype, bias=True)
        before = sd1.layers[TO_OUT].bias.clone()
        sd1.run_networks(a)
        nets.assert_merged(a)
        added = a.modules[TO_OUT].bias
        assert torch.equal(sd1.layers[TO_OUT].bias, (before.double() + added.double()).half())
        new = sd1.layers[TO_Q].bias
        assert isinstance(new, torch.nn.Parameter)
        assert not new.requires_grad
        assert torch.equal(new, a.modules[TO_Q].bias.half())
        sd1.run_networks()
        assert sd1.layers[TO_Q].bias is None
        assert sd1.fingerprint() == base

    def test_of_several_networks(self, sd1, nets, dtype):
        a, b = nets.make("a", dtype=dtype, bias=True), nets.make("b", dtype=dtype, bias=True, multiplier=0.5)
        sd1.run_networks(a, b)
        total = a.modules[TO_Q].bias.double() + b.modules[TO_Q].bias.double() / 2
        assert torch.equal(sd1.layers[TO_Q].bias, total.half())
        sd1.run_networks(a)
        assert torch.equal(sd1.layers[TO_Q].bias, a.modules[TO_Q].bias.half())


def raising(kind):
    def calc_updown(orig_weight):
        raise kind("no kernel, says the test")

    return calc_updown


class TestNetworksThatDoNotFit:
    @pytest.mark.parametrize("kind", [RuntimeError, TypeError, ValueError, AssertionError])
    def test_one_that_raises_is_left_out_and_told_once(self, sd1, nets, kind, monkeypatch, capsys):
        good, bad, worse = nets.make("good"), nets.make("bad"), nets.make("worse")
        for net in (bad, worse):
            for module in net.modules.values():
                monkeypatch.setattr(module, "calc_updown", raising(kind))
        sd1.run_networks(bad, good, worse)
        nets.assert_merged(good)
        layers = len(LINEAR_AND_CONV)
        assert sd1.networks.extra_network_lora.errors == {"bad": layers, "worse": layers}
        said = capsys.readouterr().err.splitlines()
        assert [line.split()[3] for line in said] == ["bad", "worse"]
        assert all("no kernel, says the test" in line for line in said)

    @pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9")])
    def test_out_of_memory_is_no_misfit(self, sd1, nets, error, monkeypatch):
        """The picture fails, rather than be made without the network; nothing is half done."""
        a, base = nets.make("a"), sd1.fingerprint()
        with monkeypatch.context() as failing:
            failing.setattr(a.modules[TO_Q], "calc_updown", lambda _: (_ for _ in ()).throw(error))
            with pytest.raises(type(error)):
                sd1.run_networks(a)
        sd1.run_networks(a)
        nets.assert_merged(a)
        sd1.run_networks()
        assert sd1.fingerprint() == base

    @pytest.mark.parametrize("choice", ["Merge from checkpoint file", "Add at run time"])
    def test_factors_of_different_ranks(self, host, choice, capsys):
        host.checkpoint()
        host.start(fp8_lora=choice, **ON)
        net = host.networks.Network("bad")
        tensors = {"lora_up.weight": torch.ones(16, 2), "lora_down.weight": torch.ones(4, 16)}
        net.modules[TO_Q] = host.networks.create_module(net, TO_Q, tensors, host.layers[TO_Q])
        host.networks.loaded_networks[:] = [net]
        host.job()
        assert "network bad does not fit layer" in capsys.readouterr().err

    def test_a_reason_of_several_lines(self, sd1, nets, monkeypatch, capsys):
        for error, words in ((RuntimeError("\n  first\nsecond"), "first"), (AssertionError(), "AssertionError")):
            bad = nets.make("bad", [TO_Q])
            sd1.networks.extra_network_lora.errors.clear()
            monkeypatch.setattr(bad.modules[TO_Q], "calc_updown", lambda _, error=error: (_ for _ in ()).throw(error))
            sd1.run_networks(bad)
            said = capsys.readouterr().err
            assert said.count("\n") == 1
            assert f"left out there: {words} " in said

    @pytest.mark.parametrize("parts", [PARTS[:1], PARTS[:3], (ATTENTION,)], ids=["q", "without out", "as a whole"])
    def test_a_part_of_an_attention(self, host, nets, parts, capsys):
        """The WebUI leaves such a network out without a word."""
        host.checkpoint(kind="sd2")
        host.start(**ON)
        base, bad, good = host.fingerprint(), nets.make("bad", PARTS), nets.make("good", PARTS)
        bad.modules = {part: bad.modules.get(part, bad.modules[PARTS[0]]) for part in parts}
        host.run_networks(bad)
        assert host.networks.extra_network_lora.errors == {"bad": 1}
        assert f"network bad does not fit layer {ATTENTION}" in capsys.readouterr().err
        assert host.fingerprint() == base
        host.run_networks(bad, good)
        assert host.fingerprint() != base

    def test_where_autocast_is_unknown(self, sd1, nets, monkeypatch):
        """On Apple's and DirectML's devices, older torch refuses to switch it off."""
        a = nets.make("a")
        monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: pytest.fail("unsupported device type"))
        sd1.run_networks(a)
        nets.assert_merged(a)

    def test_one_that_fits_some_layers_acts_there(self, sd1, nets, monkeypatch):
        a = nets.make("a")
        monkeypatch.setattr(a.modules[TO_Q], "calc_updown", raising(RuntimeError))
        sd1.run_networks(a)
        nets.assert_merged(a, layers=[name for name in LINEAR_AND_CONV if name != TO_Q])
        nets.assert_merged(layers=[TO_Q])

    def test_one_of_the_wrong_shape(self, sd1, nets, capsys):
        good, bad = nets.make("good"), nets.make("bad", [TO_Q], bias=True)
        bad.modules[TO_Q].down = coarse(2, 7, rng=nets.rng)
        sd1.run_networks(bad, good)
        nets.assert_merged(good)
        assert sd1.layers[TO_Q].bias is None
        said = capsys.readouterr().err
        assert "bad" in said
        assert "(16, 7)" in said

    @pytest.mark.parametrize("layer_name", [TO_Q, TO_OUT])
    def test_one_with_a_bias_of_the_wrong_shape(self, sd1, nets, layer_name):
        good, bad = nets.make("good"), nets.make("bad", [layer_name], bias=True)
        bad.modules[layer_name].bias = coarse(7, rng=nets.rng)
        sd1.run_networks(bad, good)
        nets.assert_merged(good)
        assert sd1.networks.extra_network_lora.errors == {"bad": 1}
        assert sd1.job().pictures

    def test_one_that_fails_is_no_reason_to_merge_again(self, sd1, nets, monkeypatch):
        bad = nets.make("bad")
        for module in bad.modules.values():
            monkeypatch.setattr(module, "calc_updown", raising(RuntimeError))
        sd1.run_networks(bad)
        sd1.run_networks(bad)
        assert sd1.networks.extra_network_lora.errors == {"bad": len(LINEAR_AND_CONV)}
        assert sd1.panel.status()["lora_layers"] == {}, "no layer holds it"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_factors_are_multiplied_in_float32(sd1, nets, dtype, monkeypatch):
    a = nets.make("a", factors=fine, dtype=dtype)
    seen = {}
    for name, module in a.modules.items():
        calc = module.calc_updown

        def spy(orig_weight, calc=calc, name=name):
            assert orig_weight.dtype == torch.float32
            seen[name] = calc(orig_weight)[0]
            return seen[name], None

        monkeypatch.setattr(module, "calc_updown", spy)
    sd1.run_networks(a)
    for name in LINEAR_AND_CONV:
        module = a.modules[name]
        exact = (module.up.double() @ module.down.double()).reshape(seen[name].shape)
        in_half = exact.to(dtype).double()
        assert seen[name].dtype == torch.float32
        assert (seen[name].double() - exact).abs().max() < 1e-7
        assert (in_half - exact).abs().max() > 1e-6


class TestChangesWhileMerged:
    """Networks are in the weights while the storage, the checkpoint or the extension changes."""

    @pytest.fixture
    def bits(self, host):
        """In full precision, and in 8 bits."""
        host.checkpoint()
        host.start()
        plain = host.fingerprint()
        host.set(**ON)
        return plain, host.fingerprint()

    def test_switching_on_converts_the_originals(self, host, bits, nets):
        host.set(fp8_storage="Disable")
        a = nets.make("a", [TO_Q, TO_OUT, KEPT], dtype=torch.float16, bias=True)
        host.run_networks(a)
        host.set(**ON)
        assert host.fingerprint() == bits[1]
        host.run_networks(a)
        nets.assert_merged(a)
        host.run_networks()
        assert host.fingerprint() == bits[1]

    def test_switching_off_gives_the_originals(self, host, bits, nets):
        host.run_networks(nets.make("a", bias=True))
        host.set(fp8_storage="Disable")
        assert host.fingerprint() == bits[0]
        host.run_networks()
        assert host.fingerprint() == bits[0]

    def test_after_switching_off_the_host_merges(self, host, bits, nets, monkeypatch):
        host.set(fp8_storage="Disable")
        monkeypatch.setattr(host.lora, "_change", lambda *_: pytest.fail("not ours"))
        for used in ([nets.full("a", TO_Q)], [], [nets.full("b", TO_Q)], []):
            host.networks.loaded_networks[:] = used
            host.job()
            host.run_networks(*used)
            assert (host.fingerprint() == bits[0]) == (not used)

    def test_another_format(self, host, bits, nets):
        a = nets.make("a")
        host.run_networks(a)
        host.set(fp8_format="int8")
        host.run_networks(a)
        nets.assert_merged(a)

    def test_another_checkpoint_and_back(self, host, bits, nets):
        info, other = host.model.sd_checkpoint_info, host.checkpoint("b", seed=2)
        a = nets.make("a")
        host.run_networks(a)
        host.switch_to(other)
        host.assert_packed("b", FORMAT_BY_DEFAULT)
        host.run_networks(a)
        host.switch_to(info)
        assert host.fingerprint() == bits[1]
        host.run_networks(a)
        nets.assert_merged(a)

    def test_forget(self, host, bits, nets):
        a = nets.make("a", bias=True)
        host.run_networks(a)
        host.lora.forget(host.model)
        assert host.fingerprint() == bits[1]
        host.run_networks(a)
        nets.assert_merged(a)

    def test_the_hosts_code_merges_where_the_patch_is_missing(self, host, bits, nets):
        """Correct, if noisier: design.md, LoRA."""
        sys.modules["lib_fp8.webui"]._patches.undo()
        a = nets.full("a", TO_Q)
        exact = nets.original(TO_Q).double() + a.modules[TO_Q].diff.double()
        host.run_networks(a)
        error = (host.layers[TO_Q].weight.dequantize().double() - exact).norm() / exact.norm()
        assert error < 0.06
        host.run_networks()
        assert host.fingerprint() == bits[1]

    def test_the_extension_is_switched_off(self, host, bits, nets):
        host.run_networks(nets.make("a", bias=True))
        host.opts.fp8_storage = "Enable for SDXL"  # the WebUI's own conversion stays out of it
        host.reload_ui(extension=False)
        assert host.fingerprint() == bits[0]
        host.run_networks(nets.full("b", TO_Q), nets.full("c", KEPT))
        host.run_networks()
        assert host.fingerprint() == bits[0]

    def test_reload_ui(self, host, bits, nets):
        """Lora's own patches are taken off and put on again around ours."""
        a, b = nets.make("a"), nets.make("b")
        host.run_networks(a)
        host.reload_ui()
        host.run_networks(a, b)
        nets.assert_merged(a, b)
        host.reload_ui()
        host.run_networks()
        assert host.fingerprint() == bits[1]


def test_a_lora_extension_of_another_kind(host, nets):
    """A fork that lacks one of the functions keeps its own merging."""
    host.checkpoint()
    host.start(extension=False)
    del host.networks.network_forward
    host.reload_ui()
    assert host.set(**ON) == [True] * 3
    assert host.networks.network_apply_weights.__module__ == "networks"
    host.run_networks(nets.full("a", TO_Q))
    assert host.job().pictures


def test_without_the_lora_extension(host):
    host.checkpoint()
    host.start(lora=False)
    assert "networks" not in sys.modules
    assert host.set(**ON) == [True] * 3
    host.assert_packed("a", FORMAT_BY_DEFAULT)
    host.lora.forget(host.model)
    assert host.job().pictures
