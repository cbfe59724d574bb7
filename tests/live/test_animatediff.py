"""AnimateDiff (continue-revolution/sd-webui-animatediff) with motion modules in 8 bits, in a real WebUI.

Not tried: motion modules for SDXL, which need a UNet of 2.6 billion weights, V1, and control pictures from a video.
"""

from __future__ import annotations

import numpy as np
import pytest

from live.guests import (
    ALL,
    EXTENSIONS,
    FORMATS,
    FRAMES,
    FULL_GUESTS,
    OFF,
    SLACK,
    Stage,
    control,
    db,
    in_8_bits,
    motion,
)
from live.recipe import FULL_SIZE
from live.test_pictures import cosine
from live.webui import PLAIN_PRECISION

MOTION = "motion module"
LINEARS = {"first": 12 * 20, "second": 12 * 21}
"""Linear layers: two attentions of four, a feed-forward of two, one in and one out, in 20 or 21 parts."""


@pytest.mark.parametrize("model", LINEARS)
@pytest.mark.parametrize("storage", FORMATS)
def test_acts_as_in_full_precision(stage: Stage, storage, model):
    stage.acts_as_in_full_precision(motion(model), MOTION, storage, stage.full("still", batch_size=FRAMES))
    packed = in_8_bits(stage.guest(MOTION), storage)
    assert len(packed) == LINEARS[model]
    assert not [name for name in packed if "norm" in name or ".pe" in name or name.endswith("bias")]


def test_comes_and_goes(stage: Stage):
    """Injected, run, removed, again: the same bits, nothing converted twice, and nothing left behind in the UNet."""
    stage.hold(ALL)
    still, layout, bits = stage.still(), stage.client.probe("unet_layout"), stage.client.probe("parameters")
    conversions = stage.said("FP8 weight: AnimateDiff first")
    first = stage.latent(motion("first"))
    guest = stage.guest(MOTION)
    for _ in range(2):
        assert np.array_equal(stage.latent(motion("first")), first)
        assert stage.guest(MOTION) == guest
        assert stage.client.probe("unet_layout") == layout
        assert stage.client.probe("parameters") == bits
        assert np.array_equal(stage.still(), still)
    assert stage.said("FP8 weight: AnimateDiff first") == conversions + 1
    parts = {part["part"]: part for part in stage.client.status()["parts"]}
    assert parts["AnimateDiff first.safetensors"]["converted"] == LINEARS["first"]
    assert parts["AnimateDiff first.safetensors"]["bytes"] < 0.3 * parts["UNet"]["bytes_full_precision"]


def test_another_motion_module(stage: Stage):
    stage.hold(ALL)
    made = {name: stage.latent(motion(name)) for name in LINEARS}
    assert db(made["first"], made["second"]) < 20
    for name in reversed(LINEARS):
        assert np.array_equal(stage.latent(motion(name)), made[name])
        assert stage.client.probe("alive", class_name="MotionWrapper") == 1


OVERRIDES = {
    "on": (OFF, ALL),
    "off": (ALL, OFF),
    "option": (ALL, {"fp8_motion_modules": False}),
}


@pytest.mark.parametrize(("saved", "override"), OVERRIDES.values(), ids=OVERRIDES)
def test_overrides_of_a_job(stage: Stage, saved, override):
    """AnimateDiff puts its motion module in before the overrides of a job are known."""
    stage.hold({**FULL_GUESTS, **saved, **override})
    wanted, guest = stage.latent(motion("first")), stage.guest(MOTION)["tensors"]
    stage.hold({**FULL_GUESTS, **saved})
    layout, before = stage.client.probe("unet_layout"), stage.latent(motion("first"))
    for _ in range(2):
        assert np.array_equal(stage.latent(motion("first"), override_settings=override), wanted)
        assert stage.guest(MOTION)["tensors"] == guest
    assert np.array_equal(stage.latent(motion("first")), before)
    assert stage.client.probe("unet_layout") == layout


def test_another_checkpoint_for_a_job(stage: Stage):
    """Its layers get their values although the motion module has changed their names."""
    stage.hold(ALL)
    bits = stage.client.probe("parameters")
    small = {"sd_model_checkpoint": "shapes-sd1.safetensors"}
    stage.client.txt2img("a house", steps=1, override_settings=small)
    assert stage.client.probe("parameters") != bits
    made = stage.latent(motion("first"), override_settings={"sd_model_checkpoint": f"{FULL_SIZE}.safetensors"})
    assert np.array_equal(stage.latent(motion("first")), made)
    assert stage.client.probe("parameters") == bits


