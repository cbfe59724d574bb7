"""What 8-bit values are known by: shared by copies, another after each write, and whether it was a write in place."""

from __future__ import annotations

import copy

import pytest
import torch

from lib_fp8 import QuantWeight
from lib_fp8.branch import Computed

SHAPE = (6, 8)
COPIES = {
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "clone": lambda w: w.clone(),
    "deepcopy": copy.deepcopy,
    "dtype": lambda w: w.to(torch.bfloat16),
    "another device and back": lambda w: w.to("cpu", copy=True),
    "parameter": lambda w: torch.nn.Parameter(w, requires_grad=False),
    "copy_": lambda w: QuantWeight.from_weight(torch.zeros(SHAPE), w.format).copy_(w),
    "data =": lambda w: _with_data(w),
}
WHOLE = {
    "store_": lambda w, new: w.store_(new),
    "copy_": lambda w, new: w.copy_(new),
    "data =": lambda w, new: setattr(w, "data", new),
    "a handle's copy_": lambda w, new: w.detach().copy_(new),
    "copy_ of another": lambda w, new: w.copy_(QuantWeight.from_weight(new, w.format)),
}
IN_PLACE = {
    "+=": lambda w, new: w.add_(new),
    "a part": lambda w, new: w.__setitem__(slice(0, 2), new[:2]),
    "a handle's mul_": lambda w, new: w.detach().mul_(new),
    "out=": lambda w, new: torch.add(new, 1, out=w),
}


def _with_data(weight):
    other = QuantWeight.from_weight(torch.zeros(SHAPE), weight.format)
    other.data = weight
    return other


@pytest.fixture
def weight(storage_format, rng, device):
    return QuantWeight.from_weight(torch.randn(SHAPE, generator=rng).to(device), storage_format)


@pytest.fixture
def new(rng, device):
    return torch.randn(SHAPE, generator=rng).to(device)


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_copies_are_known_by_the_same(weight, make, new):
    contents, other = weight.contents, make(weight)
    assert other.contents is contents
    if other._shared is not weight._shared:
        other.copy_(new)
        assert weight.contents is contents
        assert other.contents is not contents


@pytest.mark.parametrize("write", WHOLE.values(), ids=WHOLE)
def test_another_value_is_known_by_another(weight, write, new):
    contents = weight.contents
    write(weight, new)
    assert weight.contents is not contents
    assert not weight.contents.derives_from(contents)


@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE)
def test_written_in_place_it_is_another_that_derives_from_the_first(weight, write, new):
    contents = weight.contents
    write(weight, new)
    assert weight.contents is not contents
    assert weight.contents.derives_from(contents)
    write(weight, new)
    assert weight.contents.derives_from(contents)
    weight.copy_(new)
    assert not weight.contents.derives_from(contents)


def test_branches_are_no_part_of_it(weight):
    contents = weight.contents
    weight.set_branches((Computed(lambda base: base),))
    assert weight.contents is contents
    weight.store_(weight.dequantize())
    assert not weight.contents.derives_from(contents)


def test_two_weights_are_two(new, storage_format):
    one, other = (QuantWeight.from_weight(new, storage_format) for _ in range(2))
    assert one.contents is not other.contents
    one.store_(new, other.contents)
    assert one.contents is other.contents
