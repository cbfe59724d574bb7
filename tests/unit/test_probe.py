"""What a format needs is tried on the device, told in one line, and cached."""

from __future__ import annotations

import pytest
import torch
from helpers import FORMAT_NAMES, all_tensors, need_format, seeded, snapshot
from torch import nn

from lib_fp8 import Policy, StreamingConversion, convert_model, get_format
from lib_fp8.convert import usable_format
from lib_fp8.formats import probe

problem = probe.format_problem.__wrapped__


@pytest.fixture(autouse=True)
def probed_anew():
    """Nothing that is found out about a device of a test is remembered."""
    probe.format_problem.cache_clear()
    yield
    probe.format_problem.cache_clear()


def breaks(monkeypatch, name, error=None, result=None, when=lambda *args, **kwargs: True):
    """A device on which an op of torch raises an error, or gives something else."""
    owner, _, attribute = name.rpartition(".")
    owner = torch.Tensor if owner == "Tensor" else torch
    real = getattr(owner, attribute)

    def op(*args, **kwargs):
        if not when(*args, **kwargs):
            return real(*args, **kwargs)
        if error is not None:
            raise error
        return result(real(*args, **kwargs))

    monkeypatch.setattr(owner, attribute, op)


@pytest.mark.parametrize("device_type", ["cpu", "meta"])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_what_this_torch_has_is_no_problem(name, device_type):
    found = get_format(name)
    has = isinstance(getattr(torch, found.storage_dtype_name, None), torch.dtype)
    assert (problem(found, device_type) is None) == has


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_device_that_is_not_there(name):
    need_format(name)
    assert problem(get_format(name), "no_such_device").startswith(f"no_such_device cannot hold {name} (")


REFUSALS = {
    "frexp": (
        NotImplementedError("The operator 'aten::frexp.Tensor_out' is not implemented for the MPS device"),
        "float8",
    ),
    "Tensor.round_": (RuntimeError("not here"), "int8"),
    "Tensor.clamp_": (RuntimeError("not here\nfor reasons"), ""),
    "empty_like": (TypeError(""), ""),
    "Tensor.amax": (NotImplementedError(), "scaled"),
    "Tensor.mul_": (RuntimeError("mixed dtypes"), "scaled"),
}


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("op", REFUSALS)
def test_an_op_that_a_device_lacks(monkeypatch, name, op):
    found = need_format(name)
    error, of = REFUSALS[op]
    breaks(monkeypatch, op, error)
    needs = {"": True, "scaled": found.scale_of is not None}.get(of, name.startswith(of) and found.scale_of is not None)
    said = problem(found, "cpu")
    if not needs:
        assert said is None
    else:
        reason = str(error).partition("\n")[0] or type(error).__name__
        assert said == f"cpu cannot hold {name} ({reason})"


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_device_that_casts_wrongly(monkeypatch, name, dtype):
    """From the storage dtype to any of those that a weight can have."""
    found = need_format(name)
    asked = torch.float32 if name == "int8" else dtype
    breaks(
        monkeypatch,
        "Tensor.to",
        result=lambda tensor: tensor + 1,
        when=lambda tensor, *args, **kwargs: tensor.dtype == found.storage_dtype and asked in args,
    )
    assert problem(found, "cpu") == f"cpu does not cast {name} correctly"


def test_a_device_that_rounds_to_nothing(monkeypatch):
    breaks(monkeypatch, "Tensor.round_", result=torch.zeros_like)
    assert problem(get_format("int8"), "cpu") == "cpu does not cast int8 correctly"


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_device_that_loses_bits_on_the_way(monkeypatch, name):
    found = need_format(name)
    breaks(
        monkeypatch,
        "Tensor.cpu",
        result=lambda tensor: torch.zeros_like(tensor.view(torch.uint8)).view(tensor.dtype),
        when=lambda tensor: tensor.dtype == found.storage_dtype,
    )
    assert problem(found, "cpu") == f"cpu does not move {name} correctly"


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_device_without_bfloat16_holds_weights_of_the_others(monkeypatch, name):
    found = need_format(name)
    error = TypeError("BFloat16 is not supported on MPS")
    breaks(monkeypatch, "Tensor.to", error, when=lambda tensor, *args, **kwargs: torch.bfloat16 in args)
    assert problem(found, "cpu") is None


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_no_memory_for_trying_says_nothing(monkeypatch, name):
    found = need_format(name)
    probe.format_problem.cache_clear()
    with monkeypatch.context() as patch:
        breaks(patch, "empty_like", RuntimeError("There is not enough GPU video memory available!"))
        with pytest.raises(RuntimeError, match="video memory"):
            found.problem("cpu")
    assert found.problem("cpu") is None


def test_a_device_is_probed_once(monkeypatch):
    found = get_format("int8")
    assert found.problem("cpu") is None
    monkeypatch.setattr(torch, "tensor", None)
    assert found.problem("cpu") is None


# What follows from it


def lacking(monkeypatch, *names):
    """A device that lacks these formats."""
    real = type(get_format("int8")).problem
    monkeypatch.setattr(
        type(get_format("int8")),
        "problem",
        lambda self, device: f"it lacks {self.name}" if self.name in names else real(self, device),
    )


@pytest.mark.parametrize(
    ("wanted", "lacks", "used"),
    [
        ("int8", ["int8"], "float8_e4m3fn"),
        ("float8_e4m3fn", ["float8_e4m3fn"], "int8"),
        ("float8_e4m3fn", ["float8_e4m3fn", "int8"], "float8_e5m2"),
        ("float8_e4m3fn unscaled", ["float8_e4m3fn unscaled"], "int8"),
        ("float8_e5m2", ["int8"], "float8_e5m2"),
    ],
)
def test_what_works_takes_over(monkeypatch, wanted, lacks, used):
    need_format("float8_e5m2")
    lacking(monkeypatch, *lacks)
    model = seeded(lambda: nn.Linear(8, 8))
    report = convert_model(model, Policy(wanted, ()))
    assert (report.format, model.weight.format.name) == (used, used)
    assert report.notes == (() if used == wanted else (f"it lacks {wanted}: {used} is used instead of {wanted}",))


@pytest.mark.parametrize("streams", [False, True])
def test_where_nothing_works_the_weights_stay_and_it_is_told(monkeypatch, streams):
    lacking(monkeypatch, *FORMAT_NAMES)
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Conv2d(3, 4, 3)))
    before, policy = snapshot(model), Policy("float8_e5m2", ())
    if streams:
        with StreamingConversion([(model, policy)]) as stream:
            model.load_state_dict(before)
        (report,) = stream.reports()
    else:
        report = convert_model(model, policy)
    assert all(type(tensor) is nn.Parameter for tensor in all_tensors(model).values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in all_tensors(model).items())
    assert (report.converted, report.kept) == (0, (("no format that the device can use", 2),))
    line = "it lacks float8_e5m2; it lacks int8; it lacks float8_e4m3fn: the weights stay in full precision"
    assert report.notes == (line,)
    assert usable_format(policy, torch.device("cpu")) == (None, line)
