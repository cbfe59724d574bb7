"""State dicts with 8-bit weights look and load like any other, in both directions."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

from lib_fp8 import QuantWeight, get_format
from strangers.helpers import assert_bits, assert_plain, assert_stores, bits_of, convert, is_parameter, on_plain, truth

needs_assign = pytest.mark.skipif(
    "assign" not in inspect.signature(torch.nn.Module.load_state_dict).parameters,
    reason=f"torch {torch.__version__}: load_state_dict has no assign",
)


class Block(torch.nn.Module):
    """A convolution, a norm, a projection and an embedding."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(9, 8, 3)
        self.norm = torch.nn.LayerNorm(8)
        self.proj = torch.nn.Linear(8, 8, bias=False)
        self.embedding = torch.nn.Embedding(5, 8)
        self.register_buffer("steps", torch.arange(4.0))


@pytest.fixture
def make_block(logical_dtype, device):
    def make(seed: int = 0) -> Block:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return Block().to(device, logical_dtype).requires_grad_(False)

    return make


@pytest.fixture
def block(make_block, storage_format):
    return convert(make_block(), storage_format)


def _quantized(state):
    return {name for name, value in state.items() if isinstance(value, QuantWeight)}


def test_same_keys_shapes_and_dtypes(block, make_block):
    def look(state):
        return [(name, value.shape, value.dtype, value.device) for name, value in state.items()]

    assert look(block.state_dict()) == look(make_block().state_dict())
    assert _quantized(block.state_dict()) == {"conv.weight", "proj.weight"}
    assert [name for name, _ in block.named_parameters()] == [name for name, _ in make_block().named_parameters()]
    assert [name for name, _ in block.named_buffers()] == ["steps"]


