"""convert_model: the right layers and bits, whole or not at all, nothing else touched, originals let go."""

from __future__ import annotations

import gc
import importlib
import weakref

import pytest
import torch
from helpers import (
    EVERYTHING,
    TOY_CONVERTED,
    ToyUNet,
    all_tensors,
    assert_packed_like,
    assert_same_bits,
    failing_pack,
    need_format,
    plain_twin,
    quantized_names,
    reference_pack,
    seeded,
    snapshot,
    storage_census,
    tied_pair,
)
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lib_fp8 import ConversionError, Format, Policy, QuantWeight, convert_model, convert_models

INT8 = Policy("int8", EVERYTHING)


def assert_untouched(model, tensors, values):
    """Every parameter and buffer is the very same object and holds the same bits."""
    now = all_tensors(model)
    assert list(now) == list(tensors)
    for name, tensor in now.items():
        assert tensor is tensors[name], name
        assert_same_bits(tensor, values[name])


def test_layers_bits_and_all_the_rest(storage_format, logical_dtype, device):
    model = seeded(ToyUNet).to(logical_dtype).to(device)
    tensors, values = all_tensors(model), snapshot(model)
    convert_model(model, Policy(storage_format.name))
    assert quantized_names(model) == TOY_CONVERTED
    for name, tensor in all_tensors(model).items():
        if name.removesuffix(".weight") in TOY_CONVERTED:
            assert isinstance(tensor, nn.Parameter)
            assert tensor.dtype == logical_dtype
            assert tensor.device == values[name].device
            assert_packed_like(*tensor.packed, reference_pack(values[name], storage_format.name), storage_format.name)
        else:
            assert tensor is tensors[name]
            assert_same_bits(tensor, values[name])


def test_the_model_looks_the_same():
    model = seeded(ToyUNet).half()
    model.middle_block.eval()
    model.tokens.requires_grad_(False)

    def looks(model):
        return (
            [(name, type(module), module.training) for name, module in model.named_modules()],
            [(name, value.shape, value.dtype, value.stride()) for name, value in model.state_dict().items()],
            [
                name
                for name, p in model.named_parameters()
                if p.requires_grad and name.rsplit(".", 1)[0] not in TOY_CONVERTED
            ],
        )

    before = looks(model)
    convert_model(model, Policy("int8"))
    assert looks(model) == before


def test_forward_is_that_of_the_decoded_weights(storage_format, rng):
    model = seeded(ToyUNet).eval()
    x = torch.randn(2, 4, 8, 8, generator=rng)
    original = model(x)
    convert_model(model, Policy(storage_format.name))
    torch.testing.assert_close(model(x), plain_twin(model)(x))
    assert (model(x) - original).norm() < 0.1 * original.norm()


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_multihead_attention(storage_format, device, rng, train, grad):
    model = seeded(lambda: nn.MultiheadAttention(16, 4)).to(device).train(train)
    convert_model(model, Policy(storage_format.name, EVERYTHING))
    assert quantized_names(model) == ["out_proj"]
    x = torch.randn(5, 2, 16, generator=rng).to(device)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(model(x, x, x), plain_twin(model)(x, x, x))


@pytest.mark.parametrize("call", range(len(TOY_CONVERTED)))
def test_a_failure_leaves_the_model_as_it_was(call):
    model = seeded(ToyUNet)
    tensors, values = all_tensors(model), snapshot(model)
    with failing_pack(call), pytest.raises(ConversionError) as caught:
        convert_model(model, Policy("int8"))
    assert TOY_CONVERTED[call] in str(caught.value)
    assert "said the test" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert_untouched(model, tensors, values)
    assert convert_model(model, Policy("int8")).converted == len(TOY_CONVERTED)


