"""Whoever reads a weight, in whatever way, reads its true values in a plain tensor."""

from __future__ import annotations

import operator

import einops
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lib_fp8 import QuantWeight
from strangers.helpers import assert_bits, assert_plain, assert_stores, bits_of, close, on_plain, rounded, truth


def _outcome(read, weight):
    """What a reader gives, or the type of what it raises, as for bfloat16 in numpy."""
    try:
        return read(weight)
    except (TypeError, ValueError, RuntimeError) as error:
        if "not implemented for" in str(error):
            raise
        return type(error)


def _same(found, expected):
    if isinstance(expected, torch.Tensor):
        assert_plain(found, expected)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, (tuple, list)) and expected and isinstance(expected[0], torch.Tensor):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert_plain(one, other)
    else:
        assert type(found) is type(expected)
        assert found == expected


READERS = {
    "sum": lambda w: w.sum(),
    "sum_float32": lambda w: w.sum(dtype=torch.float32),
    "sum_dim": lambda w: w.sum(1),
    "abs_max": lambda w: w.abs().max(),
    "amax_dim": lambda w: w.amax(1, keepdim=True),
    "max_dim": lambda w: w.max(1),
    "argmax": lambda w: w.argmax(1),
    "norm": lambda w: w.norm(),
    "norm_dims": lambda w: w.norm(dim=1, keepdim=True),
    "norm_p": lambda w: torch.norm(w, p=1, dim=0),
    "linalg_norm": torch.linalg.norm,
    "linalg_norm_dims": lambda w: torch.linalg.norm(w, dim=(0, 1)),
    "vector_norm": lambda w: torch.linalg.vector_norm(w, dim=1),
    "chunk": lambda w: w.chunk(3, 0),
    "split": lambda w: torch.split(w, [4, 12]),
    "unbind": torch.unbind,
    "vstack": lambda w: torch.vstack([w, w]),
    "cat": lambda w: torch.cat([w, w * 2], 1),
    "stack": lambda w: torch.stack([w, w]),
    "chunk_vstack": lambda w: torch.vstack([part + 1 for part in w.chunk(4)]),
    "where": lambda w: torch.where(w > 0, w, torch.zeros_like(w)),
    "where_scalar": lambda w: torch.where(w.isnan(), torch.ones_like(w), w),
    "isfinite": torch.isfinite,
    "isnan_any": lambda w: torch.isnan(w).any(),
    "greater": lambda w: w > 0.01,
    "equal": lambda w: torch.equal(w, w),
    "allclose": lambda w: torch.allclose(w, w),
    "eq": lambda w: w == w.clone(),
    "view": lambda w: w.view(-1),
    "view_as_bits": lambda w: w.view(torch.int16 if w.element_size() == 2 else torch.int32),
    "flatten_start": lambda w: w[None].flatten(start_dim=1),
    "reshape": lambda w: w.reshape(4, -1),
    "transpose": lambda w: w.transpose(0, 1).contiguous(),
    "permute": lambda w: w.permute(1, 0),
    "squeeze": lambda w: w.unsqueeze(0).squeeze(0),
    "index_tensor": lambda w: w[torch.tensor([0, 2], device=w.device)],
    "index_mask": lambda w: w[w > 0],
    "index_none": lambda w: w[None, :, 3],
    "index_select": lambda w: w.index_select(0, torch.tensor([1, 1], device=w.device)),
    "gather": lambda w: w.gather(1, torch.zeros(16, 2, dtype=torch.int64, device=w.device)),
    "take": lambda w: w.take(torch.tensor([0, 5], device=w.device)),
    "repeat": lambda w: w.repeat(2, 1),
    "expand": lambda w: w[None].expand(2, -1, -1),
    "flip": lambda w: w.flip(0),
    "roll": lambda w: w.roll(1, 0),
    "tril": lambda w: w.tril(),
    "sort": lambda w: w.sort(1),
    "topk": lambda w: w.topk(2, 1),
    "unique": lambda w: w.unique(),
    "pad": lambda w: F.pad(w, (0, 2, 1, 0)),
    "clamp": lambda w: w.clamp(-0.01, 0.01),
    "nan_to_num": lambda w: w.nan_to_num(),
    "neg": operator.neg,
    "abs": abs,
    "pow": lambda w: w**2,
    "rsub": lambda w: 1 - w,
    "embedding": lambda w: F.embedding(torch.tensor([3, 1], device=w.device), w),
    "iterate": lambda w: list(w),
    "item": lambda w: w[3, 4].item(),
    "float": lambda w: float(w[3, 4]),
    "sum_item": lambda w: w.sum().item(),
    "bool": lambda w: bool(w[0, 0] == w[0, 0]),
    "len": len,
    "tolist": lambda w: w.tolist(),
    "row_tolist": lambda w: w[2].tolist(),
    "contains": lambda w: 0.125 in w,
    "numpy": lambda w: w.numpy(),
    "numpy_detached": lambda w: w.detach().cpu().numpy(),
    "numpy_force": lambda w: w.numpy(force=True),
    "asarray": np.asarray,
    "array": np.array,
    "array_dtype": lambda w: np.asarray(w, dtype=np.float64),
    "array_of_rows": lambda w: np.stack([np.asarray(row) for row in w]),
    "numpy_ufunc": lambda w: np.abs(w.detach().cpu()),
    "numpy_bytes": lambda w: w.cpu().numpy().tobytes(),
    "numpy_out_of_place": lambda w: np.add(np.asarray(w), 1),
    "from_numpy": lambda w: torch.from_numpy(w.cpu().numpy()),
    "dlpack": lambda w: torch.from_dlpack(w),
    "numpy_dlpack": lambda w: np.from_dlpack(w),
    "parameters_to_vector": lambda w: torch.nn.utils.parameters_to_vector([w]),
}


