"""Files written by strangers hold plain values, or are not written at all; never raw bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch

import lib_fp8
from strangers.helpers import convert, truth

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

READER = """
import json, sys
import torch

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "lib_fp8":
            raise ImportError("lib_fp8 is not installed here")

sys.meta_path.insert(0, Blocked())
found = {}
for path in sys.argv[1:]:
    for loader in ({}, {"weights_only": True}):
        state = torch.load(path, map_location="cpu", **loader)
        found.setdefault(path, []).append(
            {name: [type(v).__name__, str(v.dtype), v.requires_grad, v.float().tolist()] for name, v in state.items()}
        )
assert not any(name.startswith("lib_fp8") for name in sys.modules)
print(json.dumps(found))
"""


def _model(storage_format, dtype):
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(6, 5), torch.nn.Linear(6, 5))
    return convert(model.to(dtype).requires_grad_(False), storage_format)


@pytest.fixture(scope="module")
def read_elsewhere(tmp_path_factory):
    """Saves models of every format and dtype; gives them and what a process without lib_fp8 reads."""
    folder, models = tmp_path_factory.mktemp("saved"), {}
    with torch.random.fork_rng():
        for format_name in lib_fp8.format_names():
            if lib_fp8.get_format(format_name).problem("cpu") is not None:
                continue
            for dtype_name, dtype in DTYPES.items():
                model = models[format_name, dtype_name] = _model(lib_fp8.get_format(format_name), dtype)
                stem = f"{format_name.replace(' ', '_')}-{dtype_name}"
                torch.save(model.state_dict(), folder / f"{stem}-state.pt")
                torch.save(dict(model.named_parameters()), folder / f"{stem}-parameters.pt")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    files = sorted(str(path) for path in folder.iterdir())
    result = subprocess.run(
        [sys.executable, "-c", READER, *files], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return folder, models, json.loads(result.stdout)


@pytest.mark.parametrize("kind", ["state", "parameters"])
@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("format_name", lib_fp8.format_names())
def test_torch_file_is_read_where_the_library_is_missing(read_elsewhere, format_name, dtype_name, kind):
    folder, models, found = read_elsewhere
    if (format_name, dtype_name) not in models:
        pytest.skip(lib_fp8.get_format(format_name).problem("cpu"))
    path = folder / f"{format_name.replace(' ', '_')}-{dtype_name}-{kind}.pt"
    for state in found[str(path)]:
        model = models[format_name, dtype_name]
        assert list(state) == list(model.state_dict())
        for name, parameter in model.named_parameters():
            plain = truth(parameter) if isinstance(parameter, lib_fp8.QuantWeight) else parameter
            type_name, dtype, requires_grad, values = state[name]
            assert type_name == ("Tensor" if kind == "state" else "Parameter")
            assert dtype == str(plain.dtype)
            assert not requires_grad
            assert values == plain.float().tolist()


@pytest.fixture
def state(storage_format, logical_dtype):
    with torch.random.fork_rng():
        return _model(storage_format, logical_dtype).state_dict()


def _stored_plainly(state, loaded):
    assert set(loaded) == set(state)
    for name, value in state.items():
        plain = truth(value) if isinstance(value, lib_fp8.QuantWeight) else value
        assert loaded[name].dtype == plain.dtype
        assert torch.equal(loaded[name], plain)


def test_safetensors_file_is_plain_or_refused(state, tmp_path):
    path = tmp_path / "model.safetensors"
    try:
        safetensors.torch.save_file(state, path)
    except (RuntimeError, ValueError, TypeError):
        assert not path.exists()
    else:
        _stored_plainly(state, safetensors.torch.load_file(path))


def test_safetensors_bytes_are_plain_or_refused(state):
    try:
        data = safetensors.torch.save(state)
    except (RuntimeError, ValueError, TypeError):
        return
    _stored_plainly(state, safetensors.torch.load(data))


def test_safetensors_model_is_plain_or_refused(storage_format, logical_dtype, tmp_path):
    with torch.random.fork_rng():
        model = _model(storage_format, logical_dtype)
    path = tmp_path / "model.safetensors"
    try:
        safetensors.torch.save_model(model, str(path))
    except (RuntimeError, ValueError, TypeError):
        assert not path.exists()
    else:
        _stored_plainly(model.state_dict(), safetensors.torch.load_file(path))


def test_safetensors_file_of_dequantized_tensors(state, tmp_path):
    # The way that the refusal names.
    plain = {name: value.dequantize() if hasattr(value, "qdata") else value for name, value in state.items()}
    safetensors.torch.save_file(plain, tmp_path / "model.safetensors")
    _stored_plainly(state, safetensors.torch.load_file(tmp_path / "model.safetensors"))


def test_safetensors_file_fills_a_converted_model(storage_format, logical_dtype, tmp_path):
    with torch.random.fork_rng():
        model = _model(storage_format, logical_dtype)
    plain = {name: torch.full(value.shape, 0.25, dtype=value.dtype) for name, value in model.state_dict().items()}
    safetensors.torch.save_file(plain, tmp_path / "model.safetensors")
    model.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert isinstance(model[1].weight, lib_fp8.QuantWeight)
    assert torch.allclose(truth(model[1].weight), plain["1.weight"], rtol=1e-3)
