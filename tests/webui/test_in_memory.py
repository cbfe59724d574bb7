"""Models that other extensions make or change in memory: no file takes their place, whatever changes."""

from __future__ import annotations

import copy
import itertools

import pytest
import safetensors.torch
import torch
from helpers import FORMAT_BY_DEFAULT, FORMAT_NAMES, decoded, failing_pack, kernel_problem, need_format

from lib_fp8 import QuantWeight, qweight
from webui.nets import BLOCK, INT8_ANEW, ON, TO_OUT, TO_Q, key_of

OFF = {"fp8_storage": "Disable"}
ROUNDING = {"float8_e4m3fn": 0.030, "int8": 0.011}
"""The largest relative error of a layer that is rounded once."""
TWICE = 1.6
"""How much larger it may be in layers that were rounded to two formats, or to one twice."""
NOTE = "made or changed in memory"
SHARE = 0.4


def mixed(host):
    """What a merger makes of two checkpoints, computed in float64."""
    a, b = host.values("a"), host.values("b")
    return {name: ((1 - SHARE) * a[name].double() + SHARE * b[name].double()).to(a[name].dtype) for name in a}


def named(host, info, name="mix"):
    """The checkpoint that a merger makes up: the file of one that there is, under another name."""
    info = copy.deepcopy(info)
    info.name = info.title = f"{name}.safetensors"
    host.sd_models.checkpoints_list[info.title] = host.sd_models.checkpoint_aliases[info.title] = info
    return info


def load_whole(host, values=None):
    """As supermerger does."""
    info = named(host, host.a)
    host.sd_models.model_data.__init__()
    host.sd_models.load_model(info, already_loaded_state_dict=dict(mixed(host) if values is None else values))


def load_whole_under_a_name_without_a_file(host):
    """As model-mixer does."""
    load_whole(host)
    host.model.sd_model_checkpoint = host.model.sd_checkpoint_info.filename = str(host.folder / "made up.safetensors")


def load_all_blocks(host):
    """As model-mixer does if it updates what is loaded."""
    load_blocks(host, "")
    host.model.sd_checkpoint_info = named(host, host.model.sd_checkpoint_info)
    host.opts.sd_model_checkpoint = host.model.sd_checkpoint_info.title
    host.model.sd_model_checkpoint = host.model.sd_checkpoint_info.filename = str(host.folder / "made up.safetensors")


def load_blocks(host, under):
    """Write into parts of the model that is loaded."""
    host.sd_models.send_model_to_cpu(host.model)
    host.sd_hijack.model_hijack.undo_hijack(host.model)
    values = mixed(host)
    for target in host.targets.find_targets(host.model):
        prefix = target.key_prefix + under
        part = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        if part and under:
            target.module.get_submodule(under.rstrip(".")).load_state_dict(part)
        elif part:
            target.module.load_state_dict(part)
    host.sd_hijack.model_hijack.hijack(host.model)


WAYS = (load_whole, load_whole_under_a_name_without_a_file, load_all_blocks)


@pytest.fixture(params=["sd1", "sdxl"])
def merging(host, request):
    """Two checkpoints, the first of which is loaded in full precision."""
    return begin(host, request.param)


def begin(host, kind="sd1", **saved):
    host.a, host.b = host.checkpoint("a", kind=kind), host.checkpoint("b", kind=kind, seed=2)
    return host.start(sd_model_checkpoint=host.a.title, **saved)


def weights(host):
    """The weights of all parts that may be in 8 bits, by their names in the file, as they count."""
    found = {}
    for target in host.targets.find_targets(host.model):
        for name, parameter in target.module.named_parameters():
            plain = decoded(parameter, torch.float64) if isinstance(parameter, QuantWeight) else parameter.double()
            found[target.key_prefix + name.replace("wrapped.", "")] = plain
    return found


def distance(one, other):
    return float((one - other).norm() / other.norm().clamp(min=1e-9))


