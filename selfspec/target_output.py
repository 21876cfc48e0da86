"""What a pass of the target gives, with logits that are made when they are asked for.

Letters: B rows, N tree nodes, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from selfspec.output_head import FewRowsHead
from selfspec.screen import Screened


@dataclass(frozen=True, eq=False)
class TargetOutput:
    """What one pass of the target gave.

    Args:
        scored: the logits, or what makes them when they are asked for.
        hidden: `[B, N, D]`, after the final norm; None unless needed.
        layers: `[B, N, D]` each, in the order asked for.
    """

    scored: Tensor | Unscored
    hidden: Tensor | None = None
    layers: tuple[Tensor, ...] = ()

    @cached_property
    def logits(self) -> Tensor:
        """`[B, N, V]` in the model's dtype (`[B, 1, V]` after a prefill: the last token of each row)."""
        return self.scored if isinstance(self.scored, Tensor) else self.scored.logits()

    @cached_property
    def screened(self) -> Screened | None:
        """What tokens can be drawn from without the logits, of all nodes (node n of row b at b * N + n), or None."""
        return None if isinstance(self.scored, Tensor) else self.scored.head.screened(self.scored.hidden)

    @cached_property
    def screened_all(self) -> Screened | None:
        """The same, but whether there are any does not depend on the number of nodes, so not on other rows."""
        return None if isinstance(self.scored, Tensor) else self.scored.head.screened(self.scored.hidden, many=True)

    def finished(self, raw: Tensor) -> Tensor:
        """What the model makes of the output head's values."""
        return raw if isinstance(self.scored, Tensor) else self.scored.finish(raw)

    def likeliest(self) -> Tensor | None:
        """`[B, N]` int64, argmax of the logits, where it is had without making them; else None."""
        return None if isinstance(self.scored, Tensor) else self.scored.likeliest()


@dataclass(frozen=True, eq=False)
class Unscored:
    """Last hidden states `[B, N, D]` before the output head, and the head."""

    hidden: Tensor
    head: FewRowsHead
    finish: Callable[[Tensor], Tensor]

    def logits(self) -> Tensor:
        """`[B, N, V]`."""
        return self.finish(self.head(self.hidden))

    def likeliest(self) -> Tensor | None:
        """See `TargetOutput.likeliest`."""
        return self.head.likeliest(self.hidden)


def joined(parts: list[TargetOutput], last: Tensor) -> TargetOutput:
    """One output of several chunks; `last` (`[chunks, B]` bool) says which chunk holds each row's last token."""
    logits = torch.stack([part.logits for part in parts])
    chunk = last.long().argmax(0).to(logits.device)
    hidden = [part.hidden for part in parts if part.hidden is not None]
    layers = zip(*(part.layers for part in parts), strict=True)
    return TargetOutput(
        logits[chunk, torch.arange(chunk.numel(), device=logits.device)],
        torch.cat(hidden, 1) if hidden else None,
        tuple(torch.cat(layer, 1) for layer in layers),
    )
