"""Moves reach the inner tensors and never unpack a weight."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch

from lib_fp8 import QuantWeight
from strangers.helpers import assert_bits, assert_plain, assert_stores, bits_of, convert, is_parameter, truth, with_twin


def _inner(weight):
    return [weight.qdata] if weight.scale is None else [weight.qdata, weight.scale]


def _needs_cuda(device):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")


def test_meta_reaches_the_inner_tensors(layer, logical_dtype):
    shape = layer.weight.shape
    layer.to("meta")
    assert isinstance(layer.weight, QuantWeight)
    assert is_parameter(layer.weight)
    assert layer.weight.shape == shape
    assert layer.weight.dtype == logical_dtype
    assert layer.weight.is_meta
    assert all(inner.is_meta for inner in _inner(layer.weight))


def test_layer_on_meta_computes_on_meta(linear):
    linear.to("meta")
    assert linear(torch.empty(2, 24, device="meta")).shape == (2, 16)


def test_weight_on_meta_gives_meta_results(linear):
    linear.to("meta")
    assert (linear.weight + 1).is_meta
    assert "meta" in repr(linear.weight)


def test_weight_on_meta_is_filled_again(linear, device, logical_dtype):
    plain, bias = truth(linear.weight), linear.bias.clone()
    linear.to("meta").to_empty(device=device)
    linear.load_state_dict({"weight": plain, "bias": bias})
    assert torch.equal(linear.weight + 0, plain)
    assert linear.weight.dtype == logical_dtype


@pytest.mark.parametrize("move", ["module", "tensor", "contiguous", "clone"])
def test_memory_format_reaches_the_inner_tensors(conv, move):
    weight, plain, before = conv.weight, truth(conv.weight), bits_of(conv.weight)
    wanted = torch.channels_last
    if move == "module":
        conv.to(memory_format=wanted)
        assert conv.weight is weight
        result = conv.weight
    else:
        result = {
            "tensor": lambda: weight.to(memory_format=wanted),
            "contiguous": lambda: weight.contiguous(memory_format=wanted),
            "clone": lambda: weight.clone(memory_format=wanted),
        }[move]()
    assert result.is_contiguous(memory_format=wanted)
    assert not result.is_contiguous()
    assert result.qdata.stride() == result.stride() == plain.to(memory_format=wanted).stride()
    assert_bits(result, before)
    back = result.contiguous()
    assert back.is_contiguous()
    assert back.stride() == plain.stride()
    assert_bits(back, before)


def test_channels_last_layer_computes_the_same(conv, device):
    x = torch.linspace(-1, 1, 6 * 25, device=device).view(1, 6, 5, 5)
    expected = conv(x)
    torch.testing.assert_close(conv.to(memory_format=torch.channels_last)(x), expected, rtol=1e-5, atol=1e-6)


def test_memory_format_of_a_model_leaves_linears_alone(linear):
    before = bits_of(linear.weight)
    linear.to(memory_format=torch.channels_last)
    assert_bits(linear.weight, before)


@pytest.mark.parametrize("cast", ["half", "float", "bfloat16", "double", "type"])
def test_module_cast_keeps_the_parameter_and_its_8_bits(layer, cast):
    weight, before = layer.weight, bits_of(layer.weight)
    layer.type(torch.float32) if cast == "type" else getattr(layer, cast)()
    assert layer.weight is weight
    assert is_parameter(weight)
    assert all(inner.dtype == torch.float32 for inner in _inner(weight)[1:])
    assert weight.qdata.element_size() == 1
    assert layer.bias.dtype == weight.dtype
    assert_bits(weight, before)


@pytest.mark.parametrize("move", [lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.to(torch.device("cpu"))])
def test_offload_keeps_8_bits(layer, device, move):
    weight, before = layer.weight, bits_of(layer.weight)
    move(layer)
    assert layer.weight.device.type == "cpu"
    assert all(inner.device.type == "cpu" for inner in _inner(layer.weight))
    assert (layer.weight is weight) == (device.type == "cpu")
    assert_bits(layer.weight, before)
    layer.to(device)
    assert_bits(layer.weight, before)


def test_lowvram_swaps_keep_bits_and_result(storage_format, device, logical_dtype, rng):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to(device, logical_dtype)
    convert(model, storage_format)
    x = torch.randn(2, 8, generator=rng).to(device, torch.float32)
    expected, before = model(x), [bits_of(part.weight) for part in model]
    handles = [part.register_forward_pre_hook(lambda module, args: module.to(device) and None) for part in model]
    for _ in range(20):
        model.to("cpu")
        assert torch.equal(model(x), expected)
    for handle in handles:
        handle.remove()
    for part, bits in zip(model, before):
        assert_bits(part.weight, bits)


def test_moves_in_one_call_combine(conv, device):
    before = bits_of(conv.weight)
    conv.to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
    assert conv.weight.dtype == torch.float32
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert_bits(conv.weight, before)


@pytest.mark.gpu
def test_cuda_and_cuda_0_are_one_device(linear, device):
    _needs_cuda(device)
    weight = linear.weight
    for same in ("cuda", "cuda:0", torch.device("cuda"), 0):
        assert weight.to(same) is weight
        linear.to(same)
        assert linear.weight is weight


@pytest.mark.gpu
def test_device_and_back(linear, device):
    _needs_cuda(device)
    before = bits_of(linear.weight)
    for _ in range(3):
        assert_bits(linear.cpu().weight, before)
        assert_bits(linear.cuda().weight, before)
        assert all(inner.is_cuda for inner in _inner(linear.weight))


@pytest.mark.gpu
def test_pinned_memory(linear, device):
    _needs_cuda(device)
    before = bits_of(linear.weight)
    pinned = linear.weight.cpu().pin_memory()
    assert pinned.is_pinned()
    assert all(inner.is_pinned() for inner in _inner(pinned))
    assert_bits(pinned, before)
    assert_bits(pinned.to(device, non_blocking=True), before)


@pytest.mark.gpu
def test_record_stream(linear, device):
    _needs_cuda(device)
    linear.weight.record_stream(torch.cuda.current_stream())


def test_pageable_memory_is_not_pinned(weight):
    if weight.is_cuda:
        pytest.skip("only memory of the host can be pinned")
    assert not weight.is_pinned()


def _pair(storage_format, logical_dtype, device):
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    return model.to(device, logical_dtype).requires_grad_(False)


def _backward(model, device):
    x = torch.linspace(-1, 1, 24, device=device).view(2, 12).requires_grad_()
    model.float()(x).square().sum().backward()
    return x.grad


@pytest.fixture(autouse=True)
def _own_random_state():
    with torch.random.fork_rng():
        yield


def test_created_in_inference_mode_is_usable_with_autograd(storage_format, logical_dtype, device):
    model, twin = _pair(storage_format, logical_dtype, device), _pair(storage_format, logical_dtype, device)
    with torch.inference_mode():
        convert(model, storage_format)
    convert(twin, storage_format)
    for mine, other in zip(model.parameters(), twin.parameters()):
        if isinstance(other, QuantWeight):
            assert_bits(mine, bits_of(other))
    assert torch.equal(_backward(model, device), _backward(twin, device))


def test_created_in_inference_mode_can_be_written_later(storage_format, logical_dtype, device):
    model = _pair(storage_format, logical_dtype, device)
    with torch.inference_mode():
        convert(model, storage_format)
    model[0].weight += 0.5
    with torch.inference_mode():
        model[0].weight.zero_()
    assert not bool(model[0].weight.any())


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.half(),
        lambda m: m.float(),
        lambda m: m.to("cpu"),
        lambda m: m.to(torch.bfloat16).to(torch.float32),
        lambda m: m.to(memory_format=torch.channels_last),
    ],
    ids=["half", "float", "cpu", "twice", "memory_format"],
)
def test_moved_in_inference_mode_computes_later(layer, device, move):
    before = bits_of(layer.weight)
    x = torch.ones((2, 24) if isinstance(layer, torch.nn.Linear) else (1, 6, 4, 4), device=device)
    expected = layer(x).float()
    with torch.inference_mode():
        move(layer)
        layer.to(device)
        inside = layer(x).float()
    with torch.no_grad():
        outside = layer(x).float()
    assert_bits(layer.weight, before)
    assert torch.equal(inside, outside)
    torch.testing.assert_close(outside, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("copied", [lambda w: w.clone(), copy.deepcopy], ids=["clone", "deepcopy"])
def test_copied_in_inference_mode_keeps_8_bits(weight, copied):
    with torch.inference_mode():
        assert_bits(copied(weight), bits_of(weight))


def test_backup_taken_in_inference_mode_keeps_8_bits(weight):
    with torch.inference_mode():
        assert_bits(weight.to("cpu", copy=True), bits_of(weight))


def test_state_dict_in_inference_mode(linear):
    with torch.inference_mode():
        assert_bits(linear.state_dict()["weight"], bits_of(linear.weight))


def test_written_in_inference_mode(weight, delta):
    change, plain = delta(weight), truth(weight)
    plain += change
    with torch.inference_mode():
        weight += change
    assert_stores(weight, plain)
    plain = truth(weight)
    plain[0] = 0
    with torch.inference_mode():
        weight[0] = 0
    assert_stores(weight, plain)


def test_computes_in_inference_mode(layer, device):
    x = torch.ones((2, 24) if isinstance(layer, torch.nn.Linear) else (1, 6, 4, 4), device=device)
    expected = layer(x)
    with torch.inference_mode():
        assert torch.equal(layer(x), expected)


@pytest.mark.parametrize(
    "move", [lambda m: m.half(), lambda m: m.float(), lambda m: m.to("meta")], ids=["half", "float", "meta"]
)
def test_weakref_on_the_weight_does_not_hinder_moves(layer, move):
    reference = weakref.ref(layer.weight)
    seen = []
    weakref.finalize(layer.weight, seen.append, 1)
    move(layer)
    assert isinstance(layer.weight, QuantWeight)
    assert (reference() is None) == bool(seen)
    if not layer.weight.is_meta:
        assert reference() is layer.weight


def test_weight_is_freed_with_its_layer(linear):
    reference = weakref.ref(linear.weight.qdata)
    linear.weight = None
    assert reference() is None


def test_to_empty_asks_for_room_and_gets_an_ordinary_weight(linear, logical_dtype):
    linear.to_empty(device="cpu")
    assert linear.weight.dtype == logical_dtype
    assert linear.weight.shape == (16, 24)


def test_twin_agrees_after_moves(storage_format, logical_dtype, device, rng):
    model, twin = with_twin(torch.nn.Conv2d(3, 4, 3).to(device, logical_dtype), storage_format)
    model.to("cpu").to(torch.float32).to(logical_dtype).to(device)
    assert_plain(model.weight + 0, twin.weight)