@pytest.mark.parametrize("call", [0, 2, 4])
def test_several_models_are_converted_all_or_none(call):
    models = [seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), seed) for seed in range(3)]
    tensors, values = [all_tensors(model) for model in models], [snapshot(model) for model in models]
    targets = [(model, Policy("int8", keep)) for model, keep in zip(models, (EVERYTHING, ("1",), EVERYTHING))]
    with failing_pack(call), pytest.raises(ConversionError):
        convert_models(targets)
    for model, objects, bits in zip(models, tensors, values):
        assert_untouched(model, objects, bits)
    reports = convert_models(targets)
    assert [report.converted for report in reports] == [2, 1, 2]
    assert [quantized_names(model) for model in models] == [["0", "1"], ["0"], ["0", "1"]]


def test_a_failure_in_progress_leaves_the_model_as_it_was():
    model = seeded(ToyUNet)
    tensors, values = all_tensors(model), snapshot(model)

    def interrupt(layer):
        if layer.name == TOY_CONVERTED[-1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_model(model, Policy("int8"), interrupt)
    assert_untouched(model, tensors, values)


def test_a_failure_in_placing_leaves_no_hole(monkeypatch):
    moves = iter(range(1000))

    def to(weight, *args, **kwargs):
        if next(moves) == 3:  # two layers go to the host, the second comes back
            raise torch.cuda.OutOfMemoryError("said the test")
        return torch.Tensor.to(weight, *args, **kwargs)

    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    monkeypatch.setattr(QuantWeight, "to", to, raising=False)
    with pytest.raises(RuntimeError):
        convert_model(model, INT8)
    assert all(layer.weight is not None for layer in model)


def test_tied_weights_stay_tied(storage_format):
    model = tied_pair()
    convert_model(model, Policy(storage_format.name, EVERYTHING))
    assert isinstance(model[0].weight, QuantWeight)
    assert model[0].weight is model[1].weight


def test_a_tied_weight_that_is_kept_stays_tied():
    model = tied_pair()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    weight = model[0].weight
    convert_model(model, INT8)
    assert model[0].weight is model[1].weight is weight


def test_tied_layers_are_counted_and_told_one_by_one():
    model, told = tied_pair(), []
    report = convert_model(model, INT8, lambda layer: told.append(layer.name))
    assert report.converted == len(quantized_names(model)) == 2
    assert told == ["0", "1"]


def test_originals_are_let_go():
    model = seeded(ToyUNet)
    weights = [model.get_submodule(name).weight for name in TOY_CONVERTED]
    objects, storages = [weakref.ref(w) for w in weights], [StorageWeakRef(w.untyped_storage()) for w in weights]
    del weights
    report = convert_model(model, Policy("int8"))
    gc.collect()
    assert all(ref() is None for ref in objects)
    assert all(ref.expired() for ref in storages)
    assert report is not None


def test_originals_are_let_go_one_by_one(monkeypatch):
    """While packed weights are placed, each original goes before its successor arrives."""
    model = seeded(lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]))
    storages = [StorageWeakRef(layer.weight.untyped_storage()) for layer in model]
    alive = []

    def to(weight, *args, **kwargs):
        alive.append(sum(not ref.expired() for ref in storages))
        return torch.Tensor.to(weight, *args, **kwargs)

    monkeypatch.setattr(QuantWeight, "to", to, raising=False)
    convert_model(model, INT8)
    assert alive[:3] == [3, 3, 3]
    assert alive[3:] == sorted(alive[3:], reverse=True)
    assert alive[3] <= 3
    assert alive[-1] <= 1


