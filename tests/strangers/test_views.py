"""Writes by index reach the weight; other views are decoded copies, as the module documents."""

from __future__ import annotations

import pytest
import torch

import lib_fp8.qweight
from strangers.helpers import assert_bits, assert_plain, assert_stores, bits_of, convert, rounded, truth

INDICES = {
    "row": 2,
    "rows": slice(0, 8),
    "strided_rows": slice(1, None, 3),
    "columns": (slice(None), slice(4, 9)),
    "ellipsis": Ellipsis,
    "ellipsis_column": (..., 0),
    "element": (3, 5),
    "list": [1, 4, 4],
    "everything": slice(None),
}

VIEWS = {
    "view": lambda w: w.view(-1),
    "flatten": lambda w: w.flatten(),
    "reshape": lambda w: w.reshape(-1),
    "row": lambda w: w[1],
    "slice": lambda w: w[0:8],
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "transpose": lambda w: w.transpose(0, 1),
    "permute": lambda w: w.permute(1, 0),
    "chunk": lambda w: w.chunk(2, 0)[0],
    "split": lambda w: w.split(8)[0],
    "unbind": lambda w: w.unbind(0)[0],
    "narrow": lambda w: w.narrow(0, 0, 4),
    "select": lambda w: w.select(1, 3),
    "expand": lambda w: w.unsqueeze(0).expand(2, -1, -1)[0],
    "diagonal": lambda w: w.diagonal(),
    "data_view": lambda w: w.data.view(-1),
    "iteration": lambda w: next(iter(w)),
}

by_index = pytest.mark.parametrize("index", [pytest.param(value, id=name) for name, value in INDICES.items()])
by_view = pytest.mark.parametrize("view", [pytest.param(value, id=name) for name, value in VIEWS.items()])


@by_index
def test_assignment_by_index_reaches_the_weight(weight, index):
    plain, inner, handle = truth(weight), weight.qdata, weight.detach()
    plain[index] = 0.125
    weight[index] = 0.125
    assert weight.qdata is inner
    assert_stores(weight, plain)
    assert_stores(handle, plain)


@by_index
def test_augmented_assignment_by_index_reaches_the_weight(weight, delta, index):
    change, plain = delta(weight), truth(weight)
    plain[index] += change[index]
    weight[index] += change[index]
    # Values, not bits: ``w[...] += x`` writes twice, and a float8 row may be packed with half the scale then.
    assert torch.equal(truth(weight), rounded(plain, weight.format))


def test_assignment_by_mask_reaches_the_weight(weight, delta):
    mask, plain = delta(weight) > 0, truth(weight)
    plain[mask] = -0.25
    weight[mask] = -0.25
    assert_stores(weight, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_assigned_value_may_have_another_dtype(weight, delta, dtype):
    rows, plain = delta(weight, dtype)[:3], truth(weight)
    plain[2:5] = rows
    weight[2:5] = rows
    assert_stores(weight, plain)


def test_assigned_value_may_be_another_weight(weight, storage_format, device):
    other = convert(torch.nn.Linear(24, 16).to(device, weight.dtype), storage_format).weight
    plain = truth(weight)
    plain[...] = truth(other)
    weight[...] = other
    assert_stores(weight, plain)


def test_plain_tensor_takes_a_weight_by_index(weight):
    target = torch.zeros(2, *weight.shape, dtype=weight.dtype, device=weight.device)
    target[1] = weight
    target[0, :4] = weight[:4]
    assert torch.equal(target[1], truth(weight))
    assert torch.equal(target[0, :4], truth(weight)[:4])


def test_inpainting_merge_writes_channels_of_a_convolution(conv, delta):
    change, plain = delta(conv.weight)[:, :4], truth(conv.weight)
    plain[:, 0:4, :, :] = plain[:, 0:4, :, :] * 0.5 + change
    conv.weight[:, 0:4, :, :] = conv.weight[:, 0:4, :, :] * 0.5 + change
    assert_stores(conv.weight, plain)


def test_write_back_of_the_same_values_changes_no_value(weight):
    plain = truth(weight)
    for _ in range(10):
        weight[0] = weight[0]
        weight.copy_(truth(weight))
    assert torch.equal(truth(weight), plain)


def test_wrong_shape_raises_and_leaves_the_bits(weight):
    before = bits_of(weight)
    with pytest.raises(RuntimeError):
        weight[0:2] = torch.zeros(3, 24, device=weight.device)
    with pytest.raises(IndexError):
        weight[99] = 0
    assert_bits(weight, before)


@by_view
def test_view_reads_the_values_and_a_write_changes_the_view_alone(weight, view):
    before, seen = bits_of(weight), view(weight)
    assert_plain(seen, view(truth(weight)))
    seen.fill_(0.5)
    assert bool((seen == 0.5).all())
    assert_bits(weight, before)


def test_lost_writes_are_documented():
    text = " ".join(lib_fp8.qweight.__doc__.split())
    assert "writing through a view does not reach the weight" in text


def test_write_through_a_whole_handle_reaches_the_weight(weight, delta):
    plain = truth(weight)
    plain[0:4] += delta(weight)[0:4]
    handle = weight.detach()
    handle[0:4] = plain[0:4]
    assert_stores(weight, plain)
    doubled = truth(weight) * 2
    weight.data.mul_(2)
    assert_stores(handle, doubled)
