"""Memory and files that are let go: old weights, former models, refiners, models that wait or were unloaded."""

from __future__ import annotations

import gc
import itertools
import weakref
from pathlib import Path

import pytest
import torch
from helpers import all_tensors, plain_tensors
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lib_fp8 import QuantWeight, qweight
from lib_fp8.source import CheckpointFile
from webui.card import CARD, Card
from webui.nets import CLIP, KEPT, LINEAR_AND_CONV, ON, TO_Q
from webui.test_lora_sources import live_bytes
from webui.test_moving import on_card

# The card is called "meta", of which torch believes that nothing can be loaded into it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of whatever lives, when all of it is looked at
]
WAYS = ("Merge from checkpoint file", "Merge from copy in RAM", "Add at run time")
OFF = {"fp8_storage": "Disable"}


def open_files(host):
    """Checkpoints of which something is held: by the extension, and, where that can be seen, by the whole process."""
    gc.collect()
    files = [thing for thing in gc.get_objects() if type(thing) is CheckpointFile and thing.is_open]
    held = [file.path.name for file in files if file.path.parent == host.folder]
    maps = Path("/proc/self/maps")
    mapped = maps.read_text().splitlines() if maps.exists() else []
    return held + [line for line in mapped if str(host.folder) in line]


class TestAgainAndAgain:
    """What is held after two rounds is held after twelve."""

    @pytest.fixture(params=["same kind", "other kind"])
    def two(self, host, request):
        a = host.checkpoint("a")
        return a, host.checkpoint("b", kind="sd1" if request.param == "same kind" else "sdxl", seed=2)

    def assert_constant(self, host, turn):
        for _ in range(2):
            turn()
        before = live_bytes()
        for _ in range(10):
            turn()
        assert live_bytes() <= before
        assert open_files(host) == []

    @pytest.mark.parametrize("limit", [1, 2])
    def test_checkpoints_and_networks(self, host, two, nets, limit):
        a, b = two
        host.start(sd_model_checkpoint=a.title, sd_checkpoints_limit=limit, **ON)
        net = nets.make("n", [TO_Q, KEPT], bias=True)
        ways = itertools.cycle(WAYS)

        def turn():
            host.set(fp8_lora=next(ways))
            for info in (b, a):
                host.switch_to(info)
                for used in ([net], []):
                    host.networks.loaded_networks[:] = used
                    host.job()
            host.set(fp8_lora=WAYS[0])

        self.assert_constant(host, turn)

    @pytest.mark.parametrize("limit", [1, 2])
    def test_a_refiner_in_each_picture(self, host, two, limit, monkeypatch):
        """It takes over in the middle of sampling; the next picture begins with the chosen checkpoint."""
        a, b = two
        host.start(sd_model_checkpoint=a.title, sd_checkpoints_limit=limit, **ON)
        models, bits = [], {}
        setup_conds = host.processing.StableDiffusionProcessing.setup_conds

        def setup_twice(p):
            setup_conds(p)
            bits.setdefault("a", set()).add(str(host.fingerprint()))
            with host.sd_models.SkipWritingToConfig():
                models.append(host.sd_models.reload_model_weights(info=b).sd_checkpoint_info)
            setup_conds(p)
            bits.setdefault("b", set()).add(str(host.fingerprint()))

        monkeypatch.setattr(host.processing.StableDiffusionProcessing, "setup_conds", setup_twice)
        self.assert_constant(host, host.job)
        assert models == [b] * 12
        assert host.opts.sd_model_checkpoint == a.title
        assert [len(seen) for seen in bits.values()] == [1, 1]
        host.assert_packed("b", host.format_in_use())

    def test_settings(self, host, two):
        a, _ = two
        host.start(sd_model_checkpoint=a.title, **ON)
        changes = (OFF, ON, {"fp8_keep_layers": "to_q"}, {"fp8_lora": WAYS[1]}, {"fp8_lora": WAYS[0]})

        def turn():
            for change in (*changes, {"fp8_keep_layers": ""}):
                host.set(**change)

        self.assert_constant(host, turn)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", ["on", "off", "other layers", "another checkpoint", "another kind"])
