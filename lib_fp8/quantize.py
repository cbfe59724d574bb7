"""Pure packing: a weight into 8-bit data and scales, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from lib_fp8.formats import Format

_CHUNK_ELEMENTS = 1 << 20
"""Weights are packed in runs of rows of about this many elements, so that float32 temporaries stay near 4 MiB."""


class Packed(NamedTuple):
    """A weight in a storage format: ``qdata`` of the weight's shape, ``scale`` (out, 1, ...) float32 or None."""

    qdata: torch.Tensor
    scale: torch.Tensor | None


def _row_chunks(weight: torch.Tensor) -> Iterator[slice]:
    rows = weight.shape[0]
    step = max(1, _CHUNK_ELEMENTS * rows // max(1, weight.numel()))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _scratch(rows: torch.Tensor, bound: float | None = None) -> torch.Tensor:
    scratch = rows.to(torch.float32, copy=True)
    return scratch if bound is None else scratch.clamp_(-bound, bound)


def row_absmax(weight: torch.Tensor) -> torch.Tensor:
    """Largest magnitude in each output channel.

    Args:
        weight: (out, ...) of at least two dimensions, any floating dtype.

    Returns:
        (out, 1, ...) float32. A row that holds NaN gives NaN, one that holds an infinity gives infinity.
    """
    dims = tuple(range(1, weight.dim()))
    parts = [_scratch(weight[rows]).abs_().amax(dims, keepdim=True) for rows in _row_chunks(weight)]
    return torch.cat(parts) if parts else weight.new_zeros((0, *[1] * len(dims)), dtype=torch.float32)


def _finite_absmax(weight: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """Replace the entries of rows that are not finite by the largest finite magnitude of those rows."""
    bad = ~torch.isfinite(absmax).flatten()
    rows = weight[bad].float()
    absmax = absmax.clone()
    absmax[bad] = row_absmax(torch.where(torch.isfinite(rows), rows, torch.zeros_like(rows)))
    return absmax


def pack(
    weight: torch.Tensor,
    storage_format: Format,
    absmax: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Packed:
    """Round a weight to a storage format, once.

    Infinities and values beyond the range, of the format or of the dtype, become the largest value. NaN stays NaN: by
    itself in a float8 format; in int8, which has none, the whole output channel becomes NaN, as its products would.

    Args:
        weight: (out, ...) of at least two dimensions, any floating dtype; computed in float32.
        storage_format: the format.
        absmax: ``row_absmax(weight)`` where the caller has it already.
        dtype: the floating dtype that will be decoded to, and in which every value stays finite; the weight's own
            where none is given.

    Returns:
        ``qdata`` with the strides of the weight, and the scales.

    Raises:
        ValueError: the weight is not floating or has fewer than two dimensions.
    """
    if weight.dim() < 2 or not weight.is_floating_point():
        raise ValueError(f"cannot pack a {weight.dim()}-dimensional {weight.dtype} tensor")
    weight = weight.detach()
    scale = bound = None
    if storage_format.scale_of is not None:
        absmax = row_absmax(weight) if absmax is None else absmax
        within, top = absmax, storage_format.top(dtype or weight.dtype)
        if not bool((absmax <= top).all()):  # nor does NaN compare
            bound = top
            within = _finite_absmax(weight, absmax).clamp(max=bound)
        scale = storage_format.scale_of(within)
    qdata = torch.empty_like(weight, dtype=storage_format.storage_dtype)
    for rows in _row_chunks(weight):
        qdata[rows].copy_(storage_format.encode(_scratch(weight[rows], bound), None if scale is None else scale[rows]))
    if scale is not None and absmax is not None and not storage_format.storage_dtype.is_floating_point:
        scale = torch.where(torch.isnan(absmax), absmax, scale)
    return Packed(qdata, scale)


def unpack(packed: Packed, storage_format: Format, dtype: torch.dtype) -> torch.Tensor:
    """Decode to a floating dtype, rounding at most once; a new tensor with the strides of ``qdata``."""
    if packed.scale is None or packed.qdata.device.type != "cpu" or dtype not in (torch.float16, torch.bfloat16):
        return storage_format.decode(packed.qdata, packed.scale, dtype)
    # On a CPU the product with a float32 scale is made in float32, whole copies of it unless a few rows are taken.
    result = torch.empty_like(packed.qdata, dtype=dtype)
    for rows in _row_chunks(packed.qdata):
        result[rows].copy_(storage_format.decode(packed.qdata[rows], packed.scale[rows], torch.float32))
    return result
