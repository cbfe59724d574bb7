"""The panel and its route: what is told is what is true."""

from __future__ import annotations

import html
import json
import re

import pytest
from helpers import format_in_use

from lib_fp8 import QuantWeight

ROUTE = "/sdapi/v1/fp8-weight"
ON = {"fp8_storage": "Enable"}


def bytes_by_hand(module):
    """Bytes now, and with every weight in float16."""
    now = full = 0
    for tensor in [*module.parameters(), *module.buffers()]:
        if isinstance(tensor, QuantWeight):
            now += tensor.numel() + (0 if tensor.scale is None else 4 * tensor.shape[0])
            full += 2 * tensor.numel()
        else:
            now += tensor.numel() * tensor.element_size()
            full += tensor.numel() * tensor.element_size()
    return now, full


def routes(app):
    return [route for route in app.routes if getattr(route, "path", "") == ROUTE]


@pytest.mark.parametrize("format_name", ["float8_e4m3fn", "float8_e4m3fn unscaled", "int8"])
@pytest.mark.parametrize("at_start", [True, False])
def test_numbers_are_measured(host, format_name, at_start):
    host.checkpoint(kind="sdxl")
    settings = {**ON, "fp8_format": format_name, "fp8_clip_l": True}
    host.start(**(settings if at_start else {}))
    host.set(**settings)
    status = host.panel.status()
    assert json.loads(json.dumps(status)) == status
    assert status["loaded"] is status["enabled"] is True
    assert status["checkpoint"] == "a.safetensors"
    modules = {"UNet": host.unet, "CLIP-L": host.model.conditioner.embedders[0].wrapped}
    assert [part["part"] for part in status["parts"]] == list(modules)
    for part, module in zip(status["parts"], modules.values()):
        now, full = bytes_by_hand(module)
        assert (part["bytes"], part["bytes_full_precision"]) == (now, full)
        assert part["converted"] == sum(isinstance(p, QuantWeight) for p in module.parameters())
        assert part["format"] == format_in_use(format_name)
    assert status["parts"][0]["kept"] == {
        "pattern time_embed": 2,
        "pattern label_emb": 1,
        "pattern emb_layers": 1,
        r"pattern ^input_blocks\.0\.0$": 1,
        r"pattern ^out\.2$": 1,
    }


def test_parts_that_went_back_to_full_precision_are_gone(host):
    host.checkpoint()
    host.start(fp8_clip_l=True, **ON)
    host.set(fp8_clip_l=False)
    assert [part["part"] for part in host.panel.status()["parts"]] == ["UNet"]
    host.set(fp8_storage="Disable")
    status = host.panel.status()
    assert (status["enabled"], status["parts"]) == (False, [])
    assert "a.safetensors: full precision." in host.panel.status_html()


def test_no_model(host):
    host.start()
    assert host.panel.status()["loaded"] is False
    assert "No model is loaded" in host.panel.status_html()
    assert "No model is loaded" in host.settings_page()["fp8_status"].value


def test_names_are_escaped(host):
    host.checkpoint("<img src=x onerror=alert(1)>&'", kind="sd1")
    host.start(fp8_keep_layers="to_q|<b>'\"&", **ON)
    shown = host.panel.status_html()
    assert html.escape("<img src=x onerror=alert(1)>&'.safetensors") in shown
    tags = set(re.findall(r"</?(\w+)", shown))
    assert tags == {"div", "p", "table", "tr", "th", "td"}
    (title,) = re.findall(r"<tr title='([^']*)'>", shown)
    assert "1 by pattern to_q|<b>'\"&" in html.unescape(title)
    host.set(fp8_storage="Disable")
    assert "<img" not in host.panel.status_html()


def test_problems_are_escaped(host):
    host.checkpoint()
    host.start()
    host.storage.record_of(host.model).problem = "<script>"
    host.snapshot.publish()
    assert "&lt;script&gt;" in host.panel.status_html()
    assert "<script>" not in host.panel.status_html()


def test_the_entry_is_always_true_and_never_saved(host):
    host.checkpoint()
    host.start()
    assert "full precision" in host.opts.fp8_status
    host.set(**ON)
    assert "float8_e4m3fn" in host.opts.fp8_status
    assert "fp8_status" not in host.opts.data
    assert host.set(fp8_status="lies") == [False]
    assert "lies" not in host.opts.fp8_status


def test_the_refresh_button(host):
    host.checkpoint()
    host.start()
    panel = host.settings_page()["fp8_status"]
    assert "full precision" in panel.value
    assert panel.elem_id == "setting_fp8_status"


class TestTheRoute:
    def test_is_as_well_guarded_as_its_neighbour(self, host):
        host.start()
        (route,) = routes(host.app)
        assert route.dependencies == ["login"]
        assert route.methods == ["GET"]
        assert route.endpoint()["loaded"] is False

    def test_is_there_once(self, host):
        host.start()
        host.script_callbacks.run("app_started", None, host.app)
        assert len(routes(host.app)) == 1

    def test_is_absent_without_the_api(self, host):
        host.start()
        app = host.fastapi.FastAPI()
        host.script_callbacks.run("app_started", None, app)
        assert routes(app) == []


def test_where_networks_were_added(host):
    host.checkpoint()
    host.start(**ON)
    assert "LoRA: none in use (Merge from checkpoint file)." in host.panel.status_html()
    net = host.networks.Network("a")
    weight = host.layers["diffusion_model_middle_block_0_to_q"].weight
    net.modules["diffusion_model_middle_block_0_to_q"] = host.networks.NetworkModule(net, diff=weight.dequantize())
    host.run_networks(net)
    assert "LoRA merged in 1 layers (originals read from the checkpoint file)." in host.panel.status_html()
    host.set(fp8_lora="Add at run time")
    host.run_networks(net)
    assert "LoRA added at run time in 1 layers." in host.panel.status_html()
