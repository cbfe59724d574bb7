"""restore_model: plain weights again, from the originals or from the decoded weights."""

from __future__ import annotations

import torch
from helpers import (
    EVERYTHING,
    TOY_CONVERTED,
    ToyUNet,
    all_tensors,
    assert_same_bits,
    assert_same_model,
    decoded,
    plain_twin,
    quantized_names,
    seeded,
    snapshot,
    tied_pair,
)
from torch import nn

from lib_fp8 import Policy, convert_model, restore_model


def test_decoded_weights(storage_format, logical_dtype, device):
    model = seeded(ToyUNet).to(logical_dtype).to(device)
    convert_model(model, Policy(storage_format.name))
    before, expected = all_tensors(model), plain_twin(model)
    assert restore_model(model) == len(TOY_CONVERTED)
    assert quantized_names(model) == []
    assert_same_model(model, expected)
    for name, tensor in all_tensors(model).items():
        if name.removesuffix(".weight") in TOY_CONVERTED:
            assert isinstance(tensor, nn.Parameter)
        else:
            assert tensor is before[name]


def test_originals_come_back_bit_for_bit(storage_format, logical_dtype):
    model = seeded(ToyUNet).to(logical_dtype)
    values = snapshot(model)
    convert_model(model, Policy(storage_format.name))
    restore_model(model, {name: values[f"{name}.weight"] for name in TOY_CONVERTED})
    for name, tensor in all_tensors(model).items():
        assert_same_bits(tensor, values[name])


def test_a_missing_original_is_decoded():
    model = seeded(ToyUNet)
    values = snapshot(model)
    convert_model(model, Policy("int8"))
    first, *others = TOY_CONVERTED
    expected = {name: decoded(model.get_submodule(name).weight) for name in others}
    restore_model(model, {first: values[f"{first}.weight"], "no such layer": torch.zeros(1)})
    assert_same_bits(model.get_submodule(first).weight, values[f"{first}.weight"])
    for name, weight in expected.items():
        assert_same_bits(model.get_submodule(name).weight, weight)


def test_an_original_takes_the_logical_dtype():
    model = seeded(lambda: nn.Linear(8, 8)).half()
    original = torch.linspace(-1, 1, 64).reshape(8, 8)
    convert_model(model, Policy("int8", EVERYTHING))
    restore_model(model, {"": original})
    assert_same_bits(model.weight, original.half())


def test_a_plain_model_is_left_alone():
    model = seeded(ToyUNet)
    before = all_tensors(model)
    assert restore_model(model) == 0
    assert all(tensor is before[name] for name, tensor in all_tensors(model).items())


def test_convert_restore_convert_gives_the_same_bits(storage_format):
    once, twice = seeded(ToyUNet), seeded(ToyUNet)
    policy = Policy(storage_format.name)
    convert_model(once, policy)
    originals = {name: twice.get_submodule(name).weight.detach().clone() for name in TOY_CONVERTED}
    for _ in range(2):
        convert_model(twice, policy)
        restore_model(twice, originals)
    convert_model(twice, policy)
    assert_same_model(twice, once)


def test_tied_weights_stay_tied():
    model = tied_pair()
    convert_model(model, Policy("int8", EVERYTHING))
    restore_model(model)
    assert model[0].weight is model[1].weight
