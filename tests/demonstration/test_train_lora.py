"""Networks trained over a frozen 8-bit base: what gets gradients, what is kept for them, what comes out."""

from __future__ import annotations

import contextlib
import copy
import re
import sys

import pytest
import torch
from helpers import OpWatch, all_tensors, assert_same_bits, plain_tensors, plain_twin, quantized_names
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from demo.model import LORAS
from demo.networks import deltas_of, layers_of
from lib_fp8 import Policy, QuantWeight, convert_model
from tools import train_lora
from tools.tiny_sd import lora
from tools.tiny_sd.additions import OUTLINE, TRANSFORMERS, Addition
from tools.tiny_sd.networks import Networks, encode
from tools.tiny_sd.styles import style_loss
from tools.train_lora import FLOAT32, Settings, largest_difference, prepare, smoothed

FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8")
BATCH = 5
"""No weight of the model has a multiple of five elements; activations of a batch of five all have."""
PLAIN, BFLOAT16, FLOAT16 = None, torch.bfloat16, torch.float16


@pytest.fixture
def networks(pipeline):
    """A copy of the embedded model, to be changed."""
    parts = (pipeline.vae, pipeline.text_encoder, pipeline.unet)
    return Networks(*map(copy.deepcopy, parts), pipeline.tokenizer)


def base_tensors(networks):
    """Every parameter and buffer of the model, none of the network's."""
    parts = {"vae": networks.vae, "text_encoder": networks.text_encoder, "unet": networks.unet}
    return {f"{part}.{name}": t for part, module in parts.items() for name, t in all_tensors(module).items()}


def step_loss(networks, autocast=PLAIN, batch=BATCH):
    """A function ``step -> loss`` over a few pictures."""
    loss_of = style_loss(networks, OUTLINE, batch, pool=batch)

    def loss(step=0):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            return loss_of(step)

    return loss


def learns(name):
    """Not so: queries and keys of the one self-attention that sees a single token, at 1x1."""
    return re.search("mid_block.*attn1[._]to_[qk]", name) is None


