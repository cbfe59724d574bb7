"""Checkpoint files that are in float8 themselves: they are used at their size, and not rounded a second time."""

from __future__ import annotations

import pytest
import torch
from helpers import all_tensors, need_format

from lib_fp8 import QuantWeight

FLOAT8 = "float8_e4m3fn"
PREFIX = "model.diffusion_model."


@pytest.fixture(params=["float16", "no half"])
def file_in_8_bits(host, request):
    """A WebUI with a checkpoint that somebody cast to float8; the first load comes with the test."""
    need_format(FLOAT8)
    host.shared.cmd_opts.no_half = request.param == "no half"
    host.checkpoint(dtype=torch.float8_e4m3fn)
    return host


def assert_exact(host, name="a"):
    """Every weight is what the file holds, cast directly; those of the plan are in 8 bits."""
    dtype = torch.float32 if host.shared.cmd_opts.no_half else torch.float16
    values, packed = host.values(name), 0
    for layer, tensor in all_tensors(host.unet).items():
        expected = values[PREFIX + layer].to(dtype)
        assert tensor.dtype == dtype
        packed += isinstance(tensor, QuantWeight)
        plain = tensor.dequantize() if isinstance(tensor, QuantWeight) else tensor
        assert torch.equal(plain, expected), layer
    return packed


@pytest.mark.parametrize("storage_format", [FLOAT8, "float8_e4m3fn unscaled"])
def test_a_first_load_and_another(file_in_8_bits, storage_format):
    host = file_in_8_bits
    host.start(fp8_storage="Enable", fp8_format=storage_format)
    assert assert_exact(host) == 6
    host.switch_to(host.checkpoint("b", seed=2, dtype=torch.float8_e4m3fn))
    assert assert_exact(host, "b") == 6


def test_switched_on_later_and_off(file_in_8_bits):
    try:
        torch.zeros_like(torch.empty(1, device="meta"), device="cpu", dtype=torch.float8_e4m3fn)
    except RuntimeError as error:
        pytest.skip(f"the WebUI itself cannot load such a file with this torch: {error}")
    host = file_in_8_bits.start()
    assert assert_exact(host) == 0
    host.set(fp8_storage="Enable")
    assert assert_exact(host) == 6
    host.set(fp8_storage="Disable")
    assert assert_exact(host) == 0


def test_a_network_is_merged_with_the_file(file_in_8_bits, request):
    host = file_in_8_bits.start(fp8_storage="Enable")
    before = host.fingerprint()
    host.run_networks(request.getfixturevalue("nets").make("a"))
    assert host.panel.status()["lora_layers"].keys() == {"checkpoint file"}
    host.run_networks()
    assert host.fingerprint() == before
