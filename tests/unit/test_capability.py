"""What a torch and a device can do is probed, told in one line, and cached."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers import need_format

from lib_fp8 import capability
from lib_fp8.capability import autocast_enabled, storage_problem

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
probe = storage_problem.__wrapped__


@pytest.mark.parametrize("device_type", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["int8", *FLOAT8])
def test_what_this_torch_has_is_no_problem(name, device_type):
    problem = probe(name, device_type)
    assert (problem is None) == isinstance(getattr(torch, name, None), torch.dtype)


@pytest.mark.parametrize("name", ["float3", "nn", "", "Tensor"])
def test_what_is_no_dtype_is_a_problem(name):
    assert torch.__version__ in probe(name, "cpu")


def test_int8_is_never_a_problem():
    assert probe("int8", "no such device") is None


@pytest.mark.parametrize("name", FLOAT8)
@pytest.mark.parametrize("error", [TypeError("MPS has none\nfor reasons"), RuntimeError(""), NotImplementedError()])
def test_a_device_that_refuses(monkeypatch, name, error):
    need_format(name)

    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(torch, "empty_like", refuse)
    problem = probe(name, "cpu")
    assert problem.startswith(f"cpu cannot hold {name}")
    assert "\n" not in problem
    assert "reasons" not in problem
    assert (str(error).split("\n")[0] or type(error).__name__) in problem


@pytest.mark.parametrize("name", FLOAT8)
def test_a_device_that_is_not_there(name):
    need_format(name)
    assert name in probe(name, "no_such_device")


@pytest.mark.parametrize("name", FLOAT8)
def test_a_device_that_casts_wrongly(monkeypatch, name):
    need_format(name)
    monkeypatch.setattr(capability, "_PROBE_VALUES", (0.3, 1.0))  # 0.3 does not come back
    assert probe(name, "cpu") == f"cpu does not cast {name} correctly"


def test_a_device_is_probed_once(monkeypatch):
    storage_problem("float8_e4m3fn", "cpu")
    monkeypatch.setattr(torch, "tensor", None)
    storage_problem("float8_e4m3fn", "cpu")


def test_autocast_by_device():
    assert not autocast_enabled("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert autocast_enabled("cpu")
        assert not autocast_enabled("cuda")
        with torch.autocast("cpu", enabled=False):
            assert not autocast_enabled("cpu")
    assert not autocast_enabled("cpu")


@pytest.mark.parametrize("device_type", ["cuda", "xpu", "hpu", "mps"])
def test_autocast_can_be_asked_for_any_device(device_type):
    assert autocast_enabled(device_type) is False


def test_autocast_belongs_to_a_thread():
    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        thread = threading.Thread(target=lambda: seen.append(autocast_enabled("cpu")))
        thread.start()
        thread.join()
    assert seen == [False]


@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_the_older_query_gives_the_same_answers():
    assert not capability._query_autocast_before_2_4("cpu")
    assert not capability._query_autocast_before_2_4("mps")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert capability._query_autocast_before_2_4("cpu")
