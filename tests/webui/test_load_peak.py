"""While the WebUI loads: what is held at most, what the summary says of it, and the state dict that is let go."""

from __future__ import annotations

import pytest
import torch
from helpers import FORMAT_BY_DEFAULT, LiveStorages, all_tensors, storage_census

from lib_fp8 import stored_bytes
from lib_fp8.report import MIB
from webui.nets import INT8_ANEW, ON


@pytest.fixture
def given(host, monkeypatch):
    """The state dicts that were read from files, as the WebUI holds them, with values in memory of their own."""
    dicts = []
    read = host.sd_models.read_state_dict

    def read_state_dict(*args):
        dicts.append({key: value.clone() for key, value in read(*args).items()})
        return dicts[-1]

    monkeypatch.setattr(host.sd_models, "read_state_dict", read_state_dict)
    return dicts


def taken(state_dict):
    """Whether all values of a model were taken out of a state dict."""
    return not any(key.startswith("model.") for key in state_dict)


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_the_values_are_let_go_while_they_are_taken(host, given, kind):
    host.checkpoint(kind=kind)
    other = host.checkpoint("b", kind=kind, seed=2)
    host.start(**ON)
    host.switch_to(other)
    host.set(**INT8_ANEW)
    assert len(given) == 3
    assert all(taken(state_dict) for state_dict in given)
    host.assert_packed("b", "int8")


def test_values_die_one_by_one(sd1, given):
    """Each layer that is filled takes its values with it."""
    left = []
    other = sd1.checkpoint("b", seed=2)
    place = sd1.loading.LoadPeak._filled

    def filled(self, module, keys):
        left.append(stored_bytes(given[-1].values()))
        place(self, module, keys)

    sd1.loading.LoadPeak._filled = filled
    try:
        sd1.switch_to(other)
    finally:
        sd1.loading.LoadPeak._filled = place
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0
    assert len(set(left)) > 15


def test_a_cached_state_dict_stays_whole(sd1, given):
    """Also after the cache was made smaller; it is cut at the end of the next load."""
    sd1.opts.data["sd_checkpoint_cache"] = 2
    a, b = sd1.switch_to(sd1.checkpoint("b", seed=2)).sd_checkpoint_info, sd1.checkpoint("c", seed=3)
    sd1.switch_to(b)
    sd1.opts.data["sd_checkpoint_cache"] = 0
    cached = sd1.sd_models.checkpoints_loaded[a]
    sd1.switch_to(a)
    assert cached.keys() >= sd1.values("b").keys()
    sd1.assert_packed("b", FORMAT_BY_DEFAULT)
    assert len(given) == 2


def test_what_is_no_tensor_is_passed_over(sd1, given):
    """A checkpoint of a trainer, without a "state_dict" of its own."""
    read = sd1.sd_models.read_state_dict
    sd1.sd_models.read_state_dict = lambda *args: {"epoch": 3, **read(*args)}
    sd1.switch_to(sd1.checkpoint("b", seed=2))
    sd1.assert_packed("b", FORMAT_BY_DEFAULT)


def test_a_failed_conversion_reads_the_file_again(sd1, given, monkeypatch):
    other = sd1.checkpoint("b", seed=2)
    monkeypatch.setattr("lib_fp8.qweight.pack", lambda *_: 1 / 0)
    sd1.switch_to(other)
    assert len(given) == 2
    assert sd1.format_in_use() is None
    weight = sd1.values("b")["model.diffusion_model.time_embed.0.weight"]
    assert torch.equal(sd1.unet.time_embed[0].weight, weight.half())


@pytest.fixture
def peaks(sd1, monkeypatch):
    """What each load was found to take."""
    found = []

    class Remembering(sd1.loading.LoadPeak):
        def __exit__(self, *error):
            super().__exit__(*error)
            found.append(self.peak)

    monkeypatch.setattr(sd1.loading, "LoadPeak", Remembering)
    return found


def test_the_summary_tells_the_peak(sd1, peaks, capsys):
    other = sd1.checkpoint("b", seed=2)
    live = LiveStorages(all_tensors(sd1.model).values())
    with live.watch:
        sd1.switch_to(other)
    (peak,) = peaks
    final = storage_census(all_tensors(sd1.model).values())
    leaf = max(stored_bytes([value]) for value in sd1.values("b").values())
    assert final <= peak <= min(live.peak, final + 2 * leaf)
    assert f"the whole model never took more than {peak / MIB:.1f} MB" in capsys.readouterr().out
