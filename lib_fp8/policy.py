"""What is stored in which format, and what is kept: a Policy, and the plan that it makes of a model. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lib_fp8 import formats
from lib_fp8.patterns import Name, get_pattern
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


@dataclass(frozen=True)
class Policy:
    """How the Linear and Conv2d weights of one model are to be stored.

    Attributes:
        format: name of a registered storage format.
        keep: patterns (see ``patterns``); a layer in whose name one of them is found stays in full precision.

    Raises:
        UnknownFormatError, PatternError: on creation, naming what is wrong.
    """

    format: str = formats.DEFAULT.name
    keep: tuple[str, ...] = DEFAULT_KEEP

    def __post_init__(self) -> None:
        formats.get_format(self.format)
        for text in self.keep:
            get_pattern(text)


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
    patterns = [get_pattern(text) for text in policy.keep]
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
        searched = Name(name)
        return next((f"pattern {kept.text}" for kept in patterns if kept.is_in(searched)), None)

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
