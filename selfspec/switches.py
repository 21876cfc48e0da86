"""What is left out of a pass of the target, and the stand-ins for the `forward` of its parts that leave it out.

A stand-in does nothing unless a draft pass runs in its own context (a context variable), so passes of other threads are
not disturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.errors import UnsupportedModel
from selfspec.tree import Computed

ATTENTION, MLP, BLOCK, MATRIX = "attention", "mlp", "block", "matrix"
Factors = tuple[Tensor, Tensor]
"""`[r, in]` and `[out, r]`: what stands for a weight `[out, in]`."""


@dataclass(frozen=True, eq=False)
class Plan:
    """How a draft pass differs from a full one.

    Args:
        attention: layers whose attention adds nothing.
        mlp: layers whose MLP adds nothing. A layer in both sets is left out as a whole, norms included.
        stop: the first block not run; None runs them to the end.
        factors: by name of a linear module in the decoder, the two factors used in place of its weight.
        added: by name of a linear module in the decoder, what is added to its output, made from its input.
    """

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()
    stop: int | None = None
    factors: Mapping[str, Factors] = field(default_factory=dict)
    added: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)

    def leaves_out(self, layer: int) -> bool:
        """Whether the whole block is left out."""
        return (layer in self.attention and layer in self.mlp) or (self.stop is not None and layer >= self.stop)


@dataclass(eq=False)
class Running:
    """One pass in one context.

    Args:
        plan: what differs from a full pass.
        done: work that need not be repeated; None in draft passes.
        exit: set by the pass: the hidden state at `plan.stop`.
        drift: when not None, blocks run though all their parts are left out, and the largest change is noted here.
    """

    plan: Plan
    done: Computed | None = None
    exit: Tensor | None = None
    drift: float | None = None


_RUNNING: ContextVar[Running | None] = ContextVar("selfspec_draft_pass", default=None)


class Switch:
    """Stands in for the `forward` of one module of the target. An object, so that copies of the model copy it whole."""

    def __init__(self, module: nn.Module, part: str, layer: int, name: str = "") -> None:
        self.module = module
        self.part = part
        self.layer = layer
        self.name = name
        self.own = "forward" in vars(module)
        self.__wrapped__ = module.forward
        self.users = 0
        self.form: int | None = None
        """Length of the tuple that the module returns, the hidden state first; None when it is a bare tensor."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = _RUNNING.get()
        if running is None:
            return self.__wrapped__(*args, **kwargs)
        if self.part == BLOCK:
            return self._block(running, args, kwargs)
        if self.part == MATRIX:
            return self._matrix(running, args, kwargs)
        skipped = running.plan.attention if self.part == ATTENTION else running.plan.mlp
        if self.layer in skipped:
            return self._output(torch.zeros_like(_hidden(args, kwargs)))
        return self.__wrapped__(*args, **kwargs)

    def _block(self, running: Running, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        done, hidden = running.done, _hidden(args, kwargs)
        if done is not None and self.layer < done.layer:
            return self._output(done.hidden if self.layer == done.layer - 1 else hidden)
        if running.drift is not None:
            output = self.__wrapped__(*args, **kwargs)
            found = output if self.form is None else output[0]
            running.drift = max(running.drift, float((found - hidden).abs().max() / hidden.abs().max()))
            return output
        if not running.plan.leaves_out(self.layer):
            return self.__wrapped__(*args, **kwargs)
        if self.layer == running.plan.stop:
            running.exit = hidden
        return self._output(hidden)

    def _matrix(self, running: Running, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        factors, added = running.plan.factors.get(self.name), running.plan.added.get(self.name)
        if factors is None:
            output = self.__wrapped__(*args, **kwargs)
        else:
            down, up = factors
            bias: Any = self.module.bias
            output = F.linear(F.linear(args[0], down), up, bias)
        return output if added is None else output + added(args[0]).to(output)

    def _output(self, hidden: Tensor) -> Any:
        return hidden if self.form is None else (hidden, *(None,) * (self.form - 1))

    def learn(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note the form of what the module returns (a forward hook)."""
        if isinstance(output, (tuple, list)) and isinstance(output[0], Tensor):
            self.form = len(output)
        elif not isinstance(output, Tensor):
            raise UnsupportedModel(
                f"{type(self.module).__name__} of layer {self.layer} returns {type(output).__name__}, not hidden "
                "states, so it cannot be left out; use another draft"
            )


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    hidden: Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


@contextmanager
def running(now: Running) -> Iterator[Running]:
    """Passes in this block, in this context, are such ones."""
    token = _RUNNING.set(now)
    try:
        yield now
    finally:
        _RUNNING.reset(token)
