"""Others write into layers that networks are, or were, merged into: nothing of theirs is taken for what was there.

What a layer must hold is what they wrote, packed by the reference if it is in 8 bits, plus networks in float64.
"""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from helpers import reference_decode, reference_pack
from torch.nn import Parameter

from lib_fp8 import QuantWeight
from webui.nets import ATTENTION, BLOCK, IN_8_BITS, KEPT, ON, PARTS, TO_OUT, TO_Q, assert_rounded_once

CHOICES = ("Merge from checkpoint file", "Merge from copy in RAM", "Add at run time")
CAN_ASSIGN = "assign" in inspect.signature(torch.nn.Module.load_state_dict).parameters  # since torch 2.1


def load(layer, new):
    layer.load_state_dict({"weight": new}, strict=False)


def load_by_assignment(layer, new):
    if not CAN_ASSIGN:
        pytest.skip("this torch cannot load by assignment")
    layer.load_state_dict({"weight": new}, strict=False, assign=True)


def assign(layer, new):
    layer.weight = Parameter(new, requires_grad=False)


def assign_data(layer, new):
    layer.weight.data = new


def copy_into(layer, new):
    layer.weight.copy_(new)


def copy_into_data(layer, new):
    layer.weight.data.copy_(new)


def add(layer, new):
    layer.weight += new


def add_to_data(layer, new):
    layer.weight.data.add_(new)


def write_a_part(layer, new):
    layer.weight[:4] = new[:4]


WHOLE = (load, load_by_assignment, assign, assign_data)
IN_PLACE = (add, add_to_data, write_a_part)
ALL = (*WHOLE, copy_into, copy_into_data, *IN_PLACE)
by_name = {"ids": lambda value: value.__name__ if callable(value) else None}


def weights_like(layer):
    return torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(5)).half()


@torch.no_grad()
def write(host, name, way):
    """Let a layer be written to; the value that it must hold then, in float64."""
    layer = host.layers[name]
    before, new = torch.clone(layer.weight.dequantize() if name in IN_8_BITS else layer.weight), weights_like(layer)
    way(layer, new)
    if way in (add, add_to_data):
        new = before + new
    elif way is write_a_part:
        new = torch.cat([new[:4], before[4:]])
    return assert_holds(layer.weight, new)


def assert_holds(weight, value):
    """A weight holds a value, or what it becomes in 8 bits; that is returned in float64."""
    assert_rounded_once(weight, value)
    if isinstance(weight, QuantWeight):
        name = weight.format.name
        return torch.from_numpy(reference_decode(*reference_pack(value, name), name))
    return value.double()


def assert_acts(host, nets, name, base, *networks):
    """A layer holds a base and networks: rounded once where it is plain, added where there is nothing to merge over."""
    weight, exact = host.layers[name].weight, nets.expected(name, networks, base)
    if isinstance(weight, QuantWeight):
        torch.testing.assert_close(weight.dequantize(torch.float64), exact, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(weight, exact.half())


@pytest.fixture(params=CHOICES)
def started(request, newest):
    newest.checkpoint()
    return newest.start(fp8_lora=request.param, **ON)


@pytest.mark.parametrize("way", ALL, **by_name)
@pytest.mark.parametrize("name", [TO_Q, BLOCK, KEPT])
def test_after_networks_were_taken_out(started, nets, name, way):
    """Whatever way: the layer is theirs, with and without networks, from every source."""
    a, b = nets.make("a"), nets.make("b", multiplier=0.5)
    started.run_networks(a)
    started.run_networks()
    base = write(started, name, way)
    for used in ([a], [b, a], [], [a], []):
        started.run_networks(*used)
        assert_acts(started, nets, name, base, *used)
    nets.assert_merged(layers=[other for other in (TO_Q, BLOCK, KEPT) if other != name])


@pytest.mark.parametrize("released", [False, True], ids=["file held", "file let go"])
def test_the_file_is_still_the_original_of_what_was_written_back(started, nets, released):
    """The very values of the file, loaded by others, are merged over as before."""
    a = nets.make("a", [TO_Q, KEPT])
    started.run_networks(a)
    started.run_networks()
    for name in (TO_Q, KEPT):
        load(started.layers[name], nets.original(name))
    if released:
        started.job()
    started.run_networks(a)
    nets.assert_merged(a, layers=[KEPT])
    if "run time" not in started.opts.fp8_lora:
        nets.assert_merged(a, layers=[TO_Q])


@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way)
        for name in (TO_Q, BLOCK, KEPT)
        for way in ALL
        if way in WHOLE or (way not in IN_PLACE and name != KEPT)
    ],
    **by_name,
)
def test_as_a_whole_while_networks_are_in(started, nets, name, way):
    """From then on that is the layer without networks; those that are in use come on top."""
    a = nets.make("a")
    started.run_networks(a)
    base = write(started, name, way)
    for used in ([a], [], [a], []):
        started.run_networks(*used)
        assert_acts(started, nets, name, base, *used)