def stir(parameters):
    """Trained values in place of the zeros that a fresh network adds: with those, half of the gradients are zero."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


# Who gets gradients


@pytest.mark.parametrize("text_encoder", [False, True], ids=["unet", "unet and text encoder"])
@pytest.mark.parametrize("base", FORMATS)
def test_training_changes_the_network_and_nothing_else(networks, base, text_encoder, monkeypatch):
    settings = Settings(base, steps=3, batch=2, text_encoder=text_encoder)
    state = {}

    def prepare_and_look(networks, settings):
        network = prepare(networks, settings)
        state["before"] = {name: t.detach().clone() for name, t in base_tensors(networks).items()}
        state["fresh"] = {name: t.detach().clone() for name, t in network.named_parameters()}
        return network

    monkeypatch.setattr(train_lora, "prepare", prepare_and_look)
    monkeypatch.setattr(train_lora, "POOL", 2)
    optimized = []
    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: optimized.append([p for group in optimizer.param_groups for p in group["params"]])
    )
    try:
        trained = train_lora.train_lora(networks, settings)
    finally:
        handle.remove()
    assert len(quantized_names(networks.unet)) == 278
    assert len(quantized_names(networks.text_encoder)) == (12 if text_encoder else 0)
    own = dict(trained.network.named_parameters())
    assert len(optimized) == 3
    for parameters in optimized:
        assert {id(p) for p in parameters} == {id(p) for p in own.values()}
    for name, parameter in own.items():
        assert parameter.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name
        if learns(name):
            assert parameter.grad.count_nonzero() > 0, name
            assert not torch.equal(parameter, state["fresh"][name]), name
    assert any(name.startswith("lora_te_") for name in own) == text_encoder
    now = base_tensors(networks)
    assert now.keys() == state["before"].keys()
    for name, tensor in now.items():
        assert_same_bits(tensor, state["before"][name])
        assert not tensor.requires_grad, name
        assert tensor.grad is None, name


def gradients(networks, text_encoder, autocast=PLAIN, checkpointing=False):
    """Loss and gradients of a stirred network over a base that is ready."""
    network = prepare(networks, Settings(FLOAT32, text_encoder=text_encoder, checkpointing=checkpointing))
    stir(network.parameters())
    loss = step_loss(networks, autocast)()
    scale = 65536.0 if autocast is FLOAT16 else 1.0  # as GradScaler does: the smallest gradients would vanish
    (scale * loss).backward()
    return loss, {name: parameter.grad / scale for name, parameter in network.named_parameters()}


def assert_close_gradient(got, wanted, relative):
    """The length of the error against that of the gradient, which is not nought."""
    assert wanted.norm() > 0
    assert (got - wanted).norm() < relative * wanted.norm()


def with_twin(networks, base):
    """The model with UNet and text encoder in 8 bits, and the same with weights that numpy decoded."""
    for part in (networks.unet, networks.text_encoder):
        convert_model(part, Policy(format=base))
    twin = Networks(networks.vae, plain_twin(networks.text_encoder), plain_twin(networks.unet), networks.tokenizer)
    assert not any(isinstance(t, QuantWeight) for t in base_tensors(twin).values())
    return networks, twin


@pytest.mark.parametrize("base", FORMATS)
def test_gradients_are_those_over_the_decoded_weights(networks, base):
    (loss, got), (wanted_loss, wanted) = (gradients(one, text_encoder=True) for one in with_twin(networks, base))
    torch.testing.assert_close(loss, wanted_loss)
    assert got.keys() == wanted.keys()
    for name in filter(learns, wanted):
        assert_close_gradient(got[name], wanted[name], 1e-3)


@pytest.mark.parametrize("autocast", [BFLOAT16, FLOAT16], ids=str)
def test_gradients_under_autocast(networks, autocast):
    ours, twin = with_twin(networks, "float8_e4m3fn")
    (loss, got), (wanted_loss, wanted) = (gradients(one, text_encoder=True, autocast=autocast) for one in (ours, twin))
    torch.testing.assert_close(loss, wanted_loss, rtol=2e-2, atol=0)
    for name in filter(learns, wanted):
        assert got[name].dtype == torch.float32, name
        assert_close_gradient(got[name], wanted[name], 0.1)


@pytest.mark.parametrize("autocast", [PLAIN, BFLOAT16], ids=str)
def test_checkpointing_changes_no_gradient(networks, autocast):
    for part in (networks.unet, networks.text_encoder):
        convert_model(part, Policy())
    again = copy.deepcopy(networks)
    _, wanted = gradients(networks, True, autocast)
    _, got = gradients(again, True, autocast, checkpointing=True)
    assert again.unet.is_gradient_checkpointing
    assert again.text_encoder.is_activation_checkpointing
    for name, grad in wanted.items():
        torch.testing.assert_close(got[name], grad, msg=name)


def test_text_encoder_alone_learns_through_the_unet_in_8_bits(networks):
    """The only way from the loss to the text encoder leads through the converted cross attention."""
    _, twin = with_twin(networks, "int8")
    grads = []
    for one in (networks, twin):
        network = prepare(one, Settings(FLOAT32, text_encoder=True))
        for name, part in network.items():
            part.requires_grad_(name.startswith("lora_te_"))
        stir(network.parameters())
        step_loss(one)().backward()
        assert all((p.grad is None) != n.startswith("lora_te_") for n, p in network.named_parameters())
        grads.append([p.grad for p in network.parameters() if p.grad is not None])
    assert len(grads[0]) == 24
    for got, wanted in zip(*grads):
        assert_close_gradient(got, wanted, 1e-3)


# What is kept for the backward pass


class Census:
    """Finds copies of weights: among the tensors saved for backward, and among all that live at a time.

    A plain tensor counts as a copy of a weight if its storage has as many elements as one of the weights, of any
    floating dtype. The hook sees what autograd saves; the watch sees every op, also those of the recomputation, and
    everything that a graph holds on to in other ways.
    """

    def __init__(self, weights, networks):
        sizes = {weight.numel() for weight in weights}
        assert all(size % BATCH for size in sizes), "activations must not look like weights"
        self._sizes = sizes
        self._at_rest = {t.untyped_storage().data_ptr() for t in plain_tensors(list(base_tensors(networks).values()))}
        self._live = {}
        self.saved = []
        self.most = 0
        self._watch = OpWatch(lambda func, inputs, outputs: self._see(outputs))

    def _is_copy(self, tensor):
        whole = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor.is_floating_point() and tensor.element_size() > 1 and whole in self._sizes

    def _see(self, tensors):
        for tensor in filter(self._is_copy, tensors):
            if tensor.untyped_storage().data_ptr() not in self._at_rest:
                self._live[StorageWeakRef(tensor.untyped_storage())] = None
        self._live = {reference: None for reference in self._live if not reference.expired()}
        self.most = max(self.most, len(self._live))

    def _save(self, tensor):
        if not isinstance(tensor, QuantWeight) and self._is_copy(tensor):
            self.saved.append(tuple(tensor.shape))
        return tensor

    @contextlib.contextmanager
    def watch(self):
        with self._watch, torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
            yield


def census_of(networks):
    """Looks for copies of the weights that are in 8 bits."""
    return Census([t for t in base_tensors(networks).values() if isinstance(t, QuantWeight)], networks)


AT_WORK = 4
"""Decoded weights that may live at a time: the layer's that computes, and what decoding and casting it take."""


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("autocast", [PLAIN, BFLOAT16, FLOAT16], ids=str)
def test_no_decoded_weight_is_kept(networks, autocast, checkpointing):
    settings = Settings("float8_e4m3fn", text_encoder=True, autocast=autocast, checkpointing=checkpointing)
    network = prepare(networks, settings)
    loss, census = step_loss(networks, autocast), census_of(networks)
    with census.watch():
        loss().backward()
    assert census.saved == []
    assert 1 <= census.most <= AT_WORK
    assert all(parameter.grad is not None for parameter in network.parameters())


