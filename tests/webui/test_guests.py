"""Motion modules of AnimateDiff and models of ControlNet: in 8 bits by option, once, and gone when they are gone."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import weakref
from unittest import mock

import pytest
import safetensors.torch
import torch
from helpers import (
    FORMAT_BY_DEFAULT,
    FORMAT_NAMES,
    assert_packed_like,
    failing_pack,
    need_format,
    quantized_names,
    reference_pack,
)

from lib_fp8 import DEFAULT_KEEP, QuantWeight, qweight
from webui.nets import BLOCK, TO_Q, coarse, need_format_of_the_webui

ON = {"fp8_storage": "Enable"}
ALL = {**ON, "fp8_control_models": True}
IN_MOTION = [f"{part}.{name}" for part in ("down_blocks.0", "mid_block") for name in ("to_q", "proj_out")]
PLAIN = {"norm.weight", "norm.bias", "proj_out.bias", "pe"}
IN_CONTROLNET = ["control_model.middle_block.0"]
BAD = {"fp8_format": "int9"}
ANOTHER = {"fp8_keep_layers": " ".join((*DEFAULT_KEEP, "nowhere"))}
"""Another policy that converts the same; another format would not be another on a torch without float8."""


def random_state(module, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=generator) * 0.2 for name, value in module.state_dict().items()}


NO_MEMORY = "could not be packed"
"""Said by the WebUI, which goes on without what its extension could not load."""


@contextlib.contextmanager
def no_memory_at(call):
    """The packing of one weight runs out of memory, on any device."""
    real, calls, shapes = qweight.pack, itertools.count(), []

    def pack(weight, *args):
        if next(calls) == call or weight.shape in shapes:
            shapes.append(weight.shape)
            raise torch.cuda.OutOfMemoryError("CUDA out of memory, said the test")
        return real(weight, *args)

    with mock.patch.object(qweight, "pack", pack):
        yield


def write(host, name, state):
    safetensors.torch.save_file(state, host.folder / name)


def packed(module):
    """Name of a layer to its QuantWeight."""
    return {name: module.get_submodule(name).weight for name in quantized_names(module)}


def bits(module):
    return {
        name: (weight.format.name, weight.qdata.view(torch.uint8).tolist()) for name, weight in packed(module).items()
    }


def assert_packed(module, state, format_name, dtype):
    for name, weight in packed(module).items():
        expected = reference_pack(state[f"{name}.weight"].to(dtype), format_name)
        assert weight.format.name == format_name
        assert_packed_like(weight.qdata, weight.scale, expected, format_name)


def switch_off(host):
    """Switch the extension off, and with it the WebUI's own conversion, which would take over."""
    host.opts.data["fp8_storage"] = "Disable"
    host.reload_ui(extension=False)


def layout(host):
    return [(name, id(module)) for name, module in host.unet.named_modules()]


class AnimateDiff:
    """A WebUI with the extension and two motion modules, ``first`` and ``second``."""

    def __init__(self, host, **settings):
        self.host = host
        self.start = lambda **more: host.start(**{"others": ("animatediff",), **settings, **more})

    def begin(self, **more):
        self.start(**more)
        self.module.mm_animatediff.folder = self.host.folder
        self.states = {name: random_state(self.module.MotionWrapper(name), len(name)) for name in ("first", "second")}
        for name, state in self.states.items():
            write(self.host, f"{name}.safetensors", state)
        return self

    @property
    def module(self):
        return sys.modules["scripts.animatediff_mm"]

    @property
    def motion(self):
        return self.module.mm_animatediff.mm

    @property
    def loads(self):
        return self.module.mm_animatediff.loads

    def job(self, name="first", **overrides):
        """The first picture of a job with a motion module; None for one without."""
        script = next(data.module for data in self.host.scripts.scripts_data if "animatediff" in data.path)
        script.wanted = name
        errors = len(self.host.errors.shown)
        picture = self.host.job(**overrides).pictures[0]
        assert self.host.errors.shown[errors:] == []
        return picture

    def break_off(self, name="first"):
        """A job that ends in the UNet: the extension does not get to take its motion module out."""
        vars(self.host.unet)["forward"] = lambda *_: 1 / 0
        try:
            with pytest.raises(ZeroDivisionError):
                self.job(name)
        finally:
            del vars(self.host.unet)["forward"]
        assert self.module.AnimateDiffMM.mm_injected


@pytest.fixture
def animatediff(host):
    """FP8 weight off."""
    host.checkpoint()
    return AnimateDiff(host).begin()


