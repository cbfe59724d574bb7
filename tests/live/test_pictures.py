"""Prompts and networks keep their meaning on 8-bit weights, as the judge reads the pictures of a real WebUI."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from demo.shapes import judge
from demo.shapes.prompts import held_out_prompts
from live.client import Client

PROMPTS = held_out_prompts(24)
FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8")
QUALITY = "masterpiece, best quality, {}, highly detailed"
LORAS = {"outline": "hollow", "stripes": "stripes"}
"""Network to what of the judge's reading it changes."""
LYCORIS = ("loha", "lokr", "lokr-tucker", "full", "dora", "dora-in", "ia3", "glora", "oft", "boft", "norm")
LEAST_KEPT = 0.98


def pictures(client: Client, addition: str = "", prompts=PROMPTS, template: str = "{}") -> np.ndarray:
    """One picture a prompt, each with a seed of its own."""
    made = [
        client.txt2img(template.format(prompt) + addition, seed=seed, steps=20)
        for seed, (prompt, _) in enumerate(prompts)
    ]
    return np.stack([picture.pixels for picture in made])


def following(found: np.ndarray) -> float:
    """Share of pictures that show what was asked for."""
    return statistics.mean(judge.read(picture).follows(subject) for picture, (_, subject) in zip(found, PROMPTS))


def reading(found: np.ndarray, name: str) -> float:
    """Mean of one of the judge's readings."""
    return statistics.mean(getattr(judge.read(picture), name) for picture in found)


@pytest.fixture(scope="module")
def full_precision(rack) -> dict[str, np.ndarray]:
    """Pictures without FP8: without networks, and with each LoRA and both."""
    client = rack.shared().client
    client.set(fp8_storage="Disable")
    additions = {"": "", **{name: f"<lora:shapes-{name}:1>" for name in LORAS}}
    additions["both"] = "".join(additions.values())
    return {name: pictures(client, addition) for name, addition in additions.items()}


@pytest.fixture(params=FORMATS)
def enabled(request, full_precision, webui: Client) -> Client:
    webui.set(fp8_storage="Enable", fp8_format=request.param)
    if webui.status()["parts"][0]["format"] != request.param:
        pytest.skip(f"this WebUI's torch has no {request.param}")
    return webui


def test_prompts_are_followed(enabled: Client, full_precision):
    plain = following(full_precision[""])
    assert plain >= 0.95
    assert following(pictures(enabled)) >= plain - 1 / len(PROMPTS)


def test_words_of_quality_do_no_harm(webui: Client):
    webui.set(fp8_storage="Enable")
    assert following(pictures(webui, template=QUALITY)) >= 0.9


@pytest.mark.parametrize("name", [*LORAS, "both"])
def test_loras_keep_their_effect(enabled: Client, full_precision, name):
    used = list(LORAS) if name == "both" else [name]
    found = pictures(enabled, "".join(f"<lora:shapes-{lora}:1>" for lora in used))
    plain = pictures(enabled)
    for lora in used:
        wanted = reading(full_precision[name], LORAS[lora]) - reading(full_precision[""], LORAS[lora])
        assert wanted > 0.3
        kept = (reading(found, LORAS[lora]) - reading(plain, LORAS[lora])) / wanted
        assert kept >= (LEAST_KEPT if enabled.status()["parts"][0]["format"] != "float8_e5m2" else 0.9)


@pytest.mark.parametrize("name", LYCORIS)
def test_lycoris_networks_keep_their_effect(webui: Client, name):
    """Each family that the Lora code knows acts on 8-bit weights as on full ones, and leaves nothing behind."""
    prompts, addition = PROMPTS[:4], f"<lora:shapes-{name}:1>"
    plain = pictures(webui, prompts=prompts)
    wanted = pictures(webui, addition, prompts)
    if np.array_equal(plain, wanted):
        pytest.skip(f"this WebUI's Lora code does not know {name}")
    webui.set(fp8_storage="Enable", fp8_format="int8")
    bits, without = webui.probe("parameters"), pictures(webui, prompts=prompts)
    found = pictures(webui, addition, prompts)
    change, expected = (a.astype(float) - b.astype(float) for a, b in ((found, without), (wanted, plain)))
    cosine = (change * expected).sum() / np.sqrt((change**2).sum() * (expected**2).sum())
    assert cosine >= LEAST_KEPT
    np.testing.assert_array_equal(pictures(webui, prompts=prompts), without)
    assert webui.probe("parameters") == bits
