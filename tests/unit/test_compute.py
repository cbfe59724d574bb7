"""linear and conv2d over a QuantWeight: torch's own result over decoded weights, and the cast rule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import EVERYTHING, OpWatch, ToyUNet, decoded, need_kernels, plain_twin, seeded
from torch import nn

from lib_fp8 import Policy, QuantWeight, convert_model, get_format

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CONVOLUTIONS = {
    "1x1": {"kernel_size": 1},
    "3x3": {"kernel_size": 3},
    "no bias": {"kernel_size": 3, "bias": False},
    "groups": {"kernel_size": 3, "groups": 2, "padding": 1},
    "depthwise": {"kernel_size": 3, "groups": 4, "padding": 1},
    "stride": {"kernel_size": 3, "stride": 2, "padding": 1},
    "strides": {"kernel_size": (3, 1), "stride": (1, 2), "padding": (0, 2)},
    "dilation": {"kernel_size": 3, "dilation": (1, 2), "padding": 2},
    "same": {"kernel_size": 3, "padding": "same"},
    "same, even kernel": {"kernel_size": (4, 2), "padding": "same", "dilation": (1, 3)},
    "valid": {"kernel_size": 3, "padding": "valid"},
    **{
        f"{mode} {padding}": {"kernel_size": 3, "padding": padding, "padding_mode": mode}
        for mode in ("zeros", "circular", "reflect", "replicate")
        for padding in (1, (2, 1), "same")
    },
}


def converted(build, storage_format, dtype=torch.float32, device="cpu"):
    model = seeded(build).to(dtype).to(device)
    convert_model(model, Policy(storage_format.name, EVERYTHING))
    assert isinstance(model.weight, QuantWeight)
    return model


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 5, 8), (2, 3, 5, 8), (0, 8)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_linear(storage_format, device, rng, shape, bias):
    layer = converted(lambda: nn.Linear(8, 6, bias=bias), storage_format, device=device)
    x = torch.randn(shape, generator=rng).to(device)
    torch.testing.assert_close(layer(x), plain_twin(layer)(x))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("geometry", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_conv2d(storage_format, device, rng, geometry):
    layer = converted(lambda: nn.Conv2d(4, 8, **geometry), storage_format, device=device)
    x = torch.randn(2, 4, 9, 10, generator=rng).to(device)
    twin = plain_twin(layer)
    torch.testing.assert_close(layer(x), twin(x))
    if layer.padding_mode == "zeros":  # torch 2.0 pads no single image in a circle
        torch.testing.assert_close(layer(x[0]), twin(x[0]))


def test_channels_last(storage_format, device, rng):
    layer = converted(lambda: nn.Conv2d(4, 8, 3), storage_format, device=device).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 9, 10, generator=rng).to(device).to(memory_format=torch.channels_last)
    torch.testing.assert_close(layer(x), plain_twin(layer)(x))
    assert layer(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("x_dtype", DTYPES, ids=lambda dtype: f"x={dtype}")
@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_cast_rule(storage_format, logical_dtype, device, rng, kind, x_dtype, autocast):
    """Without autocast the input's dtype is the compute dtype; with it, all is as with a plain weight."""
    if not autocast:
        need_kernels(x_dtype, device)
    shape, x_shape, function = {
        "linear": ((6, 8), (5, 8), F.linear),
        "conv2d": ((6, 4, 3, 3), (2, 4, 5, 5), F.conv2d),
    }[kind]
    weight = QuantWeight.from_weight(torch.randn(shape, generator=rng).to(device, logical_dtype), storage_format)
    x = torch.randn(x_shape, generator=rng).to(device, x_dtype)
    values = torch.randn(6, generator=rng).to(device)
    for bias in (None, *(values.to(dtype) for dtype in DTYPES)):
        if autocast:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                got, expected = function(x, weight, bias), function(x, decoded(weight), bias)
            assert expected.dtype == torch.bfloat16
        else:
            got = function(x, weight, bias)
            expected = function(x, decoded(weight, x_dtype), None if bias is None else bias.to(x_dtype))
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected)


def test_autocast_switched_off_inside(storage_format, rng):
    layer = converted(lambda: nn.Linear(8, 6), storage_format, torch.bfloat16)
    x = torch.randn(5, 8, generator=rng)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        y = layer(x)
    torch.testing.assert_close(y, F.linear(x, decoded(layer.weight, x.dtype), layer.bias.float()))
    assert y.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
