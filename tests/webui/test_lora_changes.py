"""Networks that change: from step to step, in place, by other extensions, by the old method. Never stale or twice."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
import types

import pytest
import safetensors.torch
import torch
from helpers import FORMAT_BY_DEFAULT, to_numpy

from lib_fp8 import QuantWeight
from webui.nets import (
    ATTENTION,
    CLIP,
    IN_8_BITS,
    KEPT,
    LINEAR_AND_CONV,
    ON,
    PARTS,
    TO_OUT,
    TO_Q,
    assert_rounded_once,
    coarse,
    fine,
)
from webui.test_lora_families import Library, values

RUN_TIME = {"run time": len(IN_8_BITS)}
FILE = {"checkpoint file": len(IN_8_BITS)}


def layers(host):
    return host.panel.status()["lora_layers"]


class Counted:
    """Counts how often the modules of networks are asked for their deltas."""

    def __init__(self, monkeypatch, *networks):
        self.calls = []
        for net in networks:
            for name, module in net.modules.items():
                monkeypatch.setattr(module, "calc_updown", self.counting(name, module.calc_updown))

    def counting(self, name, original):
        def calc_updown(orig_weight):
            self.calls.append(name)
            return original(orig_weight)

        return calc_updown

    def __call__(self):
        found, self.calls = self.calls, []
        return sorted(found)


class TestNothingIsDoneWithoutNeed:
    def test_the_same_again(self, sd1, nets, monkeypatch):
        a = nets.make("a")
        count = Counted(monkeypatch, a)
        sd1.run_networks(a)
        assert count() == sorted(LINEAR_AND_CONV)
        sd1.run_networks(a)
        assert count() == []

    def test_another_network_elsewhere(self, sd1, nets, monkeypatch):
        a, b = nets.make("a", [TO_Q]), nets.make("b", [TO_OUT])
        count = Counted(monkeypatch, a, b)
        sd1.run_networks(a)
        sd1.run_networks(a, b)
        assert count() == sorted([TO_Q, TO_OUT])
        sd1.run_networks(b, a)
        assert count() == []

    def test_the_strength_for_the_text_encoder(self, host, monkeypatch):
        host.checkpoint()
        host.start(**ON)
        net = Library(host).make("a", "lora", [TO_Q, CLIP])
        count = Counted(monkeypatch, net)
        host.run_networks(net)
        count()
        net.te_multiplier = 0.25
        host.run_networks(net)
        assert count() == [CLIP]

    def test_strength_zero(self, sd1, nets, monkeypatch):
        base, a = sd1.fingerprint(), nets.make("a", multiplier=0)
        count = Counted(monkeypatch, a)
        sd1.run_networks(a)
        assert count() == []
        assert sd1.fingerprint() == base

    def test_originals_are_not_read(self, sd1, nets, monkeypatch):
        a = nets.make("a")
        sd1.run_networks(a)
        originals = sd1.storage.record_of(sd1.model).originals
        monkeypatch.setattr(originals.file, "tensor", lambda name: pytest.fail("read"))
        sd1.run_networks(a)
        nets.assert_merged(a)


class TestChangesInPlace:
    @pytest.mark.parametrize("change", ["written", "replaced"])
    def test_of_a_tensor(self, sd1, nets, change):
        a = nets.make("a")
        sd1.run_networks(a)
        for module in a.modules.values():
            if change == "written":
                module.up *= 0.5
            else:
                module.up = torch.nn.Parameter(module.up * 0.5)
        sd1.run_networks(a)
        nets.assert_merged(a)

    def test_of_a_module_within(self, host):
        """sd-webui-lora-block-weight replaces the weight of ``up_model``."""
        host.checkpoint()
        host.start(**ON)
        library = Library(host)
        net = library.make("a", "lora", [TO_Q])
        host.run_networks(net)
        up = net.modules[TO_Q].up_model
        up.weight = torch.nn.Parameter(up.weight * 0.5)
        tensors = library.files[net, TO_Q]
        library.files[net, TO_Q] = {**tensors, "lora_up.weight": to_numpy(up.weight)}
        host.run_networks(net)
        library.assert_merged(TO_Q, [net])

    def test_of_a_number(self, sd1, host):
        library = Library(host)
        net = library.make("a", "lora", [TO_Q])
        host.run_networks(net)
        net.modules[TO_Q].alpha = 4.0
        library.files[net, TO_Q]["alpha"] = torch.tensor(4.0).numpy()
        host.run_networks(net)
        library.assert_merged(TO_Q, [net])

    def test_of_the_file(self, sd1, nets):
        """It was trained further and loaded again: the same name, other tensors, other layers."""
        sd1.run_networks(nets.make("a", [TO_Q]))
        again = nets.make("a", [TO_OUT])
        sd1.run_networks(again)
        nets.assert_merged(again)

    def test_books_reset_by_others(self, sd1, nets):
        """Other extensions empty network_current_names to have networks merged anew: once, not twice."""
        a = nets.make("a")
        sd1.run_networks(a)
        for layer in sd1.layers.values():
            layer.network_current_names = ()
        sd1.run_networks(a)
        nets.assert_merged(a)


class TestFromStepToStep:
    def steps(self, host, *networks, strengths):
        """One pass: the strength of the first network at each step."""
        for step, strength in enumerate(strengths):
            host.shared.state.sampling_step = step
            networks[0].unet_multiplier = strength
            host.run_networks(*networks)
            yield step

    def test_many_changes(self, sd1, host):
        """They are added at run time from the second change on, and merged again in the next pass."""
        library, bits = Library(host), sd1.fingerprint()
        a, b = library.make("a", "lora", LINEAR_AND_CONV), library.make("b", "loha", LINEAR_AND_CONV)
        for _ in range(2):
            for step in self.steps(sd1, a, b, strengths=[1, 0.8, 0.6, 0.4, 0]):
                assert layers(sd1) == (FILE if step < 2 else RUN_TIME)
                for name in LINEAR_AND_CONV:
                    at_run_time = step > 1 and name in IN_8_BITS
                    (library.assert_added if at_run_time else library.assert_merged)(name, [a, b])
        sd1.shared.state.sampling_step = 0
        sd1.run_networks(a, b)
        assert layers(sd1) == FILE
        sd1.run_networks()
        assert sd1.fingerprint() == bits

    def test_start_and_stop(self, sd1, nets):
        """A single change within a pass is merged."""
        a = nets.make("a")
        for _ in self.steps(sd1, a, strengths=[0, 0, 1, 1]):
            nets.assert_merged(a)
        assert layers(sd1) == FILE

    def test_only_the_factor_is_new(self, sd1, host, monkeypatch):
        """The tensors of a LoRA are moved to the device once."""
        net = Library(host).make("a", "lora", [TO_Q])
        branches = []
        for step in self.steps(sd1, net, strengths=[1, 0.9, 0.8, 0.7]):
            if step > 1:
                branches.append(host.layers[TO_Q].weight.branches[0])
        assert branches[0].up is branches[1].up
        assert branches[0].factor != branches[1].factor

    def test_other_families_are_not_computed_twice(self, sd1, host, monkeypatch):
        """They were seen to fit; a new strength needs no trial."""
        net = Library(host).make("a", "loha", [TO_Q])
        count = Counted(monkeypatch, net)
        for step in self.steps(sd1, net, strengths=[1, 0.9, 0.8, 0.7]):
            assert count() == ([TO_Q] if step < 3 else [])
            host.layers[TO_Q].weight.dequantize()
            assert count() == ([TO_Q] if step > 1 else [])

    def test_strengths_that_are_computed(self, sd1, nets, monkeypatch):
        """sd-webui-loractl turns the strengths into properties: then the first change of a pass is enough.

        Strengths that stay as they are are merged.
        """
        strength = {"now": 1.0}
        networks_class = type("Network", (sd1.networks.Network,), {})
        networks_class.unet_multiplier = property(lambda self: strength["now"], lambda self, value: None)
        a, bits = nets.make("a"), sd1.fingerprint()
        a.__class__ = networks_class
        vars(a).pop("unet_multiplier")
        for step in range(3):
            sd1.shared.state.sampling_step = step
            sd1.run_networks(a)
            assert layers(sd1) == FILE
        strength["now"] = 0.75
        sd1.run_networks(a)
        assert layers(sd1) == RUN_TIME
        seen = {name: sd1.layers[name].weight.dequantize() for name in IN_8_BITS}
        strength["now"] = 0.5
        sd1.run_networks(a)
        assert all(not torch.equal(seen[name], sd1.layers[name].weight.dequantize()) for name in IN_8_BITS)
        sd1.run_networks()
        assert sd1.fingerprint() == bits


@pytest.mark.parametrize("family", ["lora", "loha", "full", "ia3-input"])
def test_both_ways_agree_within_rounding(newest, family):
    """In int8: their effects differ by less than two roundings, which are a small part of them."""
    newest.checkpoint()
    newest.start(fp8_format="int8", **ON)
    library = Library(newest)
    net = library.make("a", family, IN_8_BITS, size=0.3)

    def values():
        return {name: to_numpy(newest.layers[name].weight.dequantize(torch.float32)) for name in IN_8_BITS}

    stored = values()
    newest.run_networks(net)
    merged = values()
    newest.set(fp8_lora="Add at run time")
    newest.run_networks(net)
    added = values()
    for name in IN_8_BITS:
        if library.files.get((net, name)) is None:
            continue
        effect, other = merged[name] - library.original(name), added[name] - stored[name]
        rounding = abs(merged[name]).max() / 127  # half a step of each of the two
        assert abs(effect - other).max() <= rounding
        assert rounding < 0.2 * abs(other).max()


def outputs(host, names):
    """What layers give for the unit vectors, through their whole forwards: their weights, and whatever acts beside."""
    with torch.no_grad():
        return {name: host.layers[name](torch.eye(host.layers[name].in_features)).T for name in names}


def assert_acting(host, nets, without, *networks):
    """Each network acts once, up to the rounding of a weight."""
    for name, found in outputs(host, without).items():
        wanted = nets.expected(name, networks, torch.zeros(found.shape))
        assert wanted.norm() > 0.1
        assert (found - without[name] - wanted).norm() < 0.3 * wanted.norm()


class TestTheOldMethod:
    """lora_functional: networks act beside the layers, which must be whole."""

    def test_on_and_off_while_merged(self, sd1, nets):
        bits, a = sd1.fingerprint(), nets.make("a", [TO_Q, TO_OUT])
        none = outputs(sd1, [TO_Q, TO_OUT])
        for functional in (False, True, False, True):
            sd1.opts.lora_functional = functional
            sd1.networks.loaded_networks[:] = [a]
            assert_acting(sd1, nets, none, a)
            assert (sd1.fingerprint() == bits) == functional
            sd1.networks.loaded_networks.clear()
            for name, found in outputs(sd1, none).items():
                assert torch.equal(found, none[name])

    def test_attention_merges_all_the_same(self, host, nets):
        """Nothing can act beside it: the Lora extension merges into it whatever the option says."""
        host.checkpoint(kind="sd2")
        host.start(**ON)
        base, a = host.fingerprint(), nets.make("a", PARTS)
        host.opts.lora_functional = True
        host.networks.loaded_networks[:] = [a]
        attention = host.layers[ATTENTION]
        x = torch.randn(1, 3, 8, generator=nets.rng)
        with torch.no_grad(), host.devices.autocast():
            attention(x, x, x)
        prefix = "cond_stage_model.model.transformer.resblocks.0.attn."
        values = host.values()
        in_proj, out = (values[prefix + name].half().double() for name in ("in_proj_weight", "out_proj.weight"))
        q, k, v, o = (a.modules[part].up.double() @ a.modules[part].down.double() for part in PARTS)
        assert_rounded_once(attention.in_proj_weight, in_proj + torch.cat([q, k, v]))
        assert_rounded_once(attention.out_proj.weight, out + o)
        host.networks.loaded_networks.clear()
        with torch.no_grad(), host.devices.autocast():
            attention(x, x, x)
        assert host.fingerprint() == base

    def test_nothing_is_stale_without_networks(self, sd1, nets):
        """The Lora extension leaves merged layers alone where nothing is loaded."""
        bits = sd1.fingerprint()
        sd1.networks.loaded_networks[:] = [nets.make("a")]
        sd1.job()
        sd1.networks.loaded_networks.clear()
        sd1.opts.lora_functional = True
        sd1.job()
        now = sd1.fingerprint()
        assert all(now[name] == bits[name] for name in bits if name.startswith("model."))  # all that was called


@pytest.fixture
def second(sd1):
    """a1111-sd-webui-lycoris: the Lora extension once more, with networks of its own and the same books."""
    module = types.ModuleType("l_networks")
    source = importlib.util.find_spec("networks").loader.get_source("networks")
    sys.modules["l_networks"] = module
    exec(compile(source, "l_networks.py", "exec"), vars(module))
    patches = module.LoraPatches()
    sd1.script_callbacks.run("before_ui")
    yield module
    patches.undo()
    del sys.modules["l_networks"]


class TestASecondLoraExtension:
    @pytest.mark.parametrize("beside", ["lora_functional", "lyco_functional", "both"])
    def test_one_merges_and_one_acts_beside(self, sd1, second, nets, beside, monkeypatch):
        """Each network acts once, in whichever way, and nothing is merged again and again."""
        bits = sd1.fingerprint()
        a, b = nets.make("a", [TO_Q, TO_OUT]), nets.make("b", [TO_Q, TO_OUT])
        none = outputs(sd1, [TO_Q, TO_OUT])
        sd1.networks.loaded_networks[:], second.loaded_networks[:] = [a], [b]
        for option in ("lora_functional", "lyco_functional"):
            sd1.opts.data[option] = beside in (option, "both")
        assert_acting(sd1, nets, none, a, b)
        in_weights = [
            net for net, option in ((a, "lora_functional"), (b, "lyco_functional")) if beside not in (option, "both")
        ]
        nets.assert_merged(*in_weights, layers=[TO_Q, TO_OUT])
        stores = []
        store = QuantWeight.store_
        monkeypatch.setattr(QuantWeight, "store_", lambda *args: (stores.append(1), store(*args))[1])
        assert_acting(sd1, nets, none, a, b)
        assert stores == []
        sd1.networks.loaded_networks.clear()
        second.loaded_networks.clear()
        outputs(sd1, none)
        assert sd1.fingerprint() == bits

    def test_both_act(self, sd1, second, nets):
        bits, a, b = sd1.fingerprint(), nets.make("a"), nets.make("b")
        second.loaded_networks[:] = [b]
        sd1.run_networks(a)
        nets.assert_merged(a, b)
        second.loaded_networks.clear()
        sd1.run_networks(a)
        nets.assert_merged(a)
        sd1.run_networks()
        assert sd1.fingerprint() == bits

    def test_they_do_not_undo_each_other(self, sd1, second, nets, monkeypatch):
        a, b = nets.make("a"), nets.make("b")
        sd1.networks.loaded_networks[:], second.loaded_networks[:] = [a], [b]
        sd1.job()
        count = Counted(monkeypatch, a, b)
        sd1.job()
        assert count() == []


def test_a_bias_that_was_in_the_file_is_added_once(host, monkeypatch):
    """The Lora extension adds the sparse bias of a network into the network's own tensor."""
    host.checkpoint()
    host.start(**ON)
    library = Library(host)
    net = library.make("a", "full", [TO_Q], dtype=torch.float32)
    module = net.modules[TO_Q]
    module.bias = torch.ones(module.shape) * 0.01
    before = module.weight.clone()
    for strength in (1, 0.5, 1):
        net.unet_multiplier = strength
        host.run_networks(net)
    assert torch.equal(module.weight, before)