def assert_mixed(host, bound, values=None):
    """Every weight is the merger's, within a rounding."""
    expected = mixed(host) if values is None else values
    found = weights(host)
    assert len(found) > 10
    for name, weight in found.items():
        assert distance(weight, expected[name].double()) <= bound, name


def assert_kept_plain(host):
    """What never was in 8 bits is the merger's bit by bit."""
    expected, in_8_bits = mixed(host), set(host.quantized())
    for name, weight in weights(host).items():
        if name.removesuffix(".weight") not in in_8_bits and not name.endswith("weight"):
            assert torch.equal(weight, expected[name].half().double()), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("on", [False, True], ids=["merged in full precision", "merged in 8 bits"])
class TestThroughAllChanges:
    def test_stays_what_it_is(self, merging, way, on):
        host, bound = merging, ROUNDING[FORMAT_BY_DEFAULT]
        if on:
            host.set(**ON)
        way(host)
        assert_mixed(host, bound if on else 1e-3)
        host.set(**ON)
        assert host.format_in_use() == FORMAT_BY_DEFAULT
        assert_mixed(host, bound)
        host.job(fp8_format="int8")
        assert_mixed(host, TWICE * bound)
        host.job()
        assert host.format_in_use() == FORMAT_BY_DEFAULT
        assert_mixed(host, TWICE * bound)
        host.job(**OFF)
        assert host.quantized() == []
        assert_mixed(host, TWICE * bound)
        host.job(fp8_keep_layers="to_q")
        host.job()
        assert_mixed(host, TWICE * bound)
        assert host.set(fp8_format="int8", fp8_clip_l=False) == [True, True]
        assert_mixed(host, TWICE * bound)
        assert host.set(**OFF) == [True]
        assert host.quantized() == []
        assert_mixed(host, TWICE * bound)
        assert_kept_plain(host)
        host.set(**ON)
        host.opts.fp8_storage = "Disable"  # the WebUI's own conversion is to stay out of it
        host.reload_ui(extension=False)
        assert host.quantized() == []
        assert_mixed(host, TWICE * bound)
        assert host.job().pictures

    def test_with_a_network_in_it(self, merging, nets, way, on):
        """It acts on the merger's weights, and goes out of them at each change."""
        host = merging
        if on:
            host.set(**ON)
        way(host)
        host.set(**ON)
        base = weights(host)
        a = nets.make("a", [BLOCK, TO_Q, TO_OUT])
        knows_halves = host.minor >= 8 or kernel_problem(torch.float16, "cpu") is None  # as the WebUI's own code needs
        back = {key: host.opts.get_default(key) for key in INT8_ANEW}
        for change in (INT8_ANEW, back, OFF, ON):
            host.run_networks(a)
            for layer in (BLOCK, TO_Q, TO_OUT):
                key, module = key_of(layer, host), a.modules[layer]
                delta = (module.up.double() @ module.down.double()).reshape(base[key].shape)
                now = host.layers[layer].weight
                if not isinstance(now, QuantWeight) and not knows_halves:
                    continue
                now = now.dequantize(torch.float32) if isinstance(now, QuantWeight) else now
                assert distance(now.double(), base[key] + delta) < 2 * ROUNDING[FORMAT_BY_DEFAULT]
            host.set(**change)
            assert_mixed(host, TWICE * ROUNDING[FORMAT_BY_DEFAULT])
        host.run_networks(a)
        host.run_networks()
        assert_mixed(host, TWICE * ROUNDING[FORMAT_BY_DEFAULT])


