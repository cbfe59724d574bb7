"""What pictures say of their weights, and pasting it back."""

from __future__ import annotations

import pytest
from helpers import FORMAT_BY_DEFAULT, failing_pack, format_in_use, need_format

LABELS = [
    "FP8 weight",
    "FP8 format",
    "FP8 kept layers",
    "FP8 CLIP-L",
    "FP8 OpenCLIP",
    "FP8 T5",
    "FP8 LoRA",
    "FP8 motion modules",
    "FP8 control models",
]
UNSET = {
    "fp8_storage": "Disable",
    "fp8_format": "float8_e4m3fn",
    "fp8_clip_l": False,
    "fp8_open_clip": False,
    "fp8_t5": False,
    "fp8_lora": "Merge from checkpoint file",
    "fp8_motion_modules": True,
    "fp8_control_models": False,
}
ON = {"fp8_storage": "Enable"}
BUILT_IN = "a cat\nSteps: 1, Sampler: Euler, Seed: 1, Size: 8x8, FP8 weight: Enable"


def fields(host, infotext):
    """Our fields as they stand in an infotext."""
    host_fills_in = {"FP8 weight"} if "FP8 weight" not in infotext else set()
    params = host.infotext_utils.parse_generation_parameters(infotext)
    return {label: params[label] for label in LABELS if label in params and label not in host_fills_in}


def paste(host, infotext):
    """The overrides of a job after the paste button was pressed."""
    utils = host.infotext_utils
    return utils.create_override_settings_dict(utils.override_texts(infotext))


@pytest.fixture
def ready(host):
    host.checkpoint()
    return host.start()


def test_full_precision_says_nothing(ready):
    assert fields(ready, ready.job().infotexts[0]) == {}


def test_defaults_are_left_out(ready):
    p = ready.job(**ON)
    assert fields(ready, p.infotexts[0]) == {"FP8 weight": "Enable", "FP8 format": FORMAT_BY_DEFAULT}


def test_what_the_model_has_not_what_was_asked_for(ready):
    """ "Enable for SDXL" does nothing to an SD1 model."""
    assert fields(ready, ready.job(fp8_storage="Enable for SDXL", fp8_format="int8").infotexts[0]) == {}


def test_fields_of_an_earlier_use_of_the_same_job_are_taken_out(ready):
    """Scripts such as X/Y/Z plot copy a job with its parameters."""
    p = ready.processing.StableDiffusionProcessing("a cat")
    p.extra_generation_params.update(dict.fromkeys(LABELS, "old"), Other="theirs")
    ready.processing.process_images(p)
    assert fields(ready, p.infotexts[0]) == {}
    assert "Other: theirs" in p.infotexts[0]


CHOICES = [
    ON,
    {**ON, "fp8_format": "int8"},
    {**ON, "fp8_format": "float8_e4m3fn unscaled", "fp8_clip_l": True},
    {**ON, "fp8_open_clip": True, "fp8_t5": True, "fp8_lora": "Add at run time"},
    {**ON, "fp8_motion_modules": False, "fp8_control_models": True},
    {**ON, "fp8_keep_layers": r"to_q to_(k|v)$"},
    {**ON, "fp8_keep_layers": r"^a{1,2}\. (?:to_q) x"},
    {**ON, "fp8_keep_layers": "to_q\nto_k"},
    {**ON, "fp8_keep_layers": ""},
    {},
]


OTHERS = {**ON, "fp8_format": "int8", "fp8_t5": True}


