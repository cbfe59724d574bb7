"""What the tests share: references in numpy and ml_dtypes that use nothing of the library, toy models, op watchers."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from lib_fp8 import QuantWeight, format_names, get_format, qweight

ROOT = Path(__file__).resolve().parent.parent
MIB = 1024 * 1024
torch.set_num_threads(1)  # the tensors of the tests are small: threads would only wait for each other
TORCH_VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
EVERYTHING = ()
"""``keep`` of a policy that keeps nothing."""

_FLOAT8 = {
    "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 448.0),
    "float8_e5m2": (ml_dtypes.float8_e5m2, 57344.0),
    "float8_e4m3fn unscaled": (ml_dtypes.float8_e4m3fn, 448.0),
}

_UNSCALED = {"float8_e4m3fn unscaled": np.inf}
LARGEST = {
    torch.float16: {"float8_e4m3fn": 1.875 * 2.0**15, "float8_e5m2": 1.75 * 2.0**15, "int8": 65504.0, **_UNSCALED},
    None: {
        "float8_e4m3fn": 1.875 * 2.0**127,
        "float8_e5m2": 1.75 * 2.0**127,
        "int8": float(np.finfo(np.float32).max),
        **_UNSCALED,
    },
}
"""The largest value of a format that is finite in float16, and in the dtypes with the range of float32."""


def need_format(name: str, device: torch.device | str = "cpu") -> Any:
    """The format, or a visible skip where it cannot be stored."""
    if (problem := get_format(name).problem(device)) is not None:
        pytest.skip(problem)
    return get_format(name)


FORMAT_NAMES = format_names()
"""Names of all formats; the first is the default."""


def format_in_use(name: str) -> str:
    """The format that is used where one is asked for: int8 takes over where it cannot be stored."""
    return name if get_format(name).problem("cpu") is None else "int8"


FORMAT_BY_DEFAULT = format_in_use(FORMAT_NAMES[0])
"""What is used where nobody chooses a format: a torch before 2.1 has no float8."""


# Independent references


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """float64, exact."""
    return tensor.detach().cpu().double().numpy()


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of an 8-bit tensor, in its logical order."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy()


def reference_pack(weight: torch.Tensor, name: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Codes (uint8) and scales (float64, or None) that a format must give; NaN scales mark int8 rows with a NaN."""
    values = to_numpy(weight)
    rows = values.reshape(values.shape[0], int(np.prod(values.shape[1:])))
    shape = (-1,) + (1,) * (values.ndim - 1)
    largest_of_dtype = LARGEST[torch.float16 if weight.dtype == torch.float16 else None][name]
    absmax = np.where(np.isfinite(rows), np.abs(rows), 0.0).max(axis=1, initial=0.0).clip(max=largest_of_dtype)
    with np.errstate(all="ignore"):
        if name == "int8":
            values = np.clip(values, -largest_of_dtype, largest_of_dtype)
            unit = 2.0 ** np.maximum(np.floor(np.log2(absmax)) - 22, -149)
            scale = np.where(absmax == 0, 1.0, np.ceil(absmax / 127 / unit) * unit)  # at most 17 significant bits
            scale = np.where(scale.astype(np.float32) * np.float32(127) < np.inf, scale, scale - unit)
            codes = np.rint(values.astype(np.float32) / scale.reshape(shape).astype(np.float32))
            codes = np.nan_to_num(np.clip(codes, -127, 127)).astype(np.int8).view(np.uint8)
            scale = np.where(np.isnan(rows).any(axis=1), np.nan, scale.astype(np.float64))
            return codes, scale.reshape(shape)
        dtype, largest = _FLOAT8[name]
        scale = np.ones_like(absmax)
        if not name.endswith("unscaled"):
            values = np.clip(values, -largest_of_dtype, largest_of_dtype)
            powers = 2.0 ** np.arange(-149 - np.log2(float(ml_dtypes.finfo(dtype).smallest_subnormal)), 128)
            scale = np.where(absmax == 0, 1.0, powers[(absmax[:, None] / powers <= largest).argmax(axis=1)])
        scaled = np.clip(values / scale.reshape(shape), -largest, largest).astype(np.float32)
        return scaled.astype(dtype).view(np.uint8), None if name.endswith("unscaled") else scale.reshape(shape)


