"""Gradients through a frozen 8-bit base, and what is kept in memory for them: no decoded weight."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
import torch.nn.functional as F
from helpers import EVERYTHING, LiveStorages, all_tensors, decoded, plain_tensors, plain_twin, seeded
from torch import nn
from torch.utils.checkpoint import checkpoint

from lib_fp8 import Policy, QuantWeight, convert_model, get_format

INT8 = Policy("int8", EVERYTHING)
LAYERS = {
    "linear": (lambda: nn.Linear(8, 6), (5, 8)),
    "linear 1-D": (lambda: nn.Linear(8, 6), (8,)),
    "linear 4-D": (lambda: nn.Linear(8, 6), (2, 3, 4, 8)),
    "linear, no bias": (lambda: nn.Linear(8, 6, bias=False), (5, 8)),
    "linear chain": (lambda: nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 6)), (5, 8)),
    "1x1": (lambda: nn.Conv2d(4, 6, 1), (2, 4, 7, 8)),
    "3x3": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 7, 8)),
    "unbatched": (lambda: nn.Conv2d(4, 6, 3), (4, 7, 8)),
    "conv, no bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), (2, 4, 7, 8)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 7, 8)),
    "strides": (lambda: nn.Conv2d(4, 6, 3, stride=(2, 3), padding=(1, 2), dilation=(1, 2)), (2, 4, 9, 11)),
    "same": (lambda: nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 7, 8)),
    "same, even kernel": (lambda: nn.Conv2d(4, 6, (4, 2), padding="same", dilation=(1, 3)), (2, 4, 9, 8)),
    "valid": (lambda: nn.Conv2d(4, 6, 3, padding="valid"), (2, 4, 7, 8)),
    "circular": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 7, 8)),
    "conv chain": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.SiLU(), nn.Conv2d(4, 6, 1)), (2, 4, 7, 8)),
}


def converted(build, storage_format, dtype=torch.float32):
    model = seeded(build).to(dtype)
    convert_model(model, Policy(storage_format.name, EVERYTHING))
    return model


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def gradients(model, x, run=None, context=contextlib.nullcontext):
    """Output, gradient of the input, and of every bias."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    with context():
        y = (run or model)(x)
        loss = (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y)).sum()
    loss.backward()
    return [y.detach(), x.grad, *[p.grad for p in model.parameters() if p.requires_grad]]


def assert_same_gradients(model, x, **kwargs):
    got, expected = gradients(model, x, **kwargs), gradients(plain_twin(model), x)
    assert len(got) == len(expected)
    torch.testing.assert_close(got, expected)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(("build", "shape"), LAYERS.values(), ids=LAYERS)
def test_gradients(storage_format, device, rng, build, shape):
    model = converted(build, storage_format).to(device)
    assert_same_gradients(model, torch.randn(shape, generator=rng).to(device))


@pytest.mark.parametrize("case", ["linear", "3x3"])
def test_gradients_of_the_bias_alone(storage_format, rng, case):
    build, shape = LAYERS[case]
    model = converted(build, storage_format)
    twin, x = plain_twin(model), torch.randn(shape, generator=rng)
    for layer in (model, twin):
        layer(x).pow(2).sum().backward()
    torch.testing.assert_close(model.bias.grad, twin.bias.grad)


@pytest.mark.parametrize("case", ["linear", "3x3", "same"])
def test_gradients_in_the_dtypes_of_their_owners(storage_format, logical_dtype, rng, case):
    """x in float32 over a base in half precision: computed in float32, the bias gets its own dtype."""
    build, shape = LAYERS[case]
    model = converted(build, storage_format, logical_dtype)
    x = torch.randn(shape, generator=rng)
    y, grad, bias_grad = gradients(model, x)
    expected = gradients(plain_twin(model, torch.float32).float(), x)
    assert (y.dtype, grad.dtype, bias_grad.dtype) == (x.dtype, x.dtype, logical_dtype)
    torch.testing.assert_close([y, grad, bias_grad], [*expected[:2], expected[2].to(logical_dtype)])


@pytest.mark.parametrize("case", ["linear", "linear chain", "3x3", "same"])
def test_gradients_under_autocast(storage_format, logical_dtype, rng, case):
    build, shape = LAYERS[case]
    model = converted(build, storage_format, logical_dtype)
    x = torch.randn(shape, generator=rng)

    got, expected = gradients(model, x, context=autocast), gradients(plain_twin(model), x, context=autocast)
    assert [value.dtype for value in got] == [value.dtype for value in expected]
    for one, other in zip(got, expected):
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("case", ["linear chain", "conv chain"])
def test_gradient_checkpointing(storage_format, rng, case, reentrant):
    build, shape = LAYERS[case]
    model = converted(build, storage_format)
    x = torch.randn(shape, generator=rng)
    assert_same_gradients(model, x, run=lambda x: checkpoint(model, x, use_reentrant=reentrant))


