"""What is stored in which format, and what is kept: a Policy, and the plan that it makes of a model. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lib_fp8 import formats
from lib_fp8.qweight import QuantWeight

DEFAULT_KEEP: tuple[str, ...] = (
    r"time_embed",
    r"label_emb",
    r"emb_layers",
    r"^input_blocks\.0\.0$",
    r"^out\.2$",
    r"^conv_(in|out)$",
    r"^[xty]_embedder",
    r"^context_embedder$",
    r"^final_layer",
)
"""Small layers that decide over a picture: time and label embedding, first and last layer; SD and SD3 names.

The embedding layers are named by silveroxides/convert_to_quant #53 and diffusers PR 10347, among others.
"""


try:
    from re import _parser as _regex_parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_parse as _regex_parser

_NARROW = 16
"""Up to so many repetitions count as few."""


class PatternError(ValueError):
    """A pattern for layers to be kept is no valid regular expression."""


@dataclass(frozen=True)
class Policy:
    """How the Linear and Conv2d weights of one model are to be stored.

    Attributes:
        format: name of a registered storage format.
        keep: regular expressions; a layer whose name one of them finds (``re.search``) stays in full precision.

    Raises:
        UnknownFormatError, PatternError: on creation, naming what is wrong.
    """

    format: str = formats.DEFAULT.name
    keep: tuple[str, ...] = DEFAULT_KEEP

    def __post_init__(self) -> None:
        formats.get_format(self.format)
        check_patterns(self.keep)


def check_patterns(patterns: Iterable[str]) -> None:
    """Raise PatternError for the first pattern that is no valid regular expression, or one that may never end.

    A repeat within a repeat, such as ``(a+)+``, can take longer than anyone waits, and Python cannot be interrupted
    in it. Such a pattern may come with an infotext that somebody pastes; names of layers never need one.
    """
    for pattern in patterns:
        try:
            re.compile(pattern)
            endless = _nests_repeats(_regex_parser.parse(pattern))
        except (re.error, OverflowError, RecursionError) as error:
            raise PatternError(f"{pattern[:80]!r} is no valid regular expression: {error}") from None
        if endless:
            raise PatternError(f"{pattern[:80]!r} has a repeat within a repeat, which may never end")


def _nests_repeats(parsed: Any, within_repeat: bool = False) -> bool:
    """Whether a parsed expression, or a part of it, repeats something that repeats without a narrow limit."""
    if isinstance(parsed, tuple) and len(parsed) == 3 and isinstance(parsed[2], _regex_parser.SubPattern):
        repeats = isinstance(parsed[1], int) and parsed[1] > _NARROW  # (least, most, what)
        return (repeats and within_repeat) or _nests_repeats(parsed[2], within_repeat or repeats)
    if isinstance(parsed, (tuple, list, _regex_parser.SubPattern)):
        return any(_nests_repeats(part, within_repeat) for part in parsed)
    return False


@dataclass(frozen=True)
class LayerPlan:
    """What happens to one layer.

    Attributes:
        name: the layer's name in the model.
        module: the layer.
        kept_because: why it stays in full precision, None if it is converted.
    """

    name: str
    module: torch.nn.Module
    kept_because: str | None = None


def plan(model: torch.nn.Module, policy: Policy) -> list[LayerPlan]:
    """List what the policy does to each Linear and Conv2d of a model, in module order; touches nothing."""
    patterns = [(pattern, re.compile(pattern)) for pattern in policy.keep]
    foreign = {
        id(parameter): type(module).__name__
        for _, module in model.named_modules()  # ControlNet's LLLite has something else under ``modules``
        if not isinstance(module, (torch.nn.Linear, torch.nn.Conv2d))
        for parameter in module.parameters(recurse=False)
    }

    def reason(name: str, module: torch.nn.Module) -> str | None:
        weight = module._parameters.get("weight")
        if weight is None:
            return "computed weight"  # weight_norm and other parametrizations: there is nothing to store
        if not weight.is_floating_point():
            return f"{weight.dtype} weight"
        if weight.numel() == 0:
            return "empty weight"
        if id(weight) in foreign:
            return f"shared with {foreign[id(weight)]}"
        return next((f"pattern {text}" for text, pattern in patterns if pattern.search(name)), None)

    return [
        LayerPlan(name, module, reason(name, module))
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d))
    ]


def quantized_layers(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, QuantWeight]]:
    """Name, layer and weight of every layer that holds a QuantWeight now."""
    return [
        (name, module, weight)
        for name, module in model.named_modules()
        if isinstance(weight := module._parameters.get("weight"), QuantWeight)
    ]
