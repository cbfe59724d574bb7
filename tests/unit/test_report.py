"""Report: bytes counted by hand, reasons, the line that users read."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    EVERYTHING,
    TOY_CONVERTED,
    ToyUNet,
    all_tensors,
    need_format,
    seeded,
    storage_census,
    tied_pair,
)
from torch import nn

from lib_fp8 import Policy, QuantWeight, Report, convert_model, get_format, stored_bytes
from lib_fp8.report import MIB, count_reasons, mebibytes


def report(**changes):
    given = {"format": "int8", "converted": 3, "kept": (("pattern x", 2), ("NaN", 1)), "bytes_before": 10 * MIB}
    return Report(**{**given, "bytes_after": 6 * MIB, "seconds": 1.25, **changes})


def test_figures():
    assert report().saved == 4 * MIB
    assert report().kept_count == 3
    assert report().notes == ()


def test_summary():
    assert report().summary() == "3 layers in int8, 3 kept, 10.0 MB -> 6.0 MB (4.0 MB or 40% saved, 1.2 s)"
    assert "0 layers" in report(converted=0, bytes_before=0, bytes_after=0).summary()


def test_mebibytes():
    assert mebibytes(3 * MIB // 2) == "1.5 MB"


def test_reasons_are_counted_most_frequent_first():
    assert count_reasons(["a", "b", "b"]) == (("b", 2), ("a", 1))
    assert count_reasons([]) == ()


def test_stored_bytes_counts_storages():
    base = torch.zeros(8, 4)
    assert stored_bytes([]) == 0
    assert stored_bytes([base]) == 128
    assert stored_bytes([base, base, base[1:], base.t(), torch.zeros(2, dtype=torch.float16)]) == 132
    assert stored_bytes([torch.zeros(8, device="meta")]) == 0


def test_stored_bytes_of_a_quantized_weight(storage_format, device):
    weight = QuantWeight.from_weight(torch.ones(8, 4, 3, 3, device=device), storage_format)
    assert stored_bytes([weight]) == 8 * 4 * 9 + (8 * 4 if storage_format.scale_of else 0)
    assert stored_bytes([weight, weight.detach()]) == stored_bytes([weight])
    assert stored_bytes([weight, weight.clone()]) == 2 * stored_bytes([weight])


def test_conversion_report_is_what_is_there(storage_format, logical_dtype, device):
    model = seeded(ToyUNet).to(logical_dtype).to(device)
    before = storage_census(all_tensors(model).values())
    outcome = convert_model(model, Policy(storage_format.name))
    after = storage_census(all_tensors(model).values())
    weights = [model.get_submodule(name).weight for name in TOY_CONVERTED]
    width = torch.finfo(logical_dtype).bits // 8
    by_hand = sum(w.numel() * (width - 1) - (w.shape[0] * 4 if storage_format.scale_of else 0) for w in weights)
    assert (outcome.bytes_before, outcome.bytes_after) == (before, after)
    assert outcome.saved == before - after == by_hand
    assert outcome.converted == len(TOY_CONVERTED)
    assert dict(outcome.kept) == {
        "pattern time_embed": 2,
        "pattern label_emb": 1,
        "pattern emb_layers": 2,
        r"pattern ^input_blocks\.0\.0$": 1,
        r"pattern ^out\.2$": 1,
    }
    assert outcome.kept_count + outcome.converted == sum(isinstance(m, (nn.Linear, nn.Conv2d)) for m in model.modules())
    assert outcome.format == storage_format.name
    assert outcome.notes == ()
    assert 0 <= outcome.seconds < 60


def test_tied_weights_count_once():
    model = tied_pair()
    before = storage_census(all_tensors(model).values())
    outcome = convert_model(model, Policy("int8", EVERYTHING))
    assert (outcome.bytes_before, outcome.bytes_after) == (before, storage_census(all_tensors(model).values()))


def test_weights_that_are_views_of_one_storage_count_once():
    flat = torch.ones(128)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    for layer, part in zip(model, flat.chunk(2)):
        layer.weight = nn.Parameter(part.view(8, 8))
    assert storage_census(all_tensors(model).values()) == 512
    assert convert_model(model, Policy("int8", EVERYTHING)).bytes_before == 512


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8"])
def test_half_the_bytes_of_a_float16_model_are_saved(name):
    need_format(name)
    model = seeded(lambda: nn.Sequential(*[nn.Linear(256, 256) for _ in range(3)])).half()
    outcome = convert_model(model, Policy(name, EVERYTHING))
    assert 0.5 < outcome.bytes_after / outcome.bytes_before < 0.52
    assert get_format(name).name in outcome.summary()
