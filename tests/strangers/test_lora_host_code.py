"""What the Lora code of the WebUI does to weights, told in our own words."""

from __future__ import annotations

import pytest
import torch

from lib_fp8 import QuantWeight
from strangers.helpers import assert_bits, assert_stores, bits_of, convert, on_plain, rounded, truth


class Host:
    """Merges deltas into one layer as the built-in Lora does: backup, restore, merge, and a count of errors."""

    def __init__(self, layer, merge):
        self.layer, self.merge, self.errors = layer, merge, 0
        self.backup = layer.weight.to("cpu", copy=True)
        self.bias_backup = None if layer.bias is None else layer.bias.to("cpu", copy=True)

    @torch.no_grad()
    def apply(self, updowns, ex_bias=None):
        self.restore()
        for updown in updowns:
            try:
                weight = self.layer.weight
                if weight.dim() == 4 and weight.shape[1] == 9:
                    updown = torch.nn.functional.pad(updown, (0, 0, 0, 0, 0, 5))
                self.merge(self.layer, updown)
                if ex_bias is not None:
                    if self.layer.bias is None:
                        self.layer.bias = torch.nn.Parameter(ex_bias).to(weight.dtype)
                    else:
                        self.layer.bias.copy_((self.layer.bias + ex_bias).to(self.layer.bias.dtype))
            except RuntimeError:
                self.errors += 1

    @torch.no_grad()
    def restore(self):
        self.layer.weight.copy_(self.backup)
        if self.bias_backup is None:
            self.layer.bias = None
        else:
            self.layer.bias.copy_(self.bias_backup)


def _add(layer, updown):
    layer.weight += updown


def _copy(layer, updown):
    layer.weight.copy_((layer.weight.to(updown.dtype) + updown).to(layer.weight.dtype))