def test_no_gradient_for_the_weight(storage_format, rng):
    model = converted(lambda: nn.Linear(8, 6), storage_format).requires_grad_(True)
    model(torch.randn(5, 8, generator=rng)).sum().backward()
    assert not model.weight.requires_grad
    assert model.weight.grad is None
    assert model.bias.grad is not None


def test_no_graph_without_need(storage_format, rng):
    model = converted(lambda: nn.Linear(8, 6), storage_format).requires_grad_(False)
    assert not model(torch.randn(5, 8, generator=rng)).requires_grad
    with torch.no_grad():
        assert not model(torch.randn(5, 8, generator=rng, requires_grad=True)).requires_grad


def test_gradients_through_multi_head_attention(storage_format, rng):
    model = converted(lambda: nn.MultiheadAttention(32, 2, batch_first=True), storage_format, torch.float32)
    assert isinstance(model.out_proj.weight, QuantWeight)
    x = torch.randn(1, 3, 32, generator=rng)
    gradients = []
    for layer in (model, plain_twin(model)):
        leaf = x.clone().requires_grad_()
        layer(leaf, leaf, leaf)[0].pow(2).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


# Higher derivatives, and other ways to differentiate


NONLINEAR = {
    name: (lambda build=build: nn.Sequential(nn.Tanh(), build(), nn.Tanh()), shape)
    for name, (build, shape) in LAYERS.items()
}


def second_order(model, x, run=None, context=contextlib.nullcontext):
    """Gradients of a penalty on the gradient, as a GAN or a distillation has it: of x and of every bias."""
    x = x.detach().clone().requires_grad_()
    with context():
        y = (run or model)(x)
    (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [first.detach(), *torch.autograd.grad(y.sum() + first.pow(2).sum(), [x, *parameters])]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(("build", "shape"), NONLINEAR.values(), ids=NONLINEAR)
def test_gradients_of_gradients(storage_format, rng, build, shape):
    model = converted(build, storage_format)
    for module in model.modules():
        if getattr(module, "bias", None) is not None:
            module.bias.data = module.bias.data.double()
    x = torch.randn(shape, generator=rng, dtype=torch.float64)
    expected = second_order(plain_twin(model, torch.float64), x)
    torch.testing.assert_close(second_order(model, x), expected, rtol=1e-10, atol=1e-12)
    assert all(bool(value.abs().max() > 1e-3) for value in expected)


@pytest.mark.parametrize("case", ["linear", "strides"])
def test_third_derivatives(storage_format, rng, case):
    """By finite differences of the second ones."""
    build, shape = NONLINEAR[case]
    model = converted(build, storage_format)
    x = torch.randn(shape, generator=rng, dtype=torch.float64)[:1].requires_grad_()

    def gradient(x):
        return torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)[0][..., :2]

    assert torch.autograd.gradgradcheck(gradient, x)


@pytest.mark.parametrize("case", ["linear", "3x3"])
def test_gradients_of_gradients_under_autocast(storage_format, logical_dtype, rng, case):
    build, shape = NONLINEAR[case]
    model = converted(build, storage_format, logical_dtype)
    x = torch.randn(shape, generator=rng)
    got, expected = (second_order(net, x, context=autocast) for net in (model, plain_twin(model)))
    assert [value.dtype for value in got] == [value.dtype for value in expected]
    for one, other in zip(got, expected):
        assert (one - other).float().norm() <= 0.02 * other.float().norm()


@pytest.mark.parametrize("case", ["linear chain", "conv chain"])
def test_gradients_of_gradients_with_checkpointing(storage_format, rng, case):
    build, shape = NONLINEAR[case]
    model = converted(build, storage_format)
    x = torch.randn(shape, generator=rng)
    got = second_order(model, x, run=lambda x: checkpoint(model, x, use_reentrant=False))
    torch.testing.assert_close(got, second_order(plain_twin(model), x))


