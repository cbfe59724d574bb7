"""The registry of formats, and what every format promises."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import pytest
import torch
from helpers import EVERYTHING

import lib_fp8
from lib_fp8 import Format, UnknownFormatError, format_names, get_format
from lib_fp8.formats import base, register


@pytest.fixture
def half_format(monkeypatch):
    """A format made by a stranger: float16 storage, no scale."""
    monkeypatch.setattr(base, "_registry", dict(base._registry))
    return register(
        Format(
            name="half",
            storage_dtype_name="float16",
            largest=65504.0,
            scale_of=None,
            encode=lambda weight, scale: weight.half(),
            decode=lambda qdata, scale, dtype: qdata.to(dtype, copy=True),
        )
    )


def test_names_in_the_order_offered():
    assert format_names() == ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fn unscaled", "int8")


@pytest.mark.parametrize("name", ["float8", "INT8", "", None, []], ids=repr)
def test_an_unknown_name_is_answered_with_the_known_ones(name):
    with pytest.raises(UnknownFormatError) as caught:
        get_format(name)
    assert all(known in str(caught.value) for known in format_names())
    assert isinstance(caught.value, ValueError)


def test_no_name_twice():
    with pytest.raises(ValueError, match="twice"):
        register(get_format("int8"))


def test_a_format_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        get_format("int8").largest = 1.0


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("float8_e4m3fn", float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)),
        ("float8_e5m2", float(ml_dtypes.finfo(ml_dtypes.float8_e5m2).max)),
        ("float8_e4m3fn unscaled", float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)),
        ("int8", 127.0),
    ],
)
def test_largest(name, largest):
    assert get_format(name).largest == largest


def test_only_the_unscaled_format_has_no_scale():
    assert [name for name in format_names() if get_format(name).scale_of is None] == ["float8_e4m3fn unscaled"]


@pytest.mark.parametrize("name", [name for name in format_names() if not name.endswith("unscaled")])
def test_scales_are_positive_finite_and_one_for_zero_rows(name):
    scale_of = get_format(name).scale_of
    scale = scale_of(torch.tensor([0.0, 1e-45, 1e-30, 1e-7, 1.0, 448.0, 65504.0, 3e38]).reshape(-1, 1))
    assert scale.dtype == torch.float32
    assert scale.shape == (8, 1)
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()
    assert scale[0] == 1
    assert (scale[2:] >= scale[1:-1])[1:].all()


@pytest.mark.parametrize("name", format_names())
def test_a_problem_is_one_line_or_none(name):
    found = get_format(name)
    problem = found.problem("cpu")
    if hasattr(torch, found.storage_dtype_name):
        assert problem is None
        assert found.storage_dtype is getattr(torch, found.storage_dtype_name)
    else:
        assert torch.__version__ in problem
        assert found.storage_dtype_name in problem
        assert "\n" not in problem
        with pytest.raises(AttributeError):
            _ = found.storage_dtype


def test_a_new_format_needs_no_change_elsewhere(half_format, rng):
    model = torch.nn.Linear(8, 8)
    expected = model.weight.detach().half().float()
    report = lib_fp8.convert_model(model, lib_fp8.Policy("half", keep=EVERYTHING))
    assert report.format == "half"
    assert torch.equal(model.weight.dequantize(), expected)
    x = torch.randn(2, 8, generator=rng)
    torch.testing.assert_close(model(x), torch.nn.functional.linear(x, expected, model.bias))
