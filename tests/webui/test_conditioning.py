"""The cache of encoded prompts."""

from __future__ import annotations

import contextlib

import pytest
import torch
from helpers import FORMAT_NAMES, need_format

ON = {"fp8_storage": "Enable"}


@pytest.fixture
def ready(host, monkeypatch):
    """Without autocast, whose rounding is coarser than that of int8."""
    monkeypatch.setattr(host.devices, "autocast", contextlib.nullcontext)
    host.shared.cmd_opts.no_half = True
    host.checkpoint()
    return host.start(**ON)


def encoded(host, **overrides):
    """How often a job had to encode its prompt, and what it used."""
    p = host.job(**overrides)
    return p.encoded, p.c


def test_the_same_storage_uses_the_cache(ready):
    assert [encoded(ready)[0] for _ in range(3)] == [1, 0, 0]


@pytest.mark.parametrize("another", [{"fp8_format": "int8"}, {"fp8_keep_layers": "fc1"}], ids=str)
def test_another_storage_of_the_text_encoder_does_not(ready, another):
    if "fp8_format" in another:
        need_format(FORMAT_NAMES[0])  # or it is in int8 already
    full = encoded(ready)[1]
    times, packed = encoded(ready, fp8_clip_l=True)
    assert times == 1
    assert not torch.equal(packed, full)
    times, other = encoded(ready, fp8_clip_l=True, **another)
    assert times == 1
    assert not torch.equal(other, packed)
    times, again = encoded(ready)
    assert times == 1
    assert torch.equal(again, full)


def test_what_does_not_touch_it_does(ready):
    encoded(ready)
    assert encoded(ready, fp8_format="int8")[0] == 0
    assert encoded(ready, fp8_lora="Add at run time")[0] == 0


@pytest.mark.parametrize("settings", [ON, {"fp8_storage": "Disable"}], ids=["8 bits", "full precision"])
def test_another_file_of_the_same_name_does_not(ready, settings):
    """Also the empty prompt, which the WebUI encodes once for a model, is that of the new file."""
    ready.set(**settings)
    first = encoded(ready)[1]
    ready.checkpoint(seed=2)
    ready.set(fp8_storage="Enable", fp8_format="int8")
    ready.set(fp8_storage="Disable")
    times, other = encoded(ready)
    assert times == 1
    assert not torch.equal(other, first)
    with ready.devices.autocast(), torch.no_grad():
        assert torch.equal(ready.model.cond_stage_model_empty_prompt, ready.sd_models.get_empty_cond(ready.model))


def test_how_networks_are_applied_to_the_text_encoder_does_not(ready):
    encoded(ready, fp8_clip_l=True)
    assert encoded(ready, fp8_clip_l=True, fp8_lora="Add at run time")[0] == 1


def test_the_key_is_the_hosts_own_again_afterwards(host):
    host.checkpoint()
    host.start(extension=False)
    processing = host.processing.StableDiffusionProcessing
    before = processing.cached_params
    host.reload_ui()
    assert processing.cached_params is not before
    host.reload_ui()
    host.reload_ui(extension=False)
    assert processing.cached_params is before