@pytest.mark.parametrize(
    ("used", "saved"), [*((used, OTHERS) for used in CHOICES), (CHOICES[0], {}), (CHOICES[5], {})], ids=str
)
def test_round_trip(ready, used, saved):
    """Pasted on an installation with other settings, it gives the same weights, picture and infotext again.

    What was asked for text encoders that an SD1 model does not have is not told, and not asked for.
    """
    ready.set(**used)
    p, bits = ready.job(), ready.fingerprint()
    told = [key for key in (*UNSET, "fp8_keep_layers") if key not in ("fp8_open_clip", "fp8_t5")]
    asked = {key: getattr(ready.opts, key) for key in told}
    if ready.format_in_use():
        asked["fp8_format"] = format_in_use(asked["fp8_format"])
    default_keep = ready.opts.get_default("fp8_keep_layers")
    ready.set(**{**UNSET, "fp8_keep_layers": default_keep, **saved})
    overrides = paste(ready, p.infotexts[0])
    if used:
        wanted = {key: overrides.get(key, getattr(ready.opts, key)) for key in asked}
        assert {key: str(value).split() for key, value in wanted.items()} == {
            key: str(value).split() for key, value in asked.items()
        }
    again = ready.job(**overrides)
    assert ready.fingerprint() == bits
    assert again.infotexts == p.infotexts


@pytest.mark.parametrize(
    ("kind", "there"),
    [
        ("sd1", {"CLIP-L"}),
        ("sd2", {"OpenCLIP"}),
        ("sdxl", {"CLIP-L", "OpenCLIP"}),
        ("sd3", {"CLIP-L", "OpenCLIP", "T5"}),
    ],
)
def test_only_text_encoders_that_the_model_has_are_told(host, kind, there):
    host.checkpoint(kind=kind)
    host.start(fp8_storage="Enable", fp8_clip_l=True, fp8_open_clip=True, fp8_t5=True)
    (infotext,) = host.job().infotexts
    assert {label for label in ("CLIP-L", "OpenCLIP", "T5") if f"FP8 {label}: True" in infotext} == there


def test_pasting_what_is_set_already_overrides_nothing(ready):
    ready.set(fp8_storage="Enable", fp8_format="int8")
    assert paste(ready, ready.job().infotexts[0]) == {}


class TestTheWebUIsOwn:
    """Pictures of the built-in conversion: unscaled, every layer, all text encoders."""

    def test_old_infotext_gives_its_bits(self, ready):
        overrides = paste(ready, BUILT_IN)
        assert overrides == {
            "fp8_storage": "Enable",
            "fp8_format": "float8_e4m3fn unscaled",
            "fp8_keep_layers": "",
            "fp8_clip_l": True,
            "fp8_open_clip": True,
            "fp8_t5": True,
        }
        need_format("float8_e4m3fn unscaled")
        ready.job(**overrides)
        ready.assert_packed("a", "float8_e4m3fn unscaled")
        assert len(ready.quantized()) == 13  # all Linear and Conv2d but those of the VAE

    def test_made_by_the_built_in_conversion(self, newest):
        """Written by the WebUI without the extension, pasted with it."""
        need_format("float8_e4m3fn unscaled")
        newest.checkpoint()
        newest.start(extension=False, **ON)
        infotext = newest.job().infotexts[0]
        weights = {name: kind for name, (_, kind, *_) in newest.fingerprint().items() if "float8" in kind}
        newest.set(fp8_storage="Disable")
        newest.sd_models.reload_model_weights()
        newest.reload_ui()
        newest.job(**paste(newest, infotext))
        expected = {name.removesuffix(".weight") for name in weights if name.endswith(".weight")}
        assert set(newest.quantized()) == expected
        newest.assert_packed("a", "float8_e4m3fn unscaled")

    @pytest.mark.parametrize("infotext", [BUILT_IN.replace("Enable", "Disable"), BUILT_IN.partition(", FP8")[0]])
    def test_disabled_or_missing_switches_off(self, ready, infotext):
        ready.set(fp8_format="int8", **ON)
        assert paste(ready, infotext) == {"fp8_storage": "Disable"}


def test_nothing_is_written_when_the_conversion_failed(ready):
    with failing_pack(0):
        p = ready.job(**ON)
    assert fields(ready, p.infotexts[0]) == {}