@pytest.mark.parametrize("read", [pytest.param(value, id=name) for name, value in READERS.items()])
def test_reader_gets_the_values_of_a_plain_weight(weight, read):
    before = bits_of(weight)
    expected = on_plain(_outcome, read, torch.nn.Parameter(truth(weight), requires_grad=False))
    _same(_outcome(read, weight), expected)
    assert_bits(weight, before)


IN_FLOAT32 = {
    "half_numpy": lambda w: w.half().numpy(),
    "float_numpy": lambda w: w.float().cpu().numpy(),
    "float_svd": lambda w: torch.linalg.svd(w.float())[1],
    "float_mean": lambda w: w.float().mean(),
    "float_std": lambda w: w.to(torch.float32).std(),
    "float_quantile": lambda w: w.float().quantile(0.9),
    "float_histogram": lambda w: torch.histc(w.float(), 10),
    "double_norm": lambda w: w.to(torch.float64).norm(),
}


@pytest.mark.parametrize("read", [pytest.param(value, id=name) for name, value in IN_FLOAT32.items()])
def test_reader_that_casts_gets_the_values(weight, read):
    # A cast decodes anew, so an int8 weight read in float32 is not rounded to float16 on the way.
    _same(read(weight), read(truth(weight, torch.float32)))


def test_print_shows_the_values(weight):
    plain = truth(weight)
    for text in (repr(weight), str(weight), f"{weight}", "%s" % weight):  # noqa: UP031
        assert repr(plain) in text
        assert weight.format.name in text
        assert str(weight.dtype) in text
    assert "Linear" in repr(torch.nn.Linear(2, 2))


def test_summarised_print(storage_format):
    big = QuantWeight.from_weight(torch.ones(200, 200), storage_format)
    assert "..." in repr(big)


def test_raw_memory_is_refused(weight):
    with pytest.raises(RuntimeError, match="dequantize"):
        weight.data_ptr()


