"""A torch without float8, as 2.0 is: the import works, int8 takes over and says so once."""

from __future__ import annotations

import json

import pytest
import torch
from helpers import FORMAT_NAMES, run_python

WITHOUT_FLOAT8 = """
import json, torch
for name in [name for name in dir(torch) if name.startswith("float8_")]:
    delattr(torch, name)
import lib_fp8
"""


def test_import_and_formats():
    code = """
print(json.dumps({name: lib_fp8.get_format(name).problem("cpu") for name in lib_fp8.format_names()}))
"""
    problems = json.loads(run_python(WITHOUT_FLOAT8 + code))
    assert problems.pop("int8") is None
    assert len(problems) == 3
    for name, problem in problems.items():
        assert problem == f"torch {torch.__version__} has no {name.split()[0]}"


@pytest.fixture(scope="module")
def outcomes():
    """What was reported in an interpreter without float8, by format and way of converting."""
    code = """
def use(name, how):
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    policy = lib_fp8.Policy(name, keep=())
    if how == "convert":
        report = lib_fp8.convert_model(model, policy)
    else:
        with lib_fp8.StreamingConversion([(model, policy)]) as streaming:
            model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()})
        (report,) = streaming.reports()
    model(torch.randn(2, 8, requires_grad=True)).sum().backward()
    restored = lib_fp8.restore_model(model)
    return report.format, report.converted, restored, report.notes

names = lib_fp8.format_names()
print(json.dumps({f"{name} {how}": use(name, how) for name in names for how in ("convert", "stream")}))
"""
    return json.loads(run_python(WITHOUT_FLOAT8 + code))


@pytest.mark.parametrize("how", ["convert", "stream"])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_int8_takes_over_with_one_note(outcomes, name, how):
    used, converted, restored, notes = outcomes[f"{name} {how}"]
    assert (used, converted, restored) == ("int8", 3, 3)
    if name == "int8":
        assert notes == []
    else:
        (note,) = notes
        assert note == f"torch {torch.__version__} has no {name.split()[0]}: int8 is used instead of {name}"