@pytest.mark.parametrize("choice", ["Merge from checkpoint file", "Add at run time"])
def test_a_checkpoint_without_text_encoder(host, nets, choice):
    """What the new file does not name keeps its weights, without the networks."""
    host.checkpoint()
    host.start(fp8_lora=choice, **ON)
    text = {name: bits for name, bits in host.fingerprint().items() if name.startswith("cond_stage_model")}
    other = host.checkpoint("unet", seed=5)
    values = {
        name: value.clone() for name, value in host.values("unet").items() if not name.startswith("cond_stage_model")
    }
    safetensors.torch.save_file(values, other.filename)
    host.run_networks(nets.make("a", bias=True))
    host.switch_to(other)
    now = host.fingerprint()
    assert {name: now[name] for name in text} == text


def test_several_checkpoints_keep_their_own(host, nets):
    """Two models in memory: each has the networks in it that it was used with, and nothing of the other."""
    host.checkpoint()
    other = host.checkpoint("b", seed=2)
    host.start(sd_checkpoints_limit=2, **ON)
    first, bits = host.model.sd_checkpoint_info, host.fingerprint()
    a = nets.make("a")
    host.run_networks(a)
    host.switch_to(other)
    host.assert_packed("b", FORMAT_BY_DEFAULT)
    host.run_networks(nets.make("c"))
    host.switch_to(first)
    host.run_networks(a)
    nets.assert_merged(a)
    host.run_networks()
    assert host.fingerprint() == bits
    host.switch_to(other)
    host.run_networks()
    host.assert_packed("b", FORMAT_BY_DEFAULT)


