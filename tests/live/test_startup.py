"""A model that is stored in 8 bits while it is loaded: same bits as later on, and no more memory than it needs."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from live.client import Client
from live.conftest import START, reset
from live.models import EMBEDDED
from live.webui import PLAIN_PRECISION

CHECKPOINT = "sd1-A"
BOTH = {"fp8_storage": "Enable", "fp8_clip_l": True}


@pytest.fixture(scope="module")
def enabled_later(rack):
    """Weights and picture of a model that was converted in place, and again when the checkpoint was chosen."""
    client = rack.shared().client
    reset(client)
    client.set(sd_model_checkpoint=f"{CHECKPOINT}.safetensors")
    client.txt2img()
    reads = client.probe("counters")["reads"]
    client.set(**BOTH)
    assert client.probe("counters")["reads"] == reads
    found = client.probe("parameters"), client.txt2img()
    for name in (START, CHECKPOINT):
        client.set(sd_model_checkpoint=f"{name}.safetensors")
    assert (client.probe("parameters"), client.txt2img()) == found
    return found


def _write_float32_copy(data, name):
    """A float32 checkpoint whose values lie between those of float16, so that a detour over float16 would show."""
    folder = data / "models/Stable-diffusion"
    rng = torch.Generator().manual_seed(5)
    weights = {
        key: value.float() * (1 + 2e-4 * torch.randn(value.shape, generator=rng)) if value.dim() > 1 else value.float()
        for key, value in load_file(EMBEDDED).items()
    }
    save_file(weights, folder / f"{name}.safetensors")
    (folder / f"{name}.yaml").write_bytes(EMBEDDED.with_suffix(".yaml").read_bytes())


def test_start_up_gives_the_bits_of_enabling_later(enabled_later, start):
    client = start(checkpoint=CHECKPOINT, **BOTH).client
    assert client.probe("checkpoint") == f"{CHECKPOINT}.safetensors"
    assert client.status()["enabled"] is True
    assert (client.probe("parameters"), client.txt2img()) == enabled_later
    census = client.probe("census")
    assert census["leaves"] > 200
    assert census["peak"] <= census["final"] + census["largest"]


def test_without_the_ram_optimization(enabled_later, start):
    flags = (*PLAIN_PRECISION, "--disable-model-loading-ram-optimization")
    client = start(flags, CHECKPOINT, **BOTH).client
    assert client.probe("checkpoint") == f"{CHECKPOINT}.safetensors"
    assert (client.probe("parameters"), client.txt2img()) == enabled_later
    client.set(fp8_format="int8")
    assert client.txt2img() != enabled_later[1]
    client.set(fp8_storage="Disable")
    plain = client.txt2img()
    client.txt2img("a red circle<lora:sd1-te:1>")
    assert client.txt2img() == plain
    client.set(fp8_format="float8_e4m3fn")
    client.set(fp8_storage="Enable")
    assert (client.probe("parameters"), client.txt2img()) == enabled_later


def test_float32_checkpoint(shared_webui, webui: Client):
    _write_float32_copy(shared_webui.data, "float32-copy")
    webui.request("/sdapi/v1/refresh-checkpoints", {})
    webui.set(sd_model_checkpoint="float32-copy.safetensors")
    plain = webui.txt2img()
    webui.set(**BOTH)
    converted, picture = webui.probe("parameters"), webui.txt2img()
    webui.set(sd_model_checkpoint=f"{START}.safetensors")
    webui.set(sd_model_checkpoint="float32-copy.safetensors")
    assert webui.probe("parameters") == converted
    assert webui.txt2img() == picture
    assert 30 < picture.psnr(plain) < float("inf")
