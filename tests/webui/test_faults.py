"""Faults while it runs: whatever breaks off, the model is whole for the next job, and it is said what happened."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import itertools
import json
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import FORMAT_BY_DEFAULT, all_tensors, assert_same_model, need_format, seeded, snapshot
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lib_fp8 import (
    DEFAULT_KEEP,
    ConversionError,
    Policy,
    QuantWeight,
    convert_model,
    get_format,
    qweight,
)
from lib_fp8.formats import probe
from webui.card import CARD, Card
from webui.nets import INT8_ANEW, KEPT, ON, TO_OUT, TO_Q
from webui.test_moving import on_card

# The card is called "meta", of which torch believes that nothing can be loaded into it.
pytestmark = pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")
SAID = "CUDA out of memory, said the test"
FAULTS = {"out of memory": lambda: torch.cuda.OutOfMemoryError(SAID), "interrupt": KeyboardInterrupt}


class FaultAt(TorchDispatchMode):
    """Lets the op of that number fail, counted from 0."""

    def __init__(self, number, error):
        super().__init__()
        self.left, self.error = number, error

    @property
    def happened(self):
        return self.left < 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(isinstance(value, QuantWeight) for value in tree_flatten((args, kwargs))[0]):
            with self:
                return QuantWeight.__torch_dispatch__(func, types, args, kwargs)
        self.left -= 1
        if self.left == -1:
            raise self.error
        return func(*args, **kwargs)


def sweep(fault, act, step):
    """Let ``act`` fail at one op in every ``step``; yields what it raised, in words, and then it is to begin anew."""
    for number in itertools.count(step // 2, step):
        raised, mode = None, FaultAt(number, FAULTS[fault]())
        try:
            with mode:
                act()
        except BaseException as error:
            raised = repr(error)  # the error itself would hold everything that was at hand
        if not mode.happened:
            assert number > 3 * step, "nothing failed"
            return
        yield raised


def hooks(model):
    return sum(len(m._load_state_dict_pre_hooks) + len(m._load_state_dict_post_hooks) for m in model.modules())


def in_force(host):
    """What the extension has put in place of functions of the WebUI and of the Lora extension."""
    sd_models, networks = host.sd_models, host.networks
    return (
        *(getattr(sd_models, name) for name in ("load_model_weights", "reload_model_weights")),
        *(getattr(networks, name) for name in host.lora._FUNCTIONS),
        *(cls._load_from_state_dict for cls in (nn.Module, nn.Linear, nn.Conv2d, nn.MultiheadAttention)),
        nn.Module.load_state_dict,
    )


def assert_no_trace(host, patched):
    assert hooks(host.model) == 0
    assert in_force(host) == patched
    originals = host.storage.record_of(host.model).originals
    assert originals is None or not originals.file.is_open
    assert models_in_use(host) == 1


def models_in_use(host):
    """How many models are alive that were not thrown away."""
    gc.collect()
    models = [thing for thing in gc.get_objects() if type(thing) is host.tiny_models.StableDiffusion]
    return sum(not any(parameter.is_meta for parameter in model.parameters()) for model in models)


OFF = {"fp8_storage": "Disable"}
BASE = {**ON, "fp8_keep_layers": " ".join(DEFAULT_KEEP), "fp8_lora": "Merge from checkpoint file"}
CHANGES = {
    "on": (OFF, {}),
    "off": ({}, OFF),
    "other layers": ({}, {"fp8_keep_layers": "to_q"}),
    "an encoder less": ({}, {"fp8_clip_l": False}),
    "an encoder more": ({"fp8_clip_l": False}, {}),
    "copies": ({}, {"fp8_lora": "Merge from copy in RAM"}),
}
"""Settings before and after, where they differ from BASE."""


@pytest.mark.parametrize("fault", FAULTS)
class TestAtAnyOp:
    @pytest.mark.parametrize("change", CHANGES)
    def test_of_a_change_of_settings(self, newest, fault, change, capsys):
        """Converted in place, or loaded again: at the next job all is as the settings say, or it is said why not."""
        before, after = ({**BASE, **options} for options in CHANGES[change])
        newest.checkpoint()
        newest.start(**BASE)

        def state():
            return newest.fingerprint(), newest.model.cond_stage_model_empty_prompt.tolist()

        def go_to(options):
            newest.set(**options)
            newest.job()
            return state()

        plain, as_after, as_before = (go_to(options) for options in ({**BASE, **OFF}, after, before))
        patched = in_force(newest)
        for raised in sweep(fault, lambda: newest.set(**after), 37):
            said = "".join([capsys.readouterr().err, *newest.errors.shown])
            assert raised is not None or said
            newest.errors.shown.clear()
            newest.job()
            problem = newest.panel.status()["problem"]
            is_after = all(newest.opts.data[key] == value for key, value in after.items())
            if problem is None:
                assert state() == (as_after if is_after else as_before)
            else:
                assert SAID in problem
                assert state() in (plain, as_before)
            assert go_to(before) == as_before
        assert_no_trace(newest, patched)

    @pytest.mark.parametrize("kind", ["sd1", "sdxl"])
    def test_of_choosing_another_checkpoint(self, host, fault, kind, capsys):
        """Filled into the model that is there, or into a new one; then that one, or the former, is chosen again."""
        a, b = host.checkpoint("a"), host.checkpoint("b", kind=kind, seed=2)
        host.start(sd_model_checkpoint=a.title, **BASE)

        def go_to(info):
            host.switch_to(info)
            host.job()
            return host.fingerprint()

        bits = {info.title: go_to(info) for info in (b, a)}
        patched = in_force(host)
        for number, raised in enumerate(sweep(fault, lambda: host.switch_to(b), 97)):
            assert raised is not None or SAID in capsys.readouterr().err
            chosen = (a, b)[number % 2]
            assert go_to(chosen) == bits[chosen.title] or SAID in str(host.panel.status()["problem"])
            host.set(fp8_keep_layers="to_q")
            host.set(**BASE)
            assert go_to(a) == bits[a.title]
        assert_no_trace(host, patched)

    @pytest.mark.parametrize("way", ["Merge from checkpoint file", "Merge from copy in RAM", "Add at run time"])
    def test_of_a_job_with_networks(self, newest, nets, fault, way):
        """The job fails and is made again, or one as before is made: with another network, with two, with none."""
        newest.checkpoint()
        newest.start(**{**BASE, "fp8_lora": way})
        bits, a, b = newest.fingerprint(), nets.make("a", bias=True, multiplier=8), nets.make("b", [TO_Q, KEPT])

        def job(*used):
            newest.networks.loaded_networks[:] = used
            return newest.job().pictures[0]

        walk = ((a,), (a, b), (b,), ())
        pictures = {used: job(*used) for used in walk}
        patched = in_force(newest)
        for before, used in zip((*walk[3:], *walk[:3]), walk):
            job(*before)
            for number, raised in enumerate(sweep(fault, lambda used=used: job(*used), 23)):
                assert raised is not None
                for later in (used, before)[number % 2 :]:
                    assert torch.equal(job(*later), pictures[later])
        job()
        assert newest.fingerprint() == bits
        assert_no_trace(newest, patched)


class TestConvertModel:
    @pytest.fixture
    def model(self):
        return seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)))

    def failing_moves(self, monkeypatch, number, error):
        """Each weight moves to the CPU when it is packed, and back when all are."""
        moves = itertools.count()

        def to(weight, *args, **kwargs):
            if next(moves) == number:
                raise error
            return torch.Tensor.to(weight, *args, **kwargs)

        monkeypatch.setattr(QuantWeight, "to", to, raising=False)

    def test_no_room_for_a_packed_weight(self, model, monkeypatch):
        """All or nothing, and it is said which layer it was."""
        before = snapshot(model)
        self.failing_moves(monkeypatch, 1, RuntimeError("DefaultCPUAllocator: can't allocate memory"))
        with pytest.raises(ConversionError, match=r"layer 1 could not be moved to cpu: .* can't allocate") as caught:
            convert_model(model, Policy("int8", ()))
        assert caught.value.whole
        assert all(torch.equal(tensor, before[name]) for name, tensor in all_tensors(model).items())

    def test_an_interrupt_while_weights_take_their_places(self, model, monkeypatch):
        """It is raised when all have."""
        wanted = copy.deepcopy(model)
        convert_model(wanted, Policy("int8", ()))
        self.failing_moves(monkeypatch, 4, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            convert_model(model, Policy("int8", ()))
        assert_same_model(model, wanted)


class TestACardThatIsTooSmall:
    @pytest.fixture
    def small(self, sd1):
        """The model fits in 8 bits, but not in 16."""
        sd1.set(**OFF)
        with Card() as card:
            on_card(sd1)
            in_16_bits = card.used
            sd1.set(**BASE)
            card.capacity = in_16_bits - 1
            yield sd1

    def picture(self, host):
        assert {parameter.device for parameter in host.model.parameters()} == {CARD}
        return host.job().pictures[0].cpu()

    def test_switching_off(self, small):
        """It is refused, and the part of the model that was moved does not stay apart from the rest."""
        small.job()
        before = self.picture(small)
        assert small.set(**OFF) == [False]
        assert "CUDA out of memory" in small.errors.shown[-1]
        small.job()
        assert torch.equal(self.picture(small), before)

    def test_jobs_in_full_precision(self, small):
        """Each says that it does not fit, and those in 8 bits work."""
        small.job()
        before = self.picture(small)
        for _ in range(2):
            with pytest.raises(torch.cuda.OutOfMemoryError):
                small.job(**OFF)
        small.job()
        assert torch.equal(self.picture(small), before)


@contextlib.contextmanager
def no_memory_for(shape):
    """Whatever packs a weight of this shape runs out of memory, on any device."""
    real = qweight.pack

    def pack(weight, *args):
        if weight.shape == shape:
            raise torch.cuda.OutOfMemoryError(SAID)
        return real(weight, *args)

    with mock.patch.object(qweight, "pack", pack):
        yield


def plain_layers(host, layers):
    return [name for name in layers if name not in host.quantized()]


class TestNoMemoryForPacking:
    """It is said, and nothing is done that would take more; with memory at hand all goes on as the settings say."""

    @pytest.fixture
    def begun(self, host):
        host.a, host.b = host.checkpoint("a"), host.checkpoint("b", seed=2)
        host.start(sd_model_checkpoint=host.a.title, **BASE)
        host.shape = host.unet.middle_block[0].to_q.weight.shape
        return host

    def test_at_the_first_load(self, begun):
        host = begun
        read = len(host.sd_models.files_read)
        host.sd_models.model_data.__init__()
        with no_memory_for(host.shape), pytest.raises(ConversionError, match=f"{SAID}. Nothing is loaded in full"):
            host.sd_models.load_model(host.a)
        assert len(host.sd_models.files_read) == read + 1
        assert host.model is None
        host.job()
        host.assert_packed("a", FORMAT_BY_DEFAULT)
        assert host.panel.status()["problem"] is None

    @pytest.mark.parametrize("later", ["a", "b"])
    def test_at_the_load_of_another_checkpoint(self, begun, later):
        host, layers = begun, begun.quantized()
        with no_memory_for(host.shape), pytest.raises(ConversionError, match=SAID):
            host.switch_to(host.b)
        assert len(plain_layers(host, layers)) <= 1
        host.switch_to(getattr(host, later))
        host.job()
        host.assert_packed(later, FORMAT_BY_DEFAULT)
        assert plain_layers(host, layers) == []

    def test_at_a_change_of_format(self, begun):
        host, layers, bits = begun, begun.quantized(), begun.fingerprint()
        with no_memory_for(host.shape):
            assert host.set(**INT8_ANEW) == [False]
            assert len(plain_layers(host, layers)) <= 1
            with pytest.raises(ConversionError, match=SAID):
                host.job()
            assert len(plain_layers(host, layers)) <= 1
        assert SAID in host.errors.shown[-1]
        host.job()
        assert host.fingerprint() == bits
        assert host.set(**INT8_ANEW) == [True]
        host.assert_packed("a", "int8")

    def test_where_it_is_switched_on(self, begun):
        """The model stays in full precision, as it was, and the next job tries again."""
        host, bits = begun, begun.fingerprint()
        host.set(**OFF)
        plain, read = host.fingerprint(), len(host.sd_models.files_read)
        with no_memory_for(host.shape):
            assert host.set(**BASE)[0]
            assert host.job().pictures
            assert SAID in host.panel.status()["problem"]
        assert host.fingerprint() == plain
        host.job()
        assert host.fingerprint() == bits
        assert host.panel.status()["problem"] is None
        assert len(host.sd_models.files_read) == read

    @pytest.mark.parametrize("placed", [0, 1])
    @pytest.mark.parametrize("first", [OFF, BASE], ids=["full precision", "8 bits"])
    def test_for_what_cannot_be_moved_back(self, begun, first, placed, monkeypatch):
        """Some layers may have taken their places by then: those that have not, follow later."""
        host, layers, bits, moves = begun, begun.quantized(), begun.fingerprint(), itertools.count()
        host.set(**{**OFF, "fp8_clip_l": False})
        if first is BASE:
            host.set(**{**BASE, "fp8_clip_l": False})
        real = QuantWeight.to

        def to(weight, *args, **kwargs):
            if next(moves) >= len(plain) + placed:
                raise torch.cuda.OutOfMemoryError(SAID)
            return real(weight, *args, **kwargs)

        plain = plain_layers(host, layers)
        monkeypatch.setattr(QuantWeight, "to", to, raising=False)
        host.set(**BASE)
        monkeypatch.undo()
        host.job()
        assert plain_layers(host, layers) in (plain, [])
        host.set(**BASE)
        assert host.fingerprint() == bits


class TestTheCheckpointIsReplaced:
    @pytest.mark.parametrize("kind", ["inpaint", "sd3"])
    def test_by_one_of_another_kind(self, host, kind):
        """Nothing of it comes into the model; with the former file all is well again."""
        host.checkpoint()
        host.start(**BASE)
        bits = host.fingerprint()
        host.checkpoint(kind=kind)
        for change in ({"fp8_keep_layers": "to_q"}, OFF):
            assert host.set(**change) == [False]
            assert "a.safetensors was replaced by a checkpoint of another kind" in host.errors.shown[-1]
            assert host.fingerprint() == bits
            assert host.job().pictures
        host.checkpoint()
        assert host.set(fp8_keep_layers="to_q") == [True]

    def test_by_one_of_the_same_kind(self, host, nets):
        """The next load takes all of it, and networks merge into that."""
        host.checkpoint()
        host.start(**BASE)
        host.checkpoint(seed=9)
        host.set(fp8_keep_layers="to_q")
        host.assert_packed("a", FORMAT_BY_DEFAULT)
        a = nets.make("a")
        host.run_networks(a)
        nets.assert_merged(a)


def test_a_checkpoint_that_cannot_be_read_for_a_while(sd1, nets, monkeypatch):
    """Networks act all the same, it is said why not as always, and later they are merged again."""
    a, bits = nets.make("a"), sd1.fingerprint()

    def fail(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    def job(*used):
        sd1.networks.loaded_networks[:] = used
        sd1.job()
        return sd1.panel.status()

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", fail)
        status = job(a)
        assert set(status["lora_layers"]) == {"run time"}
        assert "a.safetensors cannot be read ([Errno 5] Input/output error)" in status["lora_problem"]
    job()
    assert sd1.fingerprint() == bits
    assert set(job(a)["lora_layers"]) == {"checkpoint file"}
    nets.assert_merged(a, layers=[TO_Q, TO_OUT])
    assert sd1.panel.status()["lora_problem"] is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_when_settings_are_saved(host):
    """The WebUI says so after the model has changed; the settings count until it is closed."""
    host.checkpoint()
    host.start()
    host.set(**BASE)
    with pytest.raises(OSError, match="No space left"), Path("/dev/full").open("w") as file:
        json.dump(host.opts.data, file)
    host.job()
    host.assert_packed("a", FORMAT_BY_DEFAULT)


_written: list[str] | None = None
"""Files that were opened for writing, while somebody wants to know."""


def _see(event, arguments):
    if event == "open" and _written is not None:
        path, mode, flags = arguments
        if set(mode or "") & set("wax+") or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            _written.append(str(path))


def test_nothing_is_written_to_disk(newest, nets, monkeypatch):
    """So a full disk cannot hinder it."""
    sys.addaudithook(_see)
    a, b = newest.checkpoint("a"), newest.checkpoint("b", seed=2)
    monkeypatch.setattr(sys.modules[__name__], "_written", [])
    newest.start(sd_model_checkpoint=a.title, **BASE)
    for way in ("Merge from copy in RAM", "Add at run time", "Merge from checkpoint file"):
        newest.set(fp8_lora=way)
        newest.networks.loaded_networks[:] = [nets.make("a")]
        newest.job()
    newest.switch_to(b)
    newest.reload_ui()
    newest.set(**OFF)
    assert [path for path in _written if "__pycache__" not in path] == []
    with (newest.folder / "seen").open("w"):
        assert _written[-1].endswith("seen")


def test_a_picture_is_being_interrupted(host):
    """The WebUI's flag is for the sampling alone."""
    host.checkpoint()
    host.start()
    host.shared.state.interrupted = host.shared.state.skipped = True
    host.set(**BASE)
    host.assert_packed("a", FORMAT_BY_DEFAULT)