@pytest.mark.parametrize("name", [TO_Q, KEPT])
def test_twice_between_two_looks(started, nets, name):
    """The memory of the first parameter may be that of the third."""
    a = nets.make("a")
    started.run_networks(a)
    layer = started.layers[name]
    for seed in range(4):
        new = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(seed)).half()
        layer.weight = None
        layer.weight = Parameter(new.clone(), requires_grad=False)
    started.run_networks(a)
    assert_acts(started, nets, name, new.double(), a)


@pytest.mark.parametrize("way", IN_PLACE, **by_name)
@pytest.mark.parametrize("name", [TO_Q, KEPT])
@pytest.mark.parametrize("choice", CHOICES[:2])
def test_in_place_on_top_of_networks(newest, nets, name, way, choice):
    """It stays while the same networks are used, is not merged into again, and goes with them, as in the WebUI."""
    newest.checkpoint()
    newest.start(fp8_lora=choice, **ON)
    bits, a, b = newest.fingerprint(), nets.make("a"), nets.make("b")
    newest.run_networks(a)
    write(newest, name, way)
    written = newest.fingerprint()
    newest.run_networks(a)
    newest.run_networks(a)
    assert newest.fingerprint() == written
    newest.run_networks(b)
    nets.assert_merged(b)
    newest.run_networks()
    assert newest.fingerprint() == bits


def test_the_webui_does_the_same_with_what_is_written_in_place(newest, nets):
    """In full precision, with its own code: the yardstick of the test above."""
    newest.checkpoint()
    newest.start()
    a, before = nets.full("a", TO_Q), nets.original(TO_Q)
    newest.run_networks(a)
    add(newest.layers[TO_Q], weights_like(newest.layers[TO_Q]).requires_grad_(False))
    newest.run_networks()
    assert torch.equal(newest.layers[TO_Q].weight, before)


def test_in_place_on_top_of_networks_at_run_time(newest, nets):
    """The 8-bit values are gone then, and networks were packed with what was written: said once, and loaded anew."""
    newest.checkpoint()
    newest.start(fp8_lora="Add at run time", **ON)
    bits = newest.fingerprint()
    newest.networks.loaded_networks[:] = [nets.make("a")]
    newest.job()
    with torch.no_grad():
        add(newest.layers[TO_Q], weights_like(newest.layers[TO_Q]))
    written = newest.fingerprint()
    newest.job()
    assert newest.fingerprint() == written
    newest.networks.loaded_networks.clear()
    with pytest.raises(RuntimeError, match=r"written into it in place is not known, .* is then loaded anew"):
        newest.job()
    newest.job()
    assert newest.fingerprint() == bits


