"""The axes of the X/Y/Z plot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

OURS = {"FP8 mode", "FP8 format", "FP8 text encoders"}
ENCODERS = ("fp8_clip_l", "fp8_open_clip", "fp8_t5")


def axes(host):
    grid = next(data for data in host.scripts.scripts_data if data.script_class.__module__ == "xyz_grid.py")
    return {axis.label: axis for axis in grid.module.axis_options}


def apply(host, label, value):
    """The overrides of one cell."""
    p = SimpleNamespace(override_settings={})
    axes(host)[label].apply(p, value, [value])
    return p.override_settings


def test_each_axis_once_also_after_reloads(host):
    host.start()
    for _ in range(2):
        host.script_callbacks.run("before_ui")  # the page may be built twice over the same scripts
        labels = [axis.label for axis in axes_list(host)]
        assert set(labels) > OURS
        assert len(labels) == len(set(labels))
        host.reload_ui()


def axes_list(host):
    return next(d for d in host.scripts.scripts_data if d.script_class.__module__ == "xyz_grid.py").module.axis_options


def test_costly_ones_are_changed_least_often(host):
    host.start()
    assert all(axes(host)[label].cost == pytest.approx(0.9) for label in OURS)


def test_every_choice_can_be_used(host):
    host.checkpoint()
    host.start()
    for label in sorted(OURS):
        for value in axes(host)[label].choices():
            if (confirm := axes(host)[label].confirm) is not None:
                confirm(None, [value])
            assert host.job(**apply(host, label, value)).pictures


def test_what_the_cells_ask_for(host):
    host.start()
    assert apply(host, "FP8 mode", "Enable for SDXL") == {"fp8_storage": "Enable for SDXL"}
    assert apply(host, "FP8 format", "int8") == {"fp8_format": "int8"}
    assert apply(host, "FP8 text encoders", "None") == dict.fromkeys(ENCODERS, False)
    assert apply(host, "FP8 text encoders", "T5") == {**dict.fromkeys(ENCODERS, False), "fp8_t5": True}
    assert apply(host, "FP8 text encoders", "CLIP-L + OpenCLIP+T5") == dict.fromkeys(ENCODERS, True)


@pytest.mark.parametrize(
    ("label", "values", "unknown", "choices"),
    [
        ("FP8 mode", ["Enable", "On"], "On", "Disable, Enable for SDXL, Enable"),
        ("FP8 format", ["int8", "int9"], "int9", "int8"),
        ("FP8 format", ["int8", ""], "", "float8_e4m3fn unscaled"),
        ("FP8 text encoders", ["CLIP-L", "CLIP-L+CLIP-X"], "CLIP-X", "CLIP-L, OpenCLIP, T5"),
    ],
)
def test_an_unknown_value_is_refused_before_the_plot(host, label, values, unknown, choices):
    host.start()
    with pytest.raises(RuntimeError, match=f"Unknown {label}: {unknown}.") as caught:
        axes(host)[label].confirm(None, values)
    assert choices in str(caught.value)


@pytest.mark.parametrize(
    ("label", "value", "meant"),
    [
        ("FP8 mode", "enable FOR sdxl ", {"fp8_storage": "Enable for SDXL"}),
        ("FP8 format", " Float8_E4M3FN Unscaled", {"fp8_format": "float8_e4m3fn unscaled"}),
        ("FP8 text encoders", "clip-l + t5", {"fp8_clip_l": True, "fp8_open_clip": False, "fp8_t5": True}),
        ("FP8 text encoders", " NONE", dict.fromkeys(ENCODERS, False)),
    ],
)
def test_capitals_and_blanks_are_as_on_other_axes(host, label, value, meant):
    host.start()
    axes(host)[label].confirm(None, [value])
    assert apply(host, label, value) == meant


def test_a_plot_over_the_switch_reads_the_file_once(host):
    """Two cells, and the picture after the plot."""
    host.checkpoint()
    host.start()
    read, plain = len(host.sd_models.files_read), host.fingerprint()
    for value in ("Disable", "Enable"):
        host.job(**apply(host, "FP8 mode", value))
        assert (host.fingerprint() == plain) == (value == "Disable")
    host.job()
    assert host.fingerprint() == plain
    assert len(host.sd_models.files_read) == read + 1


def test_without_the_plot_script(newest):
    newest.start()
    newest.scripts.scripts_data.clear()
    newest.script_callbacks.run("before_ui")
