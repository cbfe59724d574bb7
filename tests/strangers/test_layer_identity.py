"""Classes, names and attributes of layers stay, so whoever looks for them finds them."""

from __future__ import annotations

import copy

import pytest
import torch

from strangers.helpers import convert, is_parameter, truth


class Block(torch.nn.Module):
    """Layers of each kind, one of them in a class of its own."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 8, 3, padding=1)
        self.attention = torch.nn.MultiheadAttention(8, 2)
        self.ff = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))


@pytest.fixture
def pair(storage_format, logical_dtype, device):
    """A converted block and its untouched copy."""
    block = Block().to(device, logical_dtype).requires_grad_(False)
    return convert(copy.deepcopy(block), storage_format), block


def test_classes_and_names_are_unchanged(pair):
    converted, plain = pair
    assert [(name, type(module)) for name, module in converted.named_modules()] == [
        (name, type(module)) for name, module in plain.named_modules()
    ]
    assert [name for name, _ in converted.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for mine, other in zip(converted.modules(), plain.modules()):
        assert repr(mine) == repr(other)
        assert mine.__class__.__name__ == other.__class__.__name__
        assert "forward" not in mine.__dict__
        assert mine.forward.__func__ is other.forward.__func__


def test_attributes_that_trainers_read(pair):
    converted, plain = pair
    for layer, other in ((converted.ff[0], plain.ff[0]), (converted.conv, plain.conv)):
        for name in ("in_features", "out_features", "in_channels", "out_channels", "kernel_size", "stride", "padding"):
            assert getattr(layer, name, None) == getattr(other, name, None)
        assert layer.weight.shape == other.weight.shape
        assert layer.weight.stride() == other.weight.stride()
        assert layer.weight.is_contiguous()
        assert is_parameter(layer.weight)
        assert isinstance(layer.weight, torch.Tensor)


def test_trainer_finds_layers_by_class_name(pair):
    converted, plain = pair

    def found(model):
        return [n for n, module in model.named_modules() if module.__class__.__name__ in ("Linear", "Conv2d")]

    assert found(converted) == found(plain) == ["conv", "ff.0", "ff.2"]


def test_trainer_merges_through_the_state_dict_of_a_layer(pair, rng):
    layer = pair[0].ff[0]
    up, down = torch.randn(16, 2, generator=rng) * 0.1, torch.randn(2, 8, generator=rng) * 0.1
    state = layer.state_dict()
    merged = state["weight"].to(torch.float) + (up @ down).to(layer.weight.device)
    state["weight"] = merged.to(layer.weight.dtype)
    layer.load_state_dict(state)
    error = (truth(layer.weight).float() - merged.to(layer.weight.dtype).float()).norm() / merged.norm()
    assert error < 0.1


def test_tiling_makes_convolutions_circular(conv, device, rng):
    twin = torch.nn.Conv2d(6, 8, 3, padding=1, padding_mode="circular").to(device)
    twin.weight.data, twin.bias.data = truth(conv.weight, torch.float32), conv.bias.float()
    x = torch.randn(1, 6, 5, 5, generator=rng).to(device)
    straight = conv(x)
    layers = [layer for layer in torch.nn.ModuleList([conv]).modules() if type(layer) == torch.nn.Conv2d]  # noqa: E721
    assert layers == [conv]
    conv.padding_mode = "circular"
    torch.testing.assert_close(conv(x), twin(x), rtol=1e-5, atol=1e-6)
    conv.padding_mode = "zeros"
    assert torch.equal(conv(x), straight)


def test_tiling_by_a_replaced_conv_forward(conv, device, rng):
    # Other tiling code replaces _conv_forward and pads by itself, per axis.
    x = torch.randn(1, 6, 5, 5, generator=rng).to(device)

    def forward(x, weight, bias):
        padded = torch.nn.functional.pad(x, (1, 1, 0, 0), mode="circular")
        padded = torch.nn.functional.pad(padded, (0, 0, 1, 1), mode="constant")
        return torch.nn.functional.conv2d(padded, weight, bias, conv.stride, 0, conv.dilation, conv.groups)

    conv._conv_forward = forward
    expected = forward(x, truth(conv.weight, torch.float32), conv.bias.float())
    torch.testing.assert_close(conv(x), expected, rtol=1e-5, atol=1e-6)


def test_class_of_their_own_stays(storage_format, logical_dtype, device):
    class QkvLinear(torch.nn.Linear):
        pass

    model = convert(torch.nn.ModuleDict({"qkv": QkvLinear(8, 24)}).to(device, logical_dtype), storage_format)
    assert type(model["qkv"]) is QkvLinear
    assert model["qkv"](torch.ones(1, 8, device=device)).shape == (1, 24)
