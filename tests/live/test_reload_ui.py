"""Reload UI, switching the extension off, and on again."""

from __future__ import annotations

import pytest

from live.client import Client
from live.webui import EXTENSION

REPLACED = ["modules.sd_models.load_model_weights", "modules.sd_models.reload_model_weights"]


def _settings_on_page(client: Client) -> list[str]:
    ids = [part["props"].get("elem_id") or "" for part in client.request("/config")["components"]]
    return [name.removeprefix("setting_") for name in ids if name.startswith("setting_fp8_")]


def _without_schedule(hashes: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in hashes.items() if not name.startswith(".")}


@pytest.fixture(scope="module")
def client(rack) -> Client:
    """A WebUI whose page is reloaded, apart from the shared one."""
    return rack.start().client


def test_three_times(client: Client):
    plain = client.txt2img()
    client.set(fp8_storage="Enable")
    on, bits, patched = client.txt2img(), client.probe("parameters"), client.probe("patched")
    settings = _settings_on_page(client)
    assert set(REPLACED) <= set(patched["recorded"])
    assert patched["lora"] is True
    for _ in range(3):
        client.reload_ui()
        assert client.probe("patched") == patched
        for place in REPLACED:
            assert client.probe("function_depth", owner="modules.sd_models", field=place.split(".")[-1]) == 1
        assert client.probe("function_depth", owner="networks", field="network_apply_weights") == 1
        assert _settings_on_page(client) == settings
        assert client.probe("parameters") == bits
        assert client.txt2img() == on
    client.set(fp8_storage="Disable")
    assert client.txt2img() == plain
    client.set(fp8_storage="Enable")
    assert client.txt2img() == on
    assert client.status()["enabled"] is True


def test_switched_off_while_in_full_precision(client: Client):
    client.set(fp8_storage="Disable")
    plain, weights = client.txt2img(), client.probe("parameters")
    client.set(fp8_storage="Enable", fp8_clip_l=True)
    client.txt2img()
    client.set(fp8_storage="Disable")
    for disabled in ([EXTENSION], []):
        client.set(disabled_extensions=disabled)
        client.reload_ui()
        assert client.txt2img() == plain
        assert client.probe("parameters") == weights


def test_switched_off_and_on_again(start):
    """Without the extension the switch is the WebUI's own, where it has one; else there is none, and no 8 bits."""
    without = start(fp8_storage="Enable", disabled_extensions=[EXTENSION]).client
    own_settings, own_picture, own_weights = _settings_on_page(without), without.txt2img(), without.probe("parameters")
    assert own_settings in ([], ["fp8_storage"])

    client = start(fp8_storage="Enable").client
    settings, on, bits = _settings_on_page(client), client.txt2img(), client.probe("parameters")
    client.txt2img("a circle<lora:shapes-outline:1>")
    client.set(disabled_extensions=[EXTENSION])
    client.reload_ui()
    assert client.probe("patched") == {"recorded": [], "in_force": [], "lora": False}
    assert _settings_on_page(client) == own_settings
    assert client.txt2img() == own_picture
    assert client.probe("parameters") == own_weights

    client.set(disabled_extensions=[])
    client.reload_ui()
    assert _settings_on_page(client) == settings
    # The WebUI leaves its noise schedule (buffers of the model itself) in float16 when its own conversion ends.
    assert client.txt2img().psnr(on) > 50
    assert _without_schedule(client.probe("parameters")) == _without_schedule(bits)
    assert client.probe("fp8_flag") is False
