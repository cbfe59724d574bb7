"""What is read of checkpoint files by ordinary reads: the header, damage, and single tensors."""

from __future__ import annotations

import json
import zipfile
from unittest import mock

import pytest
import safetensors.torch
import torch
from dialect_files import safetensors_bytes
from safetensors import SafetensorError, safe_open

from lib_fp8.checkpoint.header import TORCH_DTYPES, DamagedError, TensorInfo, header_of_file
from lib_fp8.checkpoint.tensors import can_be_read, read_tensor

WRITTEN_BY_SAFETENSORS = [
    name
    for name in ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "I16", "F16", "BF16", "I32", "F32", "I64", "F64")
    if can_be_read(name)
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.safetensors"


def raw(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F16", shape=(2,), begin=0, end=4):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize("name", WRITTEN_BY_SAFETENSORS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 5)], ids=str)
def test_tensors_are_those_that_safetensors_writes(path, name, shape):
    """Bit for bit, in any place of the file."""
    dtype = TORCH_DTYPES[name]
    generator = torch.Generator().manual_seed(3)
    value = (torch.randn(shape, generator=generator) * 3).to(dtype)
    tensors = {"before": torch.ones(5), "it": value, "behind": torch.zeros(3, dtype=torch.int8)}
    safetensors.torch.save_file(tensors, path, {"format": "pt", "who": "a test"})
    header = header_of_file(path)
    assert header.metadata == {"format": "pt", "who": "a test"}
    assert header.tensors["it"] == TensorInfo(name, shape)
    with path.open("rb") as file:
        found = read_tensor(file, header, "it")
    assert (found.dtype, tuple(found.shape)) == (dtype, shape)
    flat = (tensor.reshape(-1).view(torch.uint8).tolist() for tensor in (found, value))
    assert next(flat) == next(flat)


def test_reading_maps_nothing_and_reads_only_the_tensor(path):
    safetensors.torch.save_file({"a": torch.ones(1000), "b": torch.full((7,), 2.0)}, path)
    header = header_of_file(path)
    with path.open("rb", buffering=0) as file:
        counted = mock.Mock(wraps=file)
        assert read_tensor(counted, header, "b").tolist() == [2.0] * 7
    assert [call[0] for call in counted.method_calls] == ["seek", "readinto"]
    assert len(counted.readinto.call_args.args[0]) == 28


def test_a_tensor_that_is_cut_off_while_the_file_is_open(path):
    safetensors.torch.save_file({"a": torch.ones(1000)}, path)
    header = header_of_file(path)
    path.write_bytes(path.read_bytes()[:-1])
    with path.open("rb") as file, pytest.raises(OSError, match="ends within a"):
        read_tensor(file, header, "a")


def test_a_dtype_that_torch_does_not_have(path):
    path.write_bytes(raw({"a": entry("F4", (8,), 0, 4)}, bytes(4)))
    assert not can_be_read("F4")
    with path.open("rb") as file, pytest.raises(TypeError, match="F4"):
        read_tensor(file, header_of_file(path), "a")


def test_what_is_not_known_cannot_be_read():
    assert can_be_read("F16")
    assert not can_be_read("F8_E4M4")
    assert can_be_read("F8_E4M3") == ("F8_E4M3" in TORCH_DTYPES and "F8_E4M3" in WRITTEN_BY_SAFETENSORS)


GOOD = raw({"a": entry(), "b": entry("I8", (3,), 4, 7)}, bytes(7))

DAMAGED = {
    "empty": (b"", "header"),
    "shorter than the length of the header": (GOOD[:5], "header"),
    "header alone": (GOOD[:-7], "bytes"),
    "cut": (GOOD[:-1], "should have"),
    "longer than it says": (GOOD + b"x", "should have"),
    "header cut": (GOOD[:30], "header"),
    "header beyond the file": ((10**7).to_bytes(8, "little") + GOOD[8:], "header"),
    "header beyond everything": ((2**63).to_bytes(8, "little") + GOOD[8:], "header"),
    "a web page": (b"<!DOCTYPE html><html>" * 50, "header"),
    "no object": (raw([1, 2]), "no safetensors"),
    "no JSON": (raw(b"{" + b"x" * 20), "cannot be read"),
    "no text": (raw(b'{"\xff":1}'), "cannot be read"),
    "nested without end": (raw(b'{"a":' + b"[" * 200_000), "cannot be read"),
    "metadata that are no texts": (raw({"__metadata__": {"a": 1}}), "metadata"),
    "no entry": (raw({"a": 1}), "what a is"),
    "an entry without a place": (raw({"a": {"dtype": "F16", "shape": [2]}}, bytes(4)), "what a is"),
    "a negative size": (raw({"a": entry(shape=(-2,))}, bytes(4)), "impossible"),
    "half a size": (raw({"a": entry(shape=(2.0,))}, bytes(4)), "impossible"),
    "end before begin": (raw({"a": entry(begin=4, end=0)}, bytes(4)), "impossible"),
    "fewer bytes than the shape needs": (raw({"a": entry(shape=(3,))}, bytes(4)), "do not hold"),
    "overlapping": (raw({"a": entry(), "b": entry(begin=2, end=6)}, bytes(6)), "b begins"),
    "a gap": (raw({"a": entry(), "b": entry(begin=6, end=10)}, bytes(10)), "b begins"),
    "a name twice": (raw(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2), bytes(4)), "names a twice"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_told(case, path):
    content, words = DAMAGED[case]
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=words):
        header_of_file(path)
    if case != "a name twice":  # the last one counts there
        with pytest.raises((SafetensorError, OSError, ValueError)), safe_open(path, "pt"):
            pass


def test_nothing_is_wrong_with_a_good_one(path):
    path.write_bytes(GOOD)
    assert header_of_file(path).tensors == {"a": TensorInfo("F16", (2,)), "b": TensorInfo("I8", (3,))}
    with safe_open(path, "pt") as opened:
        assert set(opened.keys()) == {"a", "b"}


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_without_tensors(path, metadata):
    path.write_bytes(safetensors_bytes({}, metadata))
    assert header_of_file(path).tensors == {}


def test_a_dtype_of_the_future_is_no_damage(path):
    path.write_bytes(raw({"a": entry("F3", (8,), 0, 3)}, bytes(3)))
    assert header_of_file(path).tensors == {"a": TensorInfo("F3", (8,))}


class TestPickled:
    @pytest.mark.parametrize("legacy", [False, True])
    def test_what_torch_writes(self, tmp_path, legacy):
        path = tmp_path / "a.ckpt"
        torch.save({"state_dict": {"a": torch.ones(9)}}, path, _use_new_zipfile_serialization=not legacy)
        assert header_of_file(path).tensors == {}

    def test_a_large_comment_is_no_damage(self, tmp_path):
        path = tmp_path / "a.ckpt"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("data.pkl", bytes(200_000))
            archive.comment = b"c" * 65535
        assert header_of_file(path).tensors == {}

    @pytest.mark.parametrize("keep", [0, 3, 100, -1])
    def test_a_cut_one(self, tmp_path, keep):
        path = tmp_path / "a.ckpt"
        torch.save({"a": torch.ones(100)}, path)
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(DamagedError):
            header_of_file(path)


def test_what_cannot_be_opened_is_not_called_damaged(tmp_path):
    with pytest.raises(FileNotFoundError):
        header_of_file(tmp_path / "none.safetensors")
    with pytest.raises(OSError):  # noqa: PT011  # a kind of its own on each system
        header_of_file(tmp_path)
