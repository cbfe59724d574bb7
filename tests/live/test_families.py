"""Every family of networks through the WebUI's own Lora code: what the layers hold is what float64 makes of the files.

One file for each family, made by ``families`` for one layer of each kind of the embedded model.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import families
import numpy as np
import pytest
import torch
from helpers import reference_decode, reference_pack
from safetensors.torch import load_file, save_file

from live.client import PROMPT, Client
from live.conftest import reset
from live.models import EMBEDDED

UNET = "model.diffusion_model."
TEXT = "cond_stage_model.transformer.text_model."
LAYERS = (
    *(f"{UNET}input_blocks.1.{name}" for name in ("0.in_layers.0", "0.in_layers.2", "1.proj_in")),
    *(f"{UNET}input_blocks.1.1.transformer_blocks.0.{name}" for name in ("attn1.to_q", "ff.net.2", "norm1")),
    f"{UNET}time_embed.0",
    f"{TEXT}encoder.layers.0.mlp.fc1",
)
FORMATS = ("float8_e4m3fn", "int8")
OTHER = "lora"
STRENGTH, OTHER_STRENGTH = 1, 0.5
RANK, SIZE = 4, 0.05
"""Of what is added, of the spread of the weight."""


def key_of(layer: str) -> str:
    """The name of a layer in the files of trainers that use the checkpoint's own names."""
    if layer.startswith(TEXT):
        return "lora_te_text_model_" + layer.removeprefix(TEXT).replace(".", "_")
    return "lora_unet_" + layer.removeprefix(UNET).replace(".", "_")


class Made:
    """The files of all families, and what they add."""

    def __init__(self, folder: Path, version: tuple[int, ...]):
        self.folder = folder
        random = np.random.default_rng(7)
        self.originals = {key: value.double().numpy() for key, value in load_file(EMBEDDED).items()}
        self.tensors: dict[tuple[str, str], dict[str, np.ndarray]] = {}
        for name, family in families.FAMILIES.items():
            file = {}
            for layer in LAYERS:
                weight = self.originals[layer + ".weight"]
                kind = families.kind_of(weight.shape)
                if kind not in family.kinds or (name == "ia3-output" and kind != families.LINEAR):
                    continue
                made = families.make(name, weight.shape, random, SIZE * weight.std(), weight, RANK)
                if "dora" in name and version < (1, 10):
                    made["alpha"] = np.float32(RANK)  # 1.9 applies alpha too late to a DoRA, unless it is no change
                tensors = {part: torch.from_numpy(np.asarray(value)) for part, value in made.items()}
                file |= {f"{key_of(layer)}.{part}": value.contiguous() for part, value in tensors.items()}
                self.tensors[name, layer] = {part: value.double().numpy() for part, value in tensors.items()}
            save_file(file, folder / f"family-{name}.safetensors")

    def delta(self, layer: str, base: np.ndarray, networks: dict[str, float]) -> np.ndarray:
        """The sum of what networks of these families and strengths add to a weight."""
        found = [
            families.added(self.tensors[name, layer], base, strength)[0]
            for name, strength in networks.items()
            if (name, layer) in self.tensors
        ]
        return sum(found, np.zeros(base.shape))

    def sum(self, layer: str, networks: dict[str, float]) -> np.ndarray:
        """The original weight with networks."""
        base = self.originals[layer + ".weight"]
        return base + self.delta(layer, base, networks)


@pytest.fixture(scope="module")
def made(rack, installation) -> Made:
    webui = rack.shared()
    found = Made(webui.data / "models/Lora", installation.version)
    webui.client.request("/sdapi/v1/refresh-loras", {})
    return found


@pytest.fixture(scope="module")
def skip_unknown(request, made, installation):
    """``skip_unknown(name)`` skips a family that the WebUI is too old for, if it makes nothing right of it."""

    @functools.cache
    def known_without_the_extension(name: str) -> bool:
        bare = request.getfixturevalue("bare")
        file = f"models/Lora/family-{name}.safetensors"
        if not (bare.data / file).exists():
            shutil.copy(made.folder / f"family-{name}.safetensors", bare.data / file)
            bare.client.request("/sdapi/v1/refresh-loras", {})
        bare.client.txt2img(f"{PROMPT}<lora:family-{name}:{STRENGTH}>", steps=1)
        found = stored(bare.client, bare.data, "save_values")
        return all(
            np.allclose(found[layer + ".weight"], made.sum(layer, {name: STRENGTH}), rtol=1e-3, atol=1e-5)
            for layer in LAYERS
        )

    def check(name: str) -> None:
        if families.FAMILIES[name].since > installation.version and not known_without_the_extension(name):
            pytest.skip(f"this WebUI's Lora code does not know {name}")

    return check