@pytest.mark.parametrize("base", ["int8", "float8_e5m2"])
def test_no_decoded_weight_is_kept_in_other_formats(networks, base):
    prepare(networks, Settings(base, text_encoder=True))
    loss, census = step_loss(networks), census_of(networks)
    with census.watch():
        loss().backward()
    assert census.saved == []
    assert 1 <= census.most <= AT_WORK


def test_the_census_finds_plain_weights_that_are_trained(networks):
    names = [name for name, layer in networks.unet.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    weights = [networks.unet.get_submodule(name).weight for name in names[1:-1]]  # but the first and the last layer
    networks.unet.requires_grad_(True)
    census = Census(weights, networks)
    with census.watch():
        step_loss(networks)()
    assert len(census.saved) >= len(weights) - 2


@pytest.mark.parametrize("autocast", [PLAIN, BFLOAT16], ids=str)
def test_the_census_finds_weights_that_are_decoded_without_care(networks, autocast, monkeypatch):
    """What happens where each layer casts its 8-bit weight and leaves the rest to autograd, as in kohya's trainer."""
    prepare(networks, Settings("float8_e4m3fn", text_encoder=True))
    monkeypatch.setattr("lib_fp8.compute._needs_graph", lambda *_: False)
    loss, census = step_loss(networks, autocast), census_of(networks)
    with census.watch():
        kept = loss()
    assert len(census.saved) > 200
    assert census.most > 200
    del kept


def test_peak_of_a_step_is_lower_over_8_bits(networks, monkeypatch):
    monkeypatch.setattr(train_lora, "POOL", 1)
    peaks = {}
    for base in (FLOAT32, "int8"):
        settings = Settings(base, steps=1, batch=1, measured=True)
        trained = train_lora.train_lora(copy.deepcopy(networks), settings)
        peaks[base] = trained.peak_bytes
        assert trained.peak_bytes > trained.base_bytes
    weights = sum(layer.weight.numel() for layer in networks.unet.modules() if isinstance(layer, nn.Linear | nn.Conv2d))
    # Three of four bytes go, but for the scales, the layers kept, and the weight that is decoded just then.
    assert peaks[FLOAT32] - peaks["int8"] > 2.5 * weights


# The loss


PICTURES = 40


@pytest.fixture(scope="module")
def short_training(pipeline):
    """``short_training(base)``: the losses of 30 steps over the embedded model, and of ten of them after training."""
    found = {}

    def losses(base, change=None):
        if (base, change) not in found:
            parts = map(copy.deepcopy, (pipeline.vae, pipeline.text_encoder, pipeline.unet))
            networks = Networks(*parts, pipeline.tokenizer)
            if change is not None:
                change(networks)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(train_lora, "POOL", PICTURES)
                during = train_lora.train_lora(networks, Settings(base, steps=30, batch=2)).losses
            again = style_loss(networks, OUTLINE, 2, PICTURES)
            with torch.no_grad():
                found[base, change] = during, [again(step).item() for step in range(10)]
        return found[base, change]

    return losses


@pytest.mark.parametrize("base", FORMATS)
def test_loss_follows_that_over_float32(short_training, base):
    """200 steps, the measure that is promised, take minutes: `python run.py train lora --compare --check`."""
    (wanted, _), (got, _) = short_training(FLOAT32), short_training(base)
    assert len(wanted) == len(got) == 30
    assert wanted != got
    assert largest_difference(wanted, got) < train_lora.LIMIT


def coarse(networks):
    """A base that is rounded far more coarsely than to 8 bits."""
    with torch.no_grad():
        for layer in networks.unet.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                step = layer.weight.abs().max() / 8
                layer.weight.copy_((layer.weight / step).round() * step)


def test_the_measure_of_the_loss_finds_a_base_that_is_too_coarse(short_training):
    assert largest_difference(short_training(FLOAT32)[0], short_training(FLOAT32, coarse)[0]) > train_lora.LIMIT


def test_smoothing_is_a_sliding_mean():
    losses = [float(step * step) for step in range(50)]
    wanted = [sum(losses[start : start + 20]) / 20 for start in range(31)]
    assert smoothed(losses).tolist() == pytest.approx(wanted)
    assert smoothed(losses[:3]).tolist() == pytest.approx([5 / 3])
    assert largest_difference([1.0] * 40, [1.0] * 20 + [1.2] * 20) == pytest.approx(0.2)
    assert largest_difference([2.0] * 40, [2.0] * 39 + [1.0]) == pytest.approx(0.025)


def test_the_loss_falls(short_training):
    during, after = short_training("float8_e4m3fn")
    assert sum(after) < 0.9 * sum(during[:10])


# The program


@pytest.fixture
def program(monkeypatch, tmp_path, capsys):
    """``program(*arguments)`` runs it in an empty folder and gives status, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train_lora, "POOL", 2)
    monkeypatch.setattr(train_lora, "peak_bytes", lambda *_: 7 * 2**20)  # the measure takes its time

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["train_lora", *map(str, arguments)])
        try:
            status = train_lora.main()
        except SystemExit as stop:
            status = stop.code
        return status, *capsys.readouterr()

    return run


QUICK = ("--steps", 2, "--batch", 2)


def test_the_file_holds_what_was_trained(program, tmp_path, pipeline, networks, monkeypatch):
    trained, real = [], train_lora.train_lora

    def train_and_note(networks, settings):
        trained.append((networks, real(networks, settings)))
        return trained[-1][1]

    monkeypatch.setattr(train_lora, "train_lora", train_and_note)
    status, said, _ = program(
        *QUICK, "--rank", 3, "--text-encoder", "--autocast", "bfloat16", "--output", "my.safetensors"
    )
    assert status == 0, said
    assert "wrote my.safetensors" in said
    assert "278 layers in float8_e4m3fn" in said
    assert [file.name for file in tmp_path.iterdir()] == ["my.safetensors"]
    file = tmp_path / "my.safetensors"
    tensors = load_file(file)
    assert tensors.keys() == load_file(LORAS / "shapes-outline.safetensors").keys()  # LyCORIS made that one
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["ss_network_dim"] == "3"
    # Merged into the base that it was trained over, the file does what the network beside it did.
    ((used, training),) = trained
    bare, merged = with_twin(networks, "float8_e4m3fn")
    deltas = deltas_of(file, layers_of(merged))
    assert len(deltas) == len(training.network)
    with torch.no_grad():
        for layer, delta in deltas.items():
            layer.weight += delta
        wanted, got, plain = map(outputs, (used, merged, bare))
    for one, other, without in zip(wanted, got, plain):
        assert (one - without).norm() > 0
        assert (one - other).norm() < 0.02 * (one - without).norm()


def outputs(networks):
    """Text states and predicted noise, of the same input whatever the model."""
    states = encode(networks, ["a red circle on a blue background", "green"])
    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    return states, networks.unet(noise, torch.tensor([300, 700]), states).sample


def test_comparison(program, tmp_path, monkeypatch):
    status, said, _ = program(*QUICK, "--compare", "--check", "--base", "int8", "--checkpointing")
    assert status == 0, said
    assert re.search(r"^float32 .* 7\.0 .*\nint8 .* 7\.0 ", said, re.M), said
    assert "largest difference of the losses, smoothed over 20 steps: 0." in said
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(train_lora, "LIMIT", 0.0)
    assert program(*QUICK, "--compare", "--check")[0] == 1
    assert program(*QUICK, "--compare", "--output", "named.safetensors")[0] == 0
    assert [file.name for file in tmp_path.iterdir()] == ["named.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--base", "float7"], r"invalid choice: 'float7' \(choose from .*int8"),
        (["--autocast", "float64"], "invalid choice"),
        (["--steps", "0"], "at least 1"),
        (["--steps", "many"], "invalid int value"),
        (["--rank", "-1"], "at least 1"),
        (["--batch", "0"], "at least 1"),
        (["--check"], "--check belongs to --compare"),
        (["--compare", "--base", "float32"], "choose another --base"),
        (["--output", "missing/x.safetensors"], "no folder missing"),
        (["--output", "x.pt"], "ends in .safetensors"),
        (["--output", "folder.safetensors"], "a file whose name"),
        (["--output", "file/x.safetensors"], "no folder file"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_done(program, tmp_path, monkeypatch, arguments, said):
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(train_lora, "load_networks", lambda _: pytest.fail("the model was loaded"))
    status, _, error = program(*arguments)
    assert status == 2
    assert re.search(said, error), error


def test_a_folder_that_cannot_be_written_into(program, monkeypatch):
    def refuse(**where):
        raise PermissionError(13, "Permission denied", str(where["dir"]))

    monkeypatch.setattr(train_lora.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(train_lora, "load_networks", lambda _: pytest.fail("the model was loaded"))
    status, _, error = program()
    assert status == 2
    assert "cannot be written into" in error
    assert "Permission denied" in error


def test_no_unfinished_file_is_left(program, tmp_path, monkeypatch):
    def half(tensors, file, metadata):
        file.write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    (tmp_path / "mine.safetensors").write_bytes(b"an older file")
    monkeypatch.setattr(lora, "save_file", half)
    status, _, error = program(*QUICK, "--output", "mine.safetensors")
    assert status == 2
    assert "mine.safetensors could not be written" in error
    assert "No space left" in error
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"mine.safetensors": b"an older file"}


def test_help_and_interruption(program, tmp_path, monkeypatch):
    status, said, _ = program("--help")
    assert status == 0
    assert "differ by more than 2 %" in " ".join(said.split())

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_lora, "style_loss", interrupt)
    status, _, error = program(*QUICK)
    assert status == 130
    assert "nothing was written" in error
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_no_number_is_told(program, tmp_path, monkeypatch):
    monkeypatch.setattr(train_lora, "style_loss", lambda *_: lambda step: torch.tensor(torch.nan, requires_grad=True))
    status, _, error = program(*QUICK)
    assert status == 2
    assert "NaN" in error
    assert list(tmp_path.iterdir()) == []


# Networks of other libraries


def is_8_bit(tensor):
    return tensor.element_size() == 1 and tensor.dtype != torch.bool


class Casts(TorchDispatchMode):
    """Notes what is cast to 8 bits, and the dtypes that matrix products and convolutions compute with."""

    PRODUCTS = ("mm", "addmm", "bmm", "convolution", "convolution_backward")

    def __init__(self):
        super().__init__()
        self.narrowed = []
        self.computed = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(isinstance(value, QuantWeight) for value in tree_flatten((args, kwargs))[0]):
            with self:
                return QuantWeight.__torch_dispatch__(func, types, args, kwargs)
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        inputs = [value for value in tree_flatten(args)[0] if isinstance(value, torch.Tensor)]
        outputs = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
        if name in self.PRODUCTS:
            self.computed |= {value.dtype for value in inputs}
        if any(map(is_8_bit, outputs)) and any(v.is_floating_point() and not is_8_bit(v) for v in inputs):
            self.narrowed.append(name)
        return result


RANK = 3
"""With another one the network's own weights could look like copies of the model's."""


def kohya_style(networks):
    """As a user of kohya's trainer has it; the program's own."""
    return lora.attach(networks, RANK).named_parameters()


def lycoris(networks, algorithm="lora", bypass=True):
    """LyCORIS, computing beside the layer, or from the weight that it reads."""
    pytest.importorskip("lycoris")
    from tools.train_networks import make_network

    extra = {"bypass_mode": True} if bypass else {}
    preset = {**TRANSFORMERS, "text_encoder_target_module": []}
    addition = Addition("test", OUTLINE, algorithm, RANK, preset=preset, extra=extra)
    return make_network(addition, networks).named_parameters()


def peft(networks):
    """PEFT's LoRA in the attention of a diffusers model, as its users have it."""
    library = pytest.importorskip("peft")
    targets = ["to_q", "to_k", "to_v", "to_out.0", "proj_in", "proj_out", "ff.net.2"]
    networks.unet.add_adapter(library.LoraConfig(r=RANK, target_modules=targets))
    return [(name, parameter) for name, parameter in networks.unet.named_parameters() if "lora_" in name]


NETWORKS = {
    "kohya's": kohya_style,
    "LyCORIS, LoRA": lycoris,
    "LyCORIS, LoRA from the weight": lambda networks: lycoris(networks, bypass=False),
    "LyCORIS, LoHa": lambda networks: lycoris(networks, "loha"),
    "LyCORIS, LoKr": lambda networks: lycoris(networks, "lokr"),
    "PEFT": peft,
}


@pytest.mark.parametrize("autocast", [PLAIN, BFLOAT16], ids=str)
@pytest.mark.parametrize("attach", NETWORKS.values(), ids=NETWORKS)
def test_networks_of_other_libraries(networks, attach, autocast):
    """Gradients reach the network alone, equal those over decoded weights, and nothing is ever cast to 8 bits."""
    ours, twin = with_twin(networks, "float8_e4m3fn")
    before = {name: t.detach().clone() for name, t in base_tensors(ours).items()}
    found = []
    for one in (ours, twin):
        for part in (one.vae, one.unet, one.text_encoder):
            part.requires_grad_(False)
        torch.manual_seed(1)
        own = dict(attach(one))
        assert len(own) > 300
        assert {parameter.dtype for parameter in own.values()} == {torch.float32}
        for parameter in own.values():
            parameter.requires_grad_(True)
        stir(own.values())
        loss, casts = step_loss(one, autocast, batch=2), Casts()
        with casts:
            value = loss()
            value.backward()
        assert casts.narrowed == []
        assert casts.computed <= {torch.float32, autocast or torch.float32}
        found.append((value, {name: parameter.grad for name, parameter in own.items()}))
    (loss, got), (wanted_loss, wanted) = found
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-4 if autocast is None else 2e-2, atol=0)
    for name in filter(learns, wanted):
        assert_close_gradient(got[name], wanted[name], 1e-3 if autocast is None else 0.15)
    now = base_tensors(ours)
    names = {name: name.replace(".base_layer.", ".") for name in now}  # PEFT puts itself in the place of a layer
    for name, original in names.items():
        if original in before:
            assert_same_bits(now[name], before[original])
            assert now[name].grad is None
    assert before.keys() <= set(names.values())