@pytest.mark.parametrize("name", [TO_Q, KEPT])
@pytest.mark.parametrize("way", [copy_into, copy_into_data], **by_name)
def test_in_place_after_the_books_were_reset(started, nets, name, way):
    """As loading does: then it is no writing on top of networks."""
    a = nets.make("a")
    started.run_networks(a)
    started.networks.network_reset_cached_weight(started.layers[name])
    base = write(started, name, way)
    for used in ([a], []):
        started.run_networks(*used)
        assert_acts(started, nets, name, base, *used)


def test_books_reset_and_nothing_written(started, nets):
    """Loading a part of a model resets the books of all its layers."""
    bits, a, b = started.fingerprint(), nets.make("a", bias=True), nets.make("b")
    started.run_networks(a)
    started.model.load_state_dict({}, strict=False)
    for used in ([a], [b], []):
        started.run_networks(*used)
        assert [started.layers[name].bias is None for name in (TO_Q, TO_OUT)] == [used != [a], False]
        nets.assert_merged(*used, layers=[KEPT])
    assert started.fingerprint() == bits


@pytest.mark.parametrize("move", ["dtype and back", "new parameters", "copied memory"])
def test_a_move_is_no_write(started, nets, move):
    bits, a = started.fingerprint(), nets.make("a", bias=True)
    started.run_networks(a)
    merged = started.fingerprint()
    modules = list(started.model.model.modules())
    if move == "dtype and back":
        started.model.model.float().half()
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and move == "new parameters":
                module._parameters[name] = copy.deepcopy(parameter)
            elif parameter is not None and move == "copied memory":
                parameter.data = parameter.data.clone()
    started.run_networks(a)
    assert started.fingerprint() == merged
    started.run_networks()
    assert started.fingerprint() == bits


def test_what_manual_cast_rounds_is_no_write(newest, nets):
    """Networks are merged while the layer is in float32, which then is rounded and widened at each call."""
    newest.checkpoint()
    newest.start(**ON)
    bits, a, layer = newest.fingerprint(), nets.make("a", [KEPT]), newest.layers[KEPT]
    for _ in range(2):
        layer.float()
        newest.networks.loaded_networks[:] = [a]
        newest.networks.network_apply_weights(layer)
        layer.half()
    nets.assert_merged(a, layers=[KEPT])
    newest.run_networks()
    assert newest.fingerprint() == bits


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("in_use", [False, True], ids=["networks out", "networks in"])
@pytest.mark.parametrize("part", ["in_proj_weight", "out_proj.weight", "out_proj.bias"])
def test_parts_of_attention(newest, nets, choice, in_use, part):
    """One of its parameters is replaced; the others keep their originals."""
    newest.checkpoint(kind="sd2")
    newest.start(fp8_lora=choice, **ON)
    bits, a, attention = newest.fingerprint(), nets.make("a", PARTS, bias=True), newest.layers[ATTENTION]
    newest.run_networks(a)
    if not in_use:
        newest.run_networks()
    owner = attention if part == "in_proj_weight" else attention.out_proj
    name = part.rpartition(".")[2]
    new = torch.randn(getattr(owner, name).shape, generator=nets.rng).half()
    setattr(owner, name, Parameter(new.clone(), requires_grad=False))
    newest.run_networks(a)
    delta = [nets_delta(a, projection) for projection in PARTS]
    added = {
        "in_proj_weight": torch.cat(delta[:3]),
        "out_proj.weight": delta[3],
        "out_proj.bias": a.modules[PARTS[3]].bias.double(),
    }[part]
    assert torch.equal(getattr(owner, name), (new.double() + added).half())
    newest.run_networks()
    assert torch.equal(getattr(owner, name), new)
    now, prefix = newest.fingerprint(), "cond_stage_model.model.transformer.resblocks.0.attn."
    assert {key for key in bits if now[key] != bits[key]} == {prefix + part}


def nets_delta(net, projection):
    return net.modules[projection].up.double() @ net.modules[projection].down.double()


