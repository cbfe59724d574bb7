"""Wrappers that take a parameter apart and build it again: by its class, by swapping, by moving it to and fro."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from lib_fp8 import Policy, QuantWeight, StreamingConversion, convert_model
from strangers.helpers import assert_bits, bits_of, is_parameter, truth


def build():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.SiLU(), nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, 8)
        ).requires_grad_(False)


@pytest.fixture
def model(storage_format):
    result = build()
    convert_model(result, Policy(storage_format.name, ()))
    return result


@pytest.fixture
def x(rng):
    return torch.randn(2, 3, 4, 4, generator=rng)


LAYERS = (0, 3, 4)


def in_8_bits(model):
    return [isinstance(model[index]._parameters["weight"], QuantWeight) for index in LAYERS]


# By its class

REBUILDS = {
    "data": lambda p: type(p)(p.data),
    "requires_grad": lambda p: type(p)(p.data, requires_grad=p.requires_grad),
    "by position": lambda p: type(p)(p.data, p.requires_grad),
    "itself": lambda p: type(p)(p, requires_grad=False),
    "attributes": lambda p: type(p)(p.data, requires_grad=p.requires_grad, **p.__dict__),
    "moved": lambda p: type(p)(p.to("cpu", copy=True), requires_grad=False).to("cpu"),
    "Parameter": lambda p: nn.Parameter(p.data, requires_grad=False),
}


@pytest.mark.parametrize("rebuild", REBUILDS.values(), ids=REBUILDS)
def test_rebuilt_by_its_class(model, x, rebuild):
    expected = model(x)
    for index in LAYERS:
        weight, bits = model[index].weight, bits_of(model[index].weight)
        weight.note = "a stranger's"
        rebuilt = rebuild(weight)
        assert is_parameter(rebuilt)
        assert rebuilt.dtype == weight.dtype
        assert not rebuilt.requires_grad
        assert_bits(rebuilt, bits)
        model[index].weight = rebuilt
        assert hasattr(rebuilt, "note") == (rebuild is REBUILDS["attributes"])
    assert torch.equal(model(x), expected)


def test_rebuilt_of_a_plain_value(model):
    """It has no format; with the attributes of the old one it has."""
    old = model[3].weight
    value = torch.randn_like(truth(old))
    plain = type(old)(value, requires_grad=True)
    assert type(plain) is nn.Parameter
    assert plain.requires_grad
    assert torch.equal(plain, value)
    packed = type(old)(value, requires_grad=True, **vars(old))
    assert_bits(packed, bits_of(QuantWeight.from_weight(value, old.format)))
    assert is_parameter(packed)
    on_meta = type(old)(value.to("meta"), requires_grad=False, **vars(old))
    assert on_meta.is_meta


def test_rebuilt_on_the_meta_device_and_back(model, x):
    expected, kept = model(x), {}
    for index in LAYERS:
        weight = model[index].weight
        kept[index] = weight.data
        model[index]._parameters["weight"] = type(weight)(weight.to("meta"), requires_grad=False)
        assert model[index].weight.is_meta
    for index in LAYERS:
        placeholder = model[index].weight
        model[index]._parameters["weight"] = type(placeholder)(kept[index], requires_grad=False)
    assert in_8_bits(model) == [True] * 3
    assert torch.equal(model(x), expected)


# accelerate


def offloaded(model, how, folder):
    accelerate = pytest.importorskip("accelerate")
    if how == "disk":
        return accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    if how == "state dict":
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        return accelerate.cpu_offload(model, torch.device("cpu"), state_dict=state)
    return accelerate.cpu_offload(model, torch.device("cpu"), offload_buffers=how == "buffers")


@pytest.mark.parametrize("how", ["memory", "buffers", "state dict", "disk"])
def test_accelerate_offloads(model, x, tmp_path, how):
    """From memory the weights come back in 8 bits; the disk holds plain values of the logical dtype."""
    expected = model(x)
    offloaded(model, how, tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())
    for _ in range(2):
        assert torch.equal(model(x), expected)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_accelerate_computes_with_8_bits(model, x):
    seen, compute = [], nn.functional.linear
    expected = model(x)
    offloaded(model, "memory", None)

    def linear(input, weight, bias=None):
        seen.append(type(weight))
        return compute(input, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", linear)
        assert torch.equal(model(x), expected)
    assert seen.count(QuantWeight) == 2


def test_accelerate_sets_values(model):
    modeling = pytest.importorskip("accelerate.utils.modeling")
    value = torch.randn(32, 64)
    modeling.set_module_tensor_to_device(model, "3.weight", "meta")
    modeling.set_module_tensor_to_device(model, "3.weight", "cpu", value=value)
    assert torch.equal(model[3].weight, value)
    packed = QuantWeight.from_weight(value, model[4].weight.format)
    modeling.set_module_tensor_to_device(model, "4.weight", "cpu", value=packed[:8, :32] * 2)
    assert torch.equal(model[4].weight, truth(packed)[:8, :32] * 2)


# Swapping


@pytest.fixture
def swapping():
    if not hasattr(torch.__future__, "set_swap_module_params_on_conversion"):
        pytest.skip(f"torch {torch.__version__} has no swapping")
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_swapped_when_a_module_is_cast(model, swapping):
    weights = [model[index].weight for index in LAYERS]
    bits = [bits_of(weight) for weight in weights]
    for dtype in (torch.float16, torch.float32):
        model.to(dtype)
        for index, weight, before in zip(LAYERS, weights, bits):
            assert model[index].weight is weight
            assert weight.dtype == dtype
            assert_bits(weight, before)


def test_swapped_with_a_state_dict_that_is_held(model, swapping):
    state = model.state_dict()
    expected = {name: value.float() for name, value in state.items()}
    model.double()
    for name, value in state.items():
        assert value.dtype == torch.float32
        assert torch.equal(value.float(), expected[name])


def test_swapped_when_a_module_is_moved(model, swapping, x):
    expected, state = model(x), {name: value.clone() for name, value in model.state_dict().items()}
    model.to("meta")
    assert in_8_bits(model) == [True] * 3
    model.load_state_dict(state, assign=True)
    assert in_8_bits(model) == [True] * 3
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("plain", [False, True], ids=["8 bits", "plain"])
def test_swapped_when_a_state_dict_is_loaded(model, swapping, x, plain):
    state, expected = {name: value.clone() for name, value in model.state_dict().items()}, model(x)
    if plain:
        state = {name: value.dequantize() if isinstance(value, QuantWeight) else value for name, value in state.items()}
    for layer in model:
        for parameter in layer.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    assert in_8_bits(model) == [True] * 3
    torch.testing.assert_close(model(x), expected)
    twin = build()
    twin.load_state_dict(state)
    assert in_8_bits(twin) == [False] * 3
    torch.testing.assert_close(twin(x), expected)


def test_swapped_while_it_is_converted(storage_format, swapping, x):
    model = build()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with StreamingConversion([(model, Policy(storage_format.name, ()))]):
        model.load_state_dict(state)
    twin = build()
    convert_model(twin, Policy(storage_format.name, ()))
    assert in_8_bits(model) == [True] * 3
    assert torch.equal(model(x), twin(x))


def test_two_weights_are_swapped(model, swapping):
    other = copy.deepcopy(model)
    other[3].weight.mul_(2)
    bits, others = bits_of(model[3].weight), bits_of(other[3].weight)
    torch.utils.swap_tensors(model[3].weight, other[3].weight)
    assert_bits(model[3].weight, others)
    assert_bits(other[3].weight, bits)
    plain = nn.Parameter(torch.ones(8, 32), requires_grad=False)
    bits = bits_of(model[4].weight)
    torch.utils.swap_tensors(model[4].weight, plain)
    assert type(model[4].weight) is nn.Parameter
    assert_bits(plain, bits)


# torch's other ways to take a parameter's place


class Twice(nn.Module):
    def forward(self, weight):
        return weight * 2


@pytest.mark.parametrize("stays", [False, True])
def test_parametrized(model, x, stays):
    weight = truth(model[3].weight)
    hidden = model[:3](x)
    parametrize.register_parametrization(model[3], "weight", Twice())
    torch.testing.assert_close(model[3](hidden), nn.functional.linear(hidden, weight * 2, model[3].bias))
    parametrize.remove_parametrizations(model[3], "weight", leave_parametrized=stays)
    if stays:
        torch.testing.assert_close(model[3].weight.detach() + 0, weight * 2, rtol=0.13, atol=1e-3)
    else:
        assert isinstance(model[3].weight, QuantWeight)
        assert torch.equal(truth(model[3].weight), weight)


@pytest.mark.filterwarnings("ignore:.*stateless.functional_call. is deprecated")
@pytest.mark.parametrize("call", ["torch.func", "stateless"])
def test_functional_call(model, x, call):
    if call == "stateless":
        from torch.nn.utils.stateless import functional_call
    else:
        functional_call = torch.func.functional_call
    other = copy.deepcopy(model)
    other[3].weight.mul_(0.5)
    expected, before = other(x), bits_of(model[3].weight)
    given = dict(other.named_parameters())
    assert torch.equal(functional_call(model, given, (x,)), expected)
    plain = {name: truth(value) if isinstance(value, QuantWeight) else value for name, value in given.items()}
    torch.testing.assert_close(functional_call(model, plain, (x,)), expected)
    assert_bits(model[3].weight, before)


def test_emptied_and_filled_again(model, x):
    """An emptied layer has no format to go back to: it is plain until it is converted."""
    expected, state = model(x), {name: value.clone() for name, value in model.state_dict().items()}
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    torch.testing.assert_close(model(x), expected)