@pytest.fixture
def moving(newest):
    """The same in the newest WebUI, FP8 weight on."""
    newest.checkpoint()
    return AnimateDiff(newest, **ON).begin()


class TestMotionModules:
    @pytest.mark.parametrize("no_half", [False, True])
    @pytest.mark.parametrize("name", FORMAT_NAMES)
    def test_linear_layers_alone(self, animatediff, name, no_half):
        need_format(name)
        host = animatediff.host
        host.shared.cmd_opts.no_half = no_half
        host.set(**ON, fp8_format=name)
        animatediff.job()
        assert quantized_names(animatediff.motion) == IN_MOTION
        dtype = torch.float32 if no_half else torch.float16
        assert_packed(animatediff.motion, animatediff.states["first"], name, dtype)
        for key, tensor in animatediff.motion.state_dict().items():
            assert tensor.dtype == dtype
            if key.split(".", 1 if key.startswith("mid") else 2)[-1] in PLAIN:
                assert torch.equal(tensor, animatediff.states["first"][key].to(dtype)), key

    @pytest.mark.parametrize("settings", [{}, {**ON, "fp8_motion_modules": False}, {"fp8_storage": "Enable for SDXL"}])
    def test_stay_in_full_precision(self, animatediff, settings):
        animatediff.host.set(**settings)
        animatediff.job()
        assert quantized_names(animatediff.motion) == []
        parts = [part["part"] for part in animatediff.host.panel.status()["parts"]]
        assert parts == ["UNet"] * (settings.get("fp8_storage") == "Enable")

    def test_for_sdxl(self, newest):
        newest.checkpoint(kind="sdxl")
        stage = AnimateDiff(newest, fp8_storage="Enable for SDXL").begin()
        write(newest, "xl.safetensors", stage.states["first"])
        stage.job("xl")
        assert quantized_names(stage.motion) == IN_MOTION

    @pytest.mark.parametrize("option", [True, False])
    def test_come_and_go(self, animatediff, option):
        """A Linear that is added after conversion, run and removed: the UNet is what it was."""
        host = animatediff.host
        host.set(**ON, fp8_motion_modules=option)
        before, names, unet = host.fingerprint(), host.quantized(), layout(host)
        still, first = animatediff.job(None), animatediff.job()
        assert not torch.equal(still, first)
        motion, weights = animatediff.motion, packed(animatediff.motion)
        assert len(weights) == len(IN_MOTION) * option
        for _ in range(2):
            assert host.fingerprint() == before
            assert host.quantized() == names
            assert layout(host) == unet
            assert torch.equal(animatediff.job(), first)
            assert animatediff.motion is motion
            assert all(now is was for now, was in zip(packed(motion).values(), weights.values()))
            assert torch.equal(animatediff.job(None), still)
        assert animatediff.loads == 1

    def test_pictures_are_those_of_full_precision_within_the_error_of_the_format(self, animatediff):
        host = animatediff.host
        plain = animatediff.job()
        errors = []
        for option in (False, True):
            host.set(**ON, fp8_motion_modules=option)
            errors.append((animatediff.job() - plain).norm() / plain.norm())
        assert 0 < errors[1] < 3 * errors[0] < 0.3

    def test_another_one(self, moving):
        made = {name: moving.job(name) for name in ("first", "second")}
        assert not torch.equal(*made.values())
        second = weakref.ref(moving.motion)
        for name in ("first", "second"):
            assert torch.equal(moving.job(name), made[name])
            assert_packed(moving.motion, moving.states[name], FORMAT_BY_DEFAULT, torch.float16)
            parts = [part["part"] for part in moving.host.panel.status()["parts"]]
            assert parts == ["UNet", f"AnimateDiff {name}"]
        gc.collect()
        assert second() is None

    @pytest.mark.parametrize("change", [{"fp8_storage": "Disable"}, {"fp8_motion_modules": False}, ANOTHER])
    def test_one_that_waits_is_let_go_when_another_storage_is_wanted(self, moving, change):
        moving.job()
        gone = weakref.ref(moving.motion)
        moving.host.set(fp8_control_models=True)
        assert moving.motion is gone()
        moving.host.set(**change)
        assert moving.motion is None
        gc.collect()
        assert gone() is None
        assert not any("first" in part["part"] for part in moving.host.panel.status()["parts"])

    def test_are_shown(self, moving, capsys):
        moving.job()
        assert "FP8 weight: AnimateDiff first 4 layers in" in capsys.readouterr().out
        part = moving.host.panel.status()["parts"][1]
        assert (part["part"], part["converted"]) == ("AnimateDiff first", 4)
        assert part["bytes"] < part["bytes_full_precision"]
        assert "AnimateDiff first" in moving.host.panel.status_html()

    def test_with_medvram_it_waits_on_the_cpu(self, moving):
        moving.host.model.lowvram = True
        picture = moving.job()
        assert torch.equal(moving.job(), picture)
        moving.host.set(fp8_format="int8")
        moving.job()
        assert {weight.format.name for weight in packed(moving.motion).values()} == {"int8"}

    def test_those_of_a_control_model_belong_to_it(self, moving):
        """ControlNet makes one without a name, as a part of SparseCtrl."""
        wrapper = moving.module.MotionWrapper("")
        wrapper.load_state_dict(moving.states["first"])
        assert quantized_names(wrapper) == []


