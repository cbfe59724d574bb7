"""Broken checkpoints and impossible settings: a clear message, and the WebUI goes on."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from live.client import ApiError, Client
from live.conftest import START
from live.models import EMBEDDED
from live.webui import PLAIN_PRECISION

LAYER = "middle_block.1.proj_in"
KEY = f"model.diffusion_model.{LAYER}.weight"


@pytest.fixture
def add_checkpoint(shared_webui, webui: Client):
    """``add(name, change)`` writes a changed copy of the start checkpoint; ``change`` gets its tensors by name."""
    written = []

    def add(name, change=None):
        path = shared_webui.data / "models/Stable-diffusion" / f"{name}.safetensors"
        weights = load_file(EMBEDDED)
        if change is not None:
            change(weights)
        save_file(weights, path)
        shutil.copyfile(EMBEDDED.with_suffix(".yaml"), path.with_suffix(".yaml"))
        written.append(path)
        webui.request("/sdapi/v1/refresh-checkpoints", {})
        return path

    yield add
    webui.set(fp8_storage="Disable", sd_model_checkpoint=f"{START}.safetensors")
    for path in written:
        path.unlink(missing_ok=True)
        path.with_suffix(".yaml").unlink()
    webui.request("/sdapi/v1/refresh-checkpoints", {})


def _kind(client: Client) -> str:
    return client.probe("parameters", prefix=KEY)[KEY].split(":")[0]


def test_truncated_checkpoint(webui: Client, add_checkpoint):
    webui.set(fp8_storage="Enable")
    before, bits = webui.txt2img(), webui.probe("parameters")
    path = add_checkpoint("truncated")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(ApiError, match=r"truncated\.safetensors is damaged or incomplete"):
        webui.txt2img(override_settings={"sd_model_checkpoint": "truncated.safetensors"})
    assert webui.txt2img(override_settings={"sd_model_checkpoint": f"{START}.safetensors"}) == before
    assert webui.probe("parameters") == bits


def test_truncated_checkpoint_chosen_in_the_settings(webui: Client, add_checkpoint, console):
    webui.set(fp8_storage="Enable")
    before = webui.txt2img()
    path = add_checkpoint("truncated")
    path.write_bytes(path.read_bytes()[:100_000])
    with console() as said:
        webui.set(sd_model_checkpoint="truncated.safetensors")
    assert "truncated.safetensors is damaged or incomplete" in said()
    assert webui.options()["sd_model_checkpoint"].startswith(START)
    assert webui.txt2img() == before


def _as_int8_of_bitsandbytes(weights):
    weights[KEY] = torch.ones_like(weights[KEY], dtype=torch.int8)
    weights[f"model.diffusion_model.{LAYER}.SCB"] = torch.ones(len(weights[KEY]))


_REFUSED = "foreign.safetensors holds weights in a form that cannot be read yet: bitsandbytes int8"


@pytest.mark.parametrize("storage", ["Disable", "Enable"])
def test_checkpoint_in_a_layout_of_another_program(storage, webui: Client, add_checkpoint, console):
    """For one job, as the refiner, chosen in the settings: refused by name, and the model stays."""
    webui.set(fp8_storage=storage)
    before, bits = webui.txt2img(), webui.probe("parameters")
    add_checkpoint("foreign", _as_int8_of_bitsandbytes)
    with pytest.raises(ApiError, match=_REFUSED):
        webui.txt2img(override_settings={"sd_model_checkpoint": "foreign.safetensors"})
    with pytest.raises(ApiError, match=_REFUSED):
        webui.txt2img(refiner_checkpoint="foreign.safetensors", refiner_switch_at=0.5)
    with console() as said:
        webui.set(sd_model_checkpoint="foreign.safetensors")
    assert _REFUSED in said()
    assert webui.options()["sd_model_checkpoint"].startswith(START)
    assert webui.txt2img(override_settings={"sd_model_checkpoint": f"{START}.safetensors"}) == before
    assert webui.probe("parameters") == bits


def test_first_checkpoint_in_a_layout_of_another_program(start, tmp_path):
    """The WebUI comes up without a model, and another checkpoint can be chosen."""
    weights = load_file(EMBEDDED)
    _as_int8_of_bitsandbytes(weights)
    save_file(weights, tmp_path / "foreign.safetensors")
    flags = (*PLAIN_PRECISION, "--ckpt", str(tmp_path / "foreign.safetensors"))
    running = start(flags, fp8_storage="Enable")
    assert _REFUSED in running.log()
    with pytest.raises(ApiError):
        running.client.txt2img()
    running.client.set(sd_model_checkpoint=f"{START}.safetensors")
    assert running.client.probe("checkpoint") == f"{START}.safetensors"
    assert running.client.status()["enabled"] is True
    running.client.txt2img()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("when", ["while loading", "in place"])
def test_weight_that_is_not_finite(bad, when, webui: Client, add_checkpoint, console):
    def spoil(weights):
        weights[KEY].view(-1)[7] = bad

    before = webui.txt2img()
    add_checkpoint("not-finite", spoil)
    if when == "while loading":
        webui.set(fp8_storage="Enable")
    webui.set(sd_model_checkpoint="not-finite.safetensors")
    webui.set(fp8_storage="Enable")
    assert webui.probe("checkpoint") == "not-finite.safetensors"
    assert _kind(webui) == "plain"
    (unet,) = webui.status()["parts"]
    assert unet["kept"]["NaN or infinity in the weight"] == 1
    webui.set(fp8_storage="Disable")
    webui.set(sd_model_checkpoint=f"{START}.safetensors")
    assert webui.txt2img() == before


def test_large_values_and_a_row_of_zeros(webui: Client, add_checkpoint):
    def stretch(weights):
        weights[KEY][3].fill_(0)
        weights[KEY].view(-1)[0] = 1000.0

    add_checkpoint("stretched", stretch)
    webui.set(sd_model_checkpoint="stretched.safetensors")
    plain = webui.txt2img()
    webui.set(fp8_storage="Enable")
    assert _kind(webui) == "float8_e4m3fn"
    assert webui.status()["parts"][0]["notes"] == []
    assert webui.txt2img().psnr(plain) > 25
    webui.set(fp8_format="float8_e4m3fn unscaled")
    (note,) = webui.status()["parts"][0]["notes"]
    assert "clamped in 1 layers" in note
    webui.txt2img()


def test_checkpoint_without_some_keys(webui: Client, add_checkpoint):
    """What a checkpoint does not name is left alone by the WebUI; that must hold with 8 bits too."""
    webui.set(fp8_storage="Enable")
    before = webui.txt2img()
    add_checkpoint("gap", lambda weights: weights.pop(KEY))
    webui.set(sd_model_checkpoint="gap.safetensors")
    webui.txt2img()
    webui.set(sd_model_checkpoint=f"{START}.safetensors")
    assert webui.txt2img() == before


def test_checkpoint_deleted_while_in_use(webui: Client, add_checkpoint):
    path = add_checkpoint("deleted")
    webui.set(sd_model_checkpoint="deleted.safetensors")
    webui.set(fp8_storage="Enable")
    before, bits = webui.txt2img(), webui.probe("parameters")
    path.unlink()
    assert webui.txt2img() == before
    webui.set(fp8_format="int8")
    assert webui.options()["fp8_format"] == "float8_e4m3fn"
    with pytest.raises(ApiError, match=r"deleted\.safetensors"):
        webui.txt2img(override_settings={"fp8_format": "int8"})
    assert webui.txt2img() == before
    assert webui.probe("parameters") == bits
    assert "deleted.safetensors" in webui.status()["lora_problem"]


def test_lora_when_the_checkpoint_is_gone(webui: Client, add_checkpoint):
    path = add_checkpoint("deleted")
    webui.set(sd_model_checkpoint="deleted.safetensors")
    webui.set(fp8_storage="Enable")
    before = webui.txt2img()
    exact = webui.txt2img("a red circle on a blue background<lora:shapes-outline:1>")
    webui.txt2img()
    path.unlink()
    noisy = webui.txt2img("a red circle on a blue background<lora:shapes-outline:1>")
    assert noisy.psnr(exact) > 20
    assert list(webui.status()["lora_layers"]) == ["run time"]
    assert webui.txt2img() == before


def test_checkpoint_replaced_on_disk(webui: Client, add_checkpoint):
    """A file that was written anew under the same name is not the original of what is loaded."""
    path = add_checkpoint("replaced")
    webui.set(sd_model_checkpoint="replaced.safetensors")
    webui.set(fp8_storage="Enable")
    before = webui.txt2img()
    weights = {key: value * 0 if key == KEY else value.clone() for key, value in load_file(path).items()}
    path.unlink()
    save_file(weights, path)
    webui.txt2img("a red circle on a blue background<lora:shapes-outline:1>")
    assert list(webui.status()["lora_layers"]) == ["run time"]
    assert webui.txt2img() == before


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"fp8_format": "float3"}, "'float3' is not one of"),
        ({"fp8_keep_layers": "(["}, r"is no valid regular expression"),
        ({"fp8_storage": "Sometimes"}, "'Sometimes' is not one of"),
        ({"fp8_lora": "Nowhere"}, "'Nowhere' is not one of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_settings(setting, message, webui: Client, console):
    webui.set(fp8_storage="Enable")
    before, options = webui.txt2img(), webui.fp8_options()
    with console() as said:
        webui.set(**setting)
    assert message.replace("\\", "") in said()
    assert webui.fp8_options() == options
    with pytest.raises(ApiError, match=message):
        webui.txt2img(override_settings=setting)
    assert webui.fp8_options() == options
    assert webui.txt2img() == before


def test_impossible_values_in_the_configuration(start):
    running = start(fp8_storage="Enable", fp8_format="float3", fp8_keep_layers="([", fp8_lora="Nowhere")
    client = running.client
    assert client.probe("checkpoint") == f"{START}.safetensors"
    assert client.options()["fp8_format"] == "float8_e4m3fn"
    assert client.status()["parts"][0]["format"] == "float8_e4m3fn"
    for value in ("float3", "([", "Nowhere"):
        assert repr(value) in running.log()
    client.txt2img()
    client.set(fp8_format="int8")
    saved = json.loads((running.data / "config.json").read_text())
    assert saved["fp8_format"] == "int8"
    assert saved["fp8_keep_layers"] != "(["
