"""A cast relabels, a cast to float8 does nothing, and the visible dtype is the logical one."""

from __future__ import annotations

import itertools

import pytest
import torch

from lib_fp8 import QuantWeight
from strangers.helpers import assert_bits, assert_plain, bits_of, truth

LOGICAL = [torch.float16, torch.bfloat16, torch.float32]
FLOAT8 = [name for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]

CASTS = {
    "to": lambda w, dtype: w.to(dtype),
    "to_keyword": lambda w, dtype: w.to(dtype=dtype),
    "to_device_and_dtype": lambda w, dtype: w.to(w.device, dtype),
    "to_other": lambda w, dtype: w.to(torch.empty(0, dtype=dtype, device=w.device)),
    "type": lambda w, dtype: w.type(dtype),
    "type_as": lambda w, dtype: w.type_as(torch.empty(0, dtype=dtype, device=w.device)),
    "method": lambda w, dtype: getattr(w, {"float16": "half", "float32": "float"}.get(name(dtype), name(dtype)))(),
}


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


by_cast = pytest.mark.parametrize("cast", [pytest.param(value, id=key) for key, value in CASTS.items()])
by_dtype = pytest.mark.parametrize("dtype", LOGICAL, ids=name)


@by_cast
@by_dtype
def test_cast_relabels_and_has_its_own_storage(weight, cast, dtype):
    before = bits_of(weight)
    result = cast(weight, dtype)
    assert result.dtype == dtype
    assert_bits(result, before)
    assert torch.equal(result + 0, truth(weight, dtype))
    if dtype == weight.dtype:
        assert result is weight
        return
    result.zero_()
    assert_bits(weight, before)
    assert not bool(result.any())


@pytest.mark.parametrize("copied", [lambda w: w.to(w.dtype, copy=True), lambda w: w.to("cpu", copy=True)])
def test_copy_has_its_own_storage(weight, copied):
    before = bits_of(weight)
    backup = copied(weight)
    assert backup is not weight
    assert_bits(backup, before)
    weight.zero_()
    assert_bits(backup, before)
    weight.copy_(backup)
    assert_bits(weight, before)


@pytest.mark.parametrize("path", list(itertools.permutations(LOGICAL)), ids=lambda path: "-".join(map(name, path)))
def test_round_trips_keep_the_bits(weight, logical_dtype, path):
    before, moved = bits_of(weight), weight
    for dtype in (*path, logical_dtype):
        moved = moved.to(dtype)
    assert_bits(moved, before)


def test_double_holds_the_values(weight):
    assert torch.equal(weight.double() + 0, truth(weight, torch.float32).double())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.bool, torch.complex64], ids=name)
def test_cast_to_another_kind_gives_plain_values(weight, dtype):
    weight.mul_(400)
    assert_plain(weight.to(dtype), truth(weight).to(dtype))


@pytest.mark.parametrize("dtype_name", FLOAT8 or ["float8_e4m3fn"])
@pytest.mark.parametrize("spelling", ["to", "type", "to_copy", "to_device"])
def test_cast_to_float8_changes_nothing(weight, dtype_name, spelling):
    if not FLOAT8:
        pytest.skip(f"torch {torch.__version__} has no float8")
    dtype, before = getattr(torch, dtype_name), bits_of(weight)
    result = {
        "to": lambda: weight.to(dtype),
        "type": lambda: weight.type(dtype),
        "to_copy": lambda: weight.to(dtype, copy=True),
        "to_device": lambda: weight.to(weight.device, dtype, non_blocking=True),
    }[spelling]()
    assert result.dtype == weight.dtype
    assert_bits(result, before)
    assert_bits(weight, before)
    assert torch.equal(result + 0, truth(weight))


def test_probes_see_the_logical_dtype(linear, logical_dtype):
    probe = next(linear.parameters())
    assert isinstance(probe, QuantWeight)
    assert probe.dtype == linear.weight.dtype == linear.state_dict()["weight"].dtype == logical_dtype
    assert probe.is_floating_point()
    assert torch.is_floating_point(probe)
    assert torch.finfo(probe.dtype).bits == probe.element_size() * 8
    assert probe.numel() == probe.nelement() == 16 * 24
    assert probe.dim() == probe.ndim == len(probe.shape) == 2
    assert tuple(probe.size()) == (16, 24)
    assert len(probe) == 16
    assert probe.layout == torch.strided
    assert not probe.is_sparse
    assert not probe.is_quantized
    assert probe.is_leaf
    assert probe.grad is None
    assert not probe.is_complex()


def test_result_type_is_that_of_a_plain_weight(weight):
    plain = truth(weight)
    for other in (1.5, torch.ones(1, dtype=torch.float64), torch.ones(2, 24), torch.ones(2, 24, dtype=torch.bfloat16)):
        assert torch.result_type(weight, other) == torch.result_type(plain, other)


CREATORS = {
    "randn": lambda w: torch.randn(3, dtype=w.dtype, device=w.device, generator=torch.Generator(w.device)),
    "zeros": lambda w: torch.zeros(3, dtype=w.dtype, device=w.device),
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda w: torch.full_like(w, 0.5),
    "zeros_like_float32": lambda w: torch.zeros_like(w, dtype=torch.float32),
    "new_zeros": lambda w: w.new_zeros(2, 3),
    "new_ones": lambda w: w.new_ones(2, 3),
    "new_full": lambda w: w.new_full((2, 3), 0.25),
    "new_tensor": lambda w: w.new_tensor([1.0, 2.0]),
    "empty_like": lambda w: torch.empty_like(w).fill_(3),
    "new_empty": lambda w: w.new_empty(4).fill_(3),
}


@pytest.mark.parametrize("create", [pytest.param(value, id=key) for key, value in CREATORS.items()])
def test_tensors_made_after_the_weight_are_plain(weight, create):
    assert_plain(create(weight), create(truth(weight)))


@pytest.mark.parametrize("create", [torch.rand_like, torch.randn_like], ids=["rand_like", "randn_like"])
def test_random_tensors_made_after_the_weight_are_plain(weight, create):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        value = create(weight)
        torch.manual_seed(1)
        assert_plain(value, create(truth(weight)))


def test_conditioner_multiplies_in_the_dtype_of_the_model(linear, logical_dtype, device):
    embedding = torch.ones(2, 24, dtype=torch.float32, device=device).to(next(linear.parameters()).dtype)
    mask = torch.tensor([0.0, 1.0], device=device)[:, None].to(embedding.dtype)
    assert (embedding * mask).sum().item() == 24
