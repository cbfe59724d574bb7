"""Where the originals of merged networks come from, that nothing else is kept, and what happens when they are gone."""

from __future__ import annotations

import gc
import os

import pytest
import safetensors.torch
import torch
from helpers import FORMAT_BY_DEFAULT, decoded

from lib_fp8 import QuantWeight
from webui.nets import CLIP, IN_8_BITS, INT8_ANEW, KEPT, LINEAR_AND_CONV, ON, TO_OUT, TO_Q, fine, key_of

FILE, COPY, RUN_TIME = "checkpoint file", "copy in RAM", "run time"
FROM_COPY = "Merge from copy in RAM"


def layers(host):
    """What the panel says: 8-bit layers with networks, by source."""
    return host.panel.status()["lora_layers"]


def decoded_base(host):
    """What is in 8 bits now, as the base; copied before anything is merged."""
    weights = {name: host.layers[name].weight for name in IN_8_BITS}
    return {name: decoded(weight, torch.float32) for name, weight in weights.items()}.__getitem__


def assert_added(host, nets, *networks, names=IN_8_BITS, base):
    """The layers act as their 8-bit values plus the networks, in float16, and hold their old bits."""
    for name in names:
        exact = nets.expected(name, networks, base(name))
        values = host.layers[name].weight.dequantize()
        torch.testing.assert_close(values.double(), exact, rtol=2**-11, atol=2**-14)


def test_the_checkpoint_file(sd1, nets):
    a = nets.make("a", IN_8_BITS)
    sd1.run_networks(a)
    nets.assert_merged(a, layers=IN_8_BITS)
    assert layers(sd1) == {FILE: 4}


def test_names_of_an_older_kind(host, nets):
    """The WebUI renames tensors of some checkpoints while it reads them."""
    info = host.checkpoint()
    values = {name: value.clone() for name, value in host.values().items()}  # the file they may lie in is rewritten
    old = {
        name.replace("transformer.text_model.encoder", "transformer.encoder"): value for name, value in values.items()
    }
    assert old.keys() != values.keys()
    safetensors.torch.save_file(old, info.filename)
    host.start(**ON)
    a = nets.make("a", [CLIP])
    host.run_networks(a)
    assert layers(host) == {FILE: 1}
    nets.assert_merged(a, layers=[CLIP], base=lambda name: values[key_of(name, host)].half())


@pytest.mark.parametrize("change", ["gone", "replaced", "touched"])
def test_a_file_that_changed_is_not_the_original(sd1, nets, change):
    base, bits, a = decoded_base(sd1), sd1.fingerprint(), nets.make("a", IN_8_BITS)
    path = sd1.folder / "a.safetensors"
    if change == "gone":
        path.unlink()
    elif change == "replaced":
        sd1.checkpoint("a", seed=9)
    else:
        path.write_bytes(path.read_bytes()[:-1])
    sd1.run_networks(a)
    assert_added(sd1, nets, a, base=base)
    assert layers(sd1) == {RUN_TIME: 4}
    assert "a.safetensors has changed on disk or cannot be read" in sd1.panel.status()["lora_problem"]
    assert "LoRA added at run time in 4 layers, because a.safetensors has changed" in sd1.panel.status_html()
    sd1.run_networks()
    assert sd1.fingerprint() == bits


def test_another_file_of_the_same_size_and_time(sd1, nets):
    """Copied with its times, or a link that points elsewhere now; after the file was held once, and let go."""
    sd1.networks.loaded_networks[:] = [nets.make("a")]
    sd1.job()
    sd1.run_networks()
    sd1.job()
    assert not is_open(sd1)
    bits, path = sd1.fingerprint(), sd1.folder / "a.safetensors"
    stat = path.stat()
    path.rename(sd1.folder / "old.safetensors")
    sd1.checkpoint("a", seed=9)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    sd1.run_networks(nets.make("a", IN_8_BITS))
    assert layers(sd1) == {RUN_TIME: 4}
    sd1.run_networks()
    assert sd1.fingerprint() == bits


def test_a_file_that_was_replaced_before_the_conversion(host, nets):
    """The model in memory is converted in place; the file is another one by then."""
    host.checkpoint()
    host.start()
    host.checkpoint("a", seed=9)
    host.set(**ON)
    base, a = decoded_base(host), nets.make("a", IN_8_BITS)
    assert host.panel.status()["lora_problem"] is None, "nobody has asked for an original yet"
    host.run_networks(a)
    assert_added(host, nets, a, base=base)
    assert layers(host) == {RUN_TIME: 4}
    problem = "a.safetensors does not hold the weights of 4 layers as they are in memory"
    assert host.panel.status()["lora_problem"] == problem
    assert f"LoRA added at run time in 4 layers, because {problem}." in host.panel.status_html()
    host.set(**INT8_ANEW)
    host.run_networks(a)
    assert host.panel.status()["lora_problem"] is None, "the weights are the file's now"


