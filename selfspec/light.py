"""Draft heads in 8 bits a weight on CPUs, where reading the weights is what drafting costs.

The target verifies whatever is guessed and q is what the light head drew from, so text is as exact as ever; only the
share of accepted guesses could change. Weights are rounded per output, inputs to 7 bits per call. The float weights
stay: they are what is trained, saved and compared, and they are used wherever gradients are on.
"""

from __future__ import annotations

import warnings
from math import isfinite
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SMALLEST, _LARGEST = 2**16, 2**26
"""Of fewer weights, calling a product costs more than reading them; packing more would take seconds."""


def packs(weight: Tensor) -> bool:
    """Whether there are kernels for such a weight, and enough of it for them to pay."""
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return has_kernels() and plain and _SMALLEST <= weight.numel() <= _LARGEST


def has_kernels() -> bool:
    """Whether torch multiplies bytes quickly on this processor."""
    return torch.backends.quantized.engine in ("fbgemm", "x86", "onednn")


def packed(rows: Tensor, bias: Tensor | None = None) -> tuple[Any, Tensor]:
    """`[V, D]` and `[V]` float32 as the kernels want them, the rows in 8 bits with one scale each; the rounded rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its quantised tensors deprecated at every use
        scale = rows.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        copy = torch.quantize_per_channel(rows, scale, torch.zeros(len(rows), dtype=torch.long), 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(copy, bias), copy.dequantize()


def gains(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether heads on such a target should have float32 weights, which can be made light, though its own are shorter.

    Half the bytes are read: on a CPU with AMX a step of an EAGLE head takes 2.1 ms, not 3.1 (four steps, 16 nodes).
    """
    return has_kernels() and device.type == "cpu" and dtype in (torch.bfloat16, torch.float16)


def can_be_light(module: nn.Module) -> bool:
    """Whether no weight of a head is too large to pack: in float32 it would take longer than in the target's dtype."""
    return all(held.numel() <= _LARGEST for held in (*module.parameters(), *module.buffers()))


class LightProduct:
    """`x W^T + b` for float32 `x`, about as exact as 7 bits. W is packed at the first use and when it has changed.

    Seen are changes that tensors count, and other tensors; not edits through `.data`, nor of tensors made in inference
    mode.
    """

    def __init__(self) -> None:
        self._packed: Any = None
        self._of: list[tuple[int, int]] = []
        self._kept: list[Tensor] = []
        """What was packed: as long as its memory is not given back, no other weight can stand there."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`[..., D]`, `[V, D]` and `[V]` to `[..., V]`."""
        if not isfinite(float(x.abs().amax())):
            return F.linear(x, weight, bias)  # there is no range to divide; a broken row must not break the others
        held = [weight] if bias is None else [weight, bias]
        of = [_state(one) for one in held]
        if self._of != of:
            self._kept = [one.detach() for one in held]
            self._packed, _ = packed(*self._kept)
            self._of = of
        found: Tensor = torch.ops.quantized.linear_dynamic(x, self._packed, True)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a head packs its own weights."""
        return LightProduct, ()


def _state(held: Tensor) -> tuple[int, int]:
    """What changes with a tensor. Those made in inference mode count no versions."""
    return held.data_ptr(), 0 if held.is_inference() else held._version


class _LightForward:
    """`forward` of a linear layer that is light where no gradients are wanted."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.product = LightProduct()

    def __call__(self, x: Tensor) -> Tensor:
        if is_light(x):
            return self.product(x, self.layer.weight, self.layer.bias)
        return type(self.layer).forward(self.layer, x)


def is_light(x: Tensor) -> bool:
    """Whether a light layer computes this in 8 bits."""
    return not torch.is_grad_enabled() and x.dtype == torch.float32 and x.device.type == "cpu"


def lighten_layers(module: nn.Module, kept: nn.Module) -> None:
    """Make the linear layers of a module light, in place.

    Args:
        module: a draft head, or a part of one.
        kept: whose layers stay as they are, though the head may hold some of them: the target.
    """
    others = {id(part) for part in kept.modules()}
    for part in module.modules():
        if type(part) is nn.Linear and id(part) not in others and packs(part.weight):
            part.__dict__["forward"] = _LightForward(part)