@pytest.mark.parametrize("computed", [False, True])
def test_pace_is_of_the_pass_alone(newest, computed):
    """Whatever was made before: the same strengths at the same steps give the same answers."""
    newest.start()
    steps = [(0, "a"), (1, "b"), (2, "c"), (3, "c"), (4, "d")]

    def a_pass(pace):
        return [pace.is_fast(((1, strength),), step, lambda: computed) for step, strength in steps]

    used = newest.pace.Pace()
    assert a_pass(used) == a_pass(used) == a_pass(newest.pace.Pace())
    assert a_pass(used) == [False, True, True, True, True] if computed else [False, False, True, True, True]


STATES = ("none", "merged", "with a bias", "at run time", "misfit")


class TestInterruptedChanges:
    """From any state to any other: a write that fails leaves nothing that the next call does not mend."""

    def enter(self, host, networks, state):
        host.shared.state.sampling_step = 0
        host.set(fp8_lora="Add at run time" if state == "at run time" else "Merge from checkpoint file")
        host.run_networks(*([networks[state]] if state != "none" else []))

    @pytest.mark.parametrize("after", STATES)
    @pytest.mark.parametrize("before", [state for state in STATES if state != "none"])
    def test_at_every_write(self, newest, nets, monkeypatch, before, after):
        newest.checkpoint()
        newest.start(**ON)
        bits = newest.fingerprint()
        networks = {
            "merged": nets.make("merged"),
            "with a bias": nets.make("biased", bias=True),
            "at run time": nets.make("added"),
            "misfit": nets.make("misfit"),
        }
        networks["misfit"].modules[TO_Q].down = coarse(2, 7, rng=nets.rng)
        self.enter(newest, networks, after)
        wanted = newest.fingerprint(), values(newest)
        for number in range(12):
            self.enter(newest, networks, "none")
            assert newest.fingerprint() == bits
            self.enter(newest, networks, before)
            with monkeypatch.context() as failing, contextlib.suppress(MemoryError):
                fail_at(failing, number)
                self.enter(newest, networks, after)
            self.enter(newest, networks, after)
            assert (newest.fingerprint(), values(newest)) == wanted
        self.enter(newest, networks, "none")
        assert newest.fingerprint() == bits