READERS = {
    "matmul": lambda x, weight: x @ weight.t(),
    "einsum": lambda x, weight: torch.einsum("bi,oi->bo", x, weight),
    "addmm": lambda x, weight: torch.addmm(x.new_ones(6), x, weight.mT),
    "transposed convolution": lambda x, weight: F.conv_transpose2d(x[:, :6, None, None], weight[:, :, None, None]),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_gradients_of_gradients_where_a_stranger_computes(storage_format, rng, read):
    weight = converted(lambda: nn.Linear(8, 6), storage_format).weight
    x = torch.randn(5, 8, generator=rng)
    results = []
    for value in (weight, decoded(weight)):
        leaf = x.clone().requires_grad_()
        y = read(leaf, value)
        (first,) = torch.autograd.grad(y.pow(3).sum(), leaf, create_graph=True)
        results.append(torch.autograd.grad(first.pow(2).sum(), leaf)[0])
    torch.testing.assert_close(*results)


def squared(f):
    return lambda x: f(x).pow(2).sum()


def several(x):
    return torch.stack([x, x.cos()])


FUNCTIONAL = {
    "grad": lambda f, x: torch.func.grad(squared(f))(x),
    "vmap": lambda f, x: torch.func.vmap(f)(several(x)),
    "vmap over a leaf": lambda f, x: torch.func.vmap(f)(several(x).requires_grad_()).detach(),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(squared(f)))(several(x)),
    "grad of vmap": lambda f, x: torch.func.grad(squared(torch.func.vmap(f)))(several(x)),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.sin(),))[1],
    "jvp of grad": lambda f, x: torch.func.jvp(torch.func.grad(squared(f)), (x,), (x.sin(),))[1],
    "hessian": lambda f, x: torch.func.hessian(squared(f))(x),
    "forward mode over a leaf": lambda f, x: forward_mode(f, x.clone().requires_grad_()),
}


def forward_mode(f, x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x.detach().sin())
        return torch.autograd.forward_ad.unpack_dual(f(dual)).tangent


@pytest.mark.parametrize("differentiate", FUNCTIONAL.values(), ids=FUNCTIONAL)
@pytest.mark.parametrize("case", ["linear", "linear, no bias", "3x3", "same", "strides", "groups", "unbatched"])
def test_functional_transforms(rng, case, differentiate):
    build, shape = NONLINEAR[case]
    model = converted(build, get_format("int8")).requires_grad_(False)
    x = torch.randn(shape, generator=rng)
    torch.testing.assert_close(differentiate(model, x), differentiate(plain_twin(model), x))


@pytest.mark.parametrize("case", ["linear", "3x3"])
def test_forward_mode_of_the_bias(rng, case):
    build, shape = LAYERS[case]
    model = converted(build, get_format("int8"))
    x = torch.randn(shape, generator=rng, requires_grad=True)

    def tangent(model):
        bias = model.bias.detach()

        def run(bias):
            return torch.func.functional_call(model, {"bias": bias}, x)

        return torch.func.jvp(run, (bias,), (bias.cos(),))[1]

    torch.testing.assert_close(tangent(model), tangent(plain_twin(model)))


# Memory


MEMORY = {
    "linear": (lambda: nn.Linear(256, 128), (1, 256)),
    "linear chain": (lambda: nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 256)), (1, 256)),
    "3x3": (lambda: nn.Conv2d(64, 48, 3), (1, 64, 4, 4)),
    "same": (lambda: nn.Conv2d(64, 48, 3, padding="same"), (1, 64, 4, 4)),
    "1x1": (lambda: nn.Conv2d(256, 128, 1), (1, 256, 2, 2)),
    "unbatched": (lambda: nn.Conv2d(64, 48, 3), (64, 4, 4)),
}


@contextlib.contextmanager
def new_tensors():
    """A list that, afterwards, holds all tensors made meanwhile that the garbage collector still knows."""
    found = []
    gc.freeze()  # what exists already is out of sight
    try:
        yield found
        # By type: isinstance would ask lazy objects for their class.
        found += [tensor for tensor in gc.get_objects() if issubclass(type(tensor), torch.Tensor)]
    finally:
        gc.unfreeze()


def quantized_sizes(model):
    return [tensor.numel() for tensor in all_tensors(model).values() if isinstance(tensor, QuantWeight)]


