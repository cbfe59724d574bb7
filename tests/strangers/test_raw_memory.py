"""Ways to the memory behind a weight, of which there is none, must raise or give values, not crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Each case runs in a forked process of its own, because the failure is a segmentation fault.
SCRIPT = """
import json, os, sys
import torch
import lib_fp8

torch.set_num_threads(1)
layer = torch.nn.Linear(8, 4).requires_grad_(False)
lib_fp8.convert_model(layer, lib_fp8.Policy(format="int8", keep=()))
weight, values = layer.weight, layer.weight.dequantize()

def set_of_a_plain_tensor():
    return torch.zeros(4, 8).set_(weight) + 0

def from_dlpack():
    return torch.from_dlpack(weight) + 0

def share_memory():
    layer.share_memory()
    return layer.weight + 0

def bytes_of_the_storage():
    return torch.frombuffer(bytes(weight.untyped_storage()), dtype=torch.float32).view(4, 8)

def list_of_the_storage():
    return torch.tensor(weight.storage().tolist()).view(4, 8)

def clone_of_the_storage():
    return torch.empty(0).set_(weight.untyped_storage().clone()).view(4, 8)

found = {}
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            same = torch.equal(globals()[name](), values)
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            os._exit(0)  # refused
        os._exit(0 if same else 1)
    found[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(found))
"""

CASES = [
    "set_of_a_plain_tensor",
    "from_dlpack",
    "share_memory",
    "bytes_of_the_storage",
    "list_of_the_storage",
    "clone_of_the_storage",
]


@pytest.fixture(scope="module")
def exit_codes():
    if not hasattr(os, "fork"):
        pytest.skip("the cases are forked processes")
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *CASES]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("case", CASES)
def test_memory_is_refused_or_holds_the_values(exit_codes, case):
    assert exit_codes[case] == 0
