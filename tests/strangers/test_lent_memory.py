"""Memory behind the values of a state dict: plain values at an address of its own, while the state dict lives."""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools

import numpy as np
import pytest
import torch

from lib_fp8 import QuantWeight
from strangers.helpers import convert, truth


@pytest.fixture
def model(storage_format):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        layers = [torch.nn.Linear(24, 16), torch.nn.Linear(24, 16), torch.nn.Conv2d(6, 8, 3)]
    return convert(torch.nn.ModuleList(layers), storage_format)


def weights(model):
    return [value for value in model.state_dict().values() if isinstance(value, QuantWeight)]


def read(pointer, like):
    """The values that a pointer leads to."""
    raw = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint8)), (like.numel() * 4,))
    return torch.from_numpy(raw.copy()).view(torch.float32).view(like.shape)


POINTERS = {
    "data_ptr": lambda weight: weight.data_ptr(),
    "untyped_storage": lambda weight: weight.untyped_storage().data_ptr(),
    "storage": lambda weight: weight.storage().data_ptr(),
}
by_pointer = pytest.mark.parametrize("pointer", POINTERS.values(), ids=POINTERS)


@by_pointer
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_pointer_leads_to_the_plain_values(model, pointer):
    for weight in weights(model):
        assert torch.equal(read(pointer(weight), weight), truth(weight))


def test_all_ways_lead_to_one_place_of_the_right_size(model):
    for weight in weights(model):
        storage = weight.untyped_storage()
        assert weight.data_ptr() == storage.data_ptr() == weight.data_ptr()
        assert storage.nbytes() == weight.numel() * weight.element_size()
        assert torch.equal(
            torch.frombuffer(bytearray(bytes(storage)), dtype=weight.dtype).view(weight.shape), truth(weight)
        )


def test_no_two_weights_look_shared(model):
    held = [*weights(model), *weights(model)]
    areas = sorted((weight.data_ptr(), weight.numel() * 4) for weight in held)
    assert all(start + size <= other for (start, size), (other, _) in itertools.pairwise(areas))


def test_the_values_are_those_of_now(model):
    held = weights(model)
    before = [weight.data_ptr() for weight in held]
    for layer in model:
        layer.weight.mul_(0.5)
    for weight, pointer in zip(held, before):
        assert weight.data_ptr() == pointer
        assert torch.equal(read(pointer, weight), truth(weight))


def test_the_memory_is_given_back_with_the_state_dict(model):
    held = weights(model)
    pointers = [weight.data_ptr() for weight in held]
    assert len(pointers) == 3
    lent = [weight._lent for weight in held]
    del held
    gc.collect()
    for tensor in lent:
        assert not any(isinstance(owner, QuantWeight) for owner in gc.get_referrers(tensor))
    for layer in model:
        assert all(value is not tensor for value in vars(layer.weight).values() for tensor in lent)


def test_a_copy_lends_its_own(model):
    for weight in weights(model):
        weight.data_ptr()
        for other in (copy.deepcopy(weight), weight.clone(), weight.to("cpu", copy=True)):
            assert not other.lends or other.data_ptr() != weight.data_ptr()
            assert other._lent is not weight._lent


REFUSING = {
    "parameter": lambda layer: layer.weight,
    "data": lambda layer: layer.weight.data,
    "detach": lambda layer: layer.weight.detach(),
    "kept variables": lambda layer: layer.state_dict(keep_vars=True)["weight"],
    "parameter of a state dict": lambda layer: torch.nn.Parameter(layer.state_dict()["weight"], requires_grad=False),
}


@pytest.mark.parametrize("handle", REFUSING.values(), ids=REFUSING)
def test_what_may_outlive_or_not_live_as_long_as_a_pointer_refuses(model, handle):
    """A layer's weight would keep its decoded copy with it, a passing handle would leave a pointer to nothing."""
    for layer in model:
        for ask in (POINTERS["data_ptr"], lambda weight: weight.storage()):
            with pytest.raises(RuntimeError, match=r"no torch.float32 values.*state_dict"):
                ask(handle(layer))


def test_assigned_state_dicts_make_layers_that_refuse(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state.update((name, value) for name, value in model.state_dict().items())
    twin = copy.deepcopy(model)
    if "assign" not in torch.nn.Module.load_state_dict.__code__.co_varnames:
        pytest.skip(f"torch {torch.__version__} cannot assign a state dict")
    twin.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match="state_dict"):
        twin[0].weight.data_ptr()


def test_on_the_meta_device_there_is_none(model):
    model.to("meta")
    assert [weight.data_ptr() for weight in weights(model)] == [0, 0, 0]
    assert [layer.weight.data_ptr() for layer in model] == [0, 0, 0]