def fail_at(monkeypatch, number):
    """Let the write of that number fail, of those into 8-bit weights, into plain ones, and of branches."""
    writes = itertools.count()

    def failing(original):
        def write(*args, **kwargs):
            if next(writes) == number:
                raise MemoryError
            return original(*args, **kwargs)

        return write

    slots = sys.modules["lib_fp8.webui.slots"]
    monkeypatch.setattr(slots, "write_rounded_once", failing(slots.write_rounded_once))
    monkeypatch.setattr(QuantWeight, "set_branches", failing(QuantWeight.set_branches))
    monkeypatch.setattr(torch.Tensor, "copy_", failing(torch.Tensor.copy_))


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
def test_an_interrupted_write_is_mended(sd1, nets, monkeypatch, kind):
    """The layer in which it happened is written anew, from its original."""
    a, b, bits = nets.make("a", bias=True), nets.make("b", bias=True), sd1.fingerprint()
    sd1.run_networks(a)
    store = QuantWeight.store_
    monkeypatch.setattr(QuantWeight, "store_", lambda *_: (_ for _ in ()).throw(kind()))
    with pytest.raises(kind):
        sd1.run_networks(b)
    monkeypatch.setattr(QuantWeight, "store_", store)
    sd1.run_networks(b)
    nets.assert_merged(b)
    sd1.run_networks(a)
    nets.assert_merged(a)
    sd1.run_networks()
    assert sd1.fingerprint() == bits


def test_the_global_generator_is_not_used(sd1, nets):
    state = torch.random.get_rng_state()
    sd1.run_networks(nets.make("a", factors=fine), nets.make("b", factors=coarse))
    sd1.set(fp8_lora="Add at run time")
    sd1.run_networks(nets.make("a", [KEPT, *IN_8_BITS]))
    assert torch.equal(torch.random.get_rng_state(), state)
