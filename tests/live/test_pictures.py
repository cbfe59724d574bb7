"""Prompts and networks keep their meaning on 8-bit weights, as the judge reads the pictures of a real WebUI."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from demo.shapes import judge
from demo.shapes.prompts import held_out_prompts
from live.client import Client
from live.conftest import reset

ALL, FEW = 6, 2
STEPS = 12
PROMPTS = held_out_prompts(ALL)
FULL, FORMATS = "full precision", ("float8_e4m3fn", "float8_e5m2", "int8")
QUALITY = "masterpiece, best quality, {}, highly detailed"
LORAS = {"outline": "hollow", "stripes": "stripes"}
"""Network to what of the judge's reading it changes."""
SETS = {"outline": ("outline",), "stripes": ("stripes",), "both": ("outline", "stripes")}
LYCORIS = ("loha", "lokr", "lokr-tucker", "full", "dora-in", "ia3", "glora", "oft", "boft", "norm")
LEAST_COSINE = {"float8_e4m3fn": 0.95, "int8": 0.98, "float8_e5m2": 0.85}
"""Of the change that networks make to the pixels, against that in full precision; e5m2 has two bits for digits."""


class Album:
    """Pictures of a running WebUI, one a prompt and each with a seed of its own; made once."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._made: dict[tuple, np.ndarray] = {}

    def hold(self, storage: str) -> None:
        """Bring the model into full precision or a format."""
        if storage == FULL:
            self.client.set(fp8_storage="Disable")
        else:
            self.client.set(fp8_storage="Enable", fp8_format=storage)
            if self.client.status()["parts"][0]["format"] != storage:
                pytest.skip(f"this WebUI's torch has no {storage}")

    def make(self, networks=(), count=ALL, template="{}") -> np.ndarray:
        """Pictures with the model as it is."""
        addition = "".join(f"<lora:shapes-{name}:1>" for name in networks)
        prompts = [template.format(prompt) + addition for prompt, _ in PROMPTS[:count]]
        return np.stack([self.client.txt2img(p, seed=seed, steps=STEPS).pixels for seed, p in enumerate(prompts)])

    def __call__(self, storage: str, networks=(), count=ALL) -> np.ndarray:
        key = storage, networks, count
        if key not in self._made:
            self.hold(storage)
            self._made[key] = self.make(networks, count)
        return self._made[key]


@pytest.fixture(scope="module")
def shared_album(rack) -> Album:
    return Album(rack.shared().client)


@pytest.fixture
def album(shared_album, webui: Client) -> Album:
    """The album; afterwards all settings are as they were."""
    yield shared_album
    reset(webui)


def following(pictures: np.ndarray) -> float:
    """Share of pictures that show what was asked for."""
    return statistics.mean(judge.read(p).follows(subject) for p, (_, subject) in zip(pictures, PROMPTS))


def change(pictures: np.ndarray, without: np.ndarray, name: str) -> float:
    """How far networks move one of the judge's readings, mean over the pictures."""
    return statistics.mean(
        getattr(judge.read(a), name) - getattr(judge.read(b), name) for a, b in zip(pictures, without)
    )


@pytest.mark.parametrize("storage", FORMATS)
def test_prompts_are_followed(album: Album, storage):
    plain = following(album(FULL))
    assert plain >= 0.95
    assert following(album(storage)) >= plain - 0.01


def test_words_of_quality_do_no_harm(album: Album):
    album.hold("float8_e4m3fn")
    assert following(album.make(template=QUALITY)) >= 0.9


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of the angle between two changes of pixels."""
    return float((a * b).sum() / np.sqrt((a**2).sum() * (b**2).sum()))


def pixels_changed(pictures: np.ndarray, without: np.ndarray) -> np.ndarray:
    """What networks add to the pixels."""
    return pictures.astype(float) - without.astype(float)


@pytest.mark.parametrize("networks", SETS.values(), ids=SETS)
@pytest.mark.parametrize("storage", FORMATS)
def test_loras_keep_their_effect(album: Album, storage, networks):
    """By pixels, and by the judge's reading, in which one of the few pictures may tip over."""
    full, stored = (album(FULL, networks), album(FULL)), (album(storage, networks), album(storage))
    assert cosine(pixels_changed(*stored), pixels_changed(*full)) >= LEAST_COSINE[storage]
    for name in networks:
        wanted = change(*full, LORAS[name])
        assert wanted > 0.3
        assert change(*stored, LORAS[name]) >= 0.98 * wanted - 1 / ALL


def test_magnitudes_of_output_channels(album: Album, installation):
    """The WebUI since 1.9 misreads such a DoRA; on 8-bit weights it does what it was trained for."""
    code = installation.folder / "extensions-builtin" / "Lora"
    if not any("dora_scale" in file.read_text("utf8") for file in code.glob("network*.py")):
        pytest.skip("this WebUI's Lora code does not know DoRA")
    plain, misread = album(FULL, (), FEW), album(FULL, ("dora",), FEW)
    intended = album(FULL, ("dora-in",), FEW)
    album.hold("int8")
    without, bits = album.make((), FEW), album.client.probe("parameters")
    right = album.make(("dora",), FEW)
    wanted = change(intended, plain, LORAS["outline"])  # the same training, with a magnitude for each input channel
    assert wanted > 0.25
    assert change(right, without, LORAS["outline"]) >= 0.9 * wanted
    assert change(misread, plain, LORAS["outline"]) < 0.5 * wanted
    np.testing.assert_array_equal(album.make((), 1), without[:1])
    assert album.client.probe("parameters") == bits


@pytest.mark.parametrize("name", LYCORIS)
def test_lycoris_networks_keep_their_effect(album: Album, request, name):
    """Each family that the Lora code knows acts on 8-bit weights as on full ones, and leaves nothing behind."""
    plain, wanted = album(FULL, (), FEW), album(FULL, (name,), FEW)
    if np.array_equal(plain, wanted):
        bare = Album(request.getfixturevalue("bare").client)
        assert np.array_equal(bare.make((), FEW), bare.make((name,), FEW)), "it does nothing, even in full precision"
        pytest.skip(f"this WebUI makes nothing of {name}, without this extension too")
    album.hold("int8")
    album.make((), 1)
    bits = album.client.probe("parameters")
    without, found = album("int8", (), FEW), album.make((name,), FEW)
    assert cosine(pixels_changed(found, without), pixels_changed(wanted, plain)) >= LEAST_COSINE["int8"]
    np.testing.assert_array_equal(album.make((), 1), without[:1])
    assert album.client.probe("parameters") == bits