@pytest.fixture
def ready(webui: Client):
    yield webui
    reset(webui)


def stored(client: Client, folder: Path, function: str) -> dict[str, np.ndarray]:
    names = [name.replace(TEXT, TEXT.replace("cond_stage_model.", "cond_stage_model.wrapped.")) for name in LAYERS]
    client.probe(function, names=[name + ".weight" for name in names], path=str(folder / "weights.npz"))
    with np.load(folder / "weights.npz") as found:
        return {name.replace(".wrapped.", "."): value for name, value in found.items()}


def assert_merged(made: Made, found: dict[str, np.ndarray], networks: dict[str, float], format_name: str) -> None:
    """The sum over the original, rounded once: at most a code in a hundred falls to the other side of a border."""
    for layer in LAYERS:
        key = layer + ".weight"
        exact = made.sum(layer, networks)
        if key in found:
            np.testing.assert_allclose(found[key], exact, rtol=1e-4, atol=1e-6, err_msg=layer)
            continue
        codes, scale = reference_pack(torch.from_numpy(exact), format_name)
        rounded = reference_decode(codes, scale, format_name)
        values = reference_decode(found[key + "|qdata"], found.get(key + "|scale"), format_name)
        assert np.linalg.norm(values - exact) <= 1.05 * np.linalg.norm(rounded - exact), layer
        assert np.mean(values != rounded) < 0.01, layer


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("name", families.FAMILIES)
def test_merged(ready: Client, made: Made, skip_unknown, shared_webui, name, format_name):
    """Alone, and with another network before and after it; then the very bits from before."""
    skip_unknown(name)
    ready.set(fp8_storage="Enable", fp8_format=format_name, fp8_clip_l=True)
    ready.txt2img(steps=1)
    bits = ready.probe("parameters")
    tag, other = f"<lora:family-{name}:{STRENGTH}>", f"<lora:family-{OTHER}:{OTHER_STRENGTH}>"
    both = {name: STRENGTH, OTHER: OTHER_STRENGTH} if name != OTHER else {name: STRENGTH}
    for prompt, networks in ((tag, {name: STRENGTH}), (tag + other, both), (other + tag, both)):
        if name == OTHER and prompt != tag:
            continue
        ready.txt2img(PROMPT + prompt, steps=1)
        assert ready.probe("lora_errors") == {}
        assert_merged(made, stored(ready, shared_webui.data, "save_weights"), networks, format_name)
    ready.txt2img(steps=1)
    assert ready.probe("parameters") == bits


@pytest.mark.parametrize("name", families.FAMILIES)
def test_at_run_time(ready: Client, made: Made, skip_unknown, shared_webui, name):
    """The 8-bit values are as they were; what a reader of the weight sees is their sum with the networks."""
    skip_unknown(name)
    ready.set(fp8_storage="Enable", fp8_clip_l=True, fp8_lora="Add at run time")
    ready.txt2img(steps=1)
    before, packed = stored(ready, shared_webui.data, "save_values"), stored(ready, shared_webui.data, "save_weights")
    bits = ready.probe("parameters")
    networks = {OTHER: OTHER_STRENGTH, name: STRENGTH}
    ready.txt2img(PROMPT + "".join(f"<lora:family-{n}:{s}>" for n, s in networks.items()), steps=1)
    assert ready.probe("lora_errors") == {}
    after, packed_now = (
        stored(ready, shared_webui.data, "save_values"),
        stored(ready, shared_webui.data, "save_weights"),
    )
    for layer in LAYERS:
        key = layer + ".weight"
        if key + "|qdata" in packed:
            np.testing.assert_array_equal(packed[key + "|qdata"], packed_now[key + "|qdata"])
        delta = made.delta(layer, before[key], networks)
        np.testing.assert_allclose(after[key] - before[key], delta, rtol=1e-3, atol=1e-5, err_msg=layer)
    ready.txt2img(steps=1)
    assert ready.probe("parameters") == bits
