"""A device without memory for packing a layer: it is packed on the CPU, to the same bits; only then is it an error."""

from __future__ import annotations

import pytest
import torch
from helpers import EVERYTHING, assert_same_bits, quantized_names, seeded, snapshot
from torch import nn
from webui.card import CARD, Card, OnCard

from lib_fp8 import ConversionError, Policy, QuantWeight, StreamingConversion, convert, convert_model, qweight
from lib_fp8.capability import is_out_of_memory

ERRORS = {
    "torch's": lambda: torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    "DirectML's": lambda: RuntimeError("Could not allocate tensor with 58982400 bytes"),
    "another": lambda: RuntimeError("CUDA error: an illegal memory access was encountered"),
}
STEPS = {"largest values": (convert, "row_absmax"), "packing": (qweight, "pack")}


@pytest.fixture
def card(monkeypatch):
    """A device that is not the CPU; of one that is called "meta" the product would not take values."""
    monkeypatch.setattr(OnCard, "is_meta", False, raising=False)
    with Card() as card:
        yield card


@pytest.fixture
def expected(storage_format):
    """Two layers, converted where there is memory."""
    model = build()
    convert_model(model, Policy(storage_format.name, EVERYTHING))
    return model


def build():
    return seeded(lambda: nn.Sequential(nn.Linear(8, 6), nn.Conv2d(3, 4, 3)))


def fails(monkeypatch, step, error, places=("meta",)):
    """Make a step raise for weights in these places; a list of the places where it was tried."""
    owner, name = STEPS[step]
    real, tried = getattr(owner, name), []

    def step_of_packing(weight, *args, **kwargs):
        tried.append(weight.device.type)
        if weight.device.type in places:
            raise ERRORS[error]()
        return real(weight, *args, **kwargs)

    monkeypatch.setattr(owner, name, step_of_packing)
    return tried


def converted(model, way, policy, keep=None):
    if way == "in place":
        return convert.convert_models([(model, policy)], keep=keep)[0]
    state = snapshot(model)
    with StreamingConversion([(model, policy)], keep=keep) as stream:
        model.load_state_dict(state)
    return stream.reports()[0]


@pytest.mark.parametrize("way", ["in place", "while loading"])
@pytest.mark.parametrize("error", ["torch's", "DirectML's"])
@pytest.mark.parametrize("step", STEPS)
def test_a_layer_is_packed_on_the_cpu(monkeypatch, card, storage_format, expected, step, error, way):
    model, kept = build().to(CARD), []
    tried = fails(monkeypatch, step, error)
    report = converted(model, way, Policy(storage_format.name, EVERYTHING), lambda layer, weight: kept.append(layer))
    assert tried == ["meta", "cpu"] * 2
    assert report.converted == 2
    assert kept == list(model)
    for layer, twin in zip(model, expected):
        assert isinstance(layer.weight, QuantWeight)
        assert layer.weight.device == CARD
        assert_same_bits(layer.weight.to("cpu"), twin.weight.detach())


@pytest.mark.parametrize("way", ["in place", "while loading"])
@pytest.mark.parametrize("step", STEPS)
def test_without_memory_on_the_cpu_either_it_is_an_error_that_says_so(monkeypatch, card, step, way):
    model = build().to(CARD)
    tried = fails(monkeypatch, step, "torch's", ("meta", "cpu"))
    with pytest.raises(ConversionError, match="layer 0 could not be packed") as caught:
        converted(model, way, Policy("int8", EVERYTHING))
    assert tried == ["meta", "cpu"]
    assert is_out_of_memory(caught.value.__cause__)
    assert caught.value.whole
    assert quantized_names(model) == []


@pytest.mark.parametrize("way", ["in place", "while loading"])
def test_another_error_is_not_tried_again(monkeypatch, card, way):
    tried = fails(monkeypatch, "packing", "another")
    with pytest.raises(ConversionError) as caught:
        converted(build().to(CARD), way, Policy("int8", EVERYTHING))
    assert tried == ["meta"]
    assert not is_out_of_memory(caught.value.__cause__)


def test_on_the_cpu_nothing_is_tried_twice(monkeypatch):
    tried = fails(monkeypatch, "packing", "torch's", ("cpu",))
    with pytest.raises(ConversionError) as caught:
        converted(build(), "in place", Policy("int8", EVERYTHING))
    assert tried == ["cpu"]
    assert is_out_of_memory(caught.value.__cause__)


def test_rounding_to_the_dtype_of_the_model_is_part_of_packing(monkeypatch, card):
    """While loading, float32 values are rounded to float16 first: that takes memory too."""
    model, real = build().to(CARD), torch.Tensor.to
    twin = build().half()
    convert_model(twin, Policy("int8", EVERYTHING))

    def to(tensor, *args, **kwargs):
        if isinstance(tensor, OnCard) and torch.float16 in args:
            raise ERRORS["torch's"]()
        return real(tensor, *args, **kwargs)

    state = snapshot(model)
    monkeypatch.setattr(torch.Tensor, "to", to)
    with StreamingConversion([(model, Policy("int8", EVERYTHING))], torch.float16):
        model.load_state_dict(state)
    monkeypatch.undo()
    for layer, other in zip(model, twin):
        assert_same_bits(layer.weight.to("cpu"), other.weight.detach())


@pytest.mark.parametrize("way", ["in place", "while loading"])
def test_no_memory_for_the_packed_layer(monkeypatch, card, way):
    """It was packed on the CPU, and the device has no room for the half of it either."""
    model = build().to(CARD)
    fails(monkeypatch, "packing", "torch's")
    card.capacity = 1
    with pytest.raises(ConversionError, match="layer 0 could not be moved to meta") as caught:
        converted(model, way, Policy("int8", EVERYTHING))
    assert is_out_of_memory(caught.value.__cause__)


def test_what_packing_took_is_let_go_before_the_cpu_packs(monkeypatch, card):
    """An exception keeps its frames, and they what was made in them."""
    model, real, used = build().to(CARD), qweight.pack, []

    def pack(weight, *args, **kwargs):
        if weight.device != CARD:
            used.append(card.used)
            return real(weight, *args, **kwargs)
        scratch = torch.zeros_like(weight, dtype=torch.float32)
        raise torch.cuda.OutOfMemoryError(f"CUDA out of memory, with {scratch.numel()} values of scratch")

    monkeypatch.setattr(qweight, "pack", pack)
    at_rest = card.used
    convert_model(model, Policy("int8", EVERYTHING))
    assert used == [at_rest, at_rest]
