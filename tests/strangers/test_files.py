"""Files written by strangers hold plain values of the logical dtype; never raw bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
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


def test_safetensors_file_is_plain(state, tmp_path):
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    _stored_plainly(state, safetensors.torch.load_file(tmp_path / "model.safetensors"))


def test_safetensors_bytes_are_plain(state):
    _stored_plainly(state, safetensors.torch.load(safetensors.torch.save(state)))


def test_safetensors_model_is_plain(storage_format, logical_dtype, tmp_path):
    with torch.random.fork_rng():
        model = _model(storage_format, logical_dtype)
    path = str(tmp_path / "model.safetensors")
    safetensors.torch.save_model(model, path)
    _stored_plainly(model.state_dict(), safetensors.torch.load_file(path))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    safetensors.torch.load_model(model, path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {name: value.cpu() for name, value in state.items()},
        lambda state: {name: value.contiguous() for name, value in state.items()},
        lambda state: {name: value.clone() for name, value in state.items()},
        lambda state: {name: value.half() for name, value in state.items()},
        lambda state: {name: value.to(torch.float32) for name, value in state.items()},
        lambda state: dict(sorted(state.items())),
    ],
    ids=["cpu", "contiguous", "clone", "half", "float", "sorted"],
)
def test_safetensors_file_of_what_savers_make_of_a_state_dict(state, tmp_path, change):
    changed = change(state)
    safetensors.torch.save_file(changed, tmp_path / "model.safetensors")
    _stored_plainly(changed, safetensors.torch.load_file(tmp_path / "model.safetensors"))


def test_safetensors_of_tied_weights(storage_format, tmp_path):
    """Each is saved under its own name; a file that names one weight twice is right, if longer than need be."""
    with torch.random.fork_rng():
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(6, 5))
    model[1].weight = model[0].weight
    convert(model, storage_format)
    state = model.state_dict()
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    _stored_plainly(state, safetensors.torch.load_file(tmp_path / "model.safetensors"))
    safetensors.torch.save_model(model, str(tmp_path / "whole.safetensors"))
    safetensors.torch.load_model(model, str(tmp_path / "whole.safetensors"))


def test_safetensors_refuses_the_weights_of_layers_and_says_what_to_save(storage_format, logical_dtype, tmp_path):
    with torch.random.fork_rng():
        model = _model(storage_format, logical_dtype)
    with pytest.raises(RuntimeError, match=r"\.dequantize\(\).*state_dict\(\)"):
        safetensors.torch.save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def test_numpy_file_is_plain(state, tmp_path):
    numpy_has = {name: value for name, value in state.items() if value.dtype != torch.bfloat16}
    np.savez(tmp_path / "model.npz", **numpy_has)
    with np.load(tmp_path / "model.npz") as loaded:
        _stored_plainly(numpy_has, {name: torch.from_numpy(loaded[name]) for name in loaded.files})


def _unet():
    diffusers = pytest.importorskip("diffusers")
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=8,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )


def _text_encoder():
    transformers = pytest.importorskip("transformers")
    return transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
        )
    )


@pytest.mark.parametrize("build", [_unet, _text_encoder], ids=["diffusers", "transformers"])
@pytest.mark.parametrize("shards", [False, True], ids=["one file", "shards"])
def test_save_pretrained_is_plain(storage_format, tmp_path, build, shards):
    with torch.random.fork_rng():
        model = convert(build().half(), storage_format)
    state = model.state_dict()
    assert sum(isinstance(value, lib_fp8.QuantWeight) for value in state.values()) > 10
    model.save_pretrained(tmp_path, max_shard_size="2KB" if shards else "1GB")
    loaded = {}
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1 if shards else len(files) == 1
    for file in files:
        loaded.update(safetensors.torch.load_file(file))
    _stored_plainly(state, loaded)


def test_safetensors_file_of_dequantized_tensors(state, tmp_path):
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