def test_new_tensor_from_a_weight_is_independent(weight):
    before = bits_of(weight)
    with pytest.warns(UserWarning, match="copy construct"):
        copied = torch.tensor(weight)
    assert torch.equal(copied + 0, truth(weight))
    copied.zero_()
    assert_bits(weight, before)


@pytest.mark.parametrize("convert", [torch.as_tensor, torch.asarray, lambda w: w.flatten(1), lambda w: w.contiguous()])
def test_conversion_that_has_nothing_to_do_gives_the_weight(weight, convert):
    assert convert(weight) is weight


def test_to_sparse_and_back(weight):
    weight[0] = 0
    assert_plain(weight.to_sparse().to_dense(), truth(weight))


# Products


PRODUCTS = {
    "matmul": lambda x, w: torch.matmul(x, w.t()),
    "operator": lambda x, w: x @ w.T,
    "mm": lambda x, w: torch.mm(x, w.t()),
    "addmm": lambda x, w: torch.addmm(torch.zeros(16, dtype=x.dtype, device=x.device), x, w.t()),
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "tensordot": lambda x, w: torch.tensordot(x, w, dims=([1], [1])),
    "bmm": lambda x, w: torch.bmm(x[None], w.t()[None])[0],
    "linear": lambda x, w: F.linear(x, w),
    "linear_keywords": lambda x, w: F.linear(input=x, weight=w, bias=None),
    "outer_product_sum": lambda x, w: (x[:, None] * w[None]).sum(-1),
}