@pytest.mark.parametrize("on", [False, True], ids=["in full precision", "in 8 bits"])
class TestABlock:
    UNDER = "middle_block."

    def changed(self, host):
        return {name for name in host.values() if name.startswith(f"model.diffusion_model.{self.UNDER}")}

    def test_keeps_its_weights_and_the_others_come_back_from_the_file(self, merging, on):
        host = merging
        if on:
            host.set(**ON)
        load_blocks(host, self.UNDER)
        host.set(**ON)
        for change in ({"fp8_format": "int8"}, OFF):
            assert host.set(**change) == [True]
            expected = {**host.values(), **{name: mixed(host)[name] for name in self.changed(host)}}
            assert_mixed(host, TWICE * ROUNDING[FORMAT_BY_DEFAULT], expected)
        file, found = host.values(), weights(host)
        for name in found.keys() - self.changed(host):
            assert torch.equal(found[name], file[name].half().double()), name

    def test_is_not_lost_when_the_conversion_is_interrupted(self, merging, on, monkeypatch):
        host = merging
        if on:
            host.set(**ON)
        load_blocks(host, self.UNDER)
        expected = {**host.values(), **{name: mixed(host)[name] for name in self.changed(host)}}
        real, calls = qweight.pack, itertools.count()

        def pack(*args):
            if next(calls) == 3:
                raise KeyboardInterrupt
            return real(*args)

        with monkeypatch.context() as patched:
            patched.setattr(qweight, "pack", pack)
            with pytest.raises(KeyboardInterrupt):
                host.set(**ON, **INT8_ANEW)
        host.job()
        assert_mixed(host, TWICE * ROUNDING[FORMAT_BY_DEFAULT], expected)


class TestWhatIsSaid:
    @pytest.mark.parametrize("way", WAYS)
    def test_on_the_console_and_in_the_panel(self, newest, way, capsys):
        need_format(FORMAT_NAMES[0])  # or it is in int8 already
        host = begin(newest)
        host.set(**ON)
        assert host.panel.status()["note"] is None
        way(host)
        host.set(fp8_format="int8")
        said = capsys.readouterr().out
        assert NOTE in said
        assert "8 layers were decoded from 8 bits, since they have no originals" in said
        status = host.panel.status()
        assert status["problem"] is None
        assert NOTE in status["note"]
        assert "LoRA is added at run time" in host.panel.status_html()
        host.set(**OFF)
        assert "rounded to 8 bits" in host.panel.status_html()

    def test_of_a_model_from_a_file_nothing(self, newest, capsys):
        host = begin(newest, **ON)
        host.set(fp8_format="int8")
        host.set(**OFF)
        assert NOTE not in "".join(capsys.readouterr()) + host.panel.status_html()


class TestOriginalsThatThereAre:
    def test_copies_in_ram(self, merging):
        """They were taken from what the merger gave."""
        host = merging
        host.set(**{**ON, "fp8_lora": "Merge from copy in RAM"})
        load_whole(host)
        assert NOTE not in (host.panel.status()["note"] or "")
        host.set(fp8_format="int8")
        host.set(**OFF)
        for name, weight in weights(host).items():
            assert torch.equal(weight, mixed(host)[name].half().double()), name

    def test_a_state_dict_that_is_the_files_after_all(self, merging):
        host = merging
        plain = host.fingerprint()
        load_whole(host, host.values())
        host.set(**ON)
        host.set(fp8_format="int8")
        host.assert_packed("a", "int8")
        host.set(**OFF)
        assert host.fingerprint() == plain

    def test_the_cache_of_the_webui(self, merging):
        """It holds what the merger gave, except on 1.6, where loading empties it."""
        host = merging
        host.opts.sd_checkpoint_cache = 2
        host.set(**ON)
        load_whole(host)
        host.set(**OFF)
        bound = 0 if host.minor >= 8 else ROUNDING[FORMAT_BY_DEFAULT]
        assert_mixed(host, bound, {name: value.half() for name, value in mixed(host).items()})

    def test_a_weight_that_is_no_number_is_no_change(self, host):
        host.a = host.checkpoint()
        values = host.values()
        values["model.diffusion_model.time_embed.0.weight"][0, 0] = float("nan")
        safetensors.torch.save_file(values, host.a.filename)
        host.start(**ON)
        host.set(fp8_format="int8")
        host.assert_packed("a", "int8")
        assert host.panel.status()["note"] is None


