"""Jobs change the model in their own threads; the page, programs and Reload UI come from others, at any moment."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from pathlib import Path

import pytest
import torch
from helpers import FORMAT_BY_DEFAULT, format_in_use

from webui.nets import IN_8_BITS, ON, need_format_of_the_webui

PATIENCE = 20
"""Seconds until a thread that ought to end counts as hanging."""


class Running:
    """A job in a thread of its own, in the queue, that waits in the middle of sampling until it is told to go on."""

    def __init__(self, host, **overrides):
        self.host = host
        self.result, self.error = None, None
        self._inside, self._go_on = threading.Event(), threading.Event()
        self._hook = host.unet.register_forward_pre_hook(self._wait)
        self._thread = threading.Thread(target=self._run, kwargs=overrides, daemon=True)
        self._thread.start()
        assert self._inside.wait(PATIENCE)

    def _wait(self, *_):
        self._inside.set()
        assert self._go_on.wait(PATIENCE)

    def _run(self, **overrides):
        try:
            with self.host.call_queue.queue_lock:
                self.result = self.host.job(**overrides)
        except BaseException as error:
            self.error = error

    def pictures(self):
        """Let it go on to its end."""
        self._go_on.set()
        self._thread.join(PATIENCE)
        self._hook.remove()
        assert self.error is None
        assert not self._thread.is_alive()
        return self.result.pictures


@contextlib.contextmanager
def failing_sampling(host, error):
    def fail(*_):
        raise error

    handle = host.unet.register_forward_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def same(some, others):
    return len(some) == len(others) and all(map(torch.equal, some, others))


class TestTheEndOfAJob:
    @pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
    def test_that_fails_lets_the_file_go(self, sd1, nets, error):
        bits, file = sd1.fingerprint(), sd1.storage.record_of(sd1.model).originals.file
        sd1.networks.loaded_networks[:] = [nets.make("a")]
        sd1.job()
        sd1.run_networks(*sd1.networks.loaded_networks)
        assert file.is_open
        sd1.networks.loaded_networks.clear()
        with failing_sampling(sd1, error), pytest.raises(type(error)):
            sd1.job()
        assert not file.is_open
        assert sd1.fingerprint() == bits
        assert sd1.panel.status()["lora_layers"] == {}

    def test_that_fails_while_networks_act_is_as_that_of_another(self, sd1, nets):
        sd1.set(fp8_lora="Add at run time")
        sd1.networks.loaded_networks[:] = [nets.make("a", IN_8_BITS)]
        with failing_sampling(sd1, RuntimeError("broken")), pytest.raises(RuntimeError, match="broken"):
            sd1.job()
        sd1.run_networks(*sd1.networks.loaded_networks)
        assert sd1.panel.status()["lora_layers"] == {"run time": 4}

    def test_costs_no_pictures_if_it_goes_wrong(self, sd1, monkeypatch):
        monkeypatch.setattr(sd1.lora, "after_job", lambda *_: 1 // 0)
        assert sd1.job().pictures
        assert "ZeroDivisionError" in sd1.errors.shown[-1]


class TestSettings:
    @pytest.mark.parametrize("override", [{"fp8_format": "int8", "fp8_storage": "Enable"}, {}])
    def test_changed_in_the_middle_of_a_job_are_for_the_next(self, host, override):
        """The API stores a value at once, and waits for its turn only then."""
        host.checkpoint()
        host.start(**ON, fp8_keep_layers="to_q")
        wanted = host.job(n_iter=2, **override)
        running = Running(host, n_iter=2, **override)
        host.opts.data.update(fp8_format="float8_e5m2", fp8_keep_layers="", fp8_lora="Add at run time")
        assert same(running.pictures(), wanted.pictures)
        assert running.result.infotexts == wanted.infotexts
        host.job()
        if not override:  # else the WebUI has put back what was saved when the job began
            assert host.format_in_use() == format_in_use("float8_e5m2")
        assert host.storage.record_of(host.model).applied.policy.keep == ()

    def test_that_a_script_overrides_when_a_job_begins_count(self, host):
        """Whichever of the scripts has its turn first."""
        host.checkpoint()
        host.start(**ON)
        real = host.scripts.ScriptRunner.run

        def run(self, method, p, *args, **kwargs):
            real(self, method, p, *args, **kwargs)
            if method == "before_process":
                p.override_settings["fp8_format"] = "int8"

        host.scripts.ScriptRunner.run = run
        assert "FP8 format: int8" in host.job().infotexts[0]
        host.scripts.ScriptRunner.run = real
        host.job()
        assert host.format_in_use() == format_in_use(host.opts.fp8_format)
        assert host.opts.fp8_format != "int8"

    def test_of_a_job_are_no_others(self, sd1):
        """What another thread does while a job with overrides is running: it looks at what is saved."""
        running = Running(sd1, fp8_format="int8")
        sd1.opts.data["fp8_format"] = "float8_e4m3fn unscaled"
        assert sd1.settings.read_policy().format == "float8_e4m3fn unscaled"
        sd1.settings.repair_saved_values()
        running.pictures()

    def test_of_a_job_that_ended_unseen_are_forgotten(self, sd1):
        p = sd1.processing.StableDiffusionProcessing("a cat", {"fp8_format": "int8"})
        sd1.settings.begin_job(p)
        assert sd1.settings.read_policy().format == "int8"
        del p
        assert sd1.settings.read_policy().format == sd1.opts.fp8_format


class TestWhoAsks:
    """The panel, its route, and whoever lists all options."""

    @staticmethod
    def ask(host):
        return host.panel.status(), host.panel.status_html(), host.opts.fp8_status

    def test_does_not_touch_the_model(self, sd1, nets, monkeypatch):
        """A job may be changing it: a dictionary that it goes through, a file that it closes."""
        sd1.run_networks(nets.make("a"))
        told = self.ask(sd1)
        assert told[0]["lora_layers"] == {"checkpoint file": 4}

        def touched(*_, **__):
            raise AssertionError("the model was touched")

        for module, name in ((sd1.snapshot, "measure"), (sd1.lora, "layers_by_source"), (sd1.snapshot, "record_of")):
            monkeypatch.setattr(module, name, touched)
        monkeypatch.setattr(sd1.sd_models, "model_data", None)
        assert self.ask(sd1) == told

    def test_in_the_middle_of_a_job_gets_an_answer_at_once(self, sd1):
        running = Running(sd1, fp8_format="int8")
        status, shown, listed = self.ask(sd1)
        assert status["parts"][0]["format"] == "int8", "the job has converted the model"
        assert shown == listed
        running.pictures()

    def test_in_the_middle_of_a_job_that_has_converted_the_model_in_place(self, host):
        host.checkpoint()
        host.start()
        running = Running(host, **ON)
        assert host.panel.status()["enabled"] is True
        running.pictures()
        host.job()
        assert host.panel.status()["enabled"] is False

    def test_between_two_jobs_is_told_what_is_true_then(self, sd1):
        for name in ("int8", "float8_e4m3fn unscaled", "int8"):
            sd1.job(fp8_format=name)
            assert sd1.panel.status()["parts"][0]["format"] == sd1.format_in_use() == format_in_use(name)
        sd1.job()
        assert sd1.panel.status()["parts"][0]["format"] == sd1.format_in_use() == FORMAT_BY_DEFAULT
        with pytest.raises(ValueError, match="int9"):
            sd1.job(fp8_format="int9")
        assert sd1.panel.status()["parts"][0]["format"] == sd1.format_in_use()

    def test_after_the_model_was_put_aside(self, sd1):
        sd1.sd_models.unload_model_weights()
        assert sd1.panel.status()["loaded"] is (sd1.model is not None)

    def test_after_another_checkpoint_was_chosen(self, sd1):
        b = sd1.checkpoint("b", seed=2)
        sd1.switch_to(b)
        assert sd1.panel.status()["checkpoint"] == "b.safetensors"
        sd1.set(fp8_storage="Disable")
        assert (sd1.panel.status()["enabled"], sd1.panel.status()["parts"]) == (False, [])

    def test_what_was_told_never_changes(self, sd1, nets):
        before = sd1.snapshot.latest()
        copy = dataclasses.replace(before)
        sd1.set(fp8_format="int8")
        sd1.run_networks(nets.make("a"))
        assert before == copy != sd1.snapshot.latest()
        with pytest.raises(dataclasses.FrozenInstanceError):
            before.enabled = False

    def test_a_look_that_finds_all_as_it_has_to_be_measures_nothing(self, sd1, monkeypatch):
        told = []
        publish = sd1.snapshot.publish
        monkeypatch.setattr(sd1.snapshot, "publish", lambda: told.append(1) or publish())
        sd1.job(n_iter=3)
        assert len(told) == 1, "at its end"


REPLACING = """
from modules import processing, script_callbacks