def test_weights_that_another_extension_merged_in_memory(host, nets):
    """Trusted layer by layer: only the layers that were changed lose their originals."""
    host.checkpoint()
    host.start()
    with torch.no_grad():
        host.layers[TO_Q].weight.mul_(1.5)
        host.layers[KEPT].weight.mul_(1.5)
    host.set(**ON)
    base, bits, a = decoded_base(host), host.fingerprint(), nets.make("a")
    kept = host.layers[KEPT].weight.clone()
    host.run_networks(a)
    assert_added(host, nets, a, names=[TO_Q], base=base)
    nets.assert_merged(a, layers=[name for name in IN_8_BITS if name != TO_Q])
    nets.assert_merged(a, layers=[KEPT], base=lambda _: kept)
    assert layers(host) == {FILE: 3, RUN_TIME: 1}
    host.run_networks()
    assert host.fingerprint() == bits


def test_a_float32_file(host, nets):
    """The WebUI rounds to float16 while loading, and so must the original be."""
    host.checkpoint(dtype=torch.float32)
    host.start(**ON)
    a = nets.make("a", IN_8_BITS)
    host.run_networks(a)
    nets.assert_merged(a, layers=IN_8_BITS)
    assert layers(host) == {FILE: 4}


def is_open(host):
    return host.storage.record_of(host.model).originals.file.is_open


def test_the_file_is_held_while_networks_are_merged(sd1, nets):
    """So that they can be taken out; otherwise it is let go: Windows lets nobody replace or delete a mapped file."""
    sd1.networks.loaded_networks[:] = [nets.make("a", [KEPT])]
    sd1.job()
    assert is_open(sd1)
    sd1.networks.loaded_networks.clear()
    sd1.job()
    assert not is_open(sd1)


def test_a_job_without_networks_takes_them_out_everywhere(sd1, nets):
    """Also of a text encoder that does not run, since the WebUI remembers what it gave for the prompt."""
    bits = sd1.fingerprint()
    sd1.job()
    sd1.run_networks(nets.make("a"))
    sd1.networks.loaded_networks.clear()
    p = sd1.job()
    assert p.encoded == 0
    assert sd1.fingerprint() == bits
    assert not is_open(sd1)


def test_the_file_of_a_former_model_is_let_go(newest, nets):
    """Though the model itself may wait for Python's collector."""
    newest.checkpoint()
    newest.start(**ON)
    newest.run_networks(nets.make("a"))
    former, originals = newest.model, newest.storage.record_of(newest.model).originals
    assert originals.file.is_open
    newest.switch_to(newest.checkpoint("b", kind="sd2"))
    assert newest.model is not former
    newest.job()
    assert not originals.file.is_open


def test_the_file_is_let_go_when_the_extension_is_switched_off(sd1, nets):
    sd1.run_networks(nets.make("a"))
    file = sd1.storage.record_of(sd1.model).originals.file
    sd1.reload_ui()
    assert file.is_open, "networks stay merged"
    sd1.reload_ui(extension=False)
    assert not file.is_open


@pytest.mark.skipif(os.name == "nt", reason="Windows lets nobody delete a file that is held")
def test_a_file_that_is_deleted_or_replaced_while_networks_are_merged(sd1, nets):
    """It is still there for whoever holds it."""
    a, b, bits = nets.make("a", bias=True), nets.make("b"), sd1.fingerprint()
    sd1.run_networks(a)
    path = sd1.folder / "a.safetensors"
    content = path.read_bytes()
    path.unlink()
    sd1.checkpoint("a", seed=9)
    sd1.run_networks(b)
    path.write_bytes(content)
    nets.assert_merged(b)
    sd1.run_networks()
    assert sd1.fingerprint() == bits


class TestAnOriginalThatIsGone:
    """The file was written to while networks were merged: they cannot be taken out by themselves."""

    @pytest.fixture
    def broken(self, sd1, nets):
        sd1.networks.loaded_networks[:] = [nets.make("a")]
        sd1.job()
        path = sd1.folder / "a.safetensors"
        with path.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\1")
        return sd1

    def test_it_is_said_and_the_next_picture_is_right(self, broken, nets):
        broken.networks.loaded_networks.clear()
        with pytest.raises(RuntimeError, match=r"a.safetensors has changed on disk .* is then loaded anew"):
            broken.job()
        broken.job()
        assert layers(broken) == {}
        broken.assert_packed("a", FORMAT_BY_DEFAULT)
        b = nets.make("b")
        broken.run_networks(b)
        nets.assert_merged(b)

    def test_nothing_happens_while_the_same_networks_are_used(self, broken):
        assert broken.job().pictures

    def test_switching_off_loads_what_is_there(self, broken):
        assert broken.set(fp8_storage="Disable") == [True]
        values = broken.values()
        for name in LINEAR_AND_CONV:
            layer = broken.layers[name]
            key = next(n for n, module in broken.model.named_modules() if module is layer)
            assert torch.equal(layer.weight, values[key.replace("wrapped.", "") + ".weight"].half())

    def test_a_file_that_cannot_be_read_at_all(self, broken):
        """The error says so, as often as it is true."""
        broken.networks.loaded_networks.clear()
        path = broken.folder / "a.safetensors"
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(RuntimeError, match="has changed"):
            broken.job()
        with pytest.raises(RuntimeError, match=r"a\.safetensors is missing"):
            broken.job()
        path.write_bytes(content)
        assert broken.job().pictures
        assert layers(broken) == {}


