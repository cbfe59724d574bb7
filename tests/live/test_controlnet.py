"""ControlNet (Mikubill/sd-webui-controlnet) with control models in 8 bits, in a real WebUI.

Not tried: models for SDXL, Union and InstantID, which need a UNet of 2.6 billion weights, and preprocessors, which are
downloaded when they are first used.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import reference_decode
from safetensors import safe_open

from lib_fp8 import DEFAULT_KEEP
from live.guests import ALL, CONTROLS, FULL_GUESTS, OFF, SLACK, Stage, control, db, in_8_bits
from live.test_pictures import cosine

MODELS = ("controlnet", "t2iadapter", "ip-adapter", "lllite", "control-lora")
KEPT = ("time_embed", "emb_layers", "input_hint_block", "zero_convs", "middle_block_out", "input_blocks.0.0")
KEPT += ("conv_in", "image_proj", "conditioning1")
"""Where the control picture enters and the control leaves, and the embedding of time."""


def to_be_packed(file) -> int:
    """Layers of a file with a weight of their own, without those that are kept."""
    with safe_open(file, "pt") as tensors:
        names = [name for name in tensors.keys() if name.endswith(".weight")]  # noqa: SIM118  # it is no dictionary
        layers = [name for name in names if len(tensors.get_slice(name).get_shape()) > 1]
    return sum(not any(kept in layer for kept in KEPT) for layer in layers)


CASES = [("float8_e4m3fn", "controlnet"), *(("int8", name) for name in MODELS)]


@pytest.mark.parametrize(("storage", "name"), CASES)
def test_acts_as_in_full_precision(stage: Stage, guest_files, storage, name):
    both = stage.acts_as_in_full_precision(control(name), name, storage, stage.full("one still"))
    packed = in_8_bits(stage.guest(name), storage)
    assert len(packed) == to_be_packed(guest_files / f"control/{name}.safetensors")
    assert not [layer for layer in packed if any(kept in layer for kept in KEPT)]
    guest = stage.guest(name)
    assert np.array_equal(stage.latent(control(name)), both)
    assert stage.guest(name)["tensors"] == guest["tensors"]
    assert stage.guest(name)["id"] == guest["id"] or name == "lllite"  # which is built anew for each job


def test_reference(stage: Stage):
    """It needs no model, and replaces the attention of the UNet."""
    wanted, still = stage.full("reference", control("reference_only")), stage.full("one still")
    stage.hold(ALL)
    plain = stage.latent()
    both = stage.latent(control("reference_only"))
    assert db(both, wanted) >= db(plain, still) - SLACK
    assert db(still, wanted) < db(both, wanted) - 6, "the reference does nothing"
    assert np.array_equal(stage.latent(), plain)


def test_comes_and_goes(stage: Stage):
    """Several models, one after the other and together: the same pictures again, and nothing left in the UNet."""
    stage.hold(ALL)
    still, layout, bits = stage.latent(), stage.client.probe("unet_layout"), stage.client.probe("parameters")
    made = {name: stage.latent(control(name)) for name in CONTROLS if name != "sparsectrl"}
    for name in reversed(made):
        assert np.array_equal(stage.latent(control(name)), made[name])
    assert stage.client.probe("unet_layout") == layout
    assert stage.client.probe("parameters") == bits
    assert np.array_equal(stage.latent(), still)


def test_control_lora_computes_with_the_values_of_the_base(stage: Stage, tmp_path):
    """The weight that it uses is that of the 8-bit layer, decoded, plus its own factors, in float64."""
    stage.hold(ALL)
    stage.latent(control("control-lora"))
    for number, layer in enumerate(("ff.net.2", "attn1.to_q", "attn2.to_k")):
        file = tmp_path / f"{number}.npz"
        layer = f"input_blocks.4.1.transformer_blocks.0.{layer}"
        stage.client.probe("control_lora_weight", model="control-lora", layer=layer, path=str(file))
        found = np.load(file)
        key = f"model.diffusion_model.{layer}.weight"
        base = reference_decode(found[f"{key}|qdata"], found[f"{key}|scale"], "int8")
        exact = base + found["up"] @ found["down"]
        assert np.abs(found["up"] @ found["down"]).max() > 0.01 * np.abs(base).max()
        np.testing.assert_allclose(found["used"], exact, atol=1e-6 * np.abs(exact).max())


CHANGES = {
    "off": OFF,
    "format": {"fp8_format": "float8_e4m3fn"},
    "option": {"fp8_control_models": False},
    "kept": {"fp8_keep_layers": "to_q"},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_stale_models_are_let_go(stage: Stage, change):
    stage.hold(ALL)
    first = stage.latent(control("t2iadapter"))
    assert stage.client.probe("alive", class_name="PlugableAdapter") == 1
    stage.client.set(**change)
    try:
        assert stage.client.probe("alive", class_name="PlugableAdapter") == 0
    finally:
        stage.hold(ALL, fp8_keep_layers=" ".join(DEFAULT_KEEP))
    assert np.array_equal(stage.latent(control("t2iadapter")), first)


OVERRIDES = {"on": (OFF, ALL), "off": (ALL, OFF), "option": (ALL, {"fp8_control_models": False})}


@pytest.mark.parametrize(("saved", "override"), OVERRIDES.values(), ids=OVERRIDES)
def test_overrides_of_a_job(stage: Stage, saved, override):
    stage.hold({**FULL_GUESTS, **saved, **override})
    wanted, guest = stage.latent(control("t2iadapter")), stage.guest("t2iadapter")["tensors"]
    stage.hold({**FULL_GUESTS, **saved})
    before = stage.latent(control("t2iadapter"))
    for _ in range(2):
        assert np.array_equal(stage.latent(control("t2iadapter"), override_settings=override), wanted)
        assert stage.guest("t2iadapter")["tensors"] == guest
    assert np.array_equal(stage.latent(control("t2iadapter")), before)


def test_lora_below_a_control_lora(stage: Stage):
    """A control-LoRA sees the base with the networks that are merged into it or added to it."""
    prompt = "a house<lora:on-unet:16>"
    fields = {"prompt": prompt, "steps": 2}  # a layer is brought to its networks when the UNet first runs
    wanted = stage.full("lora and control-lora", control("control-lora"), **fields)
    wanted = wanted - stage.full("two steps of control-lora", control("control-lora"), steps=2)
    for way in ("Merge from checkpoint file", "Add at run time"):
        stage.hold(ALL, fp8_lora=way)
        effect = stage.latent(control("control-lora"), **fields) - stage.latent(control("control-lora"), steps=2)
        assert cosine(effect, wanted) > 0.97
