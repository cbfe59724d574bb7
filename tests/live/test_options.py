"""Every setting through every way that the WebUI offers: Apply, override settings, pasted parameters, X/Y/Z plot."""

from __future__ import annotations

import pytest

from live.client import Client

FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8", "float8_e4m3fn unscaled")
CHANGES = [
    {"fp8_storage": "Enable for SDXL"},
    *({"fp8_format": name} for name in FORMATS[1:]),
    {"fp8_clip_l": True},
    {"fp8_keep_layers": "attn"},
    {"fp8_keep_layers": ""},
]


def _id(setting: dict) -> str:
    return "=".join(str(part) or "nothing" for part in next(iter(setting.items())))


@pytest.fixture
def enabled(webui: Client) -> Client:
    webui.set(fp8_storage="Enable")
    return webui


@pytest.mark.parametrize("setting", CHANGES, ids=_id)
def test_setting_acts_alike_by_every_way(setting, enabled: Client):
    """Apply, override and pasted parameters give one picture; an override is gone afterwards."""
    (key,) = setting
    before, options, bits = enabled.txt2img(), enabled.fp8_options(), enabled.probe("parameters")

    overridden = enabled.txt2img(override_settings=setting)
    assert enabled.fp8_options() == options
    assert enabled.txt2img() == before
    assert enabled.probe("parameters") == bits

    enabled.set(**setting)
    applied, applied_bits = enabled.txt2img(), enabled.probe("parameters")
    assert enabled.fp8_options()[key] == setting[key]
    assert applied == overridden
    assert applied != before
    assert applied_bits != bits

    enabled.set(**{key: options[key]})
    pasted = enabled.probe("paste", text=applied.infotext)
    assert pasted.get(key) == setting[key] or key == "fp8_storage"
    assert enabled.txt2img(override_settings=pasted) == applied
    assert enabled.txt2img() == before


def test_pasting_a_picture_of_full_precision_switches_off(webui: Client):
    plain = webui.txt2img()
    webui.set(fp8_storage="Enable")
    assert webui.txt2img() != plain
    assert webui.txt2img(override_settings=webui.probe("paste", text=plain.infotext)) == plain


def test_pasting_into_full_precision_switches_on(webui: Client):
    webui.set(fp8_storage="Enable", fp8_format="int8", fp8_clip_l=True, fp8_keep_layers="attn proj_in")
    picture = webui.txt2img()
    webui.set(fp8_storage="Disable", fp8_format="float8_e4m3fn", fp8_clip_l=False, fp8_keep_layers="out")
    assert webui.txt2img(override_settings=webui.probe("paste", text=picture.infotext)) == picture


def test_pasting_what_is_set_changes_nothing(enabled: Client):
    picture = enabled.txt2img()
    pasted = enabled.probe("paste", text=picture.infotext)
    assert not [key for key in pasted if key.startswith("fp8_")]


def test_infotext_says_nothing_when_off(webui: Client):
    assert "FP8" not in webui.txt2img().infotext
    webui.set(fp8_storage="Enable for SDXL")
    assert "FP8" not in webui.txt2img().infotext


def test_formats_in_a_row(enabled: Client):
    """e4m3fn, int8, e5m2, unscaled and back: each change starts from the originals, so it leaves no trace."""
    picture, bits, seen = enabled.txt2img(), enabled.probe("parameters"), {}
    for name in ("int8", "float8_e5m2", "float8_e4m3fn unscaled", "float8_e4m3fn"):
        enabled.set(fp8_format=name)
        seen[name] = enabled.probe("parameters")
        assert enabled.status()["parts"][0]["format"] == name
    assert seen["float8_e4m3fn"] == bits
    assert enabled.txt2img() == picture
    enabled.set(fp8_storage="Disable")
    enabled.set(fp8_format="int8")
    enabled.set(fp8_storage="Enable")
    assert enabled.probe("parameters") == seen["int8"]


def test_unscaled_is_what_the_webui_itself_does(webui: Client):
    """The bits are those of a plain cast to float8_e4m3fn."""
    webui.set(fp8_storage="Enable", fp8_format="float8_e4m3fn unscaled", fp8_keep_layers="", fp8_clip_l=True)
    assert webui.probe("unequal_to_plain_cast") == []


def _xyz(client: Client, **axes: tuple[str, list[str]]):
    """The fields that run the X/Y/Z plot script: for X and Y the label of an axis and its values."""
    arguments = client.probe("script_arguments", title="x/y/z plot")
    labels, values = [argument["label"] for argument in arguments], [argument["value"] for argument in arguments]
    choices = arguments[labels.index("X type")]["choices"]
    for letter in "XYZ":
        label, chosen = axes.get(letter, ("Nothing", []))
        start = labels.index(f"{letter} type")
        values[start : start + 3] = choices.index(label), ",".join(chosen), chosen  # as text, and from the drop-down
    values[labels.index("Include Sub Images")] = True
    return {"script_name": "x/y/z plot", "script_args": values}


def test_xyz_plot(webui: Client):
    options = webui.fp8_options()
    modes, formats = ("Disable", "Enable"), ("float8_e4m3fn", "int8")
    single = {
        (mode, name): webui.txt2img(override_settings={"fp8_storage": mode, "fp8_format": name})
        for mode in modes
        for name in formats
    }
    plot = _xyz(webui, X=("FP8 mode", list(modes)), Y=("FP8 format", list(formats)))
    pictures = webui.grid(**plot)
    assert webui.fp8_options() == options
    cells = [picture for picture in pictures if picture.pixels.shape == (64, 64, 3)]
    assert cells == [single[mode, name] for name in formats for mode in modes]
    assert webui.txt2img() == single["Disable", "int8"]


def test_xyz_text_encoders(enabled: Client):
    single = [enabled.txt2img(override_settings={"fp8_clip_l": chosen}) for chosen in (False, True)]
    pictures = enabled.grid(**_xyz(enabled, X=("FP8 text encoders", ["None", "CLIP-L"])))
    assert [picture for picture in pictures if picture.pixels.shape == (64, 64, 3)] == single
    assert single[0] != single[1]


def test_the_axes_are_there_once(webui: Client):
    arguments = webui.probe("script_arguments", title="x/y/z plot")
    choices = next(argument["choices"] for argument in arguments if argument["label"] == "X type")
    for label in ("FP8 mode", "FP8 format", "FP8 text encoders"):
        assert choices.count(label) == 1
