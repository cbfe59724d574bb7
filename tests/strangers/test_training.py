"""A frozen 8-bit base gives gradients to its input, gets none, and keeps no decoded copy of itself."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint

import lib_fp8.compute
from lib_fp8 import QuantWeight
from strangers.helpers import assert_bits, bits_of, on_plain, truth, with_twin


def _input(layer, rng, dtype=torch.float32):
    shape = (3, 24) if isinstance(layer, torch.nn.Linear) else (2, 6, 5, 5)
    return torch.randn(shape, generator=rng).to(layer.weight.device, dtype).requires_grad_()


def _twin(layer, dtype):
    if isinstance(layer, torch.nn.Linear):
        twin = torch.nn.Linear(24, 16)
    else:
        twin = torch.nn.Conv2d(6, 8, 3, padding=1)
    twin.to(layer.weight.device, dtype).requires_grad_(False)
    with torch.no_grad():
        twin.weight.copy_(truth(layer.weight, dtype))
        twin.bias.copy_(layer.bias)
    return twin


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_gradient_of_the_input(layer, dtype, rng):
    x, twin = _input(layer, rng, dtype), _twin(layer, dtype)
    other = x.detach().clone().requires_grad_()

    def backward(module, value):
        module(value).float().square().sum().backward()

    on_plain(backward, twin, other)
    backward(layer, x)
    assert x.grad.dtype == dtype
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(x.grad, other.grad, rtol=8 * step, atol=8 * step)
    assert layer.weight.grad is None


def test_gradient_of_the_bias_and_none_of_the_weight(layer, rng):
    x, twin = _input(layer, rng).detach(), _twin(layer, torch.float32)
    for module in (layer, twin):
        module.bias.requires_grad_(True)
        module(x).square().sum().backward()
    assert layer.bias.grad.dtype == layer.bias.dtype
    step = torch.finfo(layer.bias.dtype).eps
    torch.testing.assert_close(layer.bias.grad.float(), twin.bias.grad, rtol=64 * step, atol=64 * step)
    assert layer.weight.grad is None


def test_requires_grad_of_a_whole_model_does_not_fail(layer, rng):
    layer.requires_grad_(True)
    layer.weight.requires_grad = True
    layer.weight.requires_grad_()
    assert not layer.weight.requires_grad
    assert layer.bias.requires_grad
    layer(_input(layer, rng)).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    assert [p for p in layer.parameters() if p.requires_grad] == [layer.bias]


def test_parameter_made_to_require_grad_does_not(weight):
    parameter = torch.nn.Parameter(weight.detach(), requires_grad=True)
    assert isinstance(parameter, QuantWeight)
    assert not parameter.requires_grad


def _reachable(value, seen):
    """Tensors that a Python object holds in its attributes, however deep."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, QuantWeight):
        return
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _reachable(part, seen)
    else:
        for part in getattr(value, "__dict__", {}).values():
            yield from _reachable(part, seen)


def _nodes(node, seen):
    if node is not None and node not in seen:
        seen.add(node)
        yield node
        for following, _ in node.next_functions:
            yield from _nodes(following, seen)


def _kept_by(run, weight):
    """Shapes of the plain tensors of a weight's size that are kept for backward, and the result."""
    kept = []

    def pack(tensor):
        if tensor.numel() == weight.numel() and not isinstance(tensor, QuantWeight):
            kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    for node in _nodes(result.grad_fn, set()):
        kept += [tuple(t.shape) for t in _reachable(node, set()) if t.numel() == weight.numel()]
    return kept, result


def test_the_measure_of_what_is_kept_finds_a_plain_layer(layer, rng):
    twin, x = _twin(layer, torch.float32), _input(layer, rng)
    kept, _ = _kept_by(lambda: twin(x), twin.weight)
    assert kept