MERGES = {"until_1_7": _add, "from_1_8": _copy}
by_merge = pytest.mark.parametrize("merge", [pytest.param(value, id=name) for name, value in MERGES.items()])
by_updown = pytest.mark.parametrize("updown_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)


@by_merge
@by_updown
def test_one_network(layer, delta, merge, updown_dtype):
    updown, host = delta(layer.weight, updown_dtype), Host(layer, merge)
    if merge is _add:
        expected = truth(layer.weight)
        expected += updown
    else:
        expected = (truth(layer.weight, updown_dtype) + updown).to(layer.weight.dtype)
    weight = layer.weight
    host.apply([updown])
    assert host.errors == 0
    assert layer.weight is weight
    assert_stores(layer.weight, expected)


@by_merge
def test_two_networks_both_act(layer, delta, merge, storage_format):
    first, second, host = delta(layer.weight), delta(layer.weight), Host(layer, merge)
    base = truth(layer.weight, torch.float32)
    host.apply([first, second])
    both = truth(layer.weight, torch.float32)
    assert host.errors == 0
    for updown in (first, second):
        along = ((both - base) * updown).sum() / updown.float().square().sum()
        assert 0.6 < along < 1.4
    # two roundings of the format, no more
    once = rounded(base + first.float() + second.float(), storage_format)
    assert (both - once).norm() < 3 * (once - (base + first.float() + second.float())).norm() + 1e-3


@by_merge
def test_removal_over_100_cycles_keeps_the_bits(linear, delta, merge):
    updowns, host, before = [delta(linear.weight), delta(linear.weight)], Host(linear, merge), bits_of(linear.weight)
    weight, bias = linear.weight, linear.bias.clone()
    merged = None
    for _ in range(100):
        host.apply(updowns)
        merged = merged or bits_of(linear.weight)
        assert_bits(linear.weight, merged)
        host.restore()
        assert_bits(linear.weight, before)
    assert host.errors == 0
    assert linear.weight is weight
    assert torch.equal(linear.bias, bias)


@by_merge
def test_removal_from_a_convolution_keeps_the_bits(conv, delta, merge):
    host, before = Host(conv, merge), bits_of(conv.weight)
    for _ in range(3):
        host.apply([delta(conv.weight)])
        host.restore()
        assert_bits(conv.weight, before)
    assert host.errors == 0


@by_merge
def test_multiplier_that_changes_at_every_step(linear, delta, merge):
    updown, host = delta(linear.weight), Host(linear, merge)
    base = truth(linear.weight)
    for step in range(20):
        host.apply([updown * (step / 20)])
        expected = base.clone()
        if merge is _add:
            expected += updown * (step / 20)
        else:
            expected = truth(host.backup).to(base) + updown * (step / 20)
        assert_stores(linear.weight, expected)


def test_backup_is_taken_of_bits_and_not_of_the_live_weight(layer):
    host, before = Host(layer, _add), bits_of(layer.weight)
    assert isinstance(host.backup, QuantWeight)
    assert host.backup.device.type == "cpu"
    layer.weight.zero_()
    assert_bits(host.backup, before)


@by_merge
def test_network_changes_the_output(layer, delta, merge, device):
    x = torch.ones((2, 24) if isinstance(layer, torch.nn.Linear) else (1, 6, 4, 4), device=device)
    before, host = layer(x), Host(layer, merge)
    host.apply([delta(layer.weight) * 5])
    assert (layer(x) - before).norm() > 0.05 * before.norm()
    host.restore()
    assert torch.equal(layer(x), before)


def test_merge_survives_moves_in_between(layer, delta, logical_dtype):
    before, host = bits_of(layer.weight), Host(layer, _add)
    host.apply([delta(layer.weight)])
    merged = bits_of(layer.weight)
    layer.float().half().to(logical_dtype)
    assert_bits(layer.weight, merged)
    host.restore()
    assert_bits(layer.weight, before)


# Multi-head attention of SDXL's second text encoder


@pytest.fixture
def attention(storage_format, logical_dtype, device):
    with torch.random.fork_rng():
        torch.manual_seed(8)
        module = torch.nn.MultiheadAttention(16, 4).to(device, logical_dtype).requires_grad_(False)
    return convert(module, storage_format)


@by_updown
def test_attention_takes_all_four_deltas(attention, updown_dtype, device, rng):
    def updown(*shape):
        return (torch.randn(shape, generator=rng) * 0.02).to(device, updown_dtype)

    fused, out = attention.in_proj_weight.clone(), truth(attention.out_proj.weight)
    assert isinstance(attention.out_proj.weight, QuantWeight)
    deltas, out_delta = [updown(16, 16) for _ in range(3)], updown(16, 16)
    fused += torch.vstack(deltas)
    out += out_delta
    backup = attention.in_proj_weight.to("cpu", copy=True), attention.out_proj.weight.to("cpu", copy=True)
    before = bits_of(attention.out_proj.weight)
    with torch.no_grad():
        parts = attention.in_proj_weight.chunk(3, 0)
        assert [part.shape for part in parts] == [(16, 16)] * 3
        attention.in_proj_weight += torch.vstack(deltas)
        attention.out_proj.weight += out_delta
        if attention.out_proj.bias is not None:
            attention.out_proj.bias += 0.5
    assert torch.equal(attention.in_proj_weight, fused)
    assert_stores(attention.out_proj.weight, out)
    with torch.no_grad():
        attention.in_proj_weight.copy_(backup[0])
        attention.out_proj.weight.copy_(backup[1])
    assert_bits(attention.out_proj.weight, before)


def test_fused_qkv_linear(storage_format, logical_dtype, device, rng):
    # SD3: one Linear holds q, k and v; the host splits it, asks three networks and adds the stack.
    layer = convert(torch.nn.ModuleList([torch.nn.Linear(8, 24)]).to(device, logical_dtype), storage_format)[0]
    parts = layer.weight.chunk(3, 0)
    plain = truth(layer.weight)
    for part, expected in zip(parts, plain.chunk(3, 0)):
        assert torch.equal(part, expected)
    updown = torch.vstack([part * 0 + torch.randn(8, 8, generator=rng).to(part) * 0.02 for part in parts])
    plain += updown
    with torch.no_grad():
        layer.weight += updown
    assert_stores(layer.weight, plain)


# A bias for a layer that has none


@pytest.fixture
def bare(storage_format, logical_dtype, device):
    with torch.random.fork_rng():
        torch.manual_seed(8)
        layers = torch.nn.ModuleList([torch.nn.Linear(24, 16, bias=False)]).to(device, logical_dtype)
    return convert(layers, storage_format)[0]


@by_merge
def test_ex_bias_of_the_logical_dtype(bare, delta, merge, logical_dtype, device):
    ex_bias, before = torch.full((16,), 0.5, dtype=logical_dtype, device=device), bits_of(bare.weight)
    x, host = torch.zeros(2, 24, device=device), Host(bare, merge)
    host.apply([delta(bare.weight)], ex_bias)
    assert host.errors == 0
    assert isinstance(bare.bias, torch.nn.Parameter)
    assert torch.equal(bare(x), torch.full((2, 16), 0.5, device=device))
    host.restore()
    assert bare.bias is None
    assert_bits(bare.weight, before)


def test_ex_bias_of_another_dtype_fails_as_on_a_plain_layer(bare, delta, logical_dtype, device):
    # A defect of the host (the converted Parameter is no Parameter), which must not come with fp16 networks.
    other = torch.float32 if logical_dtype != torch.float32 else torch.float16
    with pytest.raises(TypeError, match="bias"):
        Host(bare, _copy).apply([delta(bare.weight)], torch.ones(16, dtype=other, device=device))


@by_merge
def test_ex_bias_on_a_layer_with_one(linear, delta, merge):
    ex_bias, host = torch.ones_like(linear.bias), Host(linear, merge)
    expected, before = linear.bias + ex_bias, linear.bias.clone()
    host.apply([delta(linear.weight)], ex_bias)
    assert host.errors == 0
    assert torch.equal(linear.bias, expected)
    host.restore()
    assert torch.equal(linear.bias, before)


# The inpainting model's first convolution


@by_merge
def test_four_channel_network_on_a_nine_channel_convolution(storage_format, logical_dtype, device, merge, rng):
    layers = torch.nn.ModuleList([torch.nn.Conv2d(9, 8, 3)]).to(device, logical_dtype)
    layer = convert(layers, storage_format)[0]
    updown = (torch.randn(8, 4, 3, 3, generator=rng) * 0.02).to(device, logical_dtype)
    expected, before = truth(layer.weight), bits_of(layer.weight)
    expected += torch.cat([updown, torch.zeros(8, 5, 3, 3).to(updown)], 1)
    host = Host(layer, merge)
    host.apply([updown])
    assert host.errors == 0
    assert_stores(layer.weight, expected)
    host.restore()
    assert_bits(layer.weight, before)


# IA3, OFT, DoRA and full networks through the whole host


def _ia3(weight):
    return weight * torch.full_like(weight[:, :1], 0.1)


def _oft(weight):
    blocks = torch.eye(4, dtype=weight.dtype, device=weight.device).repeat(4, 1, 1) * 1.1
    parts = weight.reshape(4, 4, -1)
    return torch.einsum("k n m, k n i -> k m i", blocks, parts).reshape(weight.shape) - weight


def _dora(weight):
    total = weight.to(torch.float32) + 0.01
    norm = total.transpose(0, 1).reshape(total.shape[1], -1).norm(dim=1, keepdim=True).reshape(1, -1)
    return total * (0.3 / norm) - weight.to(torch.float32)


def _full(weight):
    return torch.full(weight.shape, 0.01, dtype=weight.dtype, device=weight.device)


@by_merge
@pytest.mark.parametrize("network", [_ia3, _oft, _dora, _full], ids=lambda function: function.__name__)
def test_every_family_of_networks_acts(linear, merge, network):
    plain = truth(linear.weight)
    updown = on_plain(network, plain)
    exact = truth(linear.weight, torch.float32).double() + updown.double()
    host = Host(linear, merge)
    host.apply([network(linear.weight)])
    assert host.errors == 0
    found = truth(linear.weight, torch.float32).double()
    floor = (rounded(exact.float(), linear.weight.format).double() - exact).norm()
    floor += torch.finfo(linear.weight.dtype).eps / 2 * exact.norm()  # the host adds in the weight's own dtype
    assert (found - exact).norm() < 1.5 * floor + 1e-2 * updown.double().norm() + 1e-3