@pytest.mark.parametrize("in_use", [False, True], ids=["networks out", "networks in"])
@pytest.mark.parametrize("name", [TO_OUT, KEPT])
def test_biases(started, nets, name, in_use):
    a = nets.make("a", bias=True)
    started.run_networks(a)
    if not in_use:
        started.run_networks()
    layer = started.layers[name]
    new = torch.randn(layer.bias.shape, generator=nets.rng).half()
    layer.bias = Parameter(new.clone(), requires_grad=False)
    started.run_networks(a)
    assert torch.equal(layer.bias, (new.double() + a.modules[name].bias.double()).half())
    started.run_networks()
    assert torch.equal(layer.bias, new)


def test_norms(started, nets):
    name = "diffusion_model_out_0"
    a, layer = started.networks.Network("a"), started.layers[name]
    a.modules[name] = started.networks.NetworkModule(a, diff=torch.ones(16) / 8)
    started.run_networks(a)
    new = torch.randn(16, generator=nets.rng).half()
    load(layer, new)
    for used in ([a], []):
        started.run_networks(*used)
        assert torch.equal(layer.weight, (new.double() + (1 / 8 if used else 0)).half())


def test_a_copy_from_before_is_known_again(started, nets):
    """Others keep a layer and put it back later: with the networks, or without."""
    bits, a, b = started.fingerprint(), nets.make("a"), nets.make("b")
    layers = [started.layers[name] for name in (TO_Q, KEPT)]
    without = [layer.weight.clone() for layer in layers]
    started.run_networks(a)
    merged, with_it = started.fingerprint(), [layer.weight.clone() for layer in layers]
    with torch.no_grad():
        for layer, before, after in zip(layers, without, with_it):
            layer.weight.copy_(before)
            layer.weight.copy_(after)
    started.run_networks(a)
    assert started.fingerprint() == merged
    started.run_networks(b)
    started.run_networks()
    assert started.fingerprint() == bits
    started.run_networks(a)
    for layer, before in zip(layers, without):
        layer.weight = Parameter(before.clone(), requires_grad=False)
    started.run_networks(b)
    started.run_networks()
    assert started.fingerprint() == bits


def test_an_interrupted_write_is_not_taken_for_that_of_another(newest, nets, monkeypatch):
    """And what others load after it is."""
    newest.checkpoint()
    newest.start(**ON)
    a, b = nets.make("a"), nets.make("b")
    newest.run_networks(a)
    broken = break_off(newest, monkeypatch, b)
    newest.run_networks(b)
    nets.assert_merged(b)
    assert break_off(newest, monkeypatch, a) == broken
    base = write(newest, broken, load)
    newest.run_networks(a)
    assert_acts(newest, nets, broken, base, a)


def break_off(host, monkeypatch, net):
    """Let bringing a network in break off after it was packed into a layer; the name of that layer."""
    store = QuantWeight.store_

    def breaking(*args):
        store(*args)
        raise MemoryError

    with monkeypatch.context() as failing:
        failing.setattr(QuantWeight, "store_", breaking)
        with pytest.raises(MemoryError):
            host.run_networks(net)
    return next(name for name in IN_8_BITS if not host.layers[name].fp8_networks.is_whole)


def test_a_file_that_was_trusted_is_not_compared_again(newest, nets, monkeypatch):
    """While it is held, and the layer is as it was: comparing waits for the device."""
    newest.checkpoint()
    newest.start(**ON)
    a, b = nets.make("a", IN_8_BITS), nets.make("b", IN_8_BITS)
    newest.run_networks(a)
    monkeypatch.setattr(QuantWeight, "same_bits", lambda *_: pytest.fail("compared"))
    for used in ([b], [], [a], []):
        newest.run_networks(*used)
        nets.assert_merged(*used, layers=IN_8_BITS)


def test_asking_costs_nothing_while_nothing_changes(newest, nets, monkeypatch):
    newest.checkpoint()
    newest.start(**ON)
    a = nets.make("a", bias=True)
    newest.run_networks(a)
    monkeypatch.setattr(newest.marks, "_sums", lambda _: pytest.fail("values looked at"))
    newest.run_networks(a)