def test_progress_hears_of_each_layer_once():
    model, told = seeded(ToyUNet), []
    convert_model(model, Policy("int8"), told.append)
    assert [layer.name for layer in told] == TOY_CONVERTED
    assert all(model.get_submodule(layer.name) is layer.module for layer in told)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_kept(storage_format, value):
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Conv2d(2, 2, 1), nn.Linear(4, 4)))
    with torch.no_grad():
        model[1].weight[1, 1] = value
    weight = model[1].weight
    report = convert_model(model, Policy(storage_format.name, EVERYTHING))
    assert model[1].weight is weight
    assert quantized_names(model) == ["0", "2"]
    ((reason, count),) = report.kept
    assert "NaN" in reason
    assert count == 1


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("where", ["torch.nn.utils.parametrizations", "torch.nn.utils"])
def test_a_computed_weight_is_kept(where, rng):
    weight_norm = getattr(importlib.import_module(where), "weight_norm", None)
    if weight_norm is None:
        pytest.skip(f"torch {torch.__version__} has no {where}.weight_norm")
    model = seeded(lambda: nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8)))
    x = torch.randn(2, 8, generator=rng)
    expected = model[0](x)
    report = convert_model(model, INT8)
    assert quantized_names(model) == ["1"]
    assert report.kept == (("computed weight", 1),)
    assert torch.equal(model[0](x), expected)


@pytest.mark.parametrize("second", ["int8", "float8_e4m3fn unscaled"])
def test_a_second_conversion_does_nothing(second):
    model = seeded(ToyUNet)
    convert_model(model, Policy("int8"))
    before, told = all_tensors(model), []
    report = convert_model(model, Policy(second), told.append)
    assert all(tensor is before[name] for name, tensor in all_tensors(model).items())
    assert told == []
    assert report.converted == 0
    assert report.bytes_after == storage_census(before.values())


def test_a_wider_policy_converts_the_rest():
    model = seeded(ToyUNet)
    convert_model(model, Policy("int8"))
    weight = model.middle_block[0].proj_out.weight
    assert convert_model(model, INT8).converted > 0
    assert model.middle_block[0].proj_out.weight is weight
    assert "time_embed.0" in quantized_names(model)


def test_without_the_format_int8_takes_over_with_one_note(monkeypatch):
    """As on Apple MPS and DirectML, where torch knows float8 and the device does not."""
    line = "this device cannot hold float8"
    monkeypatch.setattr(Format, "problem", lambda self, device: line if "float8" in self.name else None)
    model = seeded(ToyUNet)
    values = snapshot(model)
    report = convert_model(model, Policy("float8_e5m2"))
    assert report.format == "int8"
    assert report.converted == len(TOY_CONVERTED)
    (note,) = report.notes
    assert line in note
    assert "int8" in note
    assert "float8_e5m2" in note
    packed = model.get_submodule(TOY_CONVERTED[0]).weight.packed
    assert_packed_like(*packed, reference_pack(values[f"{TOY_CONVERTED[0]}.weight"], "int8"), "int8")


@pytest.mark.parametrize(("name", "notes"), [("float8_e4m3fn unscaled", 1), ("float8_e4m3fn", 0), ("int8", 0)])
def test_clamped_layers_are_told(name, notes):
    need_format(name)
    model = seeded(lambda: nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]))
    with torch.no_grad():
        model[0].weight[0, 0], model[1].weight[0, 0], model[2].weight[0, 0] = 500, -1e4, 448
    report = convert_model(model, Policy(name, EVERYTHING))
    assert len(report.notes) == notes
    assert all("448" in note and "2 layers" in note for note in report.notes)


def test_the_global_generator_is_not_drawn_from():
    model = seeded(ToyUNet)
    before = torch.get_rng_state()
    convert_model(model, Policy("int8"))
    assert torch.equal(torch.get_rng_state(), before)


def test_conversion_in_inference_mode(rng):
    """The weights are in 8 bits, and usable with autograd later."""
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))).requires_grad_(False)
    with torch.inference_mode():
        convert_model(model, INT8)
    assert quantized_names(model) == ["0", "1"]
    x = torch.randn(2, 8, generator=rng, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None


def test_a_model_without_layers():
    report = convert_model(nn.LayerNorm(4), INT8)
    assert (report.converted, report.kept, report.saved) == (0, (), 0)


def test_the_model_itself_can_be_the_layer():
    model = seeded(lambda: nn.Linear(8, 8))
    assert convert_model(model, INT8).converted == 1
    assert isinstance(model.weight, QuantWeight)
