"""What LoRA and LyCORIS networks add to a weight, in float64 numpy, and random networks in their files' own layout.

It knows nothing of the extension, of torch or of the WebUI: the formulas are those of the trainers that write the files
(kohya-ss/sd-scripts and KohakuBlueleaf/LyCORIS), so that it can judge what others make of the same tensors. GLoRA is
the exception: its factors are in the order in which the WebUI reads them, since files of today's LyCORIS fail there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

Tensors = dict[str, np.ndarray]  # what a file holds for one layer, by the part of the key behind the layer's name
Maker = Callable[[tuple[int, ...], np.random.Generator, float, np.ndarray, int], Tensors]

LINEAR = "linear"  # (out, in)
CONV_1X1 = "conv1x1"  # (out, in, 1, 1)
CONV = "conv"  # (out, in, kh, kw)
NORM = "norm"  # (n,)
MATRICES = (LINEAR, CONV_1X1, CONV)

ALPHA_PER_RANK = 0.75  # not 1: a merger that forgets to scale by alpha / rank must not pass
CLOSE_TO_IDENTITY = 1e-3  # where rotations start from when they are fitted: there the change is linear in the blocks
EPSILON_KOHYA = 1e-8  # sd-scripts adds it to both norms, so that blocks of zeros stay finite


@dataclass(frozen=True)
class Family:
    """A way of writing down a change of a weight.

    `kinds` are the layers it is written for. `since` is the first WebUI (major, minor) that reads it.
    """

    name: str
    make: Maker
    kinds: tuple[str, ...]
    since: tuple[int, int]


def kind_of(shape: tuple[int, ...]) -> str:
    """The kind of layer that has a weight of this shape."""
    if len(shape) == 1:
        return NORM
    if len(shape) == 2:
        return LINEAR
    return CONV_1X1 if shape[2:] == (1, 1) else CONV


def rms(array: np.ndarray) -> float:
    """Root mean square of all elements."""
    return float(np.sqrt(np.mean(np.square(array, dtype=np.float64))))


# --- What a network adds ----------------------------------------------------------------------------------------------


def added(
    tensors: Tensors, weight: np.ndarray, multiplier: float = 1.0, dyn_dim: int | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """The float64 change of the weight, in the weight's shape, and that of the bias, (out,), or None.

    The family is told from the keys alone; unknown keys raise ValueError. With `dyn_dim` only that many ranks of a
    plain LoRA count, while its scale stays alpha / all ranks.
    """
    names = frozenset(tensors) - {"alpha", "dora_scale"}
    if names not in FORMULAS:
        raise ValueError(f"no family has these keys: {sorted(tensors)}")
    weight = np.asarray(weight, np.float64)
    parts = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    if dyn_dim is not None:
        parts = _first_ranks(parts, dyn_dim)
    delta = FORMULAS[names](parts, weight)
    if "dora_scale" in parts:
        delta = _redirected(parts["dora_scale"], delta, weight)
    bias = next((parts[name].reshape(-1) * multiplier for name in ("diff_b", "b_norm") if name in parts), None)
    return delta.reshape(weight.shape) * multiplier, bias


def _first_ranks(parts: Tensors, ranks: int) -> Tensors:
    """The same LoRA with its later ranks at zero, not cut off: the scale goes by the number of all of them."""
    down = next((name for name in ("lora_down.weight", "lora_A.weight") if name in parts), None)
    if down is None or "lora_mid.weight" in parts:
        raise ValueError(f"only a plain LoRA has ranks to choose from, not {sorted(parts)}")
    kept = parts[down].copy()
    kept[ranks:] = 0
    return {**parts, down: kept}


def _scale(parts: Tensors, rank: int) -> float:
    """alpha / rank, or 1 without alpha (kohya-ss/sd-scripts networks/lora.py, LoRAModule)."""
    return float(parts["alpha"]) / rank if "alpha" in parts else 1.0


def _lora(parts: Tensors, weight: np.ndarray) -> np.ndarray:
    """up @ down: (out, r) times (r, in, ...), flattened (arXiv:2106.09685; sd-scripts networks/lora.py merge_to)."""
    down, up = parts["lora_down.weight"], parts["lora_up.weight"]
    rank = len(down)
    return up.reshape(-1, rank) @ down.reshape(rank, -1) * _scale(parts, rank)


def _lora_diffusers(parts: Tensors, weight: np.ndarray) -> np.ndarray:
    """PEFT's names for the same two matrices: A is the one towards the input (peft tuners/lora/layer.py)."""
    return _lora({"lora_down.weight": parts["lora_A.weight"], "lora_up.weight": parts["lora_B.weight"]}, weight)