@pytest.mark.parametrize(
    ("saved", "override"),
    [
        ({}, ON),
        (ON, {"fp8_storage": "Disable"}),
        (ON, {"fp8_format": "int8"}),
        (ON, {"fp8_motion_modules": False}),
        ({**ON, "fp8_motion_modules": False}, {"fp8_motion_modules": True}),
    ],
)
def test_overrides_of_a_job(animatediff, saved, override):
    """The motion module is put in before they are in force, and changes the names of layers."""
    host = animatediff.host
    host.set(**saved, **{key: value for key, value in override.items() if key not in saved})
    host.set(**override)
    wanted, wanted_bits, unet = animatediff.job(), bits(animatediff.motion), host.fingerprint()
    host.set(fp8_storage="Disable", fp8_format=FORMAT_BY_DEFAULT, fp8_motion_modules=True)
    host.set(**saved)
    before, names = host.fingerprint(), layout(host)
    saved_picture, saved_bits = animatediff.job(), bits(animatediff.motion)
    for _ in range(2):
        assert torch.equal(animatediff.job(**override), wanted)
        assert bits(animatediff.motion) == wanted_bits
        assert host.fingerprint() == unet
    assert torch.equal(animatediff.job(), saved_picture)
    assert bits(animatediff.motion) == saved_bits
    assert host.fingerprint() == before
    assert layout(host) == names


def test_two_jobs_with_the_same_overrides_load_once(moving):
    moving.job(fp8_format="int8")
    loads = moving.loads
    moving.job(fp8_format="int8")
    assert moving.loads == loads


class TestLeftInTheUNet:
    """A job that breaks off leaves the motion module where it is; what comes next must not be misled by that."""

    @pytest.mark.parametrize("setting", [{"fp8_storage": "Disable"}, {"fp8_format": "int8"}, {"fp8_keep_layers": ""}])
    def test_settings_change(self, moving, setting):
        host = moving.host
        host.set(**setting)
        wanted, names, picture = host.fingerprint(), layout(host), moving.job()
        motion = bits(moving.motion)
        host.set(**ON, fp8_format=FORMAT_BY_DEFAULT, fp8_keep_layers=host.opts.get_default("fp8_keep_layers"))
        moving.break_off()
        host.set(**setting)
        assert bits(moving.motion) == motion
        assert torch.equal(moving.job(), picture)
        assert host.fingerprint() == wanted
        assert layout(host) == names

    def test_it_is_switched_on(self, animatediff):
        host = animatediff.host
        animatediff.break_off()
        host.set(**ON, fp8_motion_modules=False)
        assert quantized_names(animatediff.motion) == []
        animatediff.job(None)
        assert len(host.quantized()) == 6
        host.assert_packed("a", FORMAT_BY_DEFAULT)

    @pytest.mark.parametrize("settings", [{}, ON])
    def test_another_checkpoint(self, animatediff, settings):
        """Every layer gets its own values."""
        host = animatediff.host
        host.set(**settings)
        b = host.checkpoint("b", seed=2)
        host.switch_to(b)
        wanted, picture = host.fingerprint(), animatediff.job()
        host.switch_to(host.sd_models.checkpoints_list["a.safetensors"])
        animatediff.break_off()
        host.switch_to(b)
        assert torch.equal(animatediff.job(), picture)
        assert host.fingerprint() == wanted
        names = {name for name in host.layers if name.startswith("diffusion_model_middle_block")}
        assert names == {
            f"diffusion_model_middle_block_0_{part}" for part in ("norm", "to_q", "to_k", "to_v", "to_out_0")
        }

    @pytest.mark.parametrize("limit", [1, 2])
    def test_another_checkpoint_for_a_job(self, moving, limit):
        host = moving.host
        host.set(sd_checkpoints_limit=limit)
        b = host.checkpoint("b", seed=2)
        host.switch_to(b)
        wanted = moving.job()
        host.switch_to(host.sd_models.checkpoints_list["a.safetensors"])
        before, picture = host.fingerprint(), moving.job()
        assert torch.equal(moving.job(sd_model_checkpoint=b.title), wanted)
        assert torch.equal(moving.job(), picture)
        assert host.fingerprint() == before

    def test_another_kind_of_model(self, moving, capsys):
        host = moving.host
        xl = host.checkpoint("xl-model", kind="sdxl", seed=2)
        host.switch_to(xl)
        wanted, names = host.fingerprint(), [name for name, _ in layout(host)]
        host.switch_to(host.sd_models.checkpoints_list["a.safetensors"])
        moving.break_off()
        host.switch_to(xl)
        assert "first is left out. Motion module incompatible with SD." in capsys.readouterr().err
        assert [name for name, _ in layout(host)] == names
        assert host.fingerprint() == wanted
        moving.job(None)
        assert host.fingerprint() == wanted

    def test_the_extension_is_switched_off(self, moving):
        host = moving.host
        host.set(fp8_storage="Disable")
        plain, picture = host.fingerprint(), moving.job()
        host.set(**ON)
        moving.break_off()
        switch_off(host)
        assert torch.equal(moving.job(), picture)
        assert host.fingerprint() == plain
        assert quantized_names(moving.motion) == []


