"""Ways to store a model in 8 bits or fewer, told from the names, dtypes and shapes of its tensors and its metadata.

Weights that are simply cast to float8 are no dialect: their values are what they say. In every dialect a weight is a
code, worth something only together with what is stored beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lib_fp8.checkpoint.header import BITS, Header, TensorInfo

FLOATS = frozenset(name for name, bits in BITS.items() if bits <= 8 and name.startswith("F"))
CODES = FLOATS | {"I8", "U8"}
"""Dtypes in which weights take a byte or less."""


@dataclass(frozen=True)
class Dialect:
    """A way to store weights.

    Attributes:
        name: as its users know it.
        why: the tensor or the metadata that gave it away.
    """

    name: str
    why: str


Sign = Callable[[Header], "str | None"]
"""``(header) -> the tensor or the metadata that gives the dialect away, or None``."""


@dataclass(frozen=True)
class Rule:
    """How one dialect is recognised."""

    name: str
    sign: Sign


def find_dialect(header: Header) -> Dialect | None:
    """The dialect of a checkpoint; None if its weights are stored as what they are."""
    for rule in RULES:
        if (why := rule.sign(header)) is not None:
            return Dialect(rule.name, why)
    return None


def _is_gguf(header: Header) -> str | None:
    return "the file begins with GGUF" if header.is_gguf else None


def _named(ending: str) -> Sign:
    return lambda header: next((name for name in header.tensors if name.endswith(ending)), None)


def _with(part: str) -> Sign:
    return lambda header: next((name for name in header.tensors if part in name), None)


def _described(key: str) -> Sign:
    """Some tensors are codes, and the metadata have this key: it may have been left behind where none are."""

    def sign(header: Header) -> str | None:
        is_there = key in header.metadata and any(info.dtype in CODES for info in header.tensors.values())
        return f"{key} in its metadata" if is_there else None

    return sign


def _pairs(header: Header, companion: str, weight: str) -> Iterator[tuple[str, TensorInfo, TensorInfo]]:
    """``(name of the companion, itself, the weight beside it)`` for each module that has both."""
    for name, info in header.tensors.items():
        module, _, last = name.rpartition(".")
        if last == companion and (beside := header.tensors.get(f"{module}.{weight}")) is not None:
            yield name, info, beside


def _beside(companion: str, codes: frozenset[str], fits: Callable[[TensorInfo], bool] | None = None) -> Sign:
    """A tensor of that name stands beside a ``weight`` of such a dtype."""

    def sign(header: Header) -> str | None:
        pairs = _pairs(header, companion, "weight")
        return next(
            (name for name, scale, weight in pairs if weight.dtype in codes and (fits is None or fits(scale))), None
        )

    return sign


def _nunchaku(header: Header) -> str | None:
    return next((name for name, _, _ in _pairs(header, "wscales", "qweight")), None)


def _comfy_marker(header: Header) -> str | None:
    """Without float8 weights it was left behind."""
    has_codes = any(info.dtype in FLOATS and name.endswith(".weight") for name, info in header.tensors.items())
    marks = (name for name in header.tensors if name.rpartition(".")[2] == "scaled_fp8")
    return next(marks, None) if has_codes else None


def _kohya(header: Header) -> str | None:
    """Scales in the dtype of the original weight, one a row or a block; ComfyUI writes float32 and marks the file."""

    def fits(scale: TensorInfo) -> bool:
        return (
            scale.dtype in ("F16", "BF16") or len(scale.shape) == 3 or (len(scale.shape) == 2 and scale.shape[1] == 1)
        )

    return None if _comfy_marker(header) else _beside("scale_weight", FLOATS, fits)(header)


def _is_wide(scale: TensorInfo) -> bool:
    """Where a whole model was cast to float8, whatever was called scale in it is float8 too."""
    return scale.dtype not in CODES


def _codes_alone(header: Header) -> str | None:
    numbers = CODES - {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
    return next(
        (
            f"{name} in {info.dtype}"
            for name, info in header.tensors.items()
            if name.endswith(".weight") and info.dtype in numbers
        ),
        None,
    )


_WHOLE = frozenset({"I8", "U8"})

RULES = (
    Rule("GGUF", _is_gguf),
    Rule("torchao", _described("tensor_names")),
    Rule("torchao", _named("._weight_qdata")),
    Rule("ComfyUI quantized weights (comfy_quant)", _named(".comfy_quant")),
    Rule("ComfyUI quantized weights (comfy_quant)", _described("_quantization_metadata")),
    Rule("Nunchaku (SVDQuant)", _nunchaku),
    Rule("bitsandbytes nf4", _with("bitsandbytes__nf4")),
    Rule("bitsandbytes fp4", _with("bitsandbytes__fp4")),
    Rule("bitsandbytes int8", _beside("SCB", _WHOLE)),
    Rule("quanto", _with(".weight._data")),
    Rule("kohya scaled FP8 (scale_weight)", _kohya),
    Rule("ComfyUI scaled FP8 (scale_weight)", _beside("scale_weight", FLOATS)),
    Rule("ComfyUI scaled FP8 (scale_weight)", _comfy_marker),
    Rule("scaled int8 (scale_weight)", _beside("scale_weight", _WHOLE)),
    Rule("ModelOpt, compressed-tensors or the like (weight_scale)", _beside("weight_scale", CODES)),
    Rule("block-scaled FP8 (weight_scale_inv)", _beside("weight_scale_inv", CODES)),
    Rule("SDNQ", _beside("scale", CODES, _is_wide)),
    Rule("8-bit codes without a description", _codes_alone),
)
"""In this order; what is told by a name of its own comes before what is told by a common one."""
