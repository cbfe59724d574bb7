"""Networks' own code is asked for their deltas: exact whatever functions it uses, unchanged afterwards, and told of by
itself: what fails beside it is no fault of a network.
"""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
import torch
from helpers import to_numpy

from webui.nets import KEPT, ON, TO_OUT, TO_Q, fine

mm = torch.mm
CHOICES = ("Merge from checkpoint file", "Add at run time")


class OfAnother:
    """A network module of another extension: ``product`` says how it multiplies."""

    bias = None

    def __init__(self, network, up, down, product):
        self.network, self.up, self.down, self.product = network, up, down, product

    def multiplier(self):
        return self.network.unet_multiplier

    def calc_updown(self, orig_weight):
        up, down = (factor.to(orig_weight.device) for factor in (self.up, self.down))
        return self.product(self, up, down).reshape(orig_weight.shape), None


def with_out(module, up, down):
    result = torch.empty(len(up), down.shape[1], dtype=up.dtype)
    torch.mm(up, down, out=result)
    return result


def with_captured_function(module, up, down):
    return mm(up, down)


def in_place(module, up, down):
    return torch.zeros(len(up), down.shape[1], dtype=up.dtype).addmm_(up, down)


def by_einsum(module, up, down):
    return torch.einsum("o r, r i -> o i", up, down)


def by_numpy(module, up, down):
    return torch.from_numpy(up.numpy() @ down.numpy())


def by_writing_into_a_factor(module, up, down):
    result = up @ down
    up.zero_()
    module.down.mul_(0)
    return result


def by_rows(module, up, down):
    result = up.new_empty(len(up), down.shape[1])
    for row, factors in zip(result, up):
        row.copy_(factors @ down)
    return result


def by_a_view(module, up, down):
    result = up.new_zeros(len(up) * down.shape[1])
    result.view(len(up), -1).add_(up @ down)
    return result


WAYS = (
    *(with_out, with_captured_function, in_place, by_einsum, by_numpy),
    *(by_writing_into_a_factor, by_rows, by_a_view),
)


@pytest.fixture
def started(newest):
    newest.checkpoint()
    return newest.start(**ON)


def network_of(host, nets, product, dtype, layer_name=TO_Q):
    net = host.networks.Network("a")
    rows, columns = nets.shape(layer_name)
    factors = (fine(rows, 4, rng=nets.rng).to(dtype), fine(4, columns, rng=nets.rng).to(dtype))
    net.modules[layer_name] = OfAnother(net, *factors, product)
    return net


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("product", WAYS, ids=lambda way: way.__name__)
def test_exact_however_it_computes(started, nets, product, dtype):
    """To a few bits of float32, where half precision would lose all but ten; its factors are what they were."""
    net = network_of(started, nets, product, dtype)
    module = net.modules[TO_Q]
    up, down, held = module.up.clone(), module.down.clone(), dict(vars(module))
    (use,) = started.deltas.uses_of(*layer_of(started, net))
    delta, _ = started.deltas.delta_of(use, "weight", torch.zeros(16, 16))
    exact = to_numpy(up) @ to_numpy(down)
    np.testing.assert_allclose(to_numpy(delta), exact, rtol=1e-5, atol=1e-7)
    assert all(vars(module)[name] is value for name, value in held.items())
    assert torch.equal(module.up, up)
    assert torch.equal(module.down, down)
    started.run_networks(net)
    assert started.networks.extra_network_lora.errors == {}


def layer_of(host, *networks):
    host.networks.loaded_networks[:] = networks
    return host.layers[TO_Q], TO_Q


class Nested(torch.nn.Module):
    def __init__(self, up, down):
        super().__init__()
        self.factors = torch.nn.ModuleList([torch.nn.Linear(4, 16, bias=False), torch.nn.Linear(16, 4, bias=False)])
        for layer, value in zip(self.factors, (up, down)):
            layer.weight = torch.nn.Parameter(value, requires_grad=False)
        self.register_buffer("one", torch.ones(1).half())


def test_tensors_are_found_wherever_they_are(started, nets):
    """In modules within modules, in buffers and in collections; the layer itself and numbers are left alone."""
    up, down, half = fine(16, 4, rng=nets.rng).half(), fine(4, 16, rng=nets.rng).half(), torch.ones(1).half()

    def product(module, *_):
        first, second = (layer.weight for layer in module.nested.factors)
        seen = (first, second, module.nested.one, module.many[0], module.many[1]["one"])
        assert [tensor.dtype for tensor in seen] == [torch.float32] * 5
        assert module.org_module[0].weight is layer.weight
        assert (module.ranks.dtype, module.alpha) == (torch.int64, 2.0)
        return first @ second * module.many[0]

    layer = started.layers[TO_Q]
    net = network_of(started, nets, product, torch.float16)
    module = net.modules[TO_Q]
    module.nested, module.many, module.org_module = Nested(up, down), [half, {"one": half}], [layer]
    module.ranks, module.alpha = torch.arange(4), 2.0
    parameters = dict(module.nested.named_parameters())
    (use,) = started.deltas.uses_of(*layer_of(started, net))
    delta, _ = started.deltas.delta_of(use, "weight", torch.zeros(16, 16))
    np.testing.assert_allclose(to_numpy(delta), to_numpy(up) @ to_numpy(down), rtol=1e-5, atol=1e-7)
    assert all(parameter is parameters[name] for name, parameter in module.nested.named_parameters())
    assert module.nested.one.dtype == torch.float16
    assert module.many[0] is half
    assert module.many[1]["one"] is half