def test_nothing_of_the_size_of_the_weight_is_saved(layer, rng):
    x = _input(layer, rng)
    kept, result = _kept_by(lambda: layer(x), layer.weight)
    assert kept == []
    result.sum().backward()
    assert x.grad is not None


def test_nothing_is_saved_under_autocast(layer, rng, device):
    x, dtype = _input(layer, rng), torch.bfloat16 if device.type == "cpu" else torch.float16
    with torch.autocast(device.type, dtype=dtype):
        kept, result = _kept_by(lambda: layer(x), layer.weight)
    assert kept == []
    result.float().sum().backward()
    assert x.grad.dtype == torch.float32


def test_nothing_is_saved_for_an_unbatched_image(conv, rng):
    x = torch.randn(6, 5, 5, generator=rng).to(conv.weight.device).requires_grad_()
    kept, result = _kept_by(lambda: conv(x), conv.weight)
    assert kept == []
    result.sum().backward()
    assert x.grad is not None


def test_gradient_through_multi_head_attention(storage_format, device, rng):
    # Only values and gradients: that a decoded copy is kept here is documented.
    with torch.random.fork_rng():
        torch.manual_seed(15)
        attention = torch.nn.MultiheadAttention(20, 4).to(device).requires_grad_(False)
    attention, twin = with_twin(attention, storage_format)
    x = torch.randn(3, 1, 20, generator=rng).to(device)
    grads = []
    for module in (attention, twin):
        value = x.clone().requires_grad_()
        module(value, value, value, need_weights=False)[0].square().sum().backward()
        grads.append(value.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)
    assert "MultiheadAttention" in lib_fp8.compute.__doc__
    assert attention.out_proj.weight.grad is None


@pytest.mark.parametrize(
    "write",
    [
        lambda w: w.mul_(2),
        lambda w: w.__setitem__(0, 1),
        lambda w: w.detach().zero_(),
        lambda w: w.data.copy_(w.clone()),
        lambda w: torch.add(w, 1, out=w),
    ],
    ids=["mul", "setitem", "detached", "copy_of_bits", "out"],
)
def test_write_between_forward_and_backward_is_noticed(layer, rng, write):
    y = layer(_input(layer, rng))
    write(layer.weight)
    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        y.sum().backward()


def test_assignment_between_forward_and_backward_keeps_the_gradient(layer, rng):
    # As in torch: the graph holds on to the old data.
    x = _input(layer, rng)
    layer(x).sum().backward()
    expected, x.grad = x.grad, None
    y = layer(x).sum()
    layer.weight.data = torch.zeros_like(truth(layer.weight))
    y.backward()
    assert torch.equal(x.grad, expected)


def test_no_grad_builds_no_graph(layer, rng):
    x = _input(layer, rng)
    with torch.no_grad():
        assert layer(x).grad_fn is None
    assert layer(x.detach()).grad_fn is None


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non_reentrant"])
def test_checkpointing(layer, rng, reentrant):
    x = _input(layer, rng)
    layer(x).square().sum().backward()
    expected, x.grad = x.grad, None
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(x.grad, expected)