def reference_decode(codes: np.ndarray, scale: np.ndarray | None, name: str) -> np.ndarray:
    """Values of codes in float64, where the product with the scale is exact."""
    values = codes.view(np.int8 if name == "int8" else _FLOAT8[name][0]).astype(np.float64)
    return values if scale is None else values * scale


def decoded(weight: QuantWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A plain tensor with the values of a QuantWeight, computed here and rounded once."""
    scale = None if weight.scale is None else to_numpy(weight.scale)
    values = torch.from_numpy(reference_decode(bits(weight.qdata), scale, weight.format.name)).to(dtype or weight.dtype)
    result = torch.empty_like(weight.qdata, dtype=values.dtype)
    return result.copy_(values)


def assert_packed_like(
    qdata: torch.Tensor, scale: torch.Tensor | None, expected: tuple[np.ndarray, np.ndarray | None], name: str
) -> None:
    """Equal scales, and equal bits wherever the reference is no NaN; NaN exactly where the reference has one."""
    codes, reference_scale = expected
    assert (scale is None) == (reference_scale is None)
    if scale is not None:
        np.testing.assert_array_equal(to_numpy(scale), reference_scale)
    want = reference_decode(codes, reference_scale, name)
    got = reference_decode(bits(qdata), reference_scale, name)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(bits(qdata)[~np.isnan(want)], codes[~np.isnan(want)])


def assert_same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    """Equal kind, dtype and bits, of plain tensors and QuantWeights."""
    assert isinstance(one, QuantWeight) == isinstance(other, QuantWeight)
    assert one.dtype == other.dtype
    assert one.shape == other.shape
    if isinstance(one, QuantWeight):
        assert one.format.name == other.format.name
        np.testing.assert_array_equal(bits(one.qdata), bits(other.qdata))
        assert (one.scale is None) == (other.scale is None)
        if one.scale is not None:
            np.testing.assert_array_equal(to_numpy(one.scale), to_numpy(other.scale))
    else:
        np.testing.assert_array_equal(to_numpy(one), to_numpy(other))


def assert_same_model(one: nn.Module, other: nn.Module) -> None:
    """All parameters and buffers have the same names, kinds and bits."""
    first, second = all_tensors(one), all_tensors(other)
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert_same_bits(tensor, second[name])


# Models


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers themselves, tied ones under each of their names."""
    return {
        prefix + ("." if prefix else "") + name: tensor
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    }


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all tensors of a plain model."""
    return {name: tensor.detach().clone() for name, tensor in all_tensors(model).items()}


def quantized_names(model: nn.Module) -> list[str]:
    """Names of the modules that hold a QuantWeight, every one, tied or not."""
    return [
        name
        for name, module in model.named_modules()
        if any(isinstance(tensor, QuantWeight) for tensor in module._parameters.values())
    ]


def plain_twin(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy with decoded weights, frozen like the originals, built without the library's decoder."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        for name, tensor in module._parameters.items():
            if isinstance(tensor, QuantWeight):
                module._parameters[name] = nn.Parameter(decoded(tensor, dtype), requires_grad=False)
    return twin


class ToyUNet(nn.Module):
    """Names of a Stable Diffusion UNet, every kind of tensor."""

    def __init__(self, channels: int = 48) -> None:
        super().__init__()
        self.time_embed = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.label_emb = nn.Sequential(nn.Sequential(nn.Linear(4, 16), nn.SiLU()))
        first = nn.Conv2d(4, channels, 3, padding=1)
        self.input_blocks = nn.ModuleList([nn.ModuleList([first]), nn.ModuleList([_Block(channels)])])
        self.middle_block = nn.ModuleList([_Block(channels), nn.MultiheadAttention(channels, 4, batch_first=True)])
        self.tokens = nn.Embedding(16, channels)
        self.out = nn.Sequential(nn.GroupNorm(4, channels), nn.SiLU(), nn.Conv2d(channels, 4, 3, padding=1))
        self.register_buffer("betas", torch.linspace(0.1, 0.9, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        emb = self.time_embed(torch.ones(len(x), 8, dtype=x.dtype))
        h = self.input_blocks[1][0](self.input_blocks[0][0](x), emb)
        h = self.middle_block[0](h, emb)
        seq = h.flatten(2).transpose(1, 2)
        h = h + self.middle_block[1](seq, seq, seq)[0].transpose(1, 2).reshape(h.shape)
        return self.out(h)


class _Block(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(nn.GroupNorm(4, n), nn.SiLU(), nn.Conv2d(n, n, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(16, n))
        self.proj_out = nn.Conv2d(n, n, 1)

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        return x + self.proj_out(self.in_layers(x) + self.emb_layers(emb)[..., None, None])


TOY_CONVERTED = [
    "input_blocks.1.0.in_layers.2",
    "input_blocks.1.0.proj_out",
    "middle_block.0.in_layers.2",
    "middle_block.0.proj_out",
    "middle_block.1.out_proj",
]
"""What the default policy converts of a ToyUNet, in module order."""


def seeded(build: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    """A model with reproducible values that leaves the global generator alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build()


@contextlib.contextmanager
def failing_pack(call: int) -> Iterator[None]:
    """Makes the packing of one weight raise, counted from 0."""
    calls, real = itertools.count(), qweight.pack

    def pack(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            raise RuntimeError("no more memory, said the test")
        return real(*args, **kwargs)

    qweight.pack = pack
    try:
        yield
    finally:
        qweight.pack = real


def tied_pair() -> nn.Module:
    """Two layers that share one weight."""
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    model[1].weight = model[0].weight
    return model


# Watching torch at work


def plain_tensors(values: Any) -> Iterator[torch.Tensor]:
    """All plain tensors in nested arguments; a QuantWeight counts as its inner tensors."""
    for value in tree_flatten(values)[0]:
        if isinstance(value, QuantWeight):
            yield from (inner for inner in value.packed if inner is not None)
        elif isinstance(value, torch.Tensor):
            yield value


class OpWatch(TorchDispatchMode):
    """Shows every op, also those on the inner tensors of a QuantWeight, to ``see(func, inputs, outputs)``."""

    def __init__(self, see: Callable[[Any, list[torch.Tensor], list[torch.Tensor]], None]):
        super().__init__()
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(value, QuantWeight) for value in tree_flatten((args, kwargs))[0]):
            with self:
                return QuantWeight.__torch_dispatch__(func, types, args, kwargs)
        result = func(*args, **kwargs)
        self._see(func, list(plain_tensors((args, kwargs))), list(plain_tensors(result)))
        return result


class LiveStorages:
    """Bytes of the storages that ops have made and that still live: now, and at the worst moment."""

    def __init__(self, existing: Iterable[torch.Tensor] = ()):
        self._storages: dict[StorageWeakRef, int] = {}
        self.peak = 0
        self.watch = OpWatch(lambda func, inputs, outputs: self._note(outputs))
        self._note(plain_tensors(list(existing)))

    def _note(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self._storages[StorageWeakRef(storage)] = storage.nbytes()
        self.peak = max(self.peak, self.now())

    def now(self) -> int:
        self._storages = {ref: size for ref, size in self._storages.items() if not ref.expired()}
        return sum(self._storages.values())


def storage_census(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes behind tensors counted by hand: each storage once, the meta device not at all."""
    seen = {}
    for tensor in plain_tensors(list(tensors)):
        if tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


@functools.lru_cache(maxsize=None)
def kernel_problem(dtype: torch.dtype, device_type: str) -> str | None:
    """Why torch itself cannot run plain layers in a dtype, or None."""
    try:
        x = torch.zeros(1, 2, 4, 4, dtype=dtype, device=device_type)
        nn.functional.linear(x, x.new_zeros(3, 4), x.new_zeros(3))
        nn.functional.conv2d(x, x.new_zeros(3, 2, 1, 1), x.new_zeros(3))
    except RuntimeError as error:
        return f"torch {torch.__version__} on {device_type}: {str(error).splitlines()[0]}"
    return None


def need_kernels(dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    if (problem := kernel_problem(dtype, torch.device(device).type)) is not None:
        pytest.skip(problem)


def run_python(code: str) -> str:
    """Output of a script in a fresh interpreter that finds the library."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout
