"""The model behind the served settings has the embedded checkpoint's layers and values; its figures are real."""

from __future__ import annotations

import sys

import pytest
import torch
from safetensors.torch import load_file
from webui.host import fresh_modules

from demo.model import CHECKPOINT
from demo.serve import start_standin


@pytest.fixture
def opts(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    with fresh_modules("1.6"):
        yield start_standin()


def test_switching_on_converts_the_embedded_model(opts):
    from modules import sd_models

    from lib_fp8.webui import panel

    model = sd_models.model_data.sd_model
    values = load_file(CHECKPOINT)
    unet = {f"model.diffusion_model.{name}": value for name, value in model.model.diffusion_model.state_dict().items()}
    assert all(torch.equal(value, values[name]) for name, value in unet.items())
    assert len(unet) == 686
    assert panel.status()["enabled"] is False
    assert opts.set("fp8_storage", "Enable")
    (part,) = panel.status()["parts"]
    assert part["converted"] > 200
    assert part["bytes_full_precision"] == sum(2 * value.numel() for value in unet.values())
    assert 0.5 < part["bytes"] / part["bytes_full_precision"] < 0.6
    assert not opts.set("fp8_keep_layers", "([")