class TestALoadThatBreaksOff:
    """Then nothing in memory is whole, and no file holds what was there."""

    @pytest.fixture(params=["8 bits", "full precision"])
    def broken(self, host, request):
        begin(host)
        host.set(**(ON if request.param == "8 bits" else OFF))
        load_whole(host)
        values = host.values("b")
        values["model.diffusion_model.middle_block.0.to_v.weight"] = torch.zeros(3, 3)
        good = (host.folder / "b.safetensors").read_bytes()
        safetensors.torch.save_file(values, host.b.filename)
        title = host.model.sd_checkpoint_info.title
        with pytest.raises(RuntimeError):
            host.switch_to(host.b)
        (host.folder / "b.safetensors").write_bytes(good)
        host.opts.sd_model_checkpoint = title
        return host

    def test_its_parent_does_not_take_its_place(self, broken):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Choose another checkpoint"):
                broken.job()

    def test_another_checkpoint_is_loaded_as_always(self, broken):
        broken.switch_to(broken.b)
        broken.set(**ON)
        broken.job()
        broken.assert_packed("b", FORMAT_BY_DEFAULT)


class TestNoMemoryForAChange:
    """Layers are converted one by one; what breaks off is gone on with, and the model is whole all the time."""

    @pytest.mark.parametrize("call", [0, 3, 7])
    @pytest.mark.parametrize("change", [{"fp8_format": "int8"}, OFF], ids=["format", "off"])
    def test_the_next_job_has_the_former_storage(self, newest, monkeypatch, call, change):
        host = begin(newest)
        load_whole(host)
        host.set(**{**ON, "fp8_format": "int8" if change is OFF else FORMAT_BY_DEFAULT})
        before, real, calls = host.format_in_use(), QuantWeight.dequantize, itertools.count()

        def dequantize(*args, **kwargs):
            if next(calls) == call:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory, said the test")
            return real(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(QuantWeight, "dequantize", dequantize)
            assert host.set(**change) == [False]
        assert_mixed(host, TWICE * ROUNDING[FORMAT_BY_DEFAULT])
        host.job()
        assert host.format_in_use() == before
        assert len(host.quantized()) == 8
        assert_mixed(host, TWICE * ROUNDING[FORMAT_BY_DEFAULT])

    def test_one_layer_at_a_time_is_in_full_precision(self, newest, monkeypatch):
        need_format(FORMAT_NAMES[0])  # or it is in int8 already
        host = begin(newest)
        host.set(**ON)
        load_whole(host)
        layers = [layer for layer in host.model.modules() if isinstance(getattr(layer, "weight", None), QuantWeight)]
        real, most = qweight.pack, []

        def pack(*args):
            most.append(sum(not isinstance(layer.weight, QuantWeight) for layer in layers))
            return real(*args)

        monkeypatch.setattr(qweight, "pack", pack)
        host.set(fp8_format="int8")
        assert len(layers) == 8
        assert max(most) == 1


@pytest.mark.parametrize("way", WAYS)
def test_one_that_waits_in_memory_when_the_extension_goes(host, way):
    begin(host, sd_checkpoints_limit=2)
    host.set(**ON)
    way(host)
    mix = host.model
    host.switch_to(host.b)
    assert mix in host.sd_models.model_data.loaded_sd_models
    host.opts.fp8_storage = "Enable for SDXL"
    host.reload_ui(extension=False)
    host.sd_models.model_data.sd_model = mix
    assert host.quantized() == []
    assert_mixed(host, TWICE * ROUNDING[FORMAT_BY_DEFAULT])


def test_a_parent_of_another_kind(host):
    """Its file is no reason to refuse a change."""
    begin(host)
    host.set(**ON)
    load_whole(host)
    host.model.sd_checkpoint_info.filename = host.checkpoint("c", kind="inpaint").filename
    assert host.set(fp8_format="int8") == [True]
    assert_mixed(host, TWICE * ROUNDING[FORMAT_BY_DEFAULT])


def test_a_merge_that_cannot_be_packed(host):
    """The load fails; what the file holds is not loaded instead."""
    begin(host)
    host.set(**ON)
    with failing_pack(2), pytest.raises(RuntimeError, match="could not be packed"):
        load_whole(host)
    assert host.model is None
