"""Without float8, without safetensors, without a GPU: the library imports, falls back and explains once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lib_fp8
from lib_fp8 import formats

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, sys
import torch

for name in [name for name in dir(torch) if name.startswith("float8")]:
    delattr(torch, name)

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("safetensors", "numpy", "modules", "gradio"):
            raise ImportError(name)

if len(sys.argv) > 1:
    sys.meta_path.insert(0, Blocked())
    for name in [name for name in sys.modules if name.split(".")[0] == "safetensors"]:
        del sys.modules[name]

import lib_fp8

problems = {name: lib_fp8.get_format(name).problem("cpu") for name in lib_fp8.format_names()}
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(5)])
x = torch.ones(2, 8)
expected = model(x)
report = lib_fp8.convert_model(model, lib_fp8.Policy(keep=()))
error = ((model(x) - expected).norm() / expected.norm()).item()
weight = model[0].weight
weight += 1
weight[0] = 0
weight.data = torch.ones(8, 8)
half = weight.half()
print(json.dumps({
    "problems": problems, "format": report.format, "notes": list(report.notes), "converted": report.converted,
    "error": error, "type": type(half).__name__, "storage": str(half.qdata.dtype),
}))
"""


@pytest.fixture(scope="module")
def bare():
    """What a process reports whose torch has no float8 and where safetensors and numpy cannot be imported."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, "block"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_formats_say_what_is_missing(bare):
    for name, problem in bare["problems"].items():
        if name == "int8":
            assert problem is None
        else:
            assert "has no float8" in problem
            assert "\n" not in problem


def test_default_policy_falls_back_to_int8_with_one_explanation(bare):
    assert bare["format"] == "int8"
    assert bare["converted"] == 5
    assert len(bare["notes"]) == 1
    assert "int8 is used instead of float8_e4m3fn" in bare["notes"][0]


def test_fallback_works(bare):
    assert bare["error"] < 0.02
    assert bare["type"] == "QuantWeight"
    assert bare["storage"] == "torch.int8"


@pytest.mark.parametrize("kind", ["mps", "xpu", "cuda"])
def test_device_that_is_not_there_gets_an_explanation(kind):
    if getattr(getattr(torch, kind, None), "is_available", lambda: False)():
        pytest.skip(f"this machine has {kind}")
    for name in lib_fp8.format_names():
        problem = lib_fp8.get_format(name).problem(kind)
        assert problem
        assert "\n" not in problem


def test_every_format_is_offered_by_name_on_any_torch():
    assert lib_fp8.format_names() == ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fn unscaled", "int8")
    assert formats.DEFAULT.name == "float8_e4m3fn"
    for name in lib_fp8.format_names():
        lib_fp8.Policy(format=name)
