"""Several checkpoints and kinds of models."""

from __future__ import annotations

import pytest

from live.client import PROMPT, Client
from live.conftest import START


def _use(client: Client, name: str) -> None:
    client.set(sd_model_checkpoint=f"{name}.safetensors")
    assert client.probe("checkpoint") == f"{name}.safetensors"


def test_changing_checkpoints(webui: Client, shared_webui):
    """A, B, A: what is stored and what comes out depends on the checkpoint alone.

    Checkpoints with a configuration of their own get a new model each time; the others fill the one that is there.
    """
    webui.set(fp8_storage="Enable")
    seen = {}
    try:
        for configuration in (None, str(shared_webui.data / "models/Stable-diffusion/sd1-A.yaml")):
            webui.probe("share_configuration", path=configuration)
            for name in ("sd1-A", "sd1-B", "sd1-A", "sd1-B"):
                _use(webui, name)
                state = webui.txt2img(), webui.probe("parameters")
                assert seen.setdefault(name, state) == state
    finally:
        webui.probe("share_configuration", path=None)
    assert seen["sd1-A"] != seen["sd1-B"]


@pytest.fixture(scope="module")
def two_kept(rack) -> Client:
    """A WebUI that keeps two checkpoints loaded. Of its own: 1.6.1 loses track when that number is lowered."""
    client = rack.start(sd_checkpoints_limit=2, fp8_storage="Enable").client
    assert client.probe("checkpoint") == f"{START}.safetensors"
    return client


def test_two_checkpoints_kept_loaded(two_kept: Client):
    """Alternating reads nothing again; each keeps its own storage, and both follow the settings when used."""
    webui = two_kept
    seen = {}
    for name in (START, "sd1-A"):
        _use(webui, name)
        seen[name] = webui.txt2img(), webui.probe("parameters")
    assert len(webui.probe("loaded_checkpoints")) == 2
    counters = webui.probe("counters")
    for name in (START, "sd1-A", START, "sd1-A"):
        _use(webui, name)
        assert (webui.txt2img(), webui.probe("parameters")) == seen[name]
    assert webui.probe("counters") == counters
    webui.set(fp8_format="int8")
    _use(webui, START)
    assert webui.txt2img() != seen[START][0]
    assert webui.status()["parts"][0]["format"] == "int8"
    webui.set(fp8_format="float8_e4m3fn")
    for name in ("sd1-A", START):
        _use(webui, name)
        assert (webui.txt2img(), webui.probe("parameters")) == seen[name]
    webui.set(fp8_storage="Disable")
    _use(webui, "sd1-A")
    assert webui.status()["enabled"] is False
    assert all(value.startswith("plain:") for value in webui.probe("parameters").values())


def test_enable_for_sdxl(webui: Client):
    plain = webui.txt2img()
    webui.set(fp8_storage="Enable for SDXL")
    assert webui.status()["enabled"] is False
    assert webui.txt2img() == plain
    _use(webui, "sdxl")
    assert webui.status()["enabled"] is True
    on = webui.txt2img()
    assert "FP8 weight: Enable for SDXL" in on.infotext
    webui.set(fp8_storage="Disable")
    assert webui.txt2img() != on
    webui.set(fp8_storage="Enable for SDXL")
    assert webui.txt2img() == on
    _use(webui, START)
    assert webui.txt2img() == plain


def test_sdxl_text_encoders_one_by_one(webui: Client):
    webui.set(fp8_storage="Enable")
    _use(webui, "sdxl")
    pictures = [webui.txt2img()]
    for chosen in ({"fp8_clip_l": True}, {"fp8_open_clip": True}, {"fp8_clip_l": True, "fp8_open_clip": True}):
        pictures.append(webui.txt2img(override_settings=chosen))
    assert all(a != b for i, a in enumerate(pictures) for b in pictures[:i])
    webui.set(fp8_open_clip=True)
    assert [part["part"] for part in webui.status()["parts"]] == ["UNet", "OpenCLIP"]
    prefixes = {
        name.split(".")[2]
        for name, value in webui.probe("parameters", prefix="conditioner.").items()
        if not value.startswith("plain:")
    }
    assert prefixes == {"1"}


NETWORKS = PROMPT + "<lora:sdxl-all:1>"


def _check_refiner(client: Client) -> None:
    client.set(fp8_storage="Disable")
    _use(client, "sdxl")
    fields = {"refiner_checkpoint": "sdxl-refiner.safetensors", "refiner_switch_at": 0.5, "steps": 6}
    plain = client.txt2img(**fields)
    client.set(fp8_storage="Enable", fp8_open_clip=True)
    on = client.txt2img(**fields)
    assert on != plain
    assert client.status()["enabled"] is True
    assert client.txt2img(**fields) == on
    with_networks = client.txt2img(NETWORKS, **fields)  # for the base alone; the refiner's layers have other names
    assert with_networks != on
    assert client.txt2img(**fields) == on
    assert client.txt2img(NETWORKS, **fields) == with_networks
    assert set(client.status()["lora_layers"]) <= {"checkpoint file"}
    client.set(fp8_storage="Disable")
    assert client.txt2img(**fields) == plain


def test_refiner(webui: Client):
    """A switch to another checkpoint in the middle of a picture, and back at the next."""
    _check_refiner(webui)


def test_refiner_with_both_kept_loaded(two_kept: Client):
    _check_refiner(two_kept)


@pytest.mark.parametrize("name", ["sd1-inpaint", "sd1-p2p", "sd2", "sd2-v", "sdxl", "sdxl-refiner"])
def test_kinds_of_models(name, webui: Client):
    """Off, on, off on every kind; with a masked picture where that is what the model is for."""
    _use(webui, name)

    def pictures():
        more = {"image_cfg_scale": 1.5} if name == "sd1-p2p" else {}
        made = [webui.img2img(masked=name == "sd1-inpaint", **more)]
        return made if name == "sd1-p2p" else [*made, webui.txt2img()]

    pictures()  # the WebUI's first img2img after a change of the checkpoint differs from all later ones
    plain, weights = pictures(), webui.probe("parameters")
    webui.set(fp8_storage="Enable", fp8_clip_l=True, fp8_open_clip=True)
    on = pictures()
    assert all(a != b for a, b in zip(on, plain))
    status = webui.status()
    parts = {part["part"]: part for part in status["parts"]}
    assert parts["UNet"]["converted"] > 100
    assert len(parts) == (3 if name == "sdxl" else 2)
    assert parts["UNet"]["bytes"] < 0.6 * parts["UNet"]["bytes_full_precision"]
    assert all(part["bytes"] < part["bytes_full_precision"] for part in parts.values())
    assert pictures() == on
    webui.set(fp8_storage="Disable")
    assert pictures() == plain
    assert webui.probe("parameters") == weights


def test_a_vae_and_the_noise_schedule_keep_their_bits(webui: Client):
    before = webui.probe("parameters")
    webui.set(fp8_storage="Enable", fp8_clip_l=True)
    after = webui.probe("parameters")
    changed = {name for name in before if before[name] != after[name]}
    assert set(before) == set(after)
    assert all(name.startswith(("model.diffusion_model.", "cond_stage_model.")) for name in changed)
    assert all(name.endswith(".weight") for name in changed)
    assert not [name for name in changed if "norm" in name or "embedding" in name]
