"""Copies are independent and hold the same bits; pickles hold plain values."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from lib_fp8 import QuantWeight
from strangers.helpers import assert_bits, assert_plain, bits_of, convert, is_parameter, truth

COPIES = {
    "deepcopy": copy.deepcopy,
    "clone": lambda w: w.clone(),
    "torch_clone": torch.clone,
    "detach_clone": lambda w: w.detach().clone(),
    "clone_detach": lambda w: w.clone().detach(),
    "data_clone": lambda w: w.data.clone(),
    "clone_contiguous": lambda w: w.clone(memory_format=torch.contiguous_format),
    "to_cpu_copy": lambda w: w.to("cpu", copy=True),
}
by_copy = pytest.mark.parametrize("make", [pytest.param(value, id=name) for name, value in COPIES.items()])


@by_copy
def test_copy_has_equal_bits_of_its_own(weight, make):
    before = bits_of(weight)
    copied = make(weight)
    assert copied.dtype == weight.dtype
    assert copied.format == weight.format
    assert_bits(copied, before)
    weight.zero_()
    assert_bits(copied, before)
    written = bits_of(weight)
    copied.fill_(1)
    assert_bits(weight, written)


def test_copy_of_a_convolution_keeps_its_strides(conv):
    conv.to(memory_format=torch.channels_last)
    for make in (copy.deepcopy, torch.clone):
        copied = make(conv.weight)
        assert copied.stride() == conv.weight.stride()
        assert_bits(copied, bits_of(conv.weight))


@pytest.mark.parametrize("handle", [lambda w: w.detach(), lambda w: w.data], ids=["detach", "data"])
def test_detached_handle_shares_the_bits(weight, handle):
    other = handle(weight)
    other.fill_(0.5)
    assert_bits(weight, bits_of(other))
    weight.zero_()
    assert not bool(other.any())


def test_deepcopy_of_a_layer(layer):
    copied = copy.deepcopy(layer)
    assert type(copied) is type(layer)
    assert is_parameter(copied.weight)
    assert list(dict(copied.named_parameters())) == ["weight", "bias"]
    before = bits_of(layer.weight)
    assert_bits(copied.weight, before)
    copied.weight.zero_()
    assert_bits(layer.weight, before)


def test_deepcopy_keeps_attributes_and_sharing(storage_format, device):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(device)
    model[1].weight = model[0].weight
    convert(model, storage_format)
    model[0].weight.note = ["mine"]
    copied = copy.deepcopy(model)
    assert copied[0].weight is copied[1].weight
    assert copied[0].weight is not model[0].weight
    assert copied[0].weight.note == ["mine"]
    assert copied[0].weight.note is not model[0].weight.note


def test_deepcopy_of_a_state_dict(linear):
    copied = copy.deepcopy(linear.state_dict())
    before = bits_of(linear.weight)
    linear.weight.zero_()
    assert_bits(copied["weight"], before)


def test_shallow_copy_holds_the_values(weight):
    assert torch.equal(copy.copy(weight) + 0, truth(weight))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_holds_plain_values(weight, protocol):
    data = pickle.dumps(weight, protocol)
    assert b"lib_fp8" not in data
    loaded = pickle.loads(data)
    assert is_parameter(loaded)
    assert not loaded.requires_grad
    assert_plain(loaded, truth(weight))
    detached = pickle.loads(pickle.dumps(weight.detach(), protocol))
    assert type(detached) is torch.Tensor
    assert torch.equal(detached, truth(weight))


def test_pickle_of_a_layer_is_an_ordinary_layer(layer):
    data = pickle.dumps(layer)
    assert b"lib_fp8" not in data
    loaded = pickle.loads(data)
    assert type(loaded) is type(layer)
    assert not isinstance(loaded.weight, QuantWeight)
    assert torch.equal(loaded.weight, truth(layer.weight))
    assert torch.equal(loaded.bias, layer.bias)


def test_saved_layers_do_not_overwrite_each_other(storage_format, logical_dtype, device):
    # What is pickled is made on the fly: a freed one must not hand its storage key to the next.
    model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(12)]).to(device, logical_dtype)
    convert(model, storage_format)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    for index, part in enumerate(model):
        assert_plain(loaded[f"{index}.weight"], truth(part.weight))
        assert torch.equal(loaded[f"{index}.bias"], part.bias)


def test_legacy_file_holds_plain_values(linear):
    buffer = io.BytesIO()
    torch.save(linear.state_dict(), buffer, _use_new_zipfile_serialization=False)
    assert b"lib_fp8" not in buffer.getvalue()
    buffer.seek(0)
    assert_plain(torch.load(buffer)["weight"], truth(linear.weight))
