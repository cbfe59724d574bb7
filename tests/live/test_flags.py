"""Command line flags that change precision, placement or loading; each with the switch, a format change and a LoRA."""

from __future__ import annotations

import pytest

from live.client import PROMPT
from live.webui import PLAIN_PRECISION

NO_HALF = ("--no-half", "--no-half-vae")
CASES = {
    "no-half": NO_HALF,
    "precision half": ("--precision", "half"),
    "upcast sampling": ("--upcast-sampling",),
    "medvram": (*PLAIN_PRECISION, "--medvram"),
    "lowvram": (*PLAIN_PRECISION, "--lowvram"),
    "channelslast": (*PLAIN_PRECISION, "--opt-channelslast"),
}
LORA = f"{PROMPT}<lora:shapes-outline:1>"


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES)
def test_flags(flags, start_if_able):
    def work(running):
        return running.client, [running.client.txt2img(prompt) for prompt in (PROMPT, LORA, PROMPT)]

    client, (plain, plain_lora, _) = start_if_able(work, flags)
    weights = client.probe("parameters")

    client.set(fp8_storage="Enable", fp8_clip_l=True)
    bits, on, on_lora = client.probe("parameters"), client.txt2img(), client.txt2img(LORA)
    assert 25 < on.psnr(plain) < float("inf")
    assert 20 < on_lora.psnr(plain_lora) < float("inf")
    assert client.txt2img() == on
    assert client.probe("parameters") == bits
    assert client.status()["lora_layers"] == {}

    client.set(fp8_format="int8")
    assert client.txt2img().psnr(plain) > on.psnr(plain)
    client.set(fp8_format="float8_e4m3fn")
    assert client.probe("parameters") == bits
    assert client.txt2img() == on

    client.set(fp8_storage="Disable")
    assert client.txt2img() == plain
    assert client.txt2img(LORA) == plain_lora
    client.txt2img()
    assert client.probe("parameters") == weights