def test_a_job_that_ends_before_its_settings_are_in_force(host, monkeypatch):
    """What it asked for is forgotten."""
    host.checkpoint("a")
    b = host.checkpoint("b", seed=2)
    host.start(**BASE)
    with monkeypatch.context() as patched:
        patched.setattr(host.processing, "process_images_inner", None)
        with pytest.raises(TypeError):
            host.job(**OFF)
    host.switch_to(b)
    host.assert_packed("b", FORMAT_BY_DEFAULT)


FOREIGN = """
from modules import script_callbacks, scripts

def fail(*args, **kwargs):
    raise ValueError("not my day")

for name in ("model_loaded", "before_ui", "ui_settings", "app_started", "script_unloaded"):
    getattr(script_callbacks, f"on_{name}")(fail)

class Failing(scripts.Script):
    before_process = process = before_process_batch = postprocess = fail

    def title(self):
        return "Failing"

    def show(self, is_img2img):
        return scripts.AlwaysVisible
"""


def test_another_extension_fails_whenever_it_is_called(host, nets, monkeypatch):
    """The WebUI reports it and goes on to the next one, which is this extension."""
    script = host.folder / "extensions" / "foreign" / "scripts" / "foreign.py"
    script.parent.mkdir(parents=True)
    script.write_text(FOREIGN)
    load_scripts, callbacks = host.scripts.load_scripts, host.script_callbacks

    def run(name, *args):
        for callback in list(callbacks.callbacks[name]):
            try:
                callback(*args)
            except ValueError as error:
                host.errors.display(error, name)

    monkeypatch.setattr(host.scripts, "load_scripts", lambda paths: load_scripts([script, *paths]))
    monkeypatch.setattr(callbacks, "run", run)
    a, b = host.checkpoint("a"), host.checkpoint("b", seed=2)
    host.start(sd_model_checkpoint=a.title, **BASE)
    keys = list(host.settings_page())
    assert keys[keys.index("fp8_storage") + 1] == "fp8_format"
    host.switch_to(b)
    host.networks.loaded_networks[:] = [nets.make("n", [TO_Q])]
    assert host.job(**OFF).extra_generation_params.get("FP8 weight") is None
    assert host.job().extra_generation_params["FP8 weight"] == "Enable"
    host.networks.loaded_networks.clear()
    host.set(fp8_clip_l=False)
    host.reload_ui()
    host.set(fp8_clip_l=True)
    host.job()
    host.assert_packed("b", FORMAT_BY_DEFAULT)
    assert {line.partition(":")[0] for line in host.errors.shown} > {"model_loaded", "ui_settings", "script_unloaded"}


def test_no_memory_for_trying_a_format(newest):
    """It is no reason to believe that the device cannot hold it, until the WebUI is closed."""
    need_format(FORMAT_BY_DEFAULT)
    probe.format_problem.cache_clear()
    newest.checkpoint()
    with contextlib.suppress(RuntimeError), FaultAt(1, FAULTS["out of memory"]()):
        get_format(FORMAT_BY_DEFAULT).problem("cpu")
    problem = get_format(FORMAT_BY_DEFAULT).problem("cpu")
    probe.format_problem.cache_clear()
    assert problem is None