def test_together_with_controlnet(stage: Stage):
    scripts = motion("first"), control("controlnet")
    wanted, alone = stage.full("both", *scripts), stage.full("first", motion("first"))
    stage.hold(FULL_GUESTS)
    unet_only = stage.latent(*scripts)
    stage.hold(ALL)
    layout, both = stage.client.probe("unet_layout"), stage.latent(*scripts)
    assert db(both, wanted) >= db(unet_only, wanted) - SLACK
    assert db(alone, wanted) < db(both, wanted) - 6, "ControlNet does nothing"
    guests = stage.client.probe("guests")
    assert in_8_bits(guests[MOTION], "int8")
    assert in_8_bits(guests["controlnet"], "int8")
    assert np.array_equal(stage.latent(*scripts), both)
    assert stage.client.probe("guests") == guests
    assert stage.client.probe("unet_layout") == layout


def test_sparse_control_belongs_to_controlnet(stage: Stage):
    """It brings motion modules of its own, which are parts of a control model."""
    scripts = motion("first"), control("sparsectrl")
    wanted, alone = stage.full("sparse", *scripts), stage.full("first", motion("first"))
    stage.hold(ALL, fp8_control_models=False)
    unet_only = stage.latent(*scripts)
    assert in_8_bits(stage.guest("sparsectrl"), "int8") == []
    stage.hold(ALL)
    both = stage.latent(*scripts)
    packed = in_8_bits(stage.guest("sparsectrl"), "int8")
    assert sum("temporal_transformer" in name for name in packed) == 8 * 8
    assert db(both, wanted) >= db(unet_only, wanted) - SLACK
    assert db(alone, wanted) < db(both, wanted) - 6, "SparseCtrl does nothing"


NETWORKS = {
    "motion": ("<lora:motion:1>", "Merge from checkpoint file"),
    "both merged": ("<lora:motion:1><lora:on-unet:16>", "Merge from checkpoint file"),
    "both added": ("<lora:motion:1><lora:on-unet:16>", "Add at run time"),
}


@pytest.mark.parametrize(("networks", "way"), NETWORKS.values(), ids=NETWORKS)
def test_networks(stage: Stage, networks, way):
    """LoRA on the motion module, on the UNet while it is in there, and on both."""
    prompt = f"a house{networks}"
    wanted = stage.full(networks, motion("first"), prompt=prompt) - stage.full("first", motion("first"))
    stage.hold(ALL, fp8_lora=way)
    bits, none = stage.client.probe("parameters"), stage.latent(motion("first"))
    guest = stage.guest(MOTION)
    with_networks = stage.latent(motion("first"), prompt=prompt)
    assert cosine(with_networks - none, wanted) > 0.97
    assert np.array_equal(stage.latent(motion("first"), prompt=prompt), with_networks)
    assert np.array_equal(stage.latent(motion("first")), none)
    assert stage.guest(MOTION) == guest
    assert stage.client.probe("parameters") == bits


def test_network_stays_in_while_the_storage_changes(stage: Stage):
    """A network that the WebUI merged into a motion module in full precision acts once afterwards."""
    prompt = "a house<lora:motion:1>"
    stage.hold(FULL_GUESTS)
    wanted, none = stage.latent(motion("first"), prompt=prompt), stage.latent(motion("first"))
    stage.hold(OFF)
    stage.latent(motion("first"), prompt=prompt)
    stage.hold(FULL_GUESTS)
    assert np.array_equal(stage.latent(motion("first"), prompt=prompt), wanted)
    assert np.array_equal(stage.latent(motion("first")), none)


FLAGS = {"medvram": (*PLAIN_PRECISION, "--medvram"), "precision half": ("--precision", "half")}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_flags(start_if_able, other_extension, guest_files, tmp_path, flags):
    """With --medvram the motion module waits on the CPU; in half precision there is no autocast."""

    def work(running):
        stage = Stage(running, guest_files, tmp_path)
        return stage, stage.latent(motion("first"))

    stage, wanted = start_if_able(work, flags, extensions=[*map(other_extension, EXTENSIONS)])
    stage.hold(FULL_GUESTS)
    unet_only = stage.latent(motion("first"))
    stage.hold(ALL)
    both = stage.latent(motion("first"))
    assert len(in_8_bits(stage.guest(MOTION), "int8")) == LINEARS["first"]
    assert db(both, wanted) >= db(unet_only, wanted) - SLACK
    assert np.array_equal(stage.latent(motion("first")), both)