before = processing.process_images_inner

def process_images_inner(*args, **kwargs):
    return before(*args, **kwargs)

processing.process_images_inner = process_images_inner
script_callbacks.on_script_unloaded(lambda: setattr(processing, "process_images_inner", before))
"""


class TestReloadUI:
    def test_in_the_middle_of_a_job(self, sd1, nets):
        """All stays in force for it, and nobody waits."""
        sd1.networks.loaded_networks[:] = [nets.make("a")]
        wanted, bits = sd1.job().pictures, sd1.fingerprint()
        running = Running(sd1)
        sd1.reload_ui()
        assert sd1.fingerprint() == bits
        assert same(running.pictures(), wanted)
        assert same(sd1.job().pictures, wanted)

    def test_a_job_between_unloading_and_loading(self, sd1):
        """It is made as all others are; so are those that were waiting."""
        wanted, script = sd1.job(fp8_format="int8"), sd1.scripts.ScriptRunner()
        sd1.job()
        sd1.script_callbacks.run("script_unloaded")
        made = sd1.processing.StableDiffusionProcessing("a cat", {"fp8_format": "int8"})
        made.scripts = script
        made = sd1.processing.process_images(made)
        assert same(made.pictures, wanted.pictures)
        assert made.infotexts == wanted.infotexts
        assert sd1.panel.status()["parts"][0]["format"] == "int8"
        sd1._load_scripts(True)
        sd1._build_page()
        assert same(sd1.job(fp8_format="int8").pictures, wanted.pictures)

    def test_options_stay_in_meanwhile(self, sd1):
        sd1.set(fp8_format="int8")
        keys = list(sd1.opts.data_labels)
        sd1.script_callbacks.run("script_unloaded")
        assert list(sd1.opts.data_labels) == keys
        assert sd1.opts.fp8_format == "int8"

    def test_beside_one_that_takes_off_what_it_replaced(self, host, tmp_path, monkeypatch, nets):
        """Then what was put above it is off as well."""
        script, load_scripts = tmp_path / "foreign.py", host.scripts.load_scripts
        script.write_text(REPLACING)
        monkeypatch.setattr(host.scripts, "load_scripts", lambda paths: load_scripts([script, *paths]))
        host.checkpoint()
        plain = host.processing.process_images_inner
        host.start(**ON)
        file = host.storage.record_of(host.model).originals.file
        for _ in range(3):
            host.reload_ui()
            host.run_networks(nets.make("a"))
            assert file.is_open
            host.networks.loaded_networks.clear()
            assert host.job().pictures
            assert not file.is_open
        host.reload_ui(extension=False)
        host.script_callbacks.run("script_unloaded")
        assert host.processing.process_images_inner is plain

    def test_that_takes_the_extension_out_waits_for_the_job(self, sd1):
        need_format_of_the_webui(sd1)
        wanted = sd1.job().pictures
        running = Running(sd1)
        reload = threading.Thread(target=sd1.reload_ui, kwargs={"extension": False}, daemon=True)
        reload.start()
        reload.join(0.3)
        assert reload.is_alive()
        assert sd1.quantized()
        assert same(running.pictures(), wanted)
        reload.join(PATIENCE)
        assert not reload.is_alive()
        assert not sd1.quantized()
        assert "fp8_format" not in sd1.opts.data_labels

    def test_after_the_folder_was_deleted(self, sd1, tmp_path):
        need_format_of_the_webui(sd1)
        sd1.script_callbacks.clear_callbacks()
        sys.modules["lib_fp8.webui"].register_callbacks(tmp_path / "gone")
        sd1.script_callbacks.run("script_unloaded")
        assert not sd1.quantized()
        assert "fp8_format" not in sd1.opts.data_labels

    def test_without_the_lora_extension_afterwards(self, sd1, nets):
        """Nobody could take its networks out any more."""
        bits = sd1.fingerprint()
        sd1.run_networks(nets.make("a"))
        sd1.opts.disabled_extensions = [Path(sys.modules["networks"].__file__).parent.name]
        sd1.with_lora = False
        sd1.reload_ui()
        assert sd1.fingerprint() == bits
        assert sd1.quantized()


class ReadByOthers(dict):
    """The dictionary of options while another thread goes through it."""

    def _written(self, *_, **__):
        raise AssertionError("written to while others read it")

    __setitem__ = __delitem__ = pop = popitem = update = clear = setdefault = __ior__ = _written


class TestOptions:
    def test_are_brought_into_order_in_another_dictionary(self, host):
        host.start()
        for extension in (True, False, True):
            host.opts.disabled_extensions = []
            before = host.opts.data_labels = ReadByOthers(host.opts.data_labels)
            keys = list(before)
            reader = iter(before.items())
            next(reader)
            host.reload_ui(extension=extension)
            assert [key for key, _ in reader] == keys[1:]
            assert ("fp8_format" in host.opts.data_labels) is extension

    def test_are_never_missing_in_between(self, host, monkeypatch):
        """Whichever dictionary is in use at a moment, it holds all of them."""
        host.start()
        seen, real, keys = [], type(host.opts).__setattr__, set(host.opts.data_labels)

        def noting(self, key, value):
            if key == "data_labels":
                seen.append(value := ReadByOthers(value))
            real(self, key, value)

        monkeypatch.setattr(type(host.opts), "__setattr__", noting)
        host.reload_ui()
        assert seen
        assert all(set(labels) == keys for labels in seen)