def _locon_mid(parts: Tensors, weight: np.ndarray) -> np.ndarray:
    """CP decomposition of a convolution: down (q, in, 1, 1), mid (p, q, kh, kw), up (out, p, 1, 1).

    LyCORIS modules/locon.py with use_tucker, functional/locon.py; arXiv:2108.06098, proposition 3.
    """
    down, mid, up = parts["lora_down.weight"], parts["lora_mid.weight"], parts["lora_up.weight"]
    rank = len(down)
    return _tucker(mid, up.reshape(-1, len(mid)).T, down.reshape(rank, -1)) * _scale(parts, rank)


def _tucker(core: np.ndarray, out_factor: np.ndarray, in_factor: np.ndarray) -> np.ndarray:
    """(p, q, kh, kw) with (p, out) and (q, in) to (out, in, kh, kw) (LyCORIS functional/general.py rebuild_tucker)."""
    return np.einsum("pqhw,po,qi->oihw", core, out_factor, in_factor, optimize=True)


def _loha(parts: Tensors, weight: np.ndarray) -> np.ndarray:
    """Elementwise product of two low-rank matrices: (out, r) @ (r, in * kh * kw) each.

    LyCORIS modules/loha.py, functional/loha.py; arXiv:2108.06098 (FedPara).
    """
    first = parts["hada_w1_a"] @ parts["hada_w1_b"]
    second = parts["hada_w2_a"] @ parts["hada_w2_b"]
    return first * second * _scale(parts, len(parts["hada_w1_b"]))


def _loha_tucker(parts: Tensors, weight: np.ndarray) -> np.ndarray:
    """The same of two Tucker products: t (r, r, kh, kw), a (r, out), b (r, in) (LyCORIS functional/loha.py)."""
    first = _tucker(parts["hada_t1"], parts["hada_w1_a"], parts["hada_w1_b"])
    second = _tucker(parts["hada_t2"], parts["hada_w2_a"], parts["hada_w2_b"])
    return first * second * _scale(parts, len(parts["hada_w1_b"]))