class TextEncoder(torch.nn.Module):
    """Enough of one: token embedding, projections, norm."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(6, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.q, self.k, self.out = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, embedded):
        h = self.norm(embedded)
        return self.out(torch.softmax(self.q(h) @ self.k(h).transpose(-1, -2), -1) @ h)


@pytest.fixture
def encoders(storage_format, device):
    with torch.random.fork_rng():
        torch.manual_seed(13)
        model = TextEncoder().to(device).requires_grad_(False)
    return with_twin(model, storage_format)


def _train(model, parameters, compute, optimizer_class=torch.optim.AdamW, steps=15):
    optimizer = optimizer_class(parameters, lr=0.01, weight_decay=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (compute(model) - 1).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _bits(model):
    return {name: bits_of(value) for name, value in model.named_parameters() if isinstance(value, QuantWeight)}


def _assert_untouched(model, before):
    for name, bits in before.items():
        assert_bits(model.get_parameter(name), bits)
        assert model.get_parameter(name).grad is None


def test_textual_inversion(encoders, device):
    model, twin = encoders
    before, results = _bits(model), []
    tokens = torch.tensor([[0, 1, 2]], device=device)
    for encoder in (model, twin):
        vector = torch.full((1, 2, 16), 0.1, device=device, requires_grad=True)

        def compute(encoder, vector=vector):
            return encoder(torch.cat([encoder.embedding(tokens), vector], 1))

        results.append((_train(encoder, [vector], compute), vector.detach().clone()))
    assert results[0][0][-1] < results[0][0][0]
    torch.testing.assert_close(torch.tensor(results[0][0]), torch.tensor(results[1][0]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-3, atol=1e-4)
    _assert_untouched(model, before)


def test_hypernetwork(encoders, device):
    model, twin = encoders
    before, losses = _bits(model), []
    context = torch.linspace(-1, 1, 48, device=device).view(1, 3, 16)
    for encoder in (model, twin):
        with torch.random.fork_rng():
            torch.manual_seed(14)
            extra = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)).to(device)
        parameters = list(extra.parameters())
        losses.append(_train(encoder, parameters, lambda e, extra=extra: e(context + extra(context))))
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-3, atol=1e-4)
    _assert_untouched(model, before)


def test_lora_trained_over_the_base(encoders, device):
    model, twin = encoders
    before, losses = _bits(model), []
    x = torch.linspace(-1, 1, 48, device=device).view(1, 3, 16)
    for encoder in (model, twin):
        down = torch.full((2, 16), 0.05, device=device, requires_grad=True)
        up = torch.zeros(16, 2, device=device, requires_grad=True)
        original = encoder.out.forward

        def forward(h, original=original, down=down, up=up):
            return original(h) + h @ down.t() @ up.t()

        encoder.out.forward = forward
        losses.append(_train(encoder, [down, up], lambda e: e(x)))
        encoder.out.forward = original
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-3, atol=1e-4)
    _assert_untouched(model, before)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam])
def test_optimizer_over_all_parameters_leaves_the_base(encoders, device, optimizer_class):
    model, _ = encoders
    model.requires_grad_(True)
    before, norm = _bits(model), model.norm.weight.detach().clone()
    x = torch.linspace(-1, 1, 48, device=device).view(1, 3, 16)
    parameters = list(model.parameters())
    assert any(isinstance(parameter, QuantWeight) for parameter in parameters)
    losses = _train(model, parameters, lambda e: e(x), optimizer_class)
    assert losses[-1] < losses[0]
    assert not torch.equal(model.norm.weight, norm)
    _assert_untouched(model, before)


def test_clip_grad_and_zero_grad_over_all_parameters(encoders, device):
    model, _ = encoders
    model.requires_grad_(True)
    model(torch.ones(1, 3, 16, device=device)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert bool(torch.isfinite(norm))
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    model.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_optimizer_state_is_saved_and_loaded(encoders, device):
    model, _ = encoders
    model.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3, 16, device=device)).sum().backward()
    optimizer.step()
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(optimizer.state_dict())
    assert len(other.state) == len(optimizer.state)


def test_gradient_for_a_weight_is_refused_as_for_any_frozen_one(layer, rng):
    y = layer(_input(layer, rng)).sum()
    with pytest.raises(RuntimeError):
        torch.autograd.grad(y, layer.weight)


def test_gradient_through_arithmetic_on_the_weight(linear, rng):
    # Networks that are not merged: the gradient goes to the delta, not to the base.
    x = torch.randn(3, 24, generator=rng).to(linear.weight.device)
    change = torch.zeros(16, 24, device=x.device, requires_grad=True)
    torch.nn.functional.linear(x, linear.weight.float() + change).sum().backward()
    torch.testing.assert_close(change.grad, x.sum(0).expand(16, 24))
    assert linear.weight.grad is None