@pytest.mark.parametrize("attach", [lycoris, peft], ids=["LyCORIS", "PEFT"])
def test_no_decoded_weight_is_kept_under_other_libraries(networks, attach):
    """LyCORIS without ``bypass_mode`` reads the weight and keeps what it makes of it; that is its own choice."""
    convert_model(networks.unet, Policy())
    convert_model(networks.text_encoder, Policy())
    census = census_of(networks)
    for part in (networks.vae, networks.unet, networks.text_encoder):
        part.requires_grad_(False)
    own = dict(attach(networks))
    loss = step_loss(networks, BFLOAT16)
    with census.watch():
        loss().backward()
    assert census.saved == []
    assert 1 <= census.most <= AT_WORK
    assert all(parameter.grad is not None for parameter in own.values())


def test_the_watch_finds_a_cast_to_8_bits():
    with Casts() as casts:
        torch.zeros(3).to(torch.float8_e4m3fn)
    assert casts.narrowed == ["_to_copy"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peft_takes_the_dtype_that_a_weight_shows(dtype):
    """Over a plainly cast weight PEFT's adapter, and with it the layer's input, is in 8 bits; over ours it never is."""
    library = pytest.importorskip("peft")

    def adapted(layer):
        config = library.LoraConfig(r=2, target_modules=["0"])
        model = library.get_peft_model(nn.Sequential(layer), config, autocast_adapter_dtype=False)
        return model, {parameter.dtype for name, parameter in model.named_parameters() if "lora_" in name}

    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    layer, cast = nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 8, dtype=dtype)
    convert_model(layer, Policy("float8_e4m3fn", keep=()))
    model, adapters = adapted(layer)
    assert adapters == {dtype}
    with Casts() as casts:
        model(x).sum().backward()
    assert casts.narrowed == []
    assert casts.computed == {dtype}
    cast.weight.data = cast.weight.data.to(torch.float8_e4m3fn)
    assert adapted(cast)[1] == {torch.float8_e4m3fn}
