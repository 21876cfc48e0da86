"""A limit on what building modules may allocate, so that sizes in a config cannot exhaust memory.

Modules are built before their weights are read. A config from elsewhere may name any size; what the weights file holds
is known from its header, and a head allocates little beyond that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_BY_SHAPE = {torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full}
_BY_SHAPE_OF_SELF = {Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full}
_COPIES = {torch.clone, Tensor.clone}


class TooLarge(Exception):
    """More elements than the limit would have been allocated."""


class AllocationLimit(TorchFunctionMode):
    """Inside this context, tensors made in this thread may have so many elements together.

    Args:
        elements: the limit.

    Raises:
        TooLarge: before the allocation that would go beyond it.
    """

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.left = elements

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        self.left -= _elements(func, args, given)
        if self.left < 0:
            raise TooLarge
        return func(*args, **given)


def _elements(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """How many elements a call is about to allocate; 0 for calls that make nothing large from something small."""
    if func in _BY_SHAPE:
        return _product(args, kwargs)
    if func in _BY_SHAPE_OF_SELF:
        return _product(args[1:], kwargs)
    if func is torch.arange:
        return math.ceil(_span(args, kwargs))
    if func is torch.eye:
        return int(args[0]) * int(args[1] if len(args) > 1 else args[0])
    if func in _COPIES:
        return int(args[0].numel()) if args else 0
    if func is Tensor.repeat:
        return int(args[0].numel()) * _product(args[1:], {})
    return 0


def _product(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    size = kwargs.get("size", args[0] if args else ())
    lengths = size if isinstance(size, (tuple, list)) else [a for a in args if isinstance(a, int)]
    return math.prod(max(int(length), 0) for length in lengths)


def _span(args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    numbers = [float(a) for a in (*args, *(kwargs[n] for n in ("start", "end", "step") if n in kwargs))]
    if not numbers:
        return 0.0
    start, end = (0.0, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
    step = numbers[2] if len(numbers) > 2 else 1.0
    return abs(end - start) / max(abs(step), 1e-9)
