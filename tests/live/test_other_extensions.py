"""Other extensions that change what networks do: 8-bit weights follow them as full precision does, and come back.

Each extension runs in a WebUI that holds no further one. Its checkout is sought in ``--extensions DIR``.
"""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from live.client import HIRES, Client, Picture
from live.conftest import reset
from live.test_pictures import FULL, LEAST_COSINE, PROMPTS, Album, cosine, pixels_changed

FORMATS = ("float8_e4m3fn", "int8")
COUNT = 2
STEPS = 6
OUTLINE = "<lora:shapes-outline:1>"


class Studio:
    """Pictures of a WebUI with another extension; networks are what is added to the prompts.

    Args:
        client: speaks to it.
        script: the extension's scripts with their arguments, as the API wants them.
    """

    def __init__(self, client: Client, script: dict[str, list] | None = None) -> None:
        self.client = client
        self._script = {name: {"args": args} for name, args in (script or {}).items()}
        self._full: dict[tuple[str, str], np.ndarray] = {}

    def hold(self, storage: str) -> None:
        """Bring the model into full precision or a format."""
        Album(self.client).hold(storage)

    def picture(self, networks: str = "", number: int = 0, **fields) -> Picture:
        """The picture of one prompt."""
        fields = {"steps": STEPS, "alwayson_scripts": self._script, **fields}
        return self.client.txt2img(PROMPTS[number][0] + networks, seed=number, **fields)

    def change(self, networks: str, **fields) -> np.ndarray:
        """What networks change in the pixels of a few pictures, with the model as it is."""
        with_networks, without = (
            np.stack([self.picture(text, number, **fields).pixels for number in range(COUNT)])
            for text in (networks, "")
        )
        return pixels_changed(with_networks, without)

    def full_change(self, networks: str, **fields) -> np.ndarray:
        """The same in full precision, made once; leaves the model in full precision if it had to be made."""
        key = networks, repr(fields)
        if key not in self._full:
            self.hold(FULL)
            self._full[key] = self.change(networks, **fields)
        return self._full[key]


_studios: dict[str, Studio] = {}


@pytest.fixture
def studio_with(rack, other_extension):
    """``studio_with(name, script)`` gives the studio of the WebUI with that extension, FP8 weight off."""

    def give(name: str, script: dict[str, list] | None = None) -> Studio:
        client = rack.shared(other_extension(name)).client
        reset(client)
        return _studios.setdefault(client.url, Studio(client, script))

    return give


def assert_effect_kept(studio: Studio, storage: str, networks: str, **fields) -> None:
    """What networks change is as in full precision, in which they do something."""
    wanted = studio.full_change(networks, **fields)
    assert wanted.any(), "the networks do nothing, even in full precision"
    studio.hold(storage)
    assert cosine(studio.change(networks, **fields), wanted) >= LEAST_COSINE[storage]


# sd-webui-lora-block-weight: multiplies the factors of a network, and switches it on and off at steps

BLOCK_WEIGHTS = {"lora block weight": [None, True]}
"""Its own presets, and active."""


def by_block(weights: str, name: str = "outline") -> str:
    """A network with block weights, or with other arguments of the extension."""
    return f"<lora:shapes-{name}:1:1:{weights}>"


RISING = by_block("lbw=1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.8,0.9,0.9,1,1,1,1,1,1")
BLOCKS = {
    "preset": by_block("lbw=OUTALL"),
    "numbers": RISING,
    "two": by_block("lbw=INALL") + by_block("lbw=OUTALL", "stripes"),
    "loha": by_block("lbw=OUTALL", "loha"),
    "start": by_block("start=4"),
    "part": by_block("lbw=OUTALL:step=3-5"),
}


@pytest.fixture
def blocks(studio_with) -> Studio:
    return studio_with("sd-webui-lora-block-weight", BLOCK_WEIGHTS)