class TestMotionFailures:
    @pytest.mark.parametrize("call", range(len(IN_MOTION)))
    def test_stays_whole(self, animatediff, call, capsys):
        host = animatediff.host
        host.set(**ON, fp8_motion_modules=False)
        wanted = animatediff.job()
        host.set(fp8_motion_modules=True)
        with failing_pack(call):
            assert torch.equal(animatediff.job(), wanted)
        assert quantized_names(animatediff.motion) == []
        assert "said the test. It stays in full precision." in capsys.readouterr().err
        assert [part["part"] for part in host.panel.status()["parts"]] == ["UNet"]
        loads = animatediff.loads
        assert torch.equal(animatediff.job(), wanted)
        assert animatediff.loads == loads
        host.set(**ANOTHER)
        animatediff.job()
        assert quantized_names(animatediff.motion) == IN_MOTION

    @pytest.mark.parametrize("call", range(len(IN_MOTION)))
    def test_no_memory_for_packing(self, animatediff, call):
        """It is not loaded in full precision instead, and not kept; the next job loads it anew."""
        host = animatediff.host
        host.set(**ON)
        loads = animatediff.loads
        with no_memory_at(call), pytest.raises(AssertionError, match=NO_MEMORY):
            animatediff.job()
        assert animatediff.motion is None
        assert animatediff.loads == loads + 1
        animatediff.job()
        assert quantized_names(animatediff.motion) == IN_MOTION

    def test_a_setting_that_cannot_be_used(self, moving, capsys):
        """A preset that writes into the options without their callbacks; the UNet stays as it is."""
        moving.host.opts.data.update(BAD)
        moving.job()
        assert quantized_names(moving.motion) == []
        assert "'int9'" in capsys.readouterr().err

    def test_the_file_is_gone(self, moving):
        host = moving.host
        unet = layout(host)
        moving.job()
        (host.folder / "first.safetensors").unlink()
        with pytest.raises(FileNotFoundError):
            moving.job(**ANOTHER)
        assert layout(host) == unet
        moving.job(None)
        moving.job("second")

    def test_a_file_that_does_not_fit_is_not_kept(self, moving):
        moving.states["first"].pop("mid_block.to_q.weight")
        write(moving.host, "first.safetensors", moving.states["first"])
        for _ in range(2):
            with pytest.raises(RuntimeError, match="Missing key"):
                moving.module.mm_animatediff.load("first")
            assert moving.motion is None

    def test_left_in_the_unet_and_its_file_is_gone(self, moving):
        """The setting is refused, nothing has changed but that it is out; the next time it is followed."""
        host = moving.host
        unet, plain = layout(host), host.fingerprint()
        moving.break_off()
        (host.folder / "first.safetensors").unlink()
        assert host.set(**ANOTHER) == [False]
        assert layout(host) == unet
        assert host.fingerprint() == plain
        assert not moving.module.AnimateDiffMM.mm_injected
        assert host.set(**ANOTHER) == [True]
        moving.job("second")

    def test_left_in_the_unet_while_a_checkpoint_fails(self, moving, monkeypatch, capsys):
        """What is told is what went wrong with the checkpoint."""
        host = moving.host
        unet = layout(host)
        moving.break_off()
        monkeypatch.setattr(moving.module.AnimateDiffMM, "inject", lambda *_: next(iter(())))
        monkeypatch.setattr(host.sd_models, "load_model_weights", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            host.switch_to(host.checkpoint("b", seed=2))
        assert "first is left out" in capsys.readouterr().err
        assert layout(host) == unet

    def test_a_model_that_was_thrown_away_gets_none(self, moving, monkeypatch):
        host = moving.host
        moving.job()
        moving.break_off()
        other = host.checkpoint("x", kind="inpaint")
        trash = host.sd_models.send_model_to_trash
        monkeypatch.setattr(host.sd_models, "send_model_to_trash", lambda model: (trash(model), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            host.switch_to(other)
        monkeypatch.undo()
        assert not moving.module.AnimateDiffMM.mm_injected
        host.switch_to(other)
        unet = layout(host)
        moving.job()
        assert layout(host) == unet


class TestMotionInstall:
    @pytest.mark.parametrize("missing", ["mm_injected", "MotionWrapper"])
    def test_one_too_old_or_another_is_left_alone(self, newest, missing):
        newest.checkpoint()
        stage = AnimateDiff(newest, **ON)
        stage.start()
        host = newest
        owner = stage.module.AnimateDiffMM if missing == "mm_injected" else stage.module
        sys.modules["lib_fp8.webui"].uninstall()
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(owner, missing)
            sys.modules["lib_fp8.webui"].install()
            host.animatediff.install(sys.modules["lib_fp8.webui"]._patches)
            assert host.job().pictures
            assert host.set(**ANOTHER) == [True]
            assert host.job().pictures

    @pytest.mark.parametrize("others", [("animatediff",), ()])
    def test_reload_ui(self, moving, others):
        host, wrapper = moving.host, moving.module.MotionWrapper
        picture, motion = moving.job(), moving.motion
        for _ in range(2):
            host.reload_ui()
            assert torch.equal(moving.job(), picture)
            assert moving.motion is motion
        assert ours_in(wrapper) == 1
        host.others = others
        switch_off(host)
        assert "load_state_dict" not in vars(wrapper)
        if others:
            moving.job()
            assert quantized_names(moving.motion) == []

    def test_while_a_model_is_being_loaded(self, newest):
        """The WebUI replaces ``Module.load_state_dict`` for that time, in another thread."""
        newest.checkpoint()
        stage = AnimateDiff(newest, **ON)
        real, calls = torch.nn.Module.load_state_dict, []
        torch.nn.Module.load_state_dict = lambda *args, **kwargs: calls.append(1) or real(*args, **kwargs)
        try:
            stage.begin()
        finally:
            torch.nn.Module.load_state_dict = real
        seen = len(calls)
        stage.job()
        assert len(calls) == seen
        assert quantized_names(stage.motion) == IN_MOTION


def ours_in(owner):
    """How many functions of the extension lie one above the other."""
    function, depth = owner.load_state_dict, 0
    while function.__module__.startswith("lib_fp8.webui.animatediff"):
        depth, function = (
            depth + 1,
            dict(zip(function.__code__.co_freevars, function.__closure__))["original"].cell_contents,
        )
    return depth


MOTION_Q = "down_blocks_0_to_q"


class TestNetworks:
    """LoRA by the names that AnimateDiff gives the layers of its motion module, and on the UNet while it is there."""

    @pytest.fixture
    def net(self, moving, rng):
        host = moving.host
        net = host.networks.Network("motion")
        net.modules[MOTION_Q] = host.networks.NetworkModule(net, up=coarse(16, 2, rng=rng), down=coarse(2, 16, rng=rng))
        return net

    def run(self, stage, *networks):
        """A job with networks; what the weight of the motion module was while it ran."""
        stage.host.networks.loaded_networks[:] = networks
        return stage.job()

    @pytest.mark.parametrize("option", [True, False])
    def test_act_and_go(self, moving, net, option):
        moving.host.set(fp8_motion_modules=option)
        none, before = moving.job(), bits(moving.motion)
        plain = moving.motion.down_blocks[0].to_q.weight.float()
        delta, values = net.modules[MOTION_Q].up @ net.modules[MOTION_Q].down, []
        moving.motion.down_blocks[0].to_q.register_forward_hook(lambda layer, *_: values.append(layer.weight.float()))
        acting = self.run(moving, net)
        assert torch.allclose(values[-1], plain + delta, atol=2e-3)
        assert not torch.equal(acting, none)
        assert torch.equal(self.run(moving, net), acting)
        assert torch.equal(self.run(moving), none)
        assert bits(moving.motion) == before
        assert torch.equal(moving.motion.down_blocks[0].to_q.weight.float(), plain)

    @pytest.mark.parametrize("option", [True, False])
    def test_nothing_is_held_by_one_that_waits(self, moving, net, option):
        moving.host.set(fp8_motion_modules=option)
        self.run(moving, net)
        moving.host.networks.loaded_networks.clear()
        moving.job(None)
        gone = weakref.ref(net)
        del net
        moving.host.model.network_layer_mapping.clear()
        gc.collect()
        holders = [type(holder) for holder in gc.get_referrers(gone()) if holder is not self]
        assert [branch for weight in packed(moving.motion).values() for branch in weight.branches] == []
        assert not any("fp8_networks" in vars(layer) for layer in moving.motion.modules()), holders

    def test_on_the_unet_while_it_is_there(self, moving, nets):
        net = nets.make("on the UNet", layers=(BLOCK, TO_Q))
        none, before = moving.job(), moving.host.fingerprint()
        acting = self.run(moving, net)
        nets.assert_merged(net, layers=(BLOCK, TO_Q))
        assert not torch.equal(acting, none)
        assert torch.equal(self.run(moving), none)
        assert moving.host.fingerprint() == before

    def test_merged_by_the_webui_before_it_acts_once_afterwards(self, moving, net):
        host = moving.host
        host.set(fp8_motion_modules=False)
        none, wanted = moving.job(), self.run(moving, net)
        for _ in range(2):
            host.set(fp8_storage="Disable")
            self.run(moving, net)
            host.set(**ON)
            assert torch.equal(self.run(moving, net), wanted)
        assert torch.equal(self.run(moving), none)


class ControlNet:
    """A WebUI with the extension and a model of each kind: ``net``, ``lllite``, ``lora``."""

    def __init__(self, host, **settings):
        self.host = host
        host.start(others=("controlnet",), **settings)
        self.script.folder = host.folder
        self.states = {
            "net": random_state(self.script._Plugable(self.script.ControlNet()), 1),
            "lllite": {key: 10 * value for key, value in random_state(self.script.LLLite(), 2).items()},
            "lora": random_state(self.script._ControlLora(torch.zeros(16, 2), torch.zeros(2, 16)), 3),
        }
        self.states["lora"]["lora_controlnet"] = torch.zeros(1)
        for name, state in self.states.items():
            write(host, name, state)

    @property
    def script(self):
        return next(data.module for data in self.host.scripts.scripts_data if "controlnet" in data.path)

    @property
    def cache(self):
        return self.script.Script.model_cache

    def model(self, name="net"):
        return self.cache[name].model

    @property
    def builds(self):
        return self.script.Script.builds

    def job(self, *names, **overrides):
        self.script.wanted = names
        errors = len(self.host.errors.shown)
        picture = self.host.job(**overrides).pictures[0]
        assert self.host.errors.shown[errors:] == []
        return picture


@pytest.fixture
def controlnet(host):
    """FP8 weight off."""
    host.checkpoint()
    return ControlNet(host)


@pytest.fixture
def controlled(newest):
    """In the newest WebUI, all in 8 bits."""
    newest.checkpoint()
    return ControlNet(newest, **ALL)


class TestControlModels:
    @pytest.mark.parametrize("no_half", [False, True])
    @pytest.mark.parametrize("name", FORMAT_NAMES)
    def test_by_option(self, controlnet, name, no_half):
        """All but where the control picture enters and where the control leaves."""
        need_format(name)
        host = controlnet.host
        host.shared.cmd_opts.no_half = no_half
        host.set(**ALL, fp8_format=name)
        controlnet.job("net")
        assert quantized_names(controlnet.model()) == IN_CONTROLNET
        assert_packed(controlnet.model(), controlnet.states["net"], name, torch.float32)
        assert {tensor.dtype for tensor in controlnet.model().parameters()} == {
            torch.float32 if no_half else torch.float16
        }

    @pytest.mark.parametrize(
        "settings", [{}, ON, {**ALL, "fp8_storage": "Enable for SDXL"}, {"fp8_control_models": True}]
    )
    def test_stay_in_full_precision(self, controlnet, settings):
        controlnet.host.set(**settings)
        for name in controlnet.states:
            controlnet.job(name)
            assert not any(isinstance(tensor, QuantWeight) for tensor in controlnet.model(name).parameters())

    def test_pictures_are_those_of_full_precision_within_the_error_of_the_format(self, controlnet):
        host, still = controlnet.host, controlnet.job()
        for names in (("net",), ("lllite",), ("lora",), ("net", "lllite", "lora")):
            host.set(fp8_storage="Disable")
            plain = controlnet.job(*names)
            assert (plain - still).norm() > 0.05 * still.norm()
            host.set(**ALL)
            assert 0 < (controlnet.job(*names) - plain).norm() < 0.1 * plain.norm()

    def test_one_without_modules(self, controlled):
        """LLLite has something else under the name of that method, and is built anew for each job."""
        picture = controlled.job("lllite")
        assert quantized_names(controlled.model("lllite")) == ["lllite_unet_middle_block_0_to_out_0.down.0"]
        assert torch.equal(controlled.job("lllite"), picture)
        parts = [part["part"] for part in controlled.host.panel.status()["parts"]]
        assert parts == ["UNet", "ControlNet lllite"]

    def test_come_and_go(self, controlled):
        host = controlled.host
        before, unet, still = host.fingerprint(), layout(host), controlled.job()
        first = controlled.job("net")
        weights = packed(controlled.model())
        for _ in range(2):
            assert torch.equal(controlled.job("net"), first)
            assert all(now is was for now, was in zip(packed(controlled.model()).values(), weights.values()))
            assert torch.equal(controlled.job(), still)
            assert host.fingerprint() == before
            assert layout(host) == unet
        assert controlled.builds == 1

    def test_control_lora_computes_with_the_values_of_the_base(self, controlled):
        controlled.host.shared.cmd_opts.no_half = True
        controlled.job("lora")
        module = controlled.model("lora").control_model.to_q
        base = module.weight_module[0].weight
        assert isinstance(base, QuantWeight)
        used = module(torch.eye(16)).T.double()
        exact = base.dequantize(torch.float32).double() + module.up.double() @ module.down.double()
        assert torch.allclose(used, exact, atol=1e-6)
        assert quantized_names(controlled.model("lora")) == []

    @pytest.mark.parametrize(
        "change",
        [{"fp8_storage": "Disable"}, {"fp8_format": "int8"}, {"fp8_control_models": False}, {"fp8_keep_layers": "x"}],
    )
    def test_settings_change(self, controlled, change):
        """Those that are kept in another storage are let go; used again, they are as if they had never been another."""
        if FORMAT_BY_DEFAULT in change.values():
            pytest.skip("no other format in this torch")
        host = controlled.host
        first = controlled.job("net")
        old, collections = weakref.ref(controlled.model()), host.devices.collections
        host.set(**change)
        gc.collect()
        assert old() is None
        assert not controlled.cache
        assert host.devices.collections > collections
        changed = controlled.job("net")
        assert torch.equal(controlled.job("net"), changed)
        assert controlled.builds == 2
        host.set(**ALL, fp8_format=FORMAT_BY_DEFAULT, fp8_keep_layers=host.opts.get_default("fp8_keep_layers"))
        assert torch.equal(controlled.job("net"), first)

    @pytest.mark.parametrize(
        "change", [{"fp8_motion_modules": False}, {"fp8_lora": "Add at run time"}, {"fp8_clip_l": True}]
    )
    def test_settings_that_do_not_concern_them(self, controlled, change):
        controlled.job("net")
        controlled.host.set(**change)
        controlled.job("net")
        assert controlled.builds == 1

    @pytest.mark.parametrize(
        "override", [{"fp8_storage": "Disable"}, {"fp8_format": "int8"}, {"fp8_control_models": False}]
    )
    def test_overrides_of_a_job(self, controlnet, override):
        host = controlnet.host
        host.set(**ALL)
        saved = controlnet.job("net")
        host.set(**override)
        wanted = controlnet.job("net")
        host.set(**ALL, fp8_format=FORMAT_BY_DEFAULT)
        for _ in range(2):
            assert torch.equal(controlnet.job("net", **override), wanted)
        assert torch.equal(controlnet.job("net"), saved)

    def test_one_that_cannot_be_converted(self, controlled, capsys):
        host = controlled.host
        host.set(fp8_control_models=False)
        wanted = controlled.job("net")
        host.set(fp8_control_models=True)
        with failing_pack(0):
            assert torch.equal(controlled.job("net"), wanted)
        assert "ControlNet net: layer control_model.middle_block.0 could not be packed" in capsys.readouterr().err
        builds = controlled.builds
        assert torch.equal(controlled.job("net"), wanted)
        assert controlled.builds == builds
        host.set(**ANOTHER)
        controlled.job("net")
        assert quantized_names(controlled.model()) == IN_CONTROLNET

    def test_no_memory_for_packing(self, controlled):
        """It is not used in full precision instead; the next job builds it anew."""
        host = controlled.host
        host.set(fp8_control_models=False)
        controlled.job("net")
        host.set(fp8_control_models=True)
        with no_memory_at(0), pytest.raises(AssertionError, match=NO_MEMORY):
            controlled.job("net")
        assert not controlled.script.Script.model_cache
        controlled.job("net")
        assert quantized_names(controlled.model()) == IN_CONTROLNET

    def test_a_setting_that_cannot_be_used(self, controlled, capsys):
        controlled.host.opts.data.update(BAD)
        controlled.job("net")
        assert quantized_names(controlled.model()) == []
        assert "'int9'" in capsys.readouterr().err

    def test_before_models_came_with_their_type(self, controlled):
        picture = controlled.job("net")
        controlled.cache.clear()
        script, build = controlled.script, controlled.script.build_model_by_guess
        host = controlled.host
        sys.modules["lib_fp8.webui"].uninstall()
        plain = script.build_model_by_guess
        assert plain is not build
        script.build_model_by_guess = lambda *args: plain(*args).model
        sys.modules["lib_fp8.webui"].install()
        host.controlnet.install(sys.modules["lib_fp8.webui"]._patches)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(script.Script, "load_control_model", staticmethod(old_load_control_model(script)))
            assert torch.equal(controlled.job("net"), picture)
            assert quantized_names(controlled.cache["net"]) == IN_CONTROLNET
            host.set(**ANOTHER)
            assert not controlled.cache

    def test_reload_ui_leaves_nothing_of_the_former_script(self, controlled):
        """It is executed again, as another module; the former one's cache would hold its models."""
        picture, gone = controlled.job("net"), weakref.ref(controlled.model("net"))
        for _ in range(2):
            controlled.host.reload_ui()
            gc.collect()
            assert gone() is None
            controlled.script.folder = controlled.host.folder
            assert torch.equal(controlled.job("net"), picture)
            assert quantized_names(controlled.model("net")) == IN_CONTROLNET
            gone = weakref.ref(controlled.model("net"))

    def test_one_that_builds_its_models_otherwise_keeps_them(self, controlled, monkeypatch):
        host, script = controlled.host, controlled.script
        need_format_of_the_webui(host)
        sys.modules["lib_fp8.webui"].uninstall()
        build = script.build_model_by_guess
        monkeypatch.delattr(script, "build_model_by_guess")
        sys.modules["lib_fp8.webui"].install()
        host.controlnet.install(sys.modules["lib_fp8.webui"]._patches)
        kept = script.Script.model_cache["net"] = build(controlled.states["net"], host.unet, "net")
        host.job()
        assert host.set(**ANOTHER) == [True]
        assert script.Script.model_cache["net"] is kept

    def test_the_extension_is_switched_off(self, controlled):
        host = controlled.host
        host.set(fp8_storage="Disable")
        plain = controlled.job("net")
        host.set(**ALL)
        controlled.job("net")
        switch_off(host)
        assert not controlled.script.build_model_by_guess.__module__.startswith("lib_fp8")
        controlled.script.folder = host.folder
        assert torch.equal(controlled.job("net"), plain)
        assert quantized_names(controlled.model()) == []


def old_load_control_model(script):
    real = script.Script.load_control_model

    def load(unet, model):
        found = script.Script.model_cache.get(model)
        return found if found is not None else real(unet, model)

    return load


def test_both_at_once(newest):
    newest.checkpoint()
    stage = AnimateDiff(newest, others=("animatediff", "controlnet"), **ALL).begin()
    control = next(data.module for data in newest.scripts.scripts_data if "controlnet" in data.path)
    control.folder, control.wanted = newest.folder, ("net",)
    write(newest, "net", random_state(control._Plugable(control.ControlNet()), 1))
    before, unet = newest.fingerprint(), layout(newest)
    first = stage.job()
    assert torch.equal(stage.job(), first)
    parts = [part["part"] for part in newest.panel.status()["parts"]]
    assert parts == ["UNet", "AnimateDiff first", "ControlNet net"]
    control.wanted = ()
    assert not torch.equal(stage.job(), first)
    assert newest.fingerprint() == before
    assert layout(newest) == unet
    newest.set(fp8_format="int8")
    control.wanted = ("net",)
    assert (stage.job() - first).norm() < 0.1 * first.norm()


def test_without_the_other_extensions(host):
    need_format_of_the_webui(host)
    host.checkpoint()
    host.start(**ALL)
    host.job()
    host.set(fp8_motion_modules=False, fp8_control_models=False)
    host.job(fp8_format="int8")
    host.reload_ui(extension=False)
    assert host.job().pictures
    assert host.errors.shown == []
