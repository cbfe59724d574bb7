"""LoadPeak against a count of all storages that live while a model is loaded."""

from __future__ import annotations

import pytest
from helpers import FORMAT_NAMES, LiveStorages, ToyUNet, all_tensors, need_format, seeded, storage_census
from torch import nn

from lib_fp8 import ConversionError, Policy, StreamingConversion
from lib_fp8.peak import LoadPeak

WIDTH = 512
LEAF = 2 * WIDTH * WIDTH
SCRATCH = 2 * (4 << 20) + (1 << 20)
"""Packing decodes a run of rows twice over, in float32, and makes some small tensors."""


def half_model(layers=8, seed=0):
    return seeded(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))), seed).half()


@pytest.mark.parametrize("layers", [8, 40])
@pytest.mark.parametrize("storage_format", FORMAT_NAMES)
def test_it_is_what_lives_at_the_worst_moment(storage_format, layers):
    need_format(storage_format)
    state = half_model(layers, 1).state_dict()
    model = half_model(layers)
    with StreamingConversion([(model, Policy(storage_format, ()))]):
        model.load_state_dict(state)  # in 8 bits; what follows is a reload, as for another checkpoint
    live = LiveStorages(all_tensors(model).values())
    with live.watch, LoadPeak(model) as load, StreamingConversion([(model, Policy(storage_format, ()))]):
        model.load_state_dict(state)
    final = storage_census(all_tensors(model).values())
    assert load.peak <= live.peak <= load.peak + SCRATCH
    assert final + LEAF < load.peak <= final + 2 * LEAF


def test_a_model_in_full_precision_is_fullest_when_it_begins():
    model = half_model()
    full = storage_census(all_tensors(model).values())
    with LoadPeak(model) as load, StreamingConversion([(model, Policy("int8", ()))]):
        model.load_state_dict(half_model(seed=1).state_dict())
    assert full < load.peak <= full + LEAF
    assert storage_census(all_tensors(model).values()) < 0.6 * full


@pytest.mark.parametrize("make", [LoadPeak, lambda model: StreamingConversion([(model, Policy("int8", ()))])])
def test_an_interrupt_while_hooks_are_put_leaves_none(make, monkeypatch):
    model, calls = half_model(), iter(range(3))
    put = nn.Module.register_load_state_dict_post_hook

    def interrupted(module, hook):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return put(module, hook)

    monkeypatch.setattr(nn.Module, "register_load_state_dict_post_hook", interrupted)
    with pytest.raises(KeyboardInterrupt), make(model):
        pass
    hooks = [(*m._load_state_dict_pre_hooks, *m._load_state_dict_post_hooks) for m in model.modules()]
    assert not any(hooks)


def test_no_hook_stays(monkeypatch):
    model, state = seeded(ToyUNet), seeded(ToyUNet, 1).state_dict()
    monkeypatch.setattr("lib_fp8.qweight.pack", lambda *_: 1 / 0)
    with pytest.raises(ConversionError), LoadPeak(model), StreamingConversion([(model, Policy("int8", ()))]):
        model.load_state_dict(state)
    assert not any(module._load_state_dict_post_hooks for module in model.modules())