@pytest.mark.parametrize("networks", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("storage", FORMATS)
def test_block_weights_keep_their_effect(blocks: Studio, storage, networks):
    assert_effect_kept(blocks, storage, networks)


@pytest.mark.parametrize("storage", [FULL, *FORMATS])
def test_block_weights_come_and_go(blocks: Studio, storage):
    """Nothing stale and nothing twice: each setting gives its very picture again, whatever came before it."""
    blocks.hold(storage)
    none, bits = blocks.picture(), blocks.client.probe("parameters")
    settings = [OUTLINE, BLOCKS["preset"], RISING, by_block("lbw=NONE"), BLOCKS["two"], BLOCKS["part"]]
    first = [blocks.picture(text) for text in settings]
    assert first[3] == none
    different = [none, *first[:3], *first[4:]]
    assert all(a != b for i, a in enumerate(different) for b in different[:i])
    assert [blocks.picture(text) for text in settings[::-1]] == first[::-1]
    assert blocks.picture(OUTLINE) == blocks.picture(OUTLINE) == first[0]
    assert blocks.picture() == none
    assert blocks.client.probe("parameters") == bits


@pytest.mark.parametrize("storage", [FULL, *FORMATS])
def test_steps_of_block_weights(blocks: Studio, storage):
    """At the ends a start and a stop are the same as all and nothing for the UNet."""
    blocks.hold(storage)
    none, bits = blocks.picture(), blocks.client.probe("parameters")
    whole, text_only = blocks.picture(OUTLINE), blocks.picture("<lora:shapes-outline:1:0>")
    assert blocks.picture(by_block("start=1")) == whole
    assert blocks.picture(by_block("stop=100")) == whole
    assert blocks.picture(by_block("start=100")) == text_only
    assert blocks.picture(by_block("stop=1")) == text_only
    assert blocks.picture(by_block("lbw=ALL:start=1")) == whole
    assert blocks.picture() == none
    assert blocks.client.probe("parameters") == bits


@pytest.mark.parametrize("storage", FORMATS)
def test_block_weights_switched_off(blocks: Studio, storage):
    """Without the extension's script its arguments mean nothing, before and after it has acted."""
    blocks.hold(storage)
    off = {"alwayson_scripts": {name: {"args": [None, False]} for name in BLOCK_WEIGHTS}}
    whole = blocks.picture(OUTLINE, **off)
    assert blocks.picture(OUTLINE) == whole
    assert blocks.picture(RISING) != whole
    assert blocks.picture(RISING, **off) == whole


# sd-webui-loractl: the weight of a network is another one at each step

DYNAMIC = {"dynamic lora weights": [True, False]}
"""On, and no plot."""


def by_step(weights: str, name: str = "outline") -> str:
    """A network with weights of the extension."""
    return f"<lora:shapes-{name}:{weights}>"


WEIGHTS = {
    "rising": by_step("0@0,1@1"),
    "absolute": by_step("0@1,1@4"),
    "te": by_step("te=0.5:unet=1@0,0@0.5"),
    "two": by_step("1@0,0@1") + by_step("0@0,1@1", "stripes"),
    "loha": by_step("0@0,1@1", "loha"),
}
HIRES_WEIGHTS = {
    "both": by_step("0@0,1@1:hr=1@0,0@1"),
    "parts": by_step("te=1:unet=0@0,1@1:hrte=0:hrunet=0.5@0,1@1"),
}


@pytest.fixture
def dynamic(studio_with) -> Studio:
    studio = studio_with("sd-webui-loractl", DYNAMIC)
    studio.picture()  # the extension divides by the number of steps of the last picture, of which there is one now
    return studio


@pytest.mark.parametrize("networks", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("storage", FORMATS)
def test_dynamic_weights_keep_their_effect(dynamic: Studio, storage, networks):
    assert_effect_kept(dynamic, storage, networks)


@pytest.mark.parametrize("networks", HIRES_WEIGHTS.values(), ids=HIRES_WEIGHTS)
@pytest.mark.parametrize("storage", FORMATS)
def test_dynamic_weights_of_the_hires_pass(dynamic: Studio, storage, networks):
    assert_effect_kept(dynamic, storage, networks, **HIRES)


@pytest.mark.parametrize("storage", [FULL, *FORMATS])
def test_dynamic_weights_come_and_go(dynamic: Studio, storage):
    """Same seed, same picture: at once, after others, after a hires pass; and the first bits without the network."""
    dynamic.hold(storage)
    none, bits = dynamic.picture(), dynamic.client.probe("parameters")
    settings = [OUTLINE, WEIGHTS["rising"], WEIGHTS["te"], by_step("0@0,0@1"), WEIGHTS["two"]]
    first = [dynamic.picture(text) for text in settings]
    assert [dynamic.picture(text) for text in settings[4:]] == first[4:]
    assert first[3] == none
    different = [none, *first[:3], first[4]]
    assert all(a != b for i, a in enumerate(different) for b in different[:i])
    hires = dynamic.picture(HIRES_WEIGHTS["both"], **HIRES)
    assert [dynamic.picture(text) for text in settings[::-1]] == first[::-1]
    assert dynamic.picture(HIRES_WEIGHTS["both"], **HIRES) == hires
    assert dynamic.picture() == none
    assert dynamic.client.probe("parameters") == bits


@pytest.mark.parametrize("storage", [FULL, *FORMATS])
def test_constant_weight_is_that_without_the_extension(dynamic: Studio, storage):
    dynamic.hold(storage)
    off = {"alwayson_scripts": {name: {"args": [False, False]} for name in DYNAMIC}}
    for plain, spelled in (("1", "1@0,1@1"), ("0.5", "0.5@0,0.5@1"), ("1:0.3", "te=1:unet=0.3")):
        wanted = dynamic.picture(by_step(plain), **off)
        assert dynamic.picture(by_step(plain)) == wanted
        assert dynamic.picture(by_step(spelled)) == wanted


# a1111-sd-webui-lycoris: a second copy of the Lora code, with forwards of its own over those of the first

LYCORIS = "a1111-sd-webui-lycoris"
LYCO = "<lyco:only-lyco:1>"
IN_FORWARD = {"override_settings": {"lyco_functional": True}}
"""Its other way: the weights stay as they are, and the layer adds what the network gives."""
BESIDE_LORA = {"lora": OUTLINE, "lyco": LYCO, "lora-lyco": OUTLINE + LYCO, "lyco-lora": LYCO + OUTLINE}


def _write_lyco(running, models) -> None:
    """A network where the extension has its own; in float32, as its other way computes in that precision."""
    weights = load_file(models.find("lora/shapes-loha"))
    folder = running.data / "models/LyCORIS"
    folder.mkdir(exist_ok=True)
    save_file({key: value.float() for key, value in weights.items()}, folder / "only-lyco.safetensors")


@pytest.fixture
def lyco_folder(other_extension, installation):
    folder = other_extension(LYCORIS)
    if (installation.folder / "extensions-builtin/Lora/lyco_helpers.py").is_file():
        pytest.skip(f"this WebUI's Lora code has a lyco_helpers.py, which {LYCORIS} takes for its own")
    return folder


@pytest.fixture
def lyco(lyco_folder, rack, models, studio_with) -> Studio:
    """Together with the Lora code of the WebUI."""
    _write_lyco(rack.shared(lyco_folder), models)
    studio = studio_with(LYCORIS)
    studio.client.set(lyco_functional=False)  # the WebUI takes an override back only if the option was ever set
    return studio


@pytest.mark.parametrize("networks", BESIDE_LORA.values(), ids=BESIDE_LORA)
@pytest.mark.parametrize("storage", FORMATS)
def test_lyco_beside_lora(lyco: Studio, storage, networks):
    """They act as the same networks do in the WebUI's own Lora code.

    Without this extension they do nothing: the two copies of the Lora code take each other's networks out again.
    """
    wanted = lyco.full_change(networks.replace(LYCO, "<lora:shapes-loha:1>"))
    lyco.hold(storage)
    assert cosine(lyco.change(networks), wanted) >= LEAST_COSINE[storage]


@pytest.mark.parametrize("networks", [LYCO, OUTLINE + LYCO], ids=["lyco", "lora-lyco"])
@pytest.mark.parametrize("storage", FORMATS)
def test_lyco_in_forward_keeps_its_effect(lyco: Studio, storage, networks):
    assert_effect_kept(lyco, storage, networks, **IN_FORWARD)
    wanted = lyco.full_change(networks, **IN_FORWARD)
    assert np.abs(wanted - lyco.full_change(networks.replace(LYCO, "<lora:shapes-loha:1>"))).max() <= 16


@pytest.mark.parametrize("fields", [{}, IN_FORWARD], ids=["merged", "forward"])
@pytest.mark.parametrize("storage", [FULL, *FORMATS])
def test_lyco_comes_and_goes(lyco: Studio, storage, fields):
    lyco.hold(storage)
    none, bits = lyco.picture(), lyco.client.probe("parameters")
    settings = [OUTLINE, LYCO, OUTLINE + LYCO, "<lyco:only-lyco:0.5>" + OUTLINE]
    first = [lyco.picture(text, **fields) for text in settings]
    assert [lyco.picture(text, **fields) for text in settings[::-1]] == first[::-1]
    assert lyco.picture() == none
    assert lyco.client.probe("parameters") == bits
    assert lyco.picture(OUTLINE) == first[0]
    assert lyco.picture() == none
    assert lyco.client.probe("parameters") == bits


# Without the Lora code of the WebUI there is no probe, so that only pictures are compared.


@pytest.fixture
def only_lyco(lyco_folder, start, models):
    """``only_lyco(**settings)`` starts a WebUI whose own Lora code is switched off."""

    def give(**settings) -> Studio:
        running = start(extensions=[lyco_folder], disabled_extensions=["Lora"], **settings)
        _write_lyco(running, models)
        return Studio(running.client)

    return give


def test_lyco_without_lora(lyco: Studio, only_lyco):
    """It rounds for itself, and so once more than the WebUI's Lora code; still it acts, and goes."""
    wanted = lyco.full_change(LYCO, **IN_FORWARD)
    studio = only_lyco(fp8_storage="Enable")
    none = studio.picture()
    assert studio.client.status()["parts"], "not converted"
    assert cosine(studio.change(LYCO), wanted) >= LEAST_COSINE["float8_e4m3fn"] - 0.05
    first = studio.picture(LYCO)
    assert studio.picture("<lyco:only-lyco:0.5>") != first
    assert studio.picture(LYCO) == first
    assert studio.picture() == none


def test_storage_changes_under_lyco_without_lora(only_lyco):
    studio = only_lyco()
    plain, with_network = studio.picture(), studio.picture(LYCO)
    for storage in FORMATS:
        studio.client.set(fp8_storage="Enable", fp8_format=storage)
        assert [part["format"] for part in studio.client.status()["parts"]] == [storage]
        assert studio.picture(LYCO).psnr(with_network) > 25
        assert studio.picture().psnr(plain) > 25
    studio.client.set(fp8_storage="Disable")
    assert studio.picture(LYCO) == with_network
    assert studio.picture() == plain