@pytest.mark.parametrize("product", [pytest.param(value, id=name) for name, value in PRODUCTS.items()])
def test_products_with_a_weight(weight, product, rng):
    x = torch.randn(3, 24, generator=rng).to(weight.device, weight.dtype)
    expected = on_plain(product, x, truth(weight))
    found = product(x, weight)
    assert found.dtype == expected.dtype
    close(found, x.double() @ truth(weight, torch.float32).double().t())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_weight_as_the_left_operand(weight, dtype, rng):
    # A LoRA over a LoRA: the layer's weight goes through another layer as its input.
    down = torch.randn(4, 24, generator=rng).to(weight.device, weight.dtype)
    expected = on_plain(F.linear, truth(weight), down)
    close(F.linear(weight, down), expected, weight.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_control_lora_casts_the_weight_to_its_input(linear, dtype, rng):
    x = torch.randn(3, 24, generator=rng).to(linear.weight.device, dtype)
    up = torch.randn(16, 2, generator=rng).to(x) * 0.1
    down = torch.randn(2, 24, generator=rng).to(x) * 0.1

    def control(weight):
        return F.linear(x, weight.to(x) + torch.mm(up, down), linear.bias.to(x))

    on_plain(control, truth(linear.weight))
    exact = truth(linear.weight, torch.float32).double() + up.double() @ down.double()
    found = control(linear.weight)
    assert found.dtype == dtype
    close(found, x.double() @ exact.t() + linear.bias.to(x).double())


def test_control_lora_of_a_convolution(conv, rng):
    x = torch.randn(1, 6, 5, 5, generator=rng).to(conv.weight.device)
    change = torch.randn(8, 54, generator=rng).to(x).view(conv.weight.shape) * 0.1
    found = F.conv2d(x, conv.weight.to(x) + change, conv.bias.to(x), padding=1)
    exact = truth(conv.weight, torch.float32).double() + change.double()
    close(found, F.conv2d(x.double(), exact, conv.bias.double(), padding=1))


@pytest.mark.parametrize("cast", ["half", "float", "bfloat16"])
def test_linear_over_a_cast_weight(linear, cast, rng):
    x = torch.randn(3, 24, generator=rng).to(linear.weight.device)
    weight = getattr(linear.weight, cast)()
    found = F.linear(x, weight, linear.bias.float())
    assert found.dtype == torch.float32
    close(found, x.double() @ truth(linear.weight, torch.float32).double().t() + linear.bias.double())


# What network modules do with the original weight


def test_dora_norm(layer, delta, logical_dtype):
    def merged(weight, change, magnitude):
        total = change + weight.to(change.dtype)
        dims = total.dim() - 1
        norm = total.transpose(0, 1).reshape(total.shape[1], -1).norm(dim=1, keepdim=True)
        norm = norm.reshape(total.shape[1], *[1] * dims).transpose(0, 1)
        return total * (magnitude / norm) - weight.to(change.dtype)

    weight, change = layer.weight, delta(layer.weight)
    magnitude = torch.full((1, weight.shape[1], *[1] * (weight.dim() - 2)), 0.3).to(change)
    assert_plain(merged(weight, change, magnitude), on_plain(merged, truth(weight), change, magnitude))


def test_ia3_multiplies_the_original(layer, delta):
    vector = delta(layer.weight).flatten(1)[:, :1].reshape(-1, *[1] * (layer.weight.dim() - 1))
    result = (layer.weight * vector).reshape(layer.weight.shape)
    assert_plain(result, truth(layer.weight) * vector)


def test_full_and_norm_differences(layer, delta):
    change = delta(layer.weight, torch.float32)
    assert_plain(change - layer.weight, change - truth(layer.weight))
    assert layer.weight.size().numel() == change.size().numel()


def test_oft_rotates_the_original(layer, rng):
    blocks = torch.randn(4, layer.weight.shape[0] // 4, layer.weight.shape[0] // 4, generator=rng)
    blocks = blocks.to(layer.weight.device, layer.weight.dtype) * 0.1

    def rotated(weight):
        parts = einops.rearrange(weight, "(k n) ... -> k n ...", k=4)
        turned = torch.einsum("k n m, k n ... -> k m ...", blocks, parts)
        return einops.rearrange(turned, "k m ... -> (k m) ...") - weight

    expected = on_plain(rotated, truth(layer.weight))
    assert_plain(rotated(layer.weight), expected)


@pytest.mark.parametrize(
    ("pattern", "sizes"),
    [("o i -> i o", {}), ("(a b) i -> a b i", {"a": 2}), ("o (h d) -> h o d", {"h": 3}), ("o i -> (o i)", {})],
)
def test_einops_rearrange(weight, pattern, sizes):
    assert_plain(einops.rearrange(weight, pattern, **sizes), einops.rearrange(truth(weight), pattern, **sizes))


def test_einops_reduce_and_repeat(weight):
    assert_plain(einops.reduce(weight, "o i -> o", "max"), einops.reduce(truth(weight), "o i -> o", "max"))
    assert_plain(einops.repeat(weight, "o i -> o r i", r=2), einops.repeat(truth(weight), "o i -> o r i", r=2))


# EMA


def test_ema_follows_the_weight(linear):
    ema = truth(linear.weight, torch.float32) + 1
    expected = ema.clone()
    for _ in range(3):
        ema.mul_(0.9).add_(linear.weight, alpha=0.1)
        expected.mul_(0.9).add_(truth(linear.weight), alpha=0.1)
    assert_plain(ema, expected)


def test_ema_is_copied_into_the_weight_and_back(linear, delta):
    ema, stored = delta(linear.weight, torch.float32), linear.weight.clone()
    before = bits_of(linear.weight)
    linear.weight.data.copy_(ema.data)
    assert_stores(linear.weight, ema.to(linear.weight.dtype))
    linear.weight.data.copy_(stored.data)
    assert_bits(linear.weight, before)


def test_ema_held_in_8_bits_is_packed_at_every_step(linear, delta):
    ema, change = linear.weight.detach().clone(), delta(linear.weight)
    for _ in range(3):
        expected = rounded(truth(ema).mul_(0.5), ema.format).add_(change, alpha=0.5)
        ema.mul_(0.5).add_(change, alpha=0.5)
        assert_stores(ema, expected)
