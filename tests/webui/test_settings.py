"""One switch, the entries below it, and values that cannot be used."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from helpers import FORMAT_NAMES, need_format

from lib_fp8 import Format
from webui.host import SCRIPT, Host, fresh_modules

OWN = ["fp8_format", "fp8_clip_l", "fp8_open_clip", "fp8_t5", "fp8_keep_layers", "fp8_lora"]
OWN += ["fp8_motion_modules", "fp8_control_models", "fp8_status"]
CHOICES = ["Disable", "Enable for SDXL", "Enable"]
ON = {"fp8_storage": "Enable"}
NO_FLOAT8 = "this device cannot hold it, says the test"


@pytest.fixture
def without_float8(monkeypatch):
    """A device such as Apple's, on which no float8 dtype can be stored."""
    monkeypatch.setattr(Format, "problem", lambda self, device: NO_FLOAT8 if "float8" in self.name else None)


def state_of(opts):
    """Everything about the options: their order, their fields, and the values."""
    return [(key, id(info), dict(vars(info))) for key, info in opts.data_labels.items()]


def test_one_control_with_our_entries_below_it(host):
    host.start()
    keys = list(host.settings_page())
    assert keys.count("fp8_storage") == 1
    assert keys[keys.index("fp8_storage") :][: len(OWN) + 1] == ["fp8_storage", *OWN]
    switch = host.settings_page()["fp8_storage"]
    assert (switch.label, switch.kwargs["choices"], switch.value) == ("FP8 weight", CHOICES, "Disable")
    assert [info.label for info in host.opts.data_labels.values()].count("FP8 weight") == 1
    sections = {host.opts.data_labels[key].section for key in ["fp8_storage", *OWN]}
    assert sections == {("optimizations", "Optimizations")}


def test_entries_survive_several_reloads_of_the_ui(host):
    host.start()
    host.set(fp8_format="int8")
    keys = list(host.opts.data_labels)
    comment = host.opts.data_labels["fp8_storage"].comment_after
    for _ in range(3):
        host.reload_ui()
        assert list(host.opts.data_labels) == keys
        assert host.opts.fp8_format == "int8"
    assert host.opts.data_labels["fp8_storage"].comment_after == comment
    if host.minor >= 8:
        assert host.opts.data_labels["cache_fp16_weight"].comment_after.count("not used while") == 1


@pytest.mark.parametrize("reloads", [0, 2])
def test_remove_gives_the_options_back_exactly(host, reloads):
    host.start(extension=False)
    before = state_of(host.opts)
    host.reload_ui()
    for _ in range(reloads):
        host.reload_ui()
    host.reload_ui(extension=False)
    assert state_of(host.opts) == before


def test_saved_values_wait_for_the_extension(newest):
    newest.start()
    newest.set(fp8_format="int8")
    newest.reload_ui(extension=False)
    newest.opts.disabled_extensions = []
    newest.reload_ui()
    assert newest.opts.fp8_format == "int8"


def test_options_that_other_scripts_add_stay(host):
    """Scripts add theirs to ``options_templates`` when they are loaded, or to ``opts`` when the page is built."""
    host.start()
    option = host.shared.OptionInfo(1, "theirs", section=("other", "Other"))
    host.script_callbacks.on_ui_settings(lambda: host.opts.add_option("other_late", option))
    host.script_callbacks.run("ui_settings")
    host.opts.reorder()
    assert "other_late" in host.settings_page()


def test_options_added_to_the_templates_while_the_page_is_built_stay(host):
    option = host.shared.OptionInfo(1, "theirs", section=("other", "Other"))
    host.scripts.load_scripts([SCRIPT])
    host.script_callbacks.on_ui_settings(lambda: host.shared.options_templates.update(other=option))
    host._build_page()
    assert "other" in host.settings_page()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fp8_format", "int9"),
        ("fp8_keep_layers", "fine (["),
        ("fp8_storage", "Maybe"),
        ("fp8_lora", "RAM"),
        ("fp8_clip_l", "False"),
        ("fp8_keep_layers", r"fine (\w+\.?)+!"),
        ("fp8_keep_layers", r"fine (a)\1"),
    ],
)
class TestBadValues:
    def test_a_change_is_reverted_and_the_error_names_the_choices(self, host, key, value):
        host.checkpoint()
        host.start(fp8_storage="Enable")
        before, good = host.fingerprint(), getattr(host.opts, key)
        assert host.set(**{key: value}) == [False]
        assert getattr(host.opts, key) == good
        for told in (host.errors.shown[-1], sys.modules["gradio"].warnings[-1]):
            assert f"{host.settings.INFOTEXT[key]} ({key}): " in told
            assert repr(value.split()[-1])[1:-1] in told
        assert host.fingerprint() == before

    def test_a_change_is_reverted_without_a_model_too(self, newest, key, value):
        newest.start()
        assert newest.set(**{key: value}) == [False]
        assert getattr(newest.opts, key) == newest.opts.get_default(key)

    def test_a_saved_one_is_repaired_and_told(self, host, key, value, capsys):
        host.checkpoint()
        host.start(**{"fp8_storage": "Enable", "fp8_format": "int8", key: value})
        assert getattr(host.opts, key) == host.opts.get_default(key) != value
        assert capsys.readouterr().err.count("bad value in the settings") == 1
        assert host.job().pictures

    def test_an_override_fails_that_job_only(self, host, key, value):
        host.checkpoint()
        host.start(fp8_storage="Enable", fp8_format="int8", fp8_keep_layers="to_q")
        saved, before = dict(host.opts.data), host.fingerprint()
        with pytest.raises(ValueError, match="FP8"):
            host.job(**{key: value})
        assert host.opts.data == saved
        assert host.job().pictures
        assert host.fingerprint() == before