class TestACopyInRam:
    def test_from_the_start(self, host, nets):
        host.checkpoint()
        host.start(fp8_lora=FROM_COPY, **ON)
        a, bits = nets.make("a", IN_8_BITS), host.fingerprint()
        (host.folder / "a.safetensors").rename(host.folder / "hidden.safetensors")
        host.run_networks(a)
        (host.folder / "hidden.safetensors").rename(host.folder / "a.safetensors")
        nets.assert_merged(a, layers=IN_8_BITS)
        assert layers(host) == {COPY: 4}
        host.run_networks()
        assert host.fingerprint() == bits

    @pytest.mark.parametrize("later", ["copies", "8 bits"])
    def test_chosen_later(self, host, nets, later):
        host.checkpoint()
        if later == "copies":
            host.start(**ON)
            host.run_networks(nets.make("b"))
            host.set(fp8_lora=FROM_COPY)
        else:
            host.start(fp8_lora=FROM_COPY)
            host.set(**ON)
        bits, a = host.fingerprint(), nets.make("a", IN_8_BITS)
        host.run_networks(a)
        nets.assert_merged(a, layers=IN_8_BITS)
        assert layers(host) == {COPY: 4}
        host.set(fp8_lora="Merge from checkpoint file")
        assert host.fingerprint() == bits
        host.run_networks(a)
        nets.assert_merged(a, layers=IN_8_BITS)
        assert layers(host) == {FILE: 4}

    def test_copies_are_good_after_the_file_was_let_go(self, host, nets):
        """The file is opened for layers that stay in full precision; those have no copy."""
        host.checkpoint()
        host.start(fp8_lora=FROM_COPY, **ON)
        a, kept, bits = nets.make("a", IN_8_BITS), nets.make("k", [KEPT]), host.fingerprint()
        for networks in ([a, kept], [a], []):
            host.run_networks(*networks)
            host.lora.after_job(host.following.converted_models(), [])
        assert host.fingerprint() == bits

    def test_a_text_encoder_added_later(self, host, nets):
        host.checkpoint()
        host.start(fp8_lora=FROM_COPY, fp8_storage="Enable")
        host.set(fp8_clip_l=True)
        host.run_networks(nets.make("a", IN_8_BITS))
        assert layers(host) == {COPY: 4}


def nbytes(tensor):
    return tensor.numel() * tensor.element_size()


def live_bytes():
    """Of all plain tensors alive, by storage."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not isinstance(thing, QuantWeight) and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("at_run_time", [False, True], ids=["merged", "at run time"])
def test_nothing_is_kept_but_the_networks(newest, nets, at_run_time):
    """At most one layer more than without."""
    newest.checkpoint()
    newest.start(fp8_lora="Add at run time" if at_run_time else "Merge from checkpoint file", **ON)
    a, b = nets.make("a", factors=fine), nets.make("b", factors=fine)
    newest.run_networks()
    before = live_bytes()
    newest.run_networks(a)
    newest.run_networks(a, b)
    assert layers(newest) == {RUN_TIME if at_run_time else FILE: 4}
    largest = max(newest.layers[name].weight.numel() for name in LINEAR_AND_CONV)
    copies = nbytes(newest.layers[KEPT].weight) if at_run_time else 0
    assert live_bytes() - before <= 2 * largest + copies
    newest.run_networks()
    assert live_bytes() <= before


def test_a_bias_is_copied_only_if_it_is_changed(sd1, nets):
    plain, biased = nets.make("a", [TO_OUT]), nets.make("b", [TO_OUT], bias=True)
    sd1.run_networks()
    before = live_bytes()
    sd1.run_networks(plain)
    assert live_bytes() == before
    sd1.run_networks(biased)
    assert live_bytes() == before + nbytes(sd1.layers[TO_OUT].bias)


def test_the_console_says_it_once(sd1, nets, capsys):
    sd1.networks.loaded_networks[:] = [nets.make("a", IN_8_BITS)]
    sd1.job()
    sd1.job()
    line = "FP8 weight: LoRA merged in 4 layers (originals read from the checkpoint file)"
    assert capsys.readouterr().out.count(line) == 1
    assert "LoRA merged in 4 layers (originals read from the checkpoint file)." in sd1.panel.status_html()