def test_quantized_into_plain_strict(block, make_block):
    plain = make_block(seed=1)
    result = plain.load_state_dict(block.state_dict(), strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert not _quantized(plain.state_dict())
    for name in ("conv.weight", "proj.weight"):
        assert_plain(plain.get_parameter(name), truth(block.get_parameter(name)))
    assert torch.equal(plain.embedding.weight, block.embedding.weight)
    before = bits_of(block.proj.weight)
    plain.proj.weight.zero_()
    assert_bits(block.proj.weight, before)


def test_plain_into_quantized_strict(block, make_block):
    plain, identity = make_block(seed=1), block.conv.weight
    result = block.load_state_dict(plain.state_dict(), strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert block.conv.weight is identity
    for name in ("conv.weight", "proj.weight"):
        assert is_parameter(block.get_parameter(name))
        assert_stores(block.get_parameter(name), plain.get_parameter(name))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_plain_of_another_dtype_is_stored_as_the_plain_layer_would_hold_it(block, make_block, dtype):
    state = make_block(seed=1).to(dtype).state_dict()
    block.load_state_dict(state)
    held = state["conv.weight"].to(block.conv.weight.dtype)
    assert_stores(block.conv.weight, held)


def test_quantized_into_quantized(block, make_block, storage_format):
    other = convert(make_block(seed=1), storage_format)
    other.load_state_dict(block.state_dict())
    before = bits_of(block.conv.weight)
    assert_bits(other.conv.weight, before)
    assert_bits(other.proj.weight, bits_of(block.proj.weight))
    other.conv.weight.zero_()
    assert_bits(block.conv.weight, before)


def test_quantized_into_another_format(block, make_block, storage_format):
    other = convert(make_block(seed=1), get_format("int8"))
    other.load_state_dict(block.state_dict())
    assert other.conv.weight.format.name == "int8"
    if storage_format.name == "int8":
        assert_bits(other.conv.weight, bits_of(block.conv.weight))
    else:
        assert_stores(other.conv.weight, truth(block.conv.weight))


def test_strict_still_complains(block):
    state = block.state_dict()
    with pytest.raises(RuntimeError, match="Missing key"):
        block.load_state_dict({name: value for name, value in state.items() if name != "proj.weight"})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        block.load_state_dict({**state, "proj.weight_scale": torch.ones(8)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        block.load_state_dict({**state, "proj.weight": torch.ones(3, 3)})


def test_clones_in_a_state_dict_are_a_backup(block):
    backup = {name: value.clone() for name, value in block.state_dict().items()}
    before = bits_of(block.conv.weight)
    block.conv.weight.zero_()
    block.load_state_dict(backup)
    assert_bits(block.conv.weight, before)


def test_values_are_handles_as_in_torch(block):
    state = block.state_dict()
    state["proj.weight"].fill_(0.5)
    assert_bits(block.proj.weight, bits_of(state["proj.weight"]))
    assert bool((block.proj.weight > 0.4).all())
    assert block.state_dict(keep_vars=True)["proj.weight"] is block.proj.weight
    assert not is_parameter(state["proj.weight"])


def test_prefix_and_parent_modules(block, make_block):
    parent, plain = torch.nn.ModuleDict({"model": block}), torch.nn.ModuleDict({"model": make_block(seed=1)})
    plain.load_state_dict(parent.state_dict(), strict=True)
    assert torch.equal(plain["model"].proj.weight, truth(block.proj.weight))
    assert "x.proj.weight" in block.state_dict(prefix="x.")


@needs_assign
def test_assign_plain_into_quantized_takes_the_value_given(block, make_block):
    state = make_block(seed=1).state_dict()
    block.load_state_dict(state, assign=True)
    assert_plain(block.proj.weight, state["proj.weight"])


@needs_assign
def test_assign_quantized_into_plain_takes_the_value_given(block, make_block, device):
    plain = make_block(seed=1)
    plain.load_state_dict(block.state_dict(), assign=True)
    assert is_parameter(plain.proj.weight)
    assert_bits(plain.proj.weight, bits_of(block.proj.weight))
    x = torch.ones(2, 8, device=device)
    assert torch.equal(plain.proj(x), block.proj(x))


@needs_assign
def test_assign_into_a_module_on_meta(block, make_block):
    with torch.device("meta"):
        empty = Block()
    empty.load_state_dict(block.state_dict(), assign=True)
    assert_bits(empty.conv.weight, bits_of(block.conv.weight))


# The model merger


@pytest.fixture
def states(make_block, storage_format):
    """Three folded state dicts and what they stand for."""
    folded = [convert(make_block(seed), storage_format).state_dict() for seed in range(3)]
    plain = [
        {name: truth(value) if isinstance(value, QuantWeight) else value for name, value in state.items()}
        for state in folded
    ]
    return folded, plain


MERGES = {
    "weighted_sum": lambda a, b, c: ((1 - 0.3) * a) + (0.3 * b),
    "difference": lambda a, b, c: b - c,
    "add_difference": lambda a, b, c: a + (b - c) * 0.7,
    "sum": lambda a, b, c: torch.stack([a, b, c]).sum(0),
    "zeros_like": lambda a, b, c: torch.zeros_like(a),
}

MERGES_IN_FLOAT32 = {
    "cosine": lambda a, b, c: torch.nn.functional.cosine_similarity(a.float().flatten(), b.float().flatten(), dim=0),
    "lerp": lambda a, b, c: torch.lerp(a.float(), b.float(), 0.25),
}


def _ids(table):
    return [pytest.param(function, id=name) for name, function in table.items()]


@pytest.mark.parametrize("merge", _ids(MERGES))
def test_merging_state_dicts_gives_plain_results(states, merge):
    folded, plain = states
    for name in folded[0]:
        expected = on_plain(merge, *(state[name] for state in plain))
        assert_plain(merge(*(state[name] for state in folded)), expected)


@pytest.mark.parametrize("merge", _ids(MERGES_IN_FLOAT32))
def test_merging_in_float32_gives_plain_results(states, merge):
    folded, _ = states
    for name in folded[0]:
        values = [state[name] for state in folded]
        exact = [truth(value, torch.float32) if isinstance(value, QuantWeight) else value for value in values]
        assert_plain(merge(*values), merge(*exact))


def test_conversion_to_half_for_saving_keeps_8_bits(states):
    folded, _ = states
    for value in folded[0].values():
        half = value.half() if value.dtype in (torch.float32, torch.bfloat16) else value
        assert half.dtype == torch.float16
        if isinstance(value, QuantWeight):
            assert_bits(half, bits_of(value))


def test_inpainting_merge_writes_the_first_channels(states):
    folded, plain = states
    a, b = folded[0]["conv.weight"], plain[1]["conv.weight"][:, :4]
    assert a.shape[1] == 9
    assert b.shape[1] == 4
    expected = plain[0]["conv.weight"].clone()
    expected[:, 0:4, :, :] = expected[:, 0:4, :, :] * 0.5 + b * 0.5
    a[:, 0:4, :, :] = a[:, 0:4, :, :] * 0.5 + b * 0.5
    assert_stores(a, expected)


def test_shape_probes(states):
    folded, plain = states
    for name, value in folded[0].items():
        assert value.shape == plain[0][name].shape
        assert value.size(0) == plain[0][name].size(0)
        assert value.shape[-1] == plain[0][name].shape[-1]
        assert isinstance(value, torch.Tensor)
        assert torch.is_tensor(value)
        assert torch.is_floating_point(value)


def test_probe_module_is_filled_strictly(states, make_block, device):
    # As the WebUI does for SD2: a throw-away model takes a part of the state dict, strictly, and computes.
    folded, plain = states
    probe, expected = make_block(seed=7), make_block(seed=8)
    probe.load_state_dict(folded[0], strict=True)
    expected.load_state_dict(plain[0], strict=True)
    x = torch.ones(1, 9, 4, 4, device=device)
    assert torch.equal(probe.float().conv(x), expected.float().conv(x))


def test_popping_and_renaming(states):
    folded, plain = states
    state = copy.copy(folded[0])
    state["renamed"] = state.pop("conv.weight")
    assert torch.equal(state["renamed"] + 0, plain[0]["conv.weight"])
    assert torch.equal(folded[0]["conv.weight"] + 0, plain[0]["conv.weight"])
