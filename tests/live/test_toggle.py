"""The switch: off means off, on means nearly the same picture, and what is told is what is true."""

from __future__ import annotations

import re

from live.client import Client

LABEL = "FP8 weight"


def test_off_on_off(webui: Client):
    before = webui.txt2img(), webui.img2img()
    weights = webui.probe("parameters")
    webui.set(fp8_storage="Enable")
    on = webui.txt2img(), webui.img2img()
    assert any(value.startswith("float8_e4m3fn:") for value in webui.probe("parameters").values())
    webui.set(fp8_storage="Disable")
    assert webui.probe("parameters") == weights
    assert (webui.txt2img(), webui.img2img()) == before
    for picture, plain in zip(on, before):
        assert 30 < picture.psnr(plain) < float("inf")


def test_switching_on_again_gives_the_same_bits(webui: Client):
    webui.set(fp8_storage="Enable")
    weights, picture = webui.probe("parameters"), webui.txt2img()
    webui.set(fp8_storage="Disable")
    webui.set(fp8_storage="Enable")
    assert webui.probe("parameters") == weights
    assert webui.txt2img() == picture


def test_pictures_load_nothing_again(webui: Client):
    webui.set(fp8_storage="Enable")
    first, counters = webui.txt2img(), webui.probe("counters")
    assert all(webui.txt2img() == first for _ in range(10))
    assert webui.probe("counters") == counters


def test_switching_on_reads_no_file(webui: Client):
    webui.txt2img()
    counters = webui.probe("counters")
    webui.set(fp8_storage="Enable")
    assert webui.probe("counters") == counters


def test_console_names_layers_and_bytes(webui: Client, console):
    with console() as said:
        webui.set(fp8_storage="Enable")
    assert re.search(r"FP8 weight: UNet \d+ layers in float8_e4m3fn, \d+ kept, [\d.]+ MB -> [\d.]+ MB", said())


def test_status_tells_the_truth(webui: Client):
    assert webui.status()["enabled"] is False
    full = webui.probe("module_bytes", path="model.diffusion_model")
    webui.set(fp8_storage="Enable", fp8_clip_l=True)
    status = webui.status()
    assert [part["part"] for part in status["parts"]] == ["UNet", "CLIP-L"]
    unet, clip = status["parts"]
    assert unet["bytes"] == webui.probe("module_bytes", path="model.diffusion_model")
    assert unet["bytes_full_precision"] == full
    assert clip["bytes"] == webui.probe("module_bytes", path="cond_stage_model.wrapped")
    packed = [name for name, value in webui.probe("parameters").items() if not value.startswith("plain:")]
    assert unet["converted"] == sum(name.startswith("model.diffusion_model.") for name in packed)
    assert unet["converted"] + clip["converted"] == len(packed)


def test_the_built_in_conversion_never_runs(webui: Client):
    webui.set(fp8_storage="Enable")
    webui.txt2img()
    assert webui.probe("fp8_flag") is False


def test_the_page_has_one_switch_and_our_entries_below_it(webui: Client):
    components = webui.request("/config")["components"]
    ids = [component["props"].get("elem_id") or "" for component in components]
    settings = [name.removeprefix("setting_") for name in ids if name.startswith("setting_")]
    labels = [component["props"].get("label") for component in components]
    assert settings.count("fp8_storage") == 1
    assert labels.count(LABEL) == 1
    own = [name for name in settings if name.startswith("fp8_")]
    assert own[0] == "fp8_storage"
    assert {"fp8_format", "fp8_clip_l", "fp8_open_clip", "fp8_t5", "fp8_keep_layers", "fp8_lora"} <= set(own)
    position = settings.index("fp8_storage")
    assert settings[position : position + len(own)] == own


def test_unload_and_reload(webui: Client):
    webui.set(fp8_storage="Enable")
    picture, weights = webui.txt2img(), webui.probe("parameters")
    webui.request("/sdapi/v1/unload-checkpoint", {})
    webui.status()
    webui.request("/sdapi/v1/reload-checkpoint", {})
    assert webui.txt2img() == picture
    # By value: 1.6 leaves the text encoder without its wrapper, so the names differ.
    assert sorted(webui.probe("parameters").values()) == sorted(weights.values())


def test_settings_can_change_while_unloaded(webui: Client):
    plain = webui.txt2img()
    webui.request("/sdapi/v1/unload-checkpoint", {})
    webui.set(fp8_storage="Enable")
    webui.request("/sdapi/v1/reload-checkpoint", {})
    assert 30 < webui.txt2img().psnr(plain) < float("inf")
    assert webui.status()["enabled"] is True
