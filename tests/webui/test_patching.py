"""Replacing the WebUI's functions, and leaving nothing behind."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

NAMES = {
    "sd_models": ["load_model_weights", "reload_model_weights", "check_fp8"],
    "networks": ["network_apply_weights"],
}


@pytest.fixture
def patching(newest):
    newest.start()
    return newest.patching


def functions(host):
    """Everything that the extension may replace, as it is now."""
    found = {
        (module, name): getattr(getattr(host, module), name, None) for module, names in NAMES.items() for name in names
    }
    found["processing", "cached_params"] = host.processing.StableDiffusionProcessing.cached_params
    return found


def wrapping(label):
    return lambda original: lambda: [*original(), label]


def test_undo_goes_backwards(patching):
    owner = ModuleType("owner")
    owner.a, owner.b = lambda: ["a"], lambda: ["b"]
    before, order = (owner.a, owner.b), []
    patches = patching.Patches()
    patches.replace(owner, "a", wrapping("ours"))
    patches.replace(owner, "b", wrapping("ours"))
    assert (owner.a(), owner.b()) == (["a", "ours"], ["b", "ours"])
    undo = patching.patches.undo
    patching.patches.undo = lambda key, obj, field: order.append(field) or undo(key, obj, field)
    try:
        patches.undo()
    finally:
        patching.patches.undo = undo
    assert order == ["b", "a"]
    assert (owner.a, owner.b) == before
    patches.undo()
    assert (owner.a, owner.b) == before


def test_a_replacement_that_cannot_be_made_changes_nothing(patching):
    owner = ModuleType("owner")
    owner.a = before = lambda: ["a"]
    patches = patching.Patches()
    with pytest.raises(AttributeError):
        patches.replace(owner, "missing", wrapping("ours"))
    with pytest.raises(ZeroDivisionError):
        patches.replace(owner, "a", lambda original: 1 // 0)
    patches.undo()
    assert owner.a is before


class TestInstall:
    @pytest.fixture
    def clean(self, host):
        """A WebUI that never saw the extension, and what it is made of."""
        host.checkpoint()
        host.start(extension=False)
        host.labels = dict(host.opts.data_labels)
        host.functions = functions(host)
        return host

    def webui(self):
        import lib_fp8.webui

        return lib_fp8.webui

    def test_twice_is_once(self, clean):
        webui = self.webui()
        webui.install()
        once = len(webui._patches._applied)
        webui.install()
        webui.install()
        assert len(webui._patches._applied) == once
        replaced = [key for key, original in clean.functions.items() if functions(clean)[key] is not original]
        present = [key for key, original in clean.functions.items() if original is not None]
        assert replaced == present
        webui._patches.undo()
        assert functions(clean) == clean.functions

    @pytest.mark.parametrize("part", ["settings", "loading", "following", "lora", "conditioning"])
    def test_one_that_fails_leaves_nothing(self, clean, part, monkeypatch):
        webui = self.webui()
        module, name = getattr(webui, part), "repair_saved_values" if part == "settings" else "install"
        real = getattr(module, name)

        def failing(*args):
            real(*args)
            raise RuntimeError("said the test")

        monkeypatch.setattr(module, name, failing)
        with pytest.raises(RuntimeError, match="said the test"):
            webui.install()
        assert functions(clean) == clean.functions
        assert clean.opts.data_labels == clean.labels
        assert clean.job().pictures
        monkeypatch.setattr(module, name, real)
        webui.install()
        assert functions(clean) != clean.functions

    def test_switched_off_it_leaves_the_functions_of_the_webui(self, clean):
        for _ in range(2):
            clean.reload_ui()
        clean.reload_ui(extension=False)
        lora = ("networks", "network_apply_weights")
        assert functions(clean) == clean.functions
        assert functions(clean)[lora] is sys.modules["networks"].network_apply_weights