def test_autocast_of_another_device_changes_nothing(storage_format, rng):
    layer = converted(lambda: nn.Linear(8, 6), storage_format, torch.bfloat16)
    with torch.autocast("cuda"):
        assert layer(torch.randn(5, 8, generator=rng)).dtype == torch.float32


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_in_every_grad_mode(storage_format, rng, mode):
    linear = converted(lambda: nn.Linear(8, 6), storage_format)
    conv = converted(lambda: nn.Conv2d(2, 2, 3), storage_format)
    x = torch.randn(1, 2, 8, 8, generator=rng)
    with mode():
        torch.testing.assert_close(linear(x), plain_twin(linear)(x))
        torch.testing.assert_close(conv(x), plain_twin(conv)(x))


def test_called_as_strangers_call(storage_format, rng):
    linear = converted(lambda: nn.Linear(8, 6), storage_format)
    conv = converted(lambda: nn.Conv2d(4, 6, 3), storage_format)
    x, image = torch.randn(5, 8, generator=rng), torch.randn(2, 4, 9, 9, generator=rng)
    torch.testing.assert_close(F.linear(input=x, weight=linear.weight), F.linear(x, decoded(linear.weight)))
    torch.testing.assert_close(
        torch.conv2d(image, conv.weight, bias=conv.bias, stride=2, dilation=(1, 2)),
        torch.conv2d(image, decoded(conv.weight), conv.bias, 2, 0, (1, 2)),
    )
    torch.testing.assert_close(x @ linear.weight.t(), x @ decoded(linear.weight).t())


def test_a_quantized_input(storage_format, rng):
    """``W2 @ W1`` of two weights, as model mergers write it."""
    one, two = (converted(lambda: nn.Linear(8, 8), storage_format).weight for _ in range(2))
    torch.testing.assert_close(F.linear(one, two), F.linear(decoded(one), decoded(two)))


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Linear(8, 6), (5, 7)),
        (lambda: nn.Linear(8, 6), (8, 5)),
        (lambda: nn.Conv2d(4, 6, 3), (1, 3, 8, 8)),
        (lambda: nn.Conv2d(4, 6, 3), (1, 4, 2, 2)),
        (lambda: nn.Conv2d(4, 6, 3), (4, 8)),
        (lambda: nn.Conv2d(4, 6, 3, groups=2), (1, 2, 8, 8)),
    ],
)
@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
def test_wrong_shapes_are_refused(storage_format, build, shape, grad):
    layer = converted(build, storage_format)
    with pytest.raises(RuntimeError):
        layer(torch.zeros(shape, requires_grad=grad))


@pytest.mark.parametrize(
    ("grad", "padding", "stride"),
    [
        (False, "some", 1),
        (False, "same", 2),
        (True, "some", 1),
        (True, "same", 2),
    ],
)
def test_wrong_paddings_are_refused(grad, padding, stride):
    weight = converted(lambda: nn.Conv2d(2, 2, 3), get_format("int8")).weight
    with pytest.raises((RuntimeError, ValueError)):
        F.conv2d(torch.zeros(1, 2, 8, 8, requires_grad=grad), weight, None, stride, padding)


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
def test_activations_are_never_in_8_bits(storage_format, rng, grad):
    layer = converted(lambda: nn.Linear(8, 6), storage_format)
    made = []
    with OpWatch(lambda func, inputs, outputs: made.extend(tensor for tensor in outputs if tensor.element_size() == 1)):
        layer(torch.randn(5, 8, generator=rng, requires_grad=grad))
    assert made == []


def test_on_the_meta_device():
    layer = converted(lambda: nn.Linear(8, 6), get_format("int8")).to("meta")
    assert layer(torch.empty(5, 8, device="meta")).shape == (5, 6)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_nothing_but_weights_is_ever_in_8_bits(storage_format, rng, autocast):
    """Activations keep their dtype from layer to layer, and no 8-bit tensor appears that is not a weight's."""
    model = seeded(ToyUNet)
    convert_model(model, Policy(storage_format.name))
    weights = {weight.shape for weight in model.parameters() if isinstance(weight, QuantWeight)}
    in_8_bits = set()

    def see(func, inputs, outputs):
        in_8_bits.update(t.shape for t in (*inputs, *outputs) if t.dtype == storage_format.storage_dtype)

    dtypes = set()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            module.register_forward_hook(lambda _, given, result: dtypes.add((given[0].dtype, result.dtype)))
    with OpWatch(see), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(torch.randn(2, 4, 6, 6, generator=rng))
    assert in_8_bits == weights
    assert {result for _, result in dtypes} == {torch.bfloat16 if autocast else torch.float32}
    assert {given for given, _ in dtypes} <= {torch.float32, torch.bfloat16}
