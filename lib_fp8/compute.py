"""Linear and Conv2d over a QuantWeight: the cast rule, and autograd that keeps no decoded weight.

The cast rule: if autocast acts on the input's device, the weight is handed on in its logical dtype and autocast
does as it does with any layer. Otherwise the input's dtype is the compute dtype: weight and bias follow it, and so
does the output. The input is never cast.

``nn.MultiheadAttention`` reads the weight of its output projection by itself: values and gradients are right, but there
autograd keeps a decoded copy for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.grad

from lib_fp8.capability import autocast_enabled
from lib_fp8.qweight import QuantWeight, implements_function

Size = int | Sequence[int]


def _operands(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias as plain tensors, cast by the rule above."""
    plain_bias = bias.dequantize() if isinstance(bias, QuantWeight) else bias
    if autocast_enabled(x.device.type) or not x.is_floating_point():
        return weight.dequantize() if isinstance(weight, QuantWeight) else weight, plain_bias
    plain_weight = weight.dequantize(x.dtype) if isinstance(weight, QuantWeight) else weight.to(x.dtype)
    return plain_weight, None if plain_bias is None else plain_bias.to(x.dtype)


class _LinearMap:
    """A layer without its bias, remembered for backward: the QuantWeight by reference, decoded anew for each use.

    As autograd does with any tensor, it refuses to go on when the weight was written meanwhile.
    """

    def __init__(self, weight: QuantWeight):
        self._weight: QuantWeight = weight.detach()  # type: ignore[assignment]  # shares the inner tensors, whatever is assigned to the layer later
        self._writes = weight.writes

    @property
    def weight(self) -> QuantWeight:
        if self._weight.writes != self._writes:
            raise RuntimeError(
                "a quantized weight needed for gradient computation was modified by an in-place operation"
            )
        return self._weight

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, *_operands(x, self.weight, bias))

    def transposed(self, y: torch.Tensor) -> torch.Tensor:
        return torch.matmul(y, self.weight.dequantize(y.dtype))

    def bias_gradient(self, y: torch.Tensor) -> torch.Tensor:
        return y.reshape(-1, y.shape[-1]).sum(0)


class _Conv2dMap(_LinearMap):
    def __init__(self, weight: QuantWeight, x_shape: torch.Size, *geometry: Any):
        super().__init__(weight)
        self._x_shape, self._geometry = x_shape, geometry

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.conv2d(x, *_operands(x, self.weight, bias), *self._geometry)

    def transposed(self, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.grad.conv2d_input(self._x_shape, self.weight.dequantize(y.dtype), y, *self._geometry)

    def bias_gradient(self, y: torch.Tensor) -> torch.Tensor:
        return y.sum((0, 2, 3))


class _Apply(torch.autograd.Function):
    """A linear map or its transpose. Each is the derivative of the other, so both have derivatives of any order."""

    generate_vmap_rule = True

    @staticmethod
    def forward(layer: _LinearMap, transposed: bool, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return layer.transposed(x) if transposed else layer.forward(x, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, _output: torch.Tensor) -> None:
        ctx.layer, ctx.transposed, x, bias = inputs
        ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad_x = grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_x = _Apply.apply(ctx.layer, not ctx.transposed, grad, None).to(ctx.x_dtype)
        if ctx.needs_input_grad[3]:
            grad_bias = ctx.layer.bias_gradient(grad).to(ctx.bias_dtype)
        return None, None, grad_x, grad_bias

    @staticmethod
    def jvp(ctx: Any, _layer: None, _transposed: None, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _Apply.apply(ctx.layer, ctx.transposed, x, bias)


def _needs_graph(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


@implements_function(F.linear)
def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` over a QuantWeight; input (..., in), weight (out, in), bias (out,)."""
    x = input.dequantize() if isinstance(input, QuantWeight) else input
    if isinstance(weight, QuantWeight) and _needs_graph(x, bias):
        return _Apply.apply(_LinearMap(weight), False, x, bias)
    return F.linear(x, *_operands(x, weight, bias))


@implements_function(F.conv2d)
def conv2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> torch.Tensor:
    """``F.conv2d`` over a QuantWeight; input (N, C, H, W) or (C, H, W), weight (out, C / groups, kH, kW)."""
    x = input.dequantize() if isinstance(input, QuantWeight) else input
    if isinstance(weight, QuantWeight) and _needs_graph(x, bias) and not _is_refused_padding(padding, stride):
        batch = x if x.dim() == 4 else x.unsqueeze(0)
        if isinstance(padding, str):
            batch, padding = _pad_explicitly(batch, weight, padding, dilation), 0
        layer = _Conv2dMap(weight, batch.shape, stride, padding, dilation, groups)
        result = _Apply.apply(layer, False, batch, bias)
        return result if x.dim() == 4 else result.squeeze(0)
    return F.conv2d(x, *_operands(x, weight, bias), stride, padding, dilation, groups)


def _is_refused_padding(padding: Size | str, stride: Size) -> bool:
    """Whether torch raises an error for this padding; then it is left to torch to word it."""
    strided = stride != 1 if isinstance(stride, int) else any(step != 1 for step in stride)
    return isinstance(padding, str) and (padding not in ("valid", "same") or (padding == "same" and strided))


def _pad_explicitly(x: torch.Tensor, weight: torch.Tensor, padding: str, dilation: Size) -> torch.Tensor:
    """Apply the paddings "valid" and "same" as torch defines them (the odd element goes to the right)."""
    if padding == "valid":
        return x
    pair = (dilation, dilation) if isinstance(dilation, int) else tuple(dilation)
    pads: list[int] = []
    for size, step in zip(reversed(weight.shape[2:]), reversed(pair)):
        total = step * (size - 1)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads)
