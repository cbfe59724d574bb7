"""The WebUI's own conversions run over converted models without changing a bit of a weight."""

from __future__ import annotations

import pytest
import torch

from lib_fp8 import QuantWeight
from strangers.helpers import assert_bits, bits_of, convert, truth

FLOAT8 = [name for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]
NO_FLOAT8 = pytest.mark.skipif(not FLOAT8, reason=f"torch {torch.__version__} has no float8")
by_float8 = pytest.mark.parametrize("dtype_name", FLOAT8 or ["float8_e4m3fn"])


class Unet(torch.nn.Module):
    """Enough of one: convolution, norm, projections, a buffer."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 8, 3, padding=1)
        self.norm = torch.nn.GroupNorm(2, 8)
        self.proj = torch.nn.Linear(8, 8, bias=False)
        self.out = torch.nn.Linear(8, 4)
        self.register_buffer("alphas", torch.linspace(0.1, 0.9, 8))

    def forward(self, x):
        h = self.norm(self.conv(x)).mean((2, 3))
        return self.out(self.proj(h))


@pytest.fixture
def unet(storage_format, logical_dtype, device):
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = Unet().to(device, logical_dtype).requires_grad_(False)
    return convert(model, storage_format)


def _weights(model):
    return {name: value for name, value in model.named_parameters() if isinstance(value, QuantWeight)}


def _all_bits(model):
    return {name: bits_of(value) for name, value in _weights(model).items()}


def _assert_unchanged(model, before):
    assert set(_weights(model)) == set(before)
    for name, bits in before.items():
        assert_bits(model.get_parameter(name), bits)


@NO_FLOAT8
@by_float8
def test_builtin_conversion_changes_no_bits(unet, logical_dtype, dtype_name):
    before, identities = _all_bits(unet), {name: id(value) for name, value in _weights(unet).items()}
    for module in unet.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d)):
            module.to(getattr(torch, dtype_name))
    _assert_unchanged(unet, before)
    assert {name: id(value) for name, value in _weights(unet).items()} == identities
    assert all(value.dtype == logical_dtype for value in _weights(unet).values())


@NO_FLOAT8
@by_float8
def test_layers_still_compute_after_the_builtin_conversion(layer, dtype_name, device):
    dtype = getattr(torch, dtype_name)
    x = torch.ones((2, 24) if isinstance(layer, torch.nn.Linear) else (1, 6, 4, 4), device=device)
    layer.bias.data = layer.bias.data.to(dtype).to(layer.bias.dtype)  # the host's conversion rounds biases, too
    expected = layer(x)
    layer.to(dtype)
    assert layer.bias.dtype == dtype
    assert torch.equal(layer(x), expected)


@NO_FLOAT8
@by_float8
def test_manual_cast_of_a_float8_layer_and_back(layer, dtype_name, device):
    before, dtype = bits_of(layer.weight), getattr(torch, dtype_name)
    for _ in range(5):
        layer.to(torch.float16)
        layer.to(dtype)
    assert_bits(layer.weight, before)
    if layer.weight.scale is not None:
        assert bool((layer.weight.scale > 0).all())


@pytest.mark.parametrize("path", ["half", "float", "half-float-half", "float-bfloat16-float", "double-half"])
def test_casts_of_the_model_keep_the_bits(unet, path):
    before, identities = _all_bits(unet), {name: id(value) for name, value in _weights(unet).items()}
    for cast in path.split("-"):
        getattr(unet, cast)()
        _assert_unchanged(unet, before)
        wanted = {"half": torch.float16, "float": torch.float32, "bfloat16": torch.bfloat16, "double": torch.float64}
        assert all(value.dtype == wanted[cast] for value in unet.parameters())
        for value in _weights(unet).values():
            assert value.qdata.element_size() == 1
            assert value.scale is None or value.scale.dtype == torch.float32
    assert {name: id(value) for name, value in _weights(unet).items()} == identities


def test_float_round_trip_keeps_the_result(unet, device):
    x = torch.linspace(-1, 1, 4 * 36, device=device).view(1, 4, 6, 6)
    unet.half()  # biases and norms lose what float16 cannot hold, as in any model
    expected = unet.float()(x)
    assert torch.equal(unet.half().float()(x), expected)


def test_reload_over_a_converted_model_packs_anew(unet, logical_dtype, device):
    # Reload: half(), then load_state_dict, then half() or float() again.
    with torch.random.fork_rng():
        torch.manual_seed(12)
        state = Unet().to(device, logical_dtype).state_dict()
    unet.half()
    unet.load_state_dict(state, strict=False)
    unet.to(logical_dtype)
    for name, weight in _weights(unet).items():
        plain = state[name].float()
        error = (truth(weight).float() - plain).norm() / plain.norm()
        assert error < 0.1


def test_dtype_of_the_model_as_the_sdxl_set_up_reads_it(unet, logical_dtype):
    dtype = next(unet.parameters()).dtype
    assert dtype == logical_dtype
    alphas = torch.linspace(0.99, 0.01, 10).to(dtype)
    assert bool((alphas[:-1] > alphas[1:]).all())


def test_embeddings_and_norms_keep_their_bits(storage_format, device, rng):
    model = torch.nn.ModuleDict(
        {"embedding": torch.nn.Embedding(7, 8), "norm": torch.nn.LayerNorm(8), "proj": torch.nn.Linear(8, 8)}
    ).to(device)
    expected = {name: value.clone() for name, value in model.state_dict().items() if name != "proj.weight"}
    convert(model, storage_format)
    assert set(_weights(model)) == {"proj.weight"}
    for name, value in expected.items():
        assert torch.equal(model.state_dict()[name], value)
    tokens = torch.tensor([[1, 2, 6]], device=device)
    assert torch.equal(model["embedding"](tokens), expected["embedding.weight"][tokens])
