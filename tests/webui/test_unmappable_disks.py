"""Disks that cannot be mapped into memory are used all the same; files that cannot be opened are no damaged ones."""

from __future__ import annotations

import errno

import pytest
import safetensors.torch
import torch

from lib_fp8 import source
from webui.nets import ON

OFF = {"fp8_storage": "Disable"}
FAILURES = {
    "network mount": OSError(errno.ENODEV, "No such device"),
    "FUSE": OSError(errno.EINVAL, "Invalid argument"),
    "address space": MemoryError("Cannot allocate memory"),
    "torch": RuntimeError("unable to mmap 123 bytes from file <a.safetensors>: Cannot allocate memory (12)"),
}


@pytest.fixture(params=FAILURES)
def unmappable(host, request, monkeypatch):
    """A WebUI with checkpoints on such a disk, told to load without a map: its own way out."""

    def fail(*_, **__):
        raise FAILURES[request.param]

    monkeypatch.setattr(source, "safe_open", fail)
    monkeypatch.setattr(safetensors.torch, "load_file", fail)
    monkeypatch.setattr(safetensors, "safe_open", fail)
    host.a, host.b = host.checkpoint("a"), host.checkpoint("b", seed=2)
    host.opts.data["disable_mmap_load_safetensors"] = True
    return host


def test_everything_works(unmappable, nets):
    """First load, another checkpoint, another format, networks from the file, off."""
    host = unmappable
    host.start(sd_model_checkpoint=host.a.title, **OFF)
    plain = host.fingerprint()
    host.set(**ON)
    assert host.set(fp8_format="int8") == [True]
    packed = host.fingerprint()
    host.run_networks(nets.make("a"))
    assert host.panel.status()["lora_layers"].keys() == {"checkpoint file"}
    host.run_networks()
    assert host.fingerprint() == packed
    host.switch_to(host.b)
    host.switch_to(host.a)
    assert host.fingerprint() == packed
    assert host.set(**OFF) == [True]
    assert host.fingerprint() == plain


def test_networks_merge_what_the_file_holds(unmappable, nets, monkeypatch):
    host = unmappable
    host.start(sd_model_checkpoint=host.a.title, **ON)
    a = nets.make("a")
    host.run_networks(a)
    monkeypatch.undo()  # the reference reads the file with safetensors
    nets.assert_merged(a)


@pytest.mark.parametrize("failure", FAILURES)
def test_a_map_that_fails_though_it_is_wanted(sd1, nets, monkeypatch, failure):
    """The WebUI has read the file; when a network comes, there is no room for the map any more."""

    def fail(*_, **__):
        raise FAILURES[failure]

    a, bits = nets.make("a"), sd1.fingerprint()
    with monkeypatch.context() as patched:
        patched.setattr(source, "safe_open", fail)
        sd1.run_networks(a)
    assert sd1.panel.status()["lora_layers"].keys() == {"checkpoint file"}
    nets.assert_merged(a)
    sd1.run_networks()
    assert sd1.fingerprint() == bits


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "not mapped"])
def test_the_setting_decides_whether_a_map_is_asked_for(sd1, nets, monkeypatch, mapped):
    asked = []
    real = source.safe_open
    monkeypatch.setattr(source, "safe_open", lambda *args, **kwargs: asked.append(args) or real(*args, **kwargs))
    sd1.opts.data["disable_mmap_load_safetensors"] = not mapped
    sd1.switch_to(sd1.checkpoint("b", seed=2))
    sd1.run_networks(nets.make("a"))
    assert bool(asked) == mapped
    assert sd1.panel.status()["lora_layers"].keys() == {"checkpoint file"}


class TestCheckpointFile:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8])
    @pytest.mark.parametrize("mapped", [True, False])
    def test_the_same_bits_either_way(self, tmp_path, dtype, mapped):
        value = (torch.randn(5, 7, generator=torch.Generator().manual_seed(1)) * 9).to(dtype)
        path = tmp_path / "a.safetensors"
        safetensors.torch.save_file({"x": torch.ones(3), "old.y": value}, path)
        file = source.CheckpointFile(path, lambda found: {"y": found["old.y"]}, mapped)
        assert torch.equal(file.tensor("y"), value)
        assert file.tensor("y").dtype == dtype
        assert file.tensor("x") is None
        assert file.is_open
        file.close()
        assert not file.is_open
        assert torch.equal(file.tensor("y"), value)

    @pytest.mark.parametrize("mapped", [True, False])
    def test_a_file_that_is_deleted_while_open(self, tmp_path, mapped):
        path = tmp_path / "a.safetensors"
        safetensors.torch.save_file({"x": torch.ones(3), "y": torch.zeros(2)}, path)
        file = source.CheckpointFile(path, mapped=mapped)
        assert file.tensor("x").tolist() == [1, 1, 1]
        try:
            path.unlink()
        except PermissionError:
            pytest.skip("this system lets nobody delete an open file")
        assert file.tensor("y").tolist() == [0, 0]

    @pytest.mark.parametrize("mapped", [True, False])
    def test_a_damaged_file(self, tmp_path, mapped):
        path = tmp_path / "a.safetensors"
        safetensors.torch.save_file({"x": torch.ones(3)}, path)
        path.write_bytes(path.read_bytes()[:-1])
        file = source.CheckpointFile(path, mapped=mapped)
        assert file.tensor("x") is None
        assert "cannot be read (it should have" in file.problem()
        assert not file.is_open


class TestWhatCannotBeOpened:
    @pytest.fixture
    def loaded(self, host):
        host.a, host.b = host.checkpoint("a"), host.checkpoint("b", seed=2)
        return host.start(sd_model_checkpoint=host.a.title, **ON)

    @pytest.mark.parametrize(
        ("error", "words"),
        [
            (
                PermissionError(errno.EACCES, "Permission denied"),
                r"cannot be read \(.*Permission denied.*Make it readable",
            ),
            (OSError(errno.EIO, "Input/output error"), r"cannot be read \(.*Input/output error"),
            (FileNotFoundError(errno.ENOENT, "No such file"), r"b\.safetensors is missing\. Put it back"),
        ],
    )
    def test_is_told_as_what_it_is(self, loaded, monkeypatch, error, words):
        real = type(loaded.folder).open

        def opened(path, *args, **kwargs):
            if path.name == "b.safetensors":
                raise error
            return real(path, *args, **kwargs)

        monkeypatch.setattr(type(loaded.folder), "open", opened)
        bits = loaded.fingerprint()
        with pytest.raises(RuntimeError, match=words) as caught:
            loaded.switch_to(loaded.b)
        assert "damaged" not in str(caught.value)
        assert "stays in use" in str(caught.value)
        assert loaded.fingerprint() == bits

    @pytest.mark.parametrize("size", [0, 4, 1000, -1, None], ids=["empty", "4", "1000", "last byte", "header only"])
    def test_damage_is_still_found(self, loaded, size):
        content = (loaded.folder / "b.safetensors").read_bytes()
        size = 8 + int.from_bytes(content[:8], "little") if size is None else size
        (loaded.folder / "b.safetensors").write_bytes(content[:size])
        with pytest.raises(RuntimeError, match=r"b\.safetensors is damaged or incomplete"):
            loaded.switch_to(loaded.b)