def _lokr(parts: Tensors, weight: np.ndarray) -> np.ndarray:
    """Kronecker product of (a, c) and (b, d, kh, kw) to (a * b, c * d, kh, kw), each whole or a low-rank product.

    LyCORIS modules/lokr.py, functional/lokr.py. Two whole factors have no rank, hence no scale: their alpha is idle.
    """
    if "lokr_w1" in parts:
        first = parts["lokr_w1"]
    else:
        first = parts["lokr_w1_a"] @ parts["lokr_w1_b"]
    if "lokr_w2" in parts:
        second = parts["lokr_w2"]
    elif "lokr_t2" in parts:
        second = _tucker(parts["lokr_t2"], parts["lokr_w2_a"], parts["lokr_w2_b"])
    else:
        second = parts["lokr_w2_a"] @ parts["lokr_w2_b"]
    second = second.reshape(len(second), weight.shape[1] // first.shape[1], *weight.shape[2:])
    product = np.einsum("ac,bd...->abcd...", first, second).reshape(weight.shape)
    low_rank = next((parts[name] for name in ("lokr_w2_b", "lokr_w1_b") if name in parts), None)
    return product if low_rank is None else product * _scale(parts, len(low_rank))


def _glora(parts: Tensors, weight: np.ndarray) -> np.ndarray:
    """b2 @ b1 + W @ a2 @ a1 with a1, b1 (r, in), a2 (in, r), b2 (out, r) (arXiv:2306.07967).

    That is the order the WebUI reads: LyCORIS modules/glora.py has numbers 1 and 2 the other way round. The WebUI does
    not know the rank of this family, so alpha is idle; LyCORIS scales by alpha / rank.
    """
    return parts["b2.weight"] @ parts["b1.weight"] + weight @ parts["a2.weight"] @ parts["a1.weight"]


def _ia3(parts: Tensors, weight: np.ndarray) -> np.ndarray:
    """Each input or output channel times a number of its own (LyCORIS modules/ia3.py; arXiv:2205.05638)."""
    axis = 1 if parts["on_input"] else 0
    return weight * parts["weight"].reshape(_along(axis, weight.shape))


def _along(axis: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one number per index of this axis that multiplies an array of the given shape."""
    return tuple(length if index == axis else 1 for index, length in enumerate(shape))


def _full(parts: Tensors, weight: np.ndarray) -> np.ndarray:
    """The change itself (LyCORIS modules/full.py)."""
    return parts["diff"]


def _norm(parts: Tensors, weight: np.ndarray) -> np.ndarray:
    """The change itself, of a norm's (n,) weight (LyCORIS modules/norms.py)."""
    return parts["w_norm"]


def _oft(parts: Tensors, weight: np.ndarray) -> np.ndarray:
    """Rotations of the output channels from skew-symmetric blocks, times `rescale` (out, 1, ...) where there is one.

    Blocks (k, n, n) are OFT: sd-scripts networks/oft.py, LyCORIS modules/diag_oft.py; arXiv:2306.07280.
    Blocks (m, k, n, n) are BOFT: LyCORIS modules/boft.py, functional/boft.py; arXiv:2311.06243.
    """
    rotations = _cayley(parts["oft_blocks"], float(parts.get("alpha", 0)) * len(weight))
    turned = _butterfly(rotations, weight) if rotations.ndim == 4 else _block_turned(rotations, weight)
    return turned * parts.get("rescale", 1) - weight


def _oft_diag(parts: Tensors, weight: np.ndarray) -> np.ndarray:
    """Rotations of the output channels from the rotation matrices themselves, (k, n, n).

    LyCORIS modules/diag_oft.py from 5f869a4 (2023-11-15) until 0389c74 (2024-02-12), which saved `get_r()`.
    """
    return _block_turned(parts["oft_diag"], weight) - weight


def _cayley(blocks: np.ndarray, limit: float) -> np.ndarray:
    """R = (I + Q)(I - Q)^-1 of Q = B - B^T, (..., n, n); all of Q shrunk so that its norm is at most `limit`.

    sd-scripts networks/oft.py get_weight. A limit of 0 is none: so LyCORIS writes it where no constraint was asked for.
    """
    skew = blocks - blocks.swapaxes(-1, -2)
    norm = np.linalg.norm(skew)
    if limit > 0:
        skew = skew * ((min(norm, limit) + EPSILON_KOHYA) / (norm + EPSILON_KOHYA))
    identity = np.eye(blocks.shape[-1])
    return np.linalg.solve(identity - skew, identity + skew)  # the two commute, so the inverse may stand on the left


def _block_turned(rotations: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Block k of output channels times R_k transposed: "k n m, k n ... -> k m ..." (sd-scripts networks/oft.py)."""
    count, size, _ = rotations.shape
    return (rotations.swapaxes(-1, -2) @ weight.reshape(count, size, -1)).reshape(weight.shape)


def _butterfly(rotations: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Stage after stage (k, n, n) of R, not transposed; stage i mixes output channels that lie 2^i * n / 2 apart."""
    count, size = rotations.shape[1:3]
    turned = weight.reshape(len(weight), -1)
    columns = turned.shape[1]
    for stage, blocks in enumerate(rotations):
        stride = 2**stage * size // 2
        pairs = turned.reshape(-1, 2, stride, columns).swapaxes(1, 2)
        pairs = (blocks @ pairs.reshape(count, size, columns)).reshape(-1, stride, 2, columns)
        turned = pairs.swapaxes(1, 2).reshape(-1, columns)
    return turned.reshape(weight.shape)


def _redirected(magnitude: np.ndarray, delta: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """DoRA: (W + delta) * magnitude / norm - W; one norm per input (1, in, ...) or output channel (out, 1, ...).

    arXiv:2402.09353; LyCORIS functional/general.py weight_decompose (wd_on_out) and apply_dora_scale (inputs).
    """
    changed = weight + delta.reshape(weight.shape)
    return changed * magnitude / _channel_norms(changed, 1 if len(magnitude) == 1 else 0) - weight


def _channel_norms(weight: np.ndarray, axis: int) -> np.ndarray:
    """The norm over all axes but one, with that one's length and 1 elsewhere."""
    others = tuple(index for index in range(weight.ndim) if index != axis)
    return np.sqrt(np.sum(weight**2, axis=others, keepdims=True))


_LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
_LOHA_CORES = ("hada_t1", "hada_t2")
_LOKR_1, _LOKR_2 = ("lokr_w1_a", "lokr_w1_b"), ("lokr_w2_a", "lokr_w2_b")

FORMULAS: Mapping[frozenset[str], Callable[[Tensors, np.ndarray], np.ndarray]] = {
    frozenset(names): formula
    for names, formula in (
        (("lora_up.weight", "lora_down.weight"), _lora),
        (("lora_up.weight", "lora_mid.weight", "lora_down.weight"), _locon_mid),
        (("lora_A.weight", "lora_B.weight"), _lora_diffusers),
        (_LOHA, _loha),
        ((*_LOHA, *_LOHA_CORES), _loha_tucker),
        (("lokr_w1", "lokr_w2"), _lokr),
        (("lokr_w1", *_LOKR_2), _lokr),
        ((*_LOKR_1, *_LOKR_2), _lokr),
        (("lokr_w1", "lokr_t2", *_LOKR_2), _lokr),
        (("a1.weight", "a2.weight", "b1.weight", "b2.weight"), _glora),
        (("weight", "on_input"), _ia3),
        (("diff",), _full),
        (("diff", "diff_b"), _full),
        (("w_norm", "b_norm"), _norm),
        (("oft_blocks",), _oft),
        (("oft_blocks", "rescale"), _oft),
        (("oft_diag",), _oft_diag),
    )
}


# --- Random networks --------------------------------------------------------------------------------------------------


def make(
    family: str, shape: tuple[int, ...], rng: np.random.Generator, size: float, weight: np.ndarray, rank: int = 4
) -> Tensors:
    """Random float32 tensors (on_input: bool) for a layer, whose change of the weight has about `size` as its rms.

    `shape` is the weight's: (out, in), (out, in, kh, kw) or (n,). `weight` is the original one, which rotations,
    magnitudes and the like depend on.
    """
    chosen = FAMILIES[family]
    shape = tuple(shape)
    if kind_of(shape) not in chosen.kinds or weight.shape != shape:
        raise ValueError(f"{family} is for {chosen.kinds}, not for {shape} (the weight has {weight.shape})")
    drawn = chosen.make(shape, rng, size, np.asarray(weight, np.float64), rank)
    return {name: value if value.dtype == bool else value.astype(np.float32) for name, value in drawn.items()}


def _fitted(tensors: Tensors, names: tuple[str, ...], weight: np.ndarray, size: float) -> Tensors:
    """The same tensors with the named ones, which multiply each other, scaled alike until the change has its size."""
    for _ in range(20):
        ratio = size / rms(added(tensors, weight)[0])
        if abs(math.log(ratio)) < 0.02:
            return tensors
        tensors = {**tensors, **{name: tensors[name] * ratio ** (1 / len(names)) for name in names}}
    raise ValueError(f"{names} cannot change this weight by {size}: its rms is {rms(weight)}")


def _with_alpha(drawn: Tensors, weight: np.ndarray, size: float, rank: int) -> Tensors:
    """Factors of one product, and an alpha, fitted."""
    return _fitted({**drawn, "alpha": np.array(ALPHA_PER_RANK * rank)}, tuple(drawn), weight, size)


def _make_lora(shape, rng, size, weight, rank) -> Tensors:
    ones = (1,) * len(shape[2:])
    drawn = {
        "lora_up.weight": rng.standard_normal((shape[0], rank, *ones)),
        "lora_down.weight": rng.standard_normal((rank, *shape[1:])),
    }
    return _with_alpha(drawn, weight, size, rank)


def _make_locon_mid(shape, rng, size, weight, rank) -> Tensors:
    drawn = {
        "lora_up.weight": rng.standard_normal((shape[0], rank, 1, 1)),
        "lora_down.weight": rng.standard_normal((rank, shape[1], 1, 1)),
        "lora_mid.weight": rng.standard_normal((rank, rank, *shape[2:])),
    }
    return _with_alpha(drawn, weight, size, rank)


def _make_lora_diffusers(shape, rng, size, weight, rank) -> Tensors:
    ones = (1,) * len(shape[2:])
    drawn = {
        "lora_A.weight": rng.standard_normal((rank, *shape[1:])),
        "lora_B.weight": rng.standard_normal((shape[0], rank, *ones)),
    }
    return _fitted(drawn, tuple(drawn), weight, size)


def _make_loha(shape, rng, size, weight, rank) -> Tensors:
    columns = math.prod(shape[1:])
    drawn = {
        "hada_w1_a": rng.standard_normal((shape[0], rank)),
        "hada_w1_b": rng.standard_normal((rank, columns)),
        "hada_w2_a": rng.standard_normal((shape[0], rank)),
        "hada_w2_b": rng.standard_normal((rank, columns)),
    }
    return _with_alpha(drawn, weight, size, rank)


def _make_loha_tucker(shape, rng, size, weight, rank) -> Tensors:
    drawn = {
        "hada_t1": rng.standard_normal((rank, rank, *shape[2:])),
        "hada_w1_a": rng.standard_normal((rank, shape[0])),
        "hada_w1_b": rng.standard_normal((rank, shape[1])),
        "hada_t2": rng.standard_normal((rank, rank, *shape[2:])),
        "hada_w2_a": rng.standard_normal((rank, shape[0])),
        "hada_w2_b": rng.standard_normal((rank, shape[1])),
    }
    return _with_alpha(drawn, weight, size, rank)


def _kron_sizes(length: int) -> tuple[int, int]:
    """The most even split into two factors, the smaller one first (LyCORIS functional/general.py factorization)."""
    smaller = _largest_divisor(length, math.isqrt(length))
    return smaller, length // smaller


def _largest_divisor(number: int, limit: int) -> int:
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)


def _make_lokr_full(shape, rng, size, weight, rank) -> Tensors:
    (out_1, out_2), (in_1, in_2) = _kron_sizes(shape[0]), _kron_sizes(shape[1])
    drawn = {
        "lokr_w1": rng.standard_normal((out_1, in_1)),
        "lokr_w2": rng.standard_normal((out_2, in_2, *shape[2:])),
    }
    return _with_alpha(drawn, weight, size, rank)


def _make_lokr(shape, rng, size, weight, rank) -> Tensors:
    (out_1, out_2), (in_1, in_2) = _kron_sizes(shape[0]), _kron_sizes(shape[1])
    drawn = {
        "lokr_w1": rng.standard_normal((out_1, in_1)),
        "lokr_w2_a": rng.standard_normal((out_2, rank)),
        "lokr_w2_b": rng.standard_normal((rank, in_2 * math.prod(shape[2:]))),
    }
    return _with_alpha(drawn, weight, size, rank)


def _make_lokr_factors(shape, rng, size, weight, rank) -> Tensors:
    (out_1, out_2), (in_1, in_2) = _kron_sizes(shape[0]), _kron_sizes(shape[1])
    drawn = {
        "lokr_w1_a": rng.standard_normal((out_1, rank)),
        "lokr_w1_b": rng.standard_normal((rank, in_1)),
        "lokr_w2_a": rng.standard_normal((out_2, rank)),
        "lokr_w2_b": rng.standard_normal((rank, in_2 * math.prod(shape[2:]))),
    }
    return _with_alpha(drawn, weight, size, rank)


def _make_lokr_tucker(shape, rng, size, weight, rank) -> Tensors:
    (out_1, out_2), (in_1, in_2) = _kron_sizes(shape[0]), _kron_sizes(shape[1])
    drawn = {
        "lokr_w1": rng.standard_normal((out_1, in_1)),
        "lokr_t2": rng.standard_normal((rank, rank, *shape[2:])),
        "lokr_w2_a": rng.standard_normal((rank, out_2)),
        "lokr_w2_b": rng.standard_normal((rank, in_2)),
    }
    return _with_alpha(drawn, weight, size, rank)


def _make_glora(shape, rng, size, weight, rank) -> Tensors:
    """Both terms weigh the same."""
    a = {
        "a1.weight": rng.standard_normal((rank, shape[1])),
        "a2.weight": rng.standard_normal((shape[1], rank)),
    }
    b = {
        "b1.weight": rng.standard_normal((rank, shape[1])),
        "b2.weight": rng.standard_normal((shape[0], rank)),
    }
    half = size / math.sqrt(2)
    only_a = _fitted({**a, **{name: np.zeros_like(value) for name, value in b.items()}}, tuple(a), weight, half)
    only_b = _fitted({**b, **{name: np.zeros_like(value) for name, value in a.items()}}, tuple(b), weight, half)
    fitted = {name: (only_a if name in a else only_b)[name] for name in (*a, *b)}
    return {**fitted, "alpha": np.array(ALPHA_PER_RANK * rank)}


def _make_ia3(on_input: bool) -> Maker:
    def make_ia3(shape, rng, size, weight, rank) -> Tensors:
        """LyCORIS keeps the channels of a convolution on axis 1, those of its output too."""
        channels = shape[1] if on_input else shape[0]
        drawn = {
            "weight": rng.standard_normal((channels,) if len(shape) == 2 else (1, channels, 1, 1)),
            "on_input": np.array(on_input),
        }
        return _fitted(drawn, ("weight",), weight, size)

    return make_ia3


def _make_full(shape, rng, size, weight, rank) -> Tensors:
    return _fitted({"diff": rng.standard_normal(shape)}, ("diff",), weight, size)


def _make_full_bias(shape, rng, size, weight, rank) -> Tensors:
    return {**_make_full(shape, rng, size, weight, rank), "diff_b": rng.standard_normal(shape[0]) * size}


def _make_norm(shape, rng, size, weight, rank) -> Tensors:
    drawn = {"w_norm": rng.standard_normal(shape), "b_norm": rng.standard_normal(shape) * size}
    return _fitted(drawn, ("w_norm",), weight, size)


def _blocks_kohya(shape, rng, size, weight, rank) -> tuple[np.ndarray, float]:
    """oft_blocks without constraint, and the alpha at which the constraint would just begin to act.

    In kohya's files the rank is the number of blocks (sd-scripts networks/oft.py).
    """
    count = _largest_divisor(shape[0], min(rank, max(1, shape[0] // 2)))  # a block of one channel cannot be turned
    blocks = rng.standard_normal((count, shape[0] // count, shape[0] // count)) * CLOSE_TO_IDENTITY
    blocks = _fitted({"oft_blocks": blocks}, ("oft_blocks",), weight, size)["oft_blocks"]
    return blocks, float(np.linalg.norm(blocks - blocks.swapaxes(-1, -2))) / shape[0]


def _make_oft_kohya(shape, rng, size, weight, rank) -> Tensors:
    blocks, alpha = _blocks_kohya(shape, rng, size, weight, rank)
    return {"oft_blocks": blocks, "alpha": np.array(alpha * 4)}


def _make_oft_kohya_constrained(shape, rng, size, weight, rank) -> Tensors:
    """Blocks three times too large, which the constraint brings back to the size."""
    blocks, alpha = _blocks_kohya(shape, rng, size, weight, rank)
    return {"oft_blocks": blocks * 3, "alpha": np.array(alpha)}


def _make_oft_lycoris(shape, rng, size, weight, rank) -> Tensors:
    """In LyCORIS' files the rank is the size of a block, or the most it may be (modules/diag_oft.py)."""
    block = _largest_divisor(shape[0], max(rank, 2))
    blocks = rng.standard_normal((shape[0] // block, block, block)) * CLOSE_TO_IDENTITY
    fitted = _fitted({"oft_blocks": blocks}, ("oft_blocks",), weight, size)
    return {"oft_diag": _cayley(fitted["oft_blocks"], 0)}


def _make_boft(shape, rng, size, weight, rank) -> Tensors:
    """Blocks of even size, a power of two of them, log2 of that plus one stages (LyCORIS modules/boft.py)."""
    if shape[0] % 2:
        raise ValueError(f"BOFT needs an even number of output channels, not {shape[0]}")
    block = 2 * _odd_part(shape[0])
    while block < 2 * rank and block < shape[0]:
        block *= 2
    count = shape[0] // block
    blocks = rng.standard_normal((count.bit_length(), count, block, block)) * CLOSE_TO_IDENTITY
    return _fitted({"oft_blocks": blocks, "alpha": np.array(0.0)}, ("oft_blocks",), weight, size)


def _odd_part(number: int) -> int:
    return number // (number & -number)


def _make_boft_rescaled(shape, rng, size, weight, rank) -> Tensors:
    """Rotation and rescaling weigh the same."""
    half = size / math.sqrt(2)
    rescale = 1 + _relative_changes(rng, _along(0, shape), half, weight)
    return {**_make_boft(shape, rng, half, weight, rank), "rescale": rescale}


def _relative_changes(rng: np.random.Generator, shape: tuple[int, ...], size: float, weight: np.ndarray) -> np.ndarray:
    """A factor per channel that changes the weight by about `size`, less one."""
    drawn = rng.standard_normal(shape)
    return drawn * (size / rms(drawn * weight))


def _with_dora(make_family: Maker, axis: int) -> Maker:
    def make_dora(shape, rng, size, weight, rank) -> Tensors:
        """The magnitudes start from the norms of the original weight, as in training; they and delta weigh the same."""
        half = size / math.sqrt(2)
        changes = _relative_changes(rng, _along(axis, shape), half, weight)
        magnitudes = _channel_norms(weight, axis) * (1 + changes)
        return {**make_family(shape, rng, half, weight, rank), "dora_scale": magnitudes}

    return make_dora


FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("lora", _make_lora, (LINEAR, CONV_1X1), (1, 6)),
        Family("locon", _make_lora, (CONV,), (1, 6)),
        Family("locon-mid", _make_locon_mid, (CONV,), (1, 6)),
        Family("lora-diffusers", _make_lora_diffusers, (LINEAR, CONV_1X1), (1, 10)),
        Family("loha", _make_loha, MATRICES, (1, 6)),
        Family("loha-tucker", _make_loha_tucker, (CONV,), (1, 6)),
        Family("lokr-full", _make_lokr_full, MATRICES, (1, 6)),
        Family("lokr", _make_lokr, MATRICES, (1, 6)),
        Family("lokr-factors", _make_lokr_factors, MATRICES, (1, 6)),
        Family("lokr-tucker", _make_lokr_tucker, (CONV,), (1, 6)),
        Family("glora", _make_glora, (LINEAR,), (1, 7)),
        Family("ia3-input", _make_ia3(on_input=True), MATRICES, (1, 6)),
        Family("ia3-output", _make_ia3(on_input=False), MATRICES, (1, 6)),
        Family("full", _make_full, MATRICES, (1, 6)),
        Family("full-bias", _make_full_bias, MATRICES, (1, 6)),
        Family("norm", _make_norm, (NORM,), (1, 6)),
        Family("oft-kohya", _make_oft_kohya, MATRICES, (1, 7)),
        Family("oft-kohya-constrained", _make_oft_kohya_constrained, MATRICES, (1, 7)),
        Family("oft-lycoris", _make_oft_lycoris, MATRICES, (1, 7)),
        Family("boft", _make_boft, MATRICES, (1, 8)),
        Family("boft-rescaled", _make_boft_rescaled, MATRICES, (1, 8)),
        Family("lora-dora-in", _with_dora(_make_lora, axis=1), MATRICES, (1, 9)),
        Family("lora-dora-out", _with_dora(_make_lora, axis=0), MATRICES, (1, 9)),
        Family("loha-dora-in", _with_dora(_make_loha, axis=1), MATRICES, (1, 9)),
        Family("lokr-dora-out", _with_dora(_make_lokr, axis=0), MATRICES, (1, 9)),
    )
}
