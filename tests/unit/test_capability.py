"""What a torch can do on a device, and how it says that memory has run out."""

from __future__ import annotations

import threading

import pytest
import torch

from lib_fp8 import capability
from lib_fp8.capability import autocast_enabled, is_out_of_memory


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


# As users have reported them
OUT_OF_MEMORY = [
    "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 8.00 GiB total capacity; 7.10 GiB already allocated)",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY",
    "HIP out of memory. Tried to allocate 1.17 GiB. GPU 0 has a total capacity of 15.98 GiB",
    "HIP error: hipErrorOutOfMemory",
    "MPS backend out of memory (MPS allocated: 7.43 GB, other allocations: 24.46 GB, max allowed: 32.00 GB). "
    "Tried to allocate 129.21 MB on private pool.",
    "Failed to allocate private MTLBuffer for size 8589934592",
    "Invalid buffer size: 10.58 GB",
    "XPU out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 16.50 GiB.",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    "Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES) -5 (PI_ERROR_OUT_OF_RESOURCES)",
    "Could not allocate tensor with 377487360 bytes. There is not enough GPU video memory available!",
    "[enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "1610612736 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at ..\\c10\\core\\CPUAllocator.cpp:73] data. DefaultCPUAllocator: not enough memory: you tried to "
    "allocate 45909278720 bytes. Buy new RAM!",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "MIOpen Error: miopenStatusAllocFailed",
    "unable to mmap 4265146304 bytes from file </models/a.safetensors>: Cannot allocate memory (12)",
    "The paging file is too small for this operation to complete. (os error 1455)",
    "bad allocation",
    "std::bad_alloc",
]
ANOTHER = [
    "",
    "CUDA error: an illegal memory access was encountered",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    "Cannot pin memory of a tensor",
    "The size of tensor a (4) must match the size of tensor b (9) at non-singleton dimension 1",
    "Error(s) in loading state_dict for UNetModel: size mismatch for input_blocks.0.0.weight",
]


@pytest.mark.parametrize("said", OUT_OF_MEMORY)
def test_every_wording_of_out_of_memory(said):
    assert is_out_of_memory(RuntimeError(said))
    assert is_out_of_memory(RuntimeError(said.upper()))


@pytest.mark.parametrize(
    "kind", [MemoryError, torch.cuda.OutOfMemoryError, getattr(torch, "OutOfMemoryError", MemoryError)]
)
def test_out_of_memory_by_type(kind):
    assert is_out_of_memory(kind())
    assert is_out_of_memory(kind("said in a language of its own"))


def test_the_words_of_this_machine():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 62, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("said", ANOTHER)
def test_another_error_is_none(said):
    assert not is_out_of_memory(RuntimeError(said))