@pytest.mark.parametrize(("key", "value"), [("fp8_t5", 1), ("fp8_control_models", "on"), ("fp8_lora", 3)])
def test_the_option_is_named(newest, key, value):
    newest.checkpoint()
    newest.start(fp8_storage="Enable")
    with pytest.raises(ValueError, match=rf"FP8 .*\({key}\): {value!r} is n"):
        newest.job(**{key: value})


FROZEN = [
    {"freeze_settings": True},
    {"freeze_settings_in_sections": "sd, optimizations"},
    {"freeze_specific_settings": "fp8_format, fp8_storage"},
    {"freeze_specific_settings": "CLIP_stop_at_last_layers"},
]


@pytest.mark.parametrize("frozen", FROZEN, ids=str)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_an_override_that_the_webui_refuses_changes_nothing(host, monkeypatch, frozen, checkpoint):
    if host.minor < 8 and "freeze_settings" not in frozen:
        pytest.skip("options are frozen one by one from 1.8 on")
    info = host.checkpoint()
    host.start(**ON)
    before, status, read = host.fingerprint(), host.panel.status(), len(host.sd_models.files_read)
    for name, value in frozen.items():
        monkeypatch.setattr(host.shared.cmd_opts, name, value)
    overrides = {"fp8_storage": "Disable", "fp8_format": "int8", "CLIP_stop_at_last_layers": 2}
    with pytest.raises(AssertionError):
        host.job(**overrides, **({"sd_model_checkpoint": info.title} if checkpoint else {}))
    assert host.fingerprint() == before
    assert host.panel.status() == status
    assert len(host.sd_models.files_read) == read
    assert host.job().pictures
    assert host.fingerprint() == before


def test_an_override_that_the_webui_passes_over_changes_nothing(host, monkeypatch):
    host.checkpoint()
    host.start(**ON)
    before, read = host.fingerprint(), len(host.sd_models.files_read)
    host.opts.data_labels["fp8_format"].restrict_api = True
    assert host.job(fp8_format="int8").pictures
    host.opts.data_labels["fp8_keep_layers"].component_args["visible"] = False
    monkeypatch.setattr(host.shared.cmd_opts, "hide_ui_dir_config", True)
    host.opts.restricted_opts.add("fp8_storage")
    for override in ({"fp8_storage": "Disable"}, {"fp8_keep_layers": ""}):
        with pytest.raises(RuntimeError, match="restricted"):  # when it puts back what it did not override
            host.job(**override)
    assert host.fingerprint() == before
    assert len(host.sd_models.files_read) == read


def test_looking_at_overrides_leaves_the_options_alone(newest):
    newest.checkpoint()
    newest.start()
    calls, before = [], dict(newest.opts.data)
    newest.opts.data_labels["fp8_format"].onchange = lambda: calls.append(1)
    p = newest.processing.StableDiffusionProcessing("a cat", {"fp8_format": "int8"})
    newest.settings.begin_job(p)
    assert newest.settings.value_of("fp8_format") == "int8"
    assert (newest.opts.data, calls) == (before, [])


def test_the_panel_is_made_anew_when_it_is_copied(newest):
    """The API reads the defaults of all options once, when it starts, and copies them into its answers."""
    newest.checkpoint()
    newest.start()
    default = newest.opts.data_labels["fp8_status"].default
    assert "full precision" in default
    newest.set(fp8_storage="Enable", fp8_format="int8")
    copied = copy.deepcopy(default)
    assert type(copied) is str
    assert "int8" in copied
    assert "full precision" not in copied


def test_override_of_options_that_were_never_saved(host):
    """1.6 looks each override up among the saved values and knows no default."""
    host.checkpoint()
    host.start()
    p = host.job(
        fp8_storage="Enable", fp8_format="int8", fp8_clip_l=True, fp8_keep_layers="", fp8_lora="Add at run time"
    )
    assert "FP8 format: int8" in p.infotexts[0]
    assert host.opts.fp8_storage == "Disable"


