"""Weights that go to and fro between CPU and card (--medvram, --lowvram, the unload button): in 8 bits all the way."""

from __future__ import annotations

import pytest
import torch
from helpers import EVERYTHING, FORMAT_BY_DEFAULT, FORMAT_NAMES, OpWatch

from lib_fp8 import QuantWeight, get_format
from webui.card import CARD, Card
from webui.nets import CLIP, IN_8_BITS, ON, TO_OUT, TO_Q
from webui.test_lora_families import Library

# The card is called "meta", of which torch believes that nothing can be loaded into it.
pytestmark = pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")
FLAGS = ("medvram", "lowvram")
WAYS = ("Merge from checkpoint file", "Merge from copy in RAM", "Add at run time")


@pytest.fixture
def card():
    """Is there from here on: asked for after the fixture that starts the WebUI, which builds models on torch's meta."""
    with Card() as card:
        yield card


def on_card(host, flag=None):
    """Give a started WebUI the card; with a flag, its models wait on the CPU."""
    lowvram, devices, sd_models, tokens = host.lowvram, host.devices, host.sd_models, host.tiny_models._tokens
    if flag is not None:
        setattr(host.shared.cmd_opts, flag, True)

    def send_model_to_cpu(m):
        lowvram.send_everything_to_cpu() if m.lowvram else m.to(devices.cpu)

    def send_model_to_device(m):
        lowvram.apply(m)
        if not m.lowvram:
            m.to(devices.device)

    sd_models.send_model_to_cpu, sd_models.send_model_to_device = send_model_to_cpu, send_model_to_device
    host.tiny_models._tokens = lambda texts, device: tokens(texts, "cpu").to(device)
    devices.device = CARD
    devices.cond_cast_unet = lambda x: x.to(CARD, torch.float16)
    send_model_to_device(host.model)
    return host


@pytest.fixture
def started(newest):
    """An SD1 model in 8 bits, UNet and text encoder."""
    newest.checkpoint()
    return newest.start(**ON)


@pytest.fixture(params=FLAGS)
def moving(started, card, request):
    """The same with parts that wait on the CPU."""
    return on_card(started, request.param)


def picture(host, prompt="a cat"):
    return host.job(prompt).pictures[0].cpu()


def weights(host):
    """The weights in 8 bits; other objects after each move."""
    return [weight for weight in host.model.parameters() if isinstance(weight, QuantWeight)]


class TestBytes:
    """Of a UNet as wide as the inner blocks of SD 1.5, in which weights weigh more than what is beside them."""

    @pytest.fixture
    def wide(self, newest, monkeypatch):
        monkeypatch.setattr(newest.tiny_models, "WIDTH", 640)
        monkeypatch.setattr(newest.tiny_models, "CONTEXT", 768)
        newest.checkpoint(seed=640)  # the stand-in makes one file for each seed
        return newest.start()

    @pytest.fixture
    def moved(self, newest, wide, card):
        def moved(flag, **options):
            """Bytes to the CPU and to the card, for a picture with another prompt than the last one."""
            newest.set(**options)
            newest.job("a")
            card.crossed.clear()
            if flag == "unload":
                newest.sd_models.unload_model_weights()
                newest.sd_models.send_model_to_device(newest.model)
            else:
                newest.job("ab")
            return [sum(size for size, to in card.crossed if to == device) for device in ("cpu", "meta")]

        return moved

    @pytest.mark.parametrize("flag", [*FLAGS, "unload"])
    def test_half_as_many_as_in_16_bits(self, newest, moved, flag):
        on_card(newest, flag)
        in_16_bits = moved(flag)
        assert min(in_16_bits) > 2 * 640 * 640 * 9  # weights, in each direction
        for name in FORMAT_NAMES:
            if get_format(name).problem("cpu") is None:
                in_8_bits = moved(flag, fp8_format=name, **ON)
                shares = [now / before for now, before in zip(in_8_bits, in_16_bits)]
                print(f"--{flag}, {name}: {shares[0]:.4f} to the CPU, {shares[1]:.4f} to the card")
                assert max(shares) <= 0.51


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_unpacked_on_the_way(moving, nets, way, monkeypatch):
    moving.set(fp8_lora=way, fp8_keep_layers=" ".join(EVERYTHING))
    shapes, moves, unpacked = {weight.shape for weight in weights(moving)}, [], []
    move = torch.nn.Module.to

    def see(func, inputs, outputs):
        unpacked.extend(out for out in outputs if out.shape in shapes and out.dtype in (torch.float16, torch.float32))

    def watched(module, *args, **kwargs):
        with OpWatch(see):
            moves.append(module)
            return move(module, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "to", watched)
    moving.networks.loaded_networks[:] = [nets.make("a")]
    for prompt in ("", "a", "ab"):
        moving.job(prompt)
    assert len(moves) > 6
    assert unpacked == []