def test_old_weights_are_dead(newest, nets, way, change):
    """Of the layers that are in 8 bits before or after, networks or not."""
    newest.checkpoint("a")
    others = {"another checkpoint": newest.checkpoint("b", seed=2), "another kind": newest.checkpoint("c", kind="sdxl")}
    newest.start(fp8_lora=way, **ON)
    layers = newest.quantized()
    if change == "on":
        newest.set(**OFF)
    newest.networks.loaded_networks[:] = [nets.make("n")] if change != "on" else []
    newest.job()
    newest.networks.loaded_networks.clear()
    tensors = {name.replace("wrapped.", ""): tensor for name, tensor in all_tensors(newest.model).items()}
    weights = [tensors[f"{name}.weight"] for name in layers]
    objects = [weakref.ref(weight) for weight in weights]
    storages = [StorageWeakRef(inner.untyped_storage()) for inner in plain_tensors(weights)]
    assert len(storages) >= len(objects) == 8
    del tensors, weights
    if change in others:
        newest.switch_to(others[change])
    else:
        newest.set(**{"on": ON, "off": OFF, "other layers": {"fp8_keep_layers": "none of them"}}[change])
    gc.collect()
    assert [ref() for ref in objects if ref() is not None] == []
    assert all(storage.expired() for storage in storages)


def test_copies_go_when_another_way_is_chosen(newest):
    newest.checkpoint()
    newest.start(**ON)
    before = live_bytes()
    newest.set(fp8_lora="Merge from copy in RAM")
    weights = [weight for weight in newest.model.parameters() if isinstance(weight, QuantWeight)]
    assert live_bytes() - before == sum(2 * weight.numel() for weight in weights)
    newest.set(fp8_lora="Add at run time")
    assert live_bytes() <= before


class TestUnloading:
    """The button of the settings page, and the routes unload-checkpoint and reload-checkpoint."""

    @pytest.fixture
    def card(self):
        with Card() as card:
            yield card

    def reload(self, host):
        if host.minor < 8:  # what the route calls; the WebUI leaves wrapping and moving undone
            host.sd_models.reload_model_weights()
            host.sd_hijack.model_hijack.hijack(host.model)
        host.sd_models.send_model_to_device(host.model)

    @pytest.mark.parametrize("way", WAYS)
    def test_the_card_is_empty_then(self, sd1, nets, card, way):
        """Also of what networks brought; afterwards all is as before."""
        sd1.set(fp8_lora=way)
        on_card(sd1)
        bits = sd1.fingerprint()
        sd1.networks.loaded_networks[:] = [nets.make("n", bias=True)]
        picture = sd1.job("a").pictures[0].cpu()
        assert card.used > 0
        sd1.sd_models.unload_model_weights()
        sd1.processing.StableDiffusionProcessing.cached_c[:] = [None, None]
        gc.collect()
        assert card.used == 0
        self.reload(sd1)
        assert torch.equal(sd1.job("a").pictures[0].cpu(), picture)
        sd1.networks.loaded_networks.clear()
        sd1.job("a")
        assert sd1.fingerprint() == bits
        assert open_files(sd1) == []

    def test_settings_that_change_meanwhile(self, host):
        host.checkpoint()
        host.start(**ON)
        host.sd_models.unload_model_weights()
        host.panel.status_html()
        host.set(fp8_keep_layers="to_q")
        if host.minor < 8:  # its own code for taking the wrapping off bears with a model that has none
            host.sd_hijack.model_hijack.hijack(host.sd_models.model_data.loaded_sd_models[0])
            host.sd_models.reload_model_weights()
        assert not any(name.endswith("to_q") for name in host.quantized())
        host.assert_packed("a", host.format_in_use())
        assert host.job().pictures