def test_the_stand_in_of_1_6_has_that_fault(tmp_path):
    """So that the test above can fail."""
    with fresh_modules("1.6"):
        host = Host("1.6", tmp_path)
        host.checkpoint()
        host.start(extension=False)
        host.opts.add_option("late", host.shared.OptionInfo(1, "late", section=("other", "Other")))
        with pytest.raises(KeyError, match="late"):
            host.job(late=2)


@pytest.mark.parametrize("switch_on_later", [False, True])
def test_int8_where_the_device_cannot_hold_float8(host, without_float8, switch_on_later, capsys):
    host.checkpoint()
    host.start(fp8_storage="Disable" if switch_on_later else "Enable")
    if switch_on_later:
        assert host.set(fp8_storage="Enable") == [True]
    assert host.format_in_use() == "int8"
    line = f"{NO_FLOAT8}: int8 is used instead of float8_e4m3fn"
    assert capsys.readouterr().out.count(line) == 1
    assert host.panel.status()["note"] == line
    assert line in host.panel.status_html()
    assert "FP8 format: int8" in host.job().infotexts[0]


def test_the_format_is_asked_of_the_device_that_computes(newest, monkeypatch):
    """With --medvram the weights wait on the CPU, which can hold more than the device."""
    need_format(FORMAT_NAMES[0])
    newest.checkpoint()
    newest.start(fp8_storage="Enable")
    assert newest.settings.wanted_storage(newest.model).note is None
    monkeypatch.setattr(
        Format, "problem", lambda self, device: NO_FLOAT8 if device.type == "mps" and "float8" in self.name else None
    )
    monkeypatch.setattr(newest.devices, "device", torch.device("mps"))
    wanted = newest.settings.wanted_storage(newest.model)
    assert wanted.policy.format == "int8"
    assert NO_FLOAT8 in wanted.note


def test_where_no_format_works_the_model_stays_in_full_precision_and_says_why(host, monkeypatch):
    host.checkpoint()
    host.start()
    before = host.fingerprint()
    monkeypatch.setattr(Format, "problem", lambda self, device: f"it lacks {self.name}, says the test")
    host.set(fp8_storage="Enable")
    host.job()
    assert host.fingerprint() == before
    assert host.format_in_use() is None
    assert "the weights stay in full precision" in host.panel.status()["note"]
    assert "it lacks int8" in host.panel.status_html()
    host.checkpoint("b", seed=2)


@pytest.mark.parametrize(
    ("choice", "kind", "on"),
    [
        ("Enable", "sd1", True),
        ("Enable", "sdxl", True),
        ("Enable", "sd3", True),
        ("Enable for SDXL", "sdxl", True),
        ("Enable for SDXL", "sd1", False),
        ("Enable for SDXL", "sd3", False),
        ("Disable", "sdxl", False),
    ],
)
def test_which_models_the_switch_means(host, choice, kind, on):
    host.checkpoint(kind=kind)
    host.start(fp8_storage=choice)
    assert (host.format_in_use() is not None) == on
    host.set(fp8_storage="Disable")
    assert host.format_in_use() is None
    host.set(fp8_storage=choice)
    assert (host.format_in_use() is not None) == on


def test_no_option_needs_a_loaded_model(host):
    host.start()
    assert host.model is None
    assert host.set(fp8_storage="Enable", fp8_format="int8", fp8_clip_l=True) == [True] * 3


def test_a_change_waits_for_the_queue(newest):
    newest.start()
    with newest.call_queue.queue_lock:
        assert newest.set(fp8_storage="Enable") == [False]
    assert "deadlock" in newest.errors.shown[-1]


def test_overrides_end_with_a_job_that_fails(host):
    """A checkpoint that is changed after a failed job is loaded as the settings say, not as that job asked."""
    a, b = host.checkpoint("a"), host.checkpoint("b", seed=2)
    host.start(sd_model_checkpoint=a.title)
    (host.folder / "b.safetensors").rename(host.folder / "gone")
    host.opts.sd_model_checkpoint = b.title
    with pytest.raises(Exception, match=r"b\.safetensors"):
        host.job(fp8_storage="Enable")
    (host.folder / "gone").rename(host.folder / "b.safetensors")
    host.switch_to(b)
    assert host.format_in_use() is None


@pytest.mark.parametrize("value", [["int8"], {"a": 1}, None, 5])
def test_kept_layers_are_a_text(newest, value):
    newest.start()
    assert newest.set(fp8_keep_layers=value) == [False]


def test_a_value_that_is_being_refused_does_not_end_a_running_batch(host, capsys):
    """The WebUI stores a value first and asks afterwards, while another thread may be making pictures."""
    host.checkpoint()
    host.start(fp8_storage="Enable", fp8_format="int8")
    before = host.fingerprint()
    host.opts.data["fp8_format"] = "int9"
    host.sd_models.reload_model_weights()
    assert host.opts.fp8_format == "int9", "whoever set it reverts it"
    assert "int9" in capsys.readouterr().err
    assert host.fingerprint() == before