def test_nothing_is_left_changed_when_it_raises(started, nets):
    def failing(module, up, down):
        module.cache = up
        module.down = None
        raise ValueError("said the test")

    net = network_of(started, nets, failing, torch.float16)
    module = net.modules[TO_Q]
    up = module.up
    started.run_networks(net)
    assert started.networks.extra_network_lora.errors == {"a": 1}
    assert module.up is up
    assert module.down is None, "what it has put there itself stays"


def test_two_threads_that_ask_the_same(started, nets):
    both = threading.Barrier(2, timeout=0.2)

    def waiting(module, up, down):
        with contextlib.suppress(threading.BrokenBarrierError):  # the other may have to wait until this one is done
            both.wait()
        return up @ down

    net = network_of(started, nets, waiting, torch.float16)
    module = net.modules[TO_Q]
    up, exact = module.up, to_numpy(module.up) @ to_numpy(module.down)
    (use,) = started.deltas.uses_of(*layer_of(started, net))
    found = []
    ask = lambda: found.append(started.deltas.delta_of(use, "weight", torch.zeros(16, 16))[0])  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    for delta in found:
        np.testing.assert_allclose(to_numpy(delta), exact, rtol=1e-5, atol=1e-7)
    assert module.up is up


class OwnError(Exception):
    pass


@pytest.mark.parametrize("choice", CHOICES)
class TestWhoseFaultItIs:
    @pytest.fixture
    def used(self, newest, nets, choice):
        newest.checkpoint()
        newest.start(fp8_lora=choice, **ON)
        net = newest.networks.Network("a")
        for name in (TO_Q, TO_OUT, KEPT):
            shape = nets.shape(name)
            tensors = {
                "lora_up.weight": fine(shape[0], 2, rng=nets.rng),
                "lora_down.weight": fine(2, shape[1], rng=nets.rng),
            }
            net.modules[name] = newest.networks.create_module(net, name, tensors, newest.layers[name])
        newest.networks.loaded_networks[:] = [net]
        return net

    @pytest.mark.parametrize("where", ["deltas._widened", "deltas._check_shape", "slots.DeltaSum.add", "lora.low_rank"])
    def test_errors_of_our_own_code_are_raised(self, newest, used, choice, monkeypatch, where):
        if where == "lora.low_rank" and choice != "Add at run time":
            pytest.skip("not called where networks are merged")

        def failing(*args):
            raise OwnError("a bug")

        monkeypatch.setattr(f"lib_fp8.webui.{where}", failing)
        with pytest.raises(OwnError, match="a bug"):
            newest.run_networks(used)
        assert newest.networks.extra_network_lora.errors == {}

    @pytest.mark.parametrize(
        "words",
        [
            "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported",
            "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
            "HIP error: an illegal memory access was encountered",
            "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
            "CUDA out of memory. Tried to allocate 2.00 GiB",
        ],
    )
    @pytest.mark.parametrize("accelerator", [False, True], ids=["RuntimeError", "AcceleratorError"])
    def test_errors_of_a_device_are_raised(self, newest, used, monkeypatch, words, accelerator, capsys):
        """They are told of work that was given before, maybe by somebody else; nothing is half done."""
        kind = getattr(torch, "AcceleratorError", None) if accelerator else RuntimeError
        if kind is None:
            pytest.skip("this torch has no AcceleratorError")
        bits, module = newest.fingerprint(), used.modules[KEPT]

        def failing(_):
            raise kind(words)

        with monkeypatch.context() as context:
            context.setattr(module, "calc_updown", failing)
            with pytest.raises(kind, match=words.splitlines()[0][:20]):
                newest.run_networks(used)
        assert newest.networks.extra_network_lora.errors == {}
        assert "does not fit" not in capsys.readouterr().err
        newest.run_networks()
        assert newest.fingerprint() == bits

    def test_a_plain_lora_of_another_make(self, newest, used, capsys):
        """Named alike, but not made alike: it is asked itself."""
        module = type("NetworkModuleLora", (OfAnother,), {})(
            used, torch.ones(16, 2).half() / 8, torch.ones(2, 16).half() / 8, with_out
        )
        used.modules = {TO_Q: module}
        before = newest.layers[TO_Q].weight.dequantize(torch.float32)
        newest.run_networks(used)
        added = newest.layers[TO_Q].weight.dequantize(torch.float32) - before
        assert (added - 2 / 64).abs().max() < 0.02
        assert capsys.readouterr().err == ""

    def test_a_scale_that_cannot_be_computed_is_its_own_fault(self, newest, used, monkeypatch, capsys):
        def failing():
            raise ZeroDivisionError("alpha / dim")

        monkeypatch.setattr(used.modules[TO_Q], "calc_scale", failing)
        newest.run_networks(used)
        assert newest.networks.extra_network_lora.errors == {"a": 1}
        assert "network a does not fit layer" in capsys.readouterr().err