class Work:
    """Counts what must not be done without need."""

    def __init__(self, host, monkeypatch):
        self.host, self.calls = host, []
        for owner, name in ((nn.Module, "load_state_dict"), (qweight, "pack")):
            monkeypatch.setattr(owner, name, self.counting(name, getattr(owner, name)))
        self.reads = len(host.sd_models.files_read)

    def counting(self, name, original):
        def counted(*args, **kwargs):
            self.calls.append(name)
            return original(*args, **kwargs)

        return counted

    def assert_none(self):
        assert self.calls == []
        assert len(self.host.sd_models.files_read) == self.reads


class TestTwoThatAreKept:
    @pytest.fixture
    def two(self, host):
        a, b = host.checkpoint("a"), host.checkpoint("b", kind="sdxl", seed=2)
        host.start(sd_model_checkpoint=a.title, sd_checkpoints_limit=2, fp8_clip_l=True)
        host.switch_to(b)
        return a, b

    @pytest.mark.parametrize("switch", ["Enable for SDXL", "Enable"])
    def test_only_one_is_on_the_card(self, host, two, switch, monkeypatch):
        """With "Only keep one model on device": they come and go in the storage that is meant for each."""
        a, b = two
        host.set(fp8_storage=switch)
        bits = {}
        for info in (a, b):
            host.switch_to(info)
            bits[info] = host.fingerprint()
        reuse, sd_models = host.sd_models._reuse_loaded, host.sd_models

        def one_on_the_card(sd_model, checkpoint_info):
            sd_models.send_model_to_cpu(sd_model)
            found = reuse(sd_model, checkpoint_info)
            sd_models.send_model_to_device(found)
            return found

        monkeypatch.setattr(sd_models, "_reuse_loaded", one_on_the_card)
        with Card() as card:
            on_card(host)
            work = Work(host, monkeypatch)
            for info in (a, b) * 3:
                model = host.switch_to(info)
                waiting = next(other for other in sd_models.model_data.loaded_sd_models if other is not model)
                assert model.sd_checkpoint_info is info
                assert {tensor.device for tensor in model.parameters()} == {CARD}
                assert {tensor.device.type for tensor in waiting.parameters()} == {"cpu"}
                held = plain_tensors([*model.parameters(), *model.buffers()])
                assert card.used == sum(tensor.numel() * tensor.element_size() for tensor in held)
                host.job()
                host.processing.StableDiffusionProcessing.cached_c[:] = [None, None]
                assert host.fingerprint() == bits[info]
                assert bool(host.quantized()) == (switch == "Enable" or info is b)
            work.assert_none()

    @pytest.mark.parametrize("way", WAYS[1:])
    def test_another_way_for_networks_while_one_waits(self, host, nets, way):
        """It waits with networks in it, and comes back without: then they act in the way that was chosen."""
        a, b = host.checkpoint("a"), host.checkpoint("b", seed=2)
        host.start(sd_model_checkpoint=a.title, sd_checkpoints_limit=2, **ON)
        bits, net = host.fingerprint(), nets.make("n", [TO_Q, CLIP], bias=True)
        host.networks.loaded_networks[:] = [net]
        host.job("a")
        host.switch_to(b)
        host.networks.loaded_networks.clear()
        host.set(fp8_lora=way)
        host.switch_to(a)
        assert host.fingerprint() == bits
        host.run_networks(net)
        assert set(host.panel.status()["lora_layers"]) == {"copy in RAM" if way == WAYS[1] else "run time"}
        host.run_networks()
        assert host.fingerprint() == bits


def test_copies_are_trusted_when_the_file_is_let_go(sd1, nets):
    """Layers that are kept have no copies: their originals come from the file, and it is closed once they need none."""
    sd1.set(fp8_lora="Merge from copy in RAM")
    bits = sd1.fingerprint()
    for used in ([nets.make("a", LINEAR_AND_CONV)], [nets.make("b", [TO_Q, CLIP])], []):
        sd1.networks.loaded_networks[:] = used
        sd1.job("a" * len(used))
    assert sd1.fingerprint() == bits
