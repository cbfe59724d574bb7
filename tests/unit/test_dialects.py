"""Foreign 8-bit layouts are told by name, and nothing else is taken for one."""

from __future__ import annotations

import pytest
import torch
from dialect_files import DIALECTS, HARMLESS, LAYER, write

from lib_fp8.checkpoint.dialects import find_dialect
from lib_fp8.checkpoint.header import header_of_file, header_of_tensors


@pytest.mark.parametrize("case", DIALECTS)
def test_each_is_told(case, tmp_path):
    name, tensors, metadata = DIALECTS[case]
    found = find_dialect(header_of_file(write(tmp_path / "a.safetensors", tensors, metadata)))
    assert found is not None
    assert name in found.name
    assert any(part in found.why for part in (*tensors, *metadata))


@pytest.mark.parametrize("case", DIALECTS)
def test_among_ordinary_layers(case, tmp_path):
    """Most of a file is in full precision, and the odd layer comes last."""
    name, tensors, metadata = DIALECTS[case]
    tensors = {**{f"{LAYER}.{number}.weight": ("F16", (4, 4)) for number in range(20)}, **tensors}
    found = find_dialect(header_of_file(write(tmp_path / "a.safetensors", tensors, metadata)))
    assert name in found.name


@pytest.mark.parametrize("case", HARMLESS)
def test_no_false_alarm(case, tmp_path):
    assert find_dialect(header_of_file(write(tmp_path / "a.safetensors", *HARMLESS[case]))) is None


@pytest.mark.parametrize("suffix", ["gguf", "safetensors", "ckpt"])
def test_gguf_is_told_by_its_first_bytes(suffix, tmp_path):
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"GGUF\x03\0\0\0" + bytes(64))
    assert find_dialect(header_of_file(path)).name == "GGUF"


def test_a_state_dict_is_told_by_its_tensors():
    codes = torch.zeros(64, 64, dtype=torch.int8)
    state = {"epoch": 3, f"{LAYER}.weight": codes, f"{LAYER}.SCB": torch.ones(64), "names": ["a"]}
    assert find_dialect(header_of_tensors(state)).name == "bitsandbytes int8"
    state[f"{LAYER}.weight"] = codes.half()
    assert find_dialect(header_of_tensors(state)) is None


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_state_dict_in_float8(dtype):
    if not hasattr(torch, dtype):
        pytest.skip(f"torch {torch.__version__} has no {dtype}")
    state = {f"{LAYER}.weight": torch.zeros(64, 64).to(getattr(torch, dtype))}
    assert find_dialect(header_of_tensors(state)) is None
    state[f"{LAYER}.scale_weight"] = torch.tensor(0.5)
    assert find_dialect(header_of_tensors(state)).name == "ComfyUI scaled FP8 (scale_weight)"
