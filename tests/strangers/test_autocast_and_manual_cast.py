"""The cast rule holds under autocast, the WebUI's manual_cast and replaced forwards."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch
import torch.nn.functional as F

from strangers.helpers import assert_bits, bits_of, close, convert, on_plain, truth

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
by_input = pytest.mark.parametrize("x_dtype", DTYPES, ids=str)


def _input(layer, rng, dtype=torch.float32):
    shape = (3, 24) if isinstance(layer, torch.nn.Linear) else (2, 6, 5, 5)
    return torch.randn(shape, generator=rng).to(layer.weight.device, dtype)


def _exact(layer, x, dtype):
    """The layer in float64 over the weight decoded in a dtype."""
    weight, bias = truth(layer.weight, dtype).double(), layer.bias.to(dtype).double()
    if isinstance(layer, torch.nn.Linear):
        return F.linear(x.double(), weight, bias)
    return F.conv2d(x.double(), weight, bias, padding=1)


def _plain_twin(layer):
    """A layer of the logical dtype that holds the same values."""
    twin = torch.nn.Linear(24, 16) if isinstance(layer, torch.nn.Linear) else torch.nn.Conv2d(6, 8, 3, padding=1)
    twin.weight = torch.nn.Parameter(truth(layer.weight), requires_grad=False)
    twin.bias = torch.nn.Parameter(layer.bias.clone(), requires_grad=False)
    return twin


def _plain_kernel(layer, x):
    """Skips where this torch cannot compute such a layer in the dtype of x at all."""
    if isinstance(layer, torch.nn.Linear):
        on_plain(F.linear, x, truth(layer.weight, x.dtype), layer.bias.to(x.dtype))
    else:
        on_plain(F.conv2d, x, truth(layer.weight, x.dtype), layer.bias.to(x.dtype))


# The rule without autocast


@by_input
def test_output_has_the_dtype_of_the_input(layer, x_dtype, rng):
    x = _input(layer, rng, x_dtype)
    _plain_kernel(layer, x)
    y = layer(x)
    assert y.dtype == x_dtype
    close(y, _exact(layer, x, x_dtype))


@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
def test_bias_of_any_dtype(layer, bias_dtype, rng):
    layer.bias.data = layer.bias.data.to(bias_dtype)
    x = _input(layer, rng)
    y = layer(x)
    assert y.dtype == torch.float32
    close(y, _exact(layer, x, torch.float32))


def test_input_is_never_cast_to_8_bits(layer, rng):
    x = _input(layer, rng)
    finer = x + 2.0**-20
    assert not torch.equal(layer(x), layer(finer))
    seen = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    layer(x)
    assert seen == [torch.float32]


@by_input
def test_attention_projections_agree_in_dtype(storage_format, logical_dtype, device, x_dtype, rng):
    model = torch.nn.ModuleList([torch.nn.Linear(24, 16, bias=False) for _ in range(3)]).to(device, logical_dtype)
    plain = torch.nn.Linear(24, 16, bias=False).to(device, x_dtype)
    convert(model, storage_format)
    x = torch.randn(2, 24, generator=rng).to(device, x_dtype)
    on_plain(plain, x)
    q, k, v = (projection(x) for projection in model)
    assert {q.dtype, k.dtype, v.dtype, plain(x).dtype} == {x_dtype}
    assert (q @ k.t() @ v).dtype == x_dtype


@pytest.mark.parametrize("size", [(24,), (1, 24), (2, 3, 24), (0, 24)], ids=str)
def test_any_shape_of_input(linear, size, device):
    x = torch.ones(size, device=device)
    assert linear(x).shape == (*size[:-1], 16)


def test_unbatched_image(conv, rng):
    x = _input(conv, rng)
    torch.testing.assert_close(conv(x[0]), conv(x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "geometry",
    [
        {"stride": 2},
        {"padding": 2, "dilation": 2},
        {"padding": "same"},
        {"padding": "valid"},
        {"groups": 2},
        {"padding": 1, "padding_mode": "circular"},
        {"padding": 1, "padding_mode": "reflect"},
    ],
    ids=str,
)
def test_geometry_of_convolutions(storage_format, logical_dtype, device, geometry, rng):
    layer = torch.nn.Conv2d(6, 8, 3, **geometry).to(device, logical_dtype).requires_grad_(False)
    twin = torch.nn.Conv2d(6, 8, 3, **geometry).to(device)
    convert(layer, storage_format)
    twin.weight.data, twin.bias.data = truth(layer.weight, torch.float32), layer.bias.float()
    x = torch.randn(2, 6, 7, 7, generator=rng).to(device)
    torch.testing.assert_close(layer(x), twin(x), rtol=1e-5, atol=1e-6)


# Autocast


@by_input
def test_autocast_computes_as_with_a_plain_layer(layer, x_dtype, device, rng):
    x = _input(layer, rng, x_dtype)
    target = torch.bfloat16 if device.type == "cpu" else torch.float16
    with torch.autocast(device.type, dtype=target):
        y = layer(x)
    assert y.dtype == target
    close(y, _exact(layer, x.to(target), target))


@by_input
def test_autocast_is_given_the_logical_dtype(layer, x_dtype, device, rng):
    # To the last bit: the weight is rounded to the logical dtype first, and from there by autocast.
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=rng).to(layer.weight))
    twin, x = _plain_twin(layer), _input(layer, rng, x_dtype)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(layer(x), twin(x))


def test_disabled_autocast_is_no_autocast(layer, device, rng):
    x = _input(layer, rng)
    expected = layer(x)
    dtype = torch.bfloat16 if device.type == "cpu" else torch.float16
    with torch.autocast(device.type, dtype=dtype), torch.autocast(device.type, dtype=dtype, enabled=False):
        assert torch.equal(layer(x), expected)


@pytest.mark.gpu
def test_autocast_of_another_device_does_not_matter(linear, device, rng):
    if device.type != "cuda":
        pytest.skip("needs two devices: a CUDA device beside the CPU")
    x = _input(linear, rng)
    expected = linear(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear(x), expected)


def test_autocast_sees_writes_made_under_it(linear, device, rng):
    # Autocast caches casts of weights; a stale one would hide the write.
    x, dtype = _input(linear, rng), torch.bfloat16 if device.type == "cpu" else torch.float16
    with torch.autocast(device.type, dtype=dtype):
        linear(x)
        linear.weight.zero_()
        y = linear(x)
    torch.testing.assert_close(y, linear.bias.to(dtype).expand(3, -1), rtol=0, atol=0)


def test_products_by_hand_under_autocast(linear, device, rng):
    x, dtype = _input(linear, rng), torch.bfloat16 if device.type == "cpu" else torch.float16
    with torch.autocast(device.type, dtype=dtype):
        y = x @ linear.weight.t()
    assert y.dtype == dtype
    exact = x.to(dtype).double() @ truth(linear.weight).to(dtype).double().t()
    close(y, exact)


# The WebUI's manual_cast: forwards patched on the classes, modules moved to the target and back at every call


def _moving_forward(original, target, result_dtype):
    def forward(self, *args, **kwargs):
        def cast(value, dtype):
            return value.to(dtype) if isinstance(value, torch.Tensor) else value

        own = next((parameter.dtype for parameter in self.parameters() if parameter.dtype != target), target)
        if own != target:
            self.to(target)
        result = original(self, *(cast(a, target) for a in args), **{k: cast(v, target) for k, v in kwargs.items()})
        if own != target:
            self.to(own)
        if isinstance(result, tuple):
            return tuple(cast(part, result_dtype) for part in result)
        return cast(result, result_dtype)

    return forward


@contextlib.contextmanager
def manual_cast(target, result_dtype=torch.float32):
    classes = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.MultiheadAttention, torch.nn.LayerNorm, torch.nn.GroupNorm)
    originals = {cls: cls.forward for cls in classes}
    try:
        for cls, original in originals.items():
            wanted = torch.float32 if cls is torch.nn.MultiheadAttention else target
            cls.forward = _moving_forward(original, wanted, result_dtype)
        yield
    finally:
        for cls, original in originals.items():
            cls.forward = original


@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_manual_cast(layer, target, logical_dtype, rng):
    x, weight, before = _input(layer, rng), layer.weight, bits_of(layer.weight)
    _plain_kernel(layer, x.to(target))
    bias = layer.bias.clone()
    with manual_cast(target, torch.float32):
        y = layer(x)
    assert y.dtype == torch.float32
    # biases follow the module into the target and back, so they lose what the target cannot hold
    layer.bias.data = bias
    close(y, _exact(layer, x.to(target), target), target)
    assert layer.weight is weight
    assert weight.dtype == logical_dtype
    assert_bits(weight, before)


def test_manual_cast_a_hundred_times_keeps_the_bits(linear, rng):
    x, before = _input(linear, rng), bits_of(linear.weight)
    with manual_cast(torch.float32):
        expected = linear(x)
        for _ in range(100):
            assert torch.equal(linear(x), expected)
    assert_bits(linear.weight, before)


def test_manual_cast_finds_nothing_to_cast_in_the_logical_dtype(linear, logical_dtype, rng, monkeypatch):
    x = _input(linear, rng, logical_dtype)
    _plain_kernel(linear, x)
    monkeypatch.setattr(linear, "to", lambda *args: pytest.fail("moved"))
    with manual_cast(logical_dtype):
        linear(x)


def test_manual_cast_of_multi_head_attention(storage_format, device, logical_dtype, rng):
    attention = torch.nn.MultiheadAttention(16, 4).to(device, logical_dtype).requires_grad_(False)
    convert(attention, storage_format)
    twin = torch.nn.MultiheadAttention(16, 4).to(device)
    state = {name: value.float() for name, value in attention.state_dict().items()}
    twin.load_state_dict({**state, "out_proj.weight": truth(attention.out_proj.weight, torch.float32)})
    before = bits_of(attention.out_proj.weight)
    x = torch.randn(5, 1, 16, generator=rng).to(device, torch.float16)
    with manual_cast(torch.float16):
        y = attention(x, x, x)[0]
    torch.testing.assert_close(y, twin(x.float(), x.float(), x.float())[0], rtol=1e-5, atol=1e-6)
    assert_bits(attention.out_proj.weight, before)


# Multi-head attention: it reads the weight of its output projection by itself


@pytest.fixture
def attention(storage_format, device, logical_dtype):
    with torch.random.fork_rng():
        torch.manual_seed(6)
        module = torch.nn.MultiheadAttention(16, 4).to(device, logical_dtype).requires_grad_(False)
    return convert(module, storage_format)


def _attention_twin(attention, dtype):
    twin = torch.nn.MultiheadAttention(16, 4).to(attention.in_proj_weight.device, dtype).requires_grad_(False)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            source = attention.get_parameter(name)
            parameter.copy_(truth(source, dtype) if name == "out_proj.weight" else source)
    return twin


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference"])
def test_multi_head_attention(attention, logical_dtype, device, mode, rng):
    x = torch.randn(5, 1, 16, generator=rng).to(device, logical_dtype)
    twin = _attention_twin(attention, logical_dtype)
    attention.train(mode == "train")
    twin.train(mode == "train")
    context = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(mode, contextlib.nullcontext)
    with context():
        expected = on_plain(twin, x, x, x)[0]
        y = attention(x, x, x)[0]
    assert y.dtype == logical_dtype
    close(y, expected)


def test_multi_head_attention_under_autocast(attention, device, rng):
    x = torch.randn(5, 1, 16, generator=rng).to(device)
    dtype = torch.bfloat16 if device.type == "cpu" else torch.float16
    twin = _attention_twin(attention, torch.float32)
    with torch.autocast(device.type, dtype=dtype):
        y = attention(x, x, x)[0]
        expected = twin(x, x, x)[0]
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y.float(), expected.float(), rtol=5e-2, atol=2e-2)


@pytest.mark.parametrize("logical_dtype", [torch.float16, torch.bfloat16], ids=str, indirect=True)
def test_multi_head_attention_of_mixed_dtypes_is_refused_as_a_plain_one(attention, logical_dtype, device, rng):
    for name in ("in_proj_weight", "in_proj_bias"):
        parameter = attention.get_parameter(name)
        parameter.data = parameter.data.float()
    twin = _attention_twin(attention, torch.float32)
    twin.out_proj.to(logical_dtype)
    x = torch.randn(5, 1, 16, generator=rng).to(device)
    for module in (twin, attention):
        with pytest.raises(RuntimeError, match="dtype"):
            module(x, x, x)


# Foreign forwards and hooks


def _kohya(layer):
    """Replaces the forward of the instance; the original is kept as a bound method."""
    original = layer.forward

    def forward(x):
        return original(x) + x.flatten(1).sum(1).view(-1, *[1] * (x.dim() - 1)) * 0.01

    layer.forward = forward
    return lambda: setattr(layer, "forward", original)


def _lllite(layer):
    """Replaces the forward on the instance by a method that changes the input."""
    original = layer.forward

    def forward(self, x):
        return original(x * 1.5)

    layer.forward = types.MethodType(forward, layer)
    return lambda: setattr(layer, "forward", original)


def _direct(layer):
    """Calls the functional form itself, as negpip and LLLite do."""
    original = layer.forward
    if isinstance(layer, torch.nn.Linear):
        layer.forward = lambda x: F.linear(x, layer.weight, layer.bias) * 2
    else:
        layer.forward = lambda x: F.conv2d(x, layer.weight, layer.bias, layer.stride, layer.padding) * 2
    return lambda: setattr(layer, "forward", original)


def _class_patch(layer):
    """Patches the class and ends in its original, as the built-in Lora does."""
    cls, original = type(layer), type(layer).forward

    def forward(self, x):
        return original(self, x) + 1

    cls.forward = forward
    return lambda: setattr(cls, "forward", original)


def _pre_hook(layer):
    return layer.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)).remove


def _post_hook(layer):
    return layer.register_forward_hook(lambda module, args, output: output * 3).remove


STRANGERS = [_kohya, _lllite, _direct, _class_patch, _pre_hook, _post_hook]


def _fresh(kind, dtype, device):
    with torch.random.fork_rng():
        torch.manual_seed(9)
        layer = torch.nn.Linear(24, 16) if kind == "linear" else torch.nn.Conv2d(6, 8, 3, padding=1)
    return layer.to(device, dtype).requires_grad_(False)


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_order_of_conversion_and_patch_does_not_matter(storage_format, logical_dtype, device, kind, stranger, rng):
    early, late = _fresh(kind, logical_dtype, device), _fresh(kind, logical_dtype, device)
    x = _input(early, rng)
    undo = stranger(early)
    convert(torch.nn.ModuleList([early]), storage_format)
    first = early(x)
    undo()
    convert(torch.nn.ModuleList([late]), storage_format)
    untouched = late(x)
    undo = stranger(late)
    second = late(x)
    undo()
    assert first.dtype == torch.float32
    assert torch.equal(first, second)
    assert not torch.equal(first, untouched)
    assert torch.equal(early(x), untouched)
    assert torch.equal(late(x), untouched)
    torch.testing.assert_close(untouched.double(), _exact(late, x, torch.float32), rtol=1e-4, atol=1e-5)


def test_all_strangers_stacked(storage_format, logical_dtype, device, rng):
    results = []
    for converted_after in range(len(STRANGERS) + 1):
        layer, undo = _fresh("linear", logical_dtype, device), []
        wrapped = torch.nn.ModuleList([layer])
        for position, stranger in enumerate(STRANGERS):
            if position == converted_after:
                convert(wrapped, storage_format)
            undo.append(stranger(layer))
        convert(wrapped, storage_format)
        x = torch.linspace(-1, 1, 48, device=device).view(2, 24)
        results.append(layer(x))
        for step in reversed(undo):
            step()
    assert all(torch.equal(result, results[0]) for result in results)


def test_logical_dtype_follows_no_half_and_force_fp16(storage_format, device, rng):
    # --no-half keeps float32, the default and --precision half make float16: before or after the conversion.
    x = torch.randn(2, 24, generator=rng).to(device)
    outputs = []
    for make in (
        lambda layer: convert(layer, storage_format),
        lambda layer: convert(layer.half().float(), storage_format),
        lambda layer: convert(layer.half(), storage_format).float(),
    ):
        holder = torch.nn.ModuleList([_fresh("linear", torch.float16, device).float()])
        layer = make(holder)[0]
        assert layer.weight.dtype == torch.float32
        outputs.append(layer(x))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_upcast_sampling(storage_format, device, rng):
    # A float16 model that is given float32 conditioning outside autocast, cast by cond_cast_unet to its dtype.
    layer = convert(torch.nn.ModuleList([_fresh("linear", torch.float16, device)]), storage_format)[0]
    x = torch.randn(2, 24, generator=rng).to(device)
    unet_dtype = next(layer.parameters()).dtype
    assert unet_dtype == torch.float16
    half = x.to(unet_dtype)
    on_plain(F.linear, half, truth(layer.weight), layer.bias)
    close(layer(half), _exact(layer, half, torch.float16))
    close(layer(x), _exact(layer, x, torch.float32))
