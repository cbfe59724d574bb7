"""A model that is stored in 8 bits while it is loaded: same bits as later on, and no more memory than it needs."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from live.client import Client
from live.conftest import START, reset
from live.models import EMBEDDED
from live.webui import PLAIN_PRECISION

BOTH = {"fp8_storage": "Enable", "fp8_clip_l": True}


@pytest.fixture(scope="module")
def enabled_later(rack):
    """Weights and picture of a model that was converted in place."""
    client = rack.shared().client
    reset(client)
    client.txt2img()
    reads = client.probe("counters")["reads"]
    client.set(**BOTH)
    assert client.probe("counters")["reads"] == reads
    return client.probe("parameters"), client.txt2img()


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
    client = start(**BOTH).client
    assert client.probe("checkpoint") == f"{START}.safetensors"
    assert client.status()["enabled"] is True
    assert client.probe("parameters") == enabled_later[0]
    assert client.txt2img() == enabled_later[1]
    census = client.probe("census")
    assert census["leaves"] > 100
    assert census["peak"] <= census["final"] + census["largest"]


def test_without_the_ram_optimization(enabled_later, start):
    client = start((*PLAIN_PRECISION, "--disable-model-loading-ram-optimization"), **BOTH).client
    assert client.probe("checkpoint") == f"{START}.safetensors"
    assert client.probe("parameters") == enabled_later[0]
    assert client.txt2img() == enabled_later[1]


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