def test_all_but_one_part_waits_on_the_cpu_in_8_bits(moving):
    bits, count = moving.fingerprint(), len(weights(moving))
    for prompt in ("", "a", "ab"):
        moving.job(prompt)
        assert moving.fingerprint() == bits
        there = {id(weight) for weight in moving.lowvram.module_in_gpu.parameters()}
        assert len(weights(moving)) == count
        assert {id(weight) for weight in weights(moving) if weight.device == CARD} <= there
    moving.lowvram.send_everything_to_cpu()
    assert {weight.device.type for weight in weights(moving)} == {"cpu"}
    assert moving.fingerprint() == bits


def assert_as_without_moving(host, flag, walk):
    """Bits and pictures of a model that is on the card, and of the same model after it began to move."""
    staying = list(walk())
    assert {tensor.device for tensor in host.model.parameters()} == {CARD}
    host.sd_models.send_model_to_cpu(host.model)
    on_card(host, flag)
    assert "cpu" in {tensor.device.type for tensor in host.model.parameters()}
    for (bits, seen), (bits_moving, seen_moving) in zip(staying, walk()):
        assert bits == bits_moving
        assert torch.equal(seen, seen_moving)


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("way", WAYS)
def test_networks(started, card, nets, flag, way):
    """From none to one, to two, to another one, to none, in the UNet and in the text encoder."""
    started.set(fp8_lora=way)
    a, b = nets.make("a", bias=True, multiplier=8), Library(started).make("b", "lora", IN_8_BITS, size=0.5)

    def walk():
        for prompt, used in zip(("", "a", "ab", "abc", "abcd"), ([], [a], [b, a], [b], [])):
            started.networks.loaded_networks[:] = used
            yield None, picture(started, prompt)

    assert_as_without_moving(on_card(started), flag, walk)


@pytest.mark.parametrize("flag", FLAGS)
def test_settings(sd1, card, flag):
    """Loaded anew and converted in place, with parts here and there."""
    changes = ({"fp8_format": "int8"}, {"fp8_storage": "Disable"}, ON, {"fp8_clip_l": False}, {"fp8_clip_l": True})

    def walk():
        sd1.set(fp8_format=FORMAT_BY_DEFAULT)
        for change in changes:
            sd1.set(**change)
            bits = sd1.fingerprint()
            yield bits, picture(sd1, "a")
            yield bits, picture(sd1, "ab")
            assert sd1.fingerprint() == bits

    assert_as_without_moving(on_card(sd1), flag, walk)


def test_branches_move_along(moving):
    """What is added at run time is where the weight is."""
    moving.set(fp8_lora="Add at run time")
    library, names = Library(moving), (TO_Q, TO_OUT, CLIP)
    moving.networks.loaded_networks[:] = [library.make(name, "lora", names) for name in "ab"]

    def places():
        branches = [(weight, branch) for weight in weights(moving) for branch in weight.branches]
        assert len(branches) == 2 * len(names)
        assert all(weight.device == branch.up.device == branch.down.device for weight, branch in branches)
        return {weight.device.type for weight, _ in branches}

    moving.job()
    assert places() == {"cpu", "meta"}
    moving.lowvram.send_everything_to_cpu()
    assert places() == {"cpu"}
    moving.job("ab")
    assert places() == {"cpu", "meta"}
