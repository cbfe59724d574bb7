"""The page in a browser, as a user sees it."""

from __future__ import annotations

import re
import shutil

import pytest

from live.client import Client

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def page():
    """A page of a headless browser; skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if (browser := next(filter(None, map(shutil.which, BROWSERS)), None)) is None:
        pytest.skip(f"needs one of {', '.join(BROWSERS)}")
    with playwright.sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=browser, args=["--no-sandbox", "--headless"])
        yield chromium.new_page(viewport={"width": 1400, "height": 1600})
        chromium.close()


def test_switch_and_panel(page, webui: Client, shared_webui):
    client = webui
    plain = client.txt2img()
    errors = []
    page.on("pageerror", lambda error: errors.append(error.stack))
    page.goto(client.url, wait_until="domcontentloaded")
    page.get_by_role("button", name="Settings", exact=True).click(timeout=60_000)
    page.locator("#settings").get_by_role("button", name="Optimizations", exact=True).click()
    switch = page.locator("#setting_fp8_storage")
    assert page.locator("#setting_fp8_storage:visible").count() == 1
    switch.get_by_label("Enable", exact=True).check()
    page.locator("#settings_submit").click()
    panel = page.locator(".fp8-status")
    panel.locator("text=UNet").wait_for(timeout=60_000)
    said = panel.inner_text()
    unet = client.status()["parts"][0]
    page.screenshot(path=shared_webui.data / "page.png")
    assert str(unet["converted"]) in said
    assert re.search(r"[\d.]+ MB . [\d.]+ MB", said)
    assert f"{unet['bytes'] / 2**20:.1f} MB" in said

    page.get_by_role("button", name="txt2img", exact=True).first.click()
    page.locator("#txt2img_prompt textarea").fill("a red circle")
    for name, value in (("steps", "4"), ("width", "64"), ("height", "64")):
        page.locator(f"#txt2img_{name} input[type=number]").fill(value)
    page.locator("#txt2img_generate").click()
    page.locator("#txt2img_gallery img").first.wait_for(timeout=60_000)
    page.locator("#html_info_txt2img", has_text="FP8 weight: Enable").first.wait_for(timeout=60_000)
    page.screenshot(path=shared_webui.data / "generated.png")
    assert not [error for error in errors if "fp8" in error]  # gradio has some of its own
    assert client.txt2img() != plain