@pytest.mark.parametrize("context", [contextlib.nullcontext, autocast], ids=["", "autocast"])
@pytest.mark.parametrize(("build", "shape"), [pytest.param(*case, id=name) for name, case in MEMORY.items()])
def test_no_decoded_weight_is_kept_for_backward(storage_format, rng, build, shape, context):
    model = converted(build, storage_format, torch.bfloat16 if context is autocast else torch.float32)
    model.train()
    x = torch.randn(shape, generator=rng, requires_grad=True)
    smallest = min(quantized_sizes(model))
    assert 4 * smallest > 2 * (8 * x.numel() + 8192), "activations must not hide a weight"
    saved = []

    def save(tensor):
        saved.append(tensor)
        return tensor

    live = LiveStorages(all_tensors(model).values())
    at_rest = live.now()
    with (
        new_tensors() as new,
        live.watch,
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
        context(),
    ):
        y = model(x)
    assert any(tensor is y for tensor in new), "the census sees nothing"
    assert [tensor.shape for tensor in saved if tensor.numel() == smallest] == []
    assert [tensor.shape for tensor in new if tensor.numel() == smallest and not isinstance(tensor, QuantWeight)] == []
    assert live.now() - at_rest < smallest  # less than a byte a weight, be it float16
    assert live.peak - at_rest >= 2 * smallest, "the watch sees nothing"
    new.clear()
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize(("build", "shape"), [pytest.param(*case, id=name) for name, case in MEMORY.items()])
def test_no_decoded_weight_is_kept_for_a_second_derivative(storage_format, rng, build, shape):
    model = converted(build, storage_format)
    x = torch.randn(shape, generator=rng, requires_grad=True)
    smallest, saved = min(quantized_sizes(model)), []

    def save(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        (first,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    assert saved, "the watch sees nothing"
    assert [tensor.shape for tensor in saved if tensor.numel() == smallest] == []
    assert torch.autograd.grad(first.sum(), x)[0].abs().sum() > 0


def test_the_graph_holds_the_packed_weight_only_while_it_lives(rng):
    model = seeded(lambda: nn.Linear(256, 128))
    convert_model(model, INT8)
    live = LiveStorages(plain_tensors(list(all_tensors(model).values())))
    at_rest = live.now()
    with live.watch:
        x = torch.randn(1, 256, generator=rng, requires_grad=True)
        model(x).sum().backward()
        x = None
    gc.collect()
    assert live.now() <= at_rest + 128 * 4  # the gradient of the bias


# Writing between forward and backward


def write_state(model):
    model.load_state_dict({name: torch.zeros_like(value) for name, value in plain_twin(model).state_dict().items()})


WRITES = {
    "store_": lambda model: model.weight.store_(torch.zeros_like(model.weight.dequantize())),
    "setitem": lambda model: model.weight.__setitem__(0, 0.0),
    "copy_": lambda model: model.weight.copy_(torch.zeros(model.weight.shape)),
    "add_": lambda model: model.weight.add_(1),
    "zero_": lambda model: model.weight.zero_(),
    "load_state_dict": write_state,
}


@pytest.mark.parametrize("case", ["linear", "3x3"])
@pytest.mark.parametrize(
    "write",
    [pytest.param(write, id=name) for name, write in WRITES.items()],
)
def test_a_write_between_forward_and_backward_is_an_error(rng, case, write):
    build, shape = LAYERS[case]
    model = seeded(build)
    convert_model(model, INT8)
    y = model(torch.randn(shape, generator=rng, requires_grad=True))
    with torch.no_grad():
        write(model)
    with pytest.raises(RuntimeError, match="modified by an in"):
        y.sum().backward()


@pytest.mark.parametrize("case", ["linear", "3x3"])
def test_a_write_between_backward_and_its_backward_is_an_error(rng, case):
    build, shape = LAYERS[case]
    model = seeded(build)
    convert_model(model, INT8)
    x = torch.randn(shape, generator=rng, requires_grad=True)
    (first,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    model.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an in"):
        first.sum().backward()


READS = {
    "nothing": lambda model: None,
    "clone": lambda model: model.weight.clone(),
    "half": lambda model: model.weight.half(),
    "state_dict": lambda model: [value.float() for value in model.state_dict().values()],
    "forward": lambda model: model(torch.zeros(5, 8)),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_between_forward_and_backward_is_none(storage_format, rng, read):
    model = converted(lambda: nn.Linear(8, 6), storage_format)
    x = torch.randn(5, 8, generator=rng)

    def forward_and_read(x):
        y = model(x)
        read(model)
        return y

    assert_same_gradients(model, x, run=forward_and_read)


def test_writing_after_backward_is_fine(storage_format, rng):
    model = converted(lambda: nn.Linear(8, 6), storage_format)
    x = torch.randn(5, 8, generator=rng)
    gradients(model, x)
    with torch.no_grad():
        model.weight.mul_(2)
    assert_same_gradients(model, x)


def test_functional_use_of_the_gradient(storage_format, rng):
    weight = converted(lambda: nn.Linear(8, 6), storage_format).weight
    x = torch.randn(5, 8, generator=rng, requires_grad=True)
    (grad,) = torch.autograd.grad(F.linear(x, weight).sum(), x)
    torch.testing.assert_close(grad, torch.ones(5, 6) @ weight.dequantize())
