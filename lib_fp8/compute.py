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
from torch.autograd.function import once_differentiable

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


class _FrozenWeight:
    """A QuantWeight remembered for backward by reference, with autograd's check that it was not written meanwhile."""

    def __init__(self, weight: QuantWeight):
        self._weight: QuantWeight = weight.detach()  # type: ignore[assignment]  # shares the inner tensors, whatever is assigned to the layer later
        self._writes = weight.writes

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        if self._weight.writes != self._writes:
            raise RuntimeError(
                "a quantized weight needed for gradient computation was modified by an in-place operation"
            )
        return self._weight.dequantize(dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: QuantWeight, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = _FrozenWeight(weight)
        ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        return F.linear(x, *_operands(x, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.matmul(grad, ctx.weight.dequantize(grad.dtype)).to(ctx.x_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias_dtype)
        return grad_x, None, grad_bias


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: QuantWeight,
        bias: torch.Tensor | None,
        stride: Size,
        padding: Size,
        dilation: Size,
        groups: int,
    ) -> torch.Tensor:
        ctx.weight = _FrozenWeight(weight)
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.geometry = stride, padding, dilation, groups
        return F.conv2d(x, *_operands(x, weight, bias), stride, padding, dilation, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            weight = ctx.weight.dequantize(grad.dtype)
            grad_x = torch.nn.grad.conv2d_input(ctx.x_shape, weight, grad, *ctx.geometry).to(ctx.x_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum((0, 2, 3)).to(ctx.bias_dtype)
        return grad_x, None, grad_bias, None, None, None, None


def _needs_graph(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return (
        isinstance(weight, QuantWeight)
        and torch.is_grad_enabled()
        and (x.requires_grad or (bias is not None and bias.requires_grad))
    )


@implements_function(F.linear)
def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` over a QuantWeight; input (..., in), weight (out, in), bias (out,)."""
    x = input.dequantize() if isinstance(input, QuantWeight) else input
    if _needs_graph(x, weight, bias):
        return _Linear.apply(x, weight, bias)
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
    if _needs_graph(x, weight, bias) and not _is_refused_padding(padding, stride):
        batch = x if x.dim() == 4 else x.unsqueeze(0)
        if isinstance(padding, str):
            batch, padding = _pad_explicitly(batch, weight, padding, dilation), 0
        result = _Conv2d.apply(batch, weight, bias, stride, padding, dilation, groups)
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
