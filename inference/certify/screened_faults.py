"""Faults of tokens drawn without all logits, and a model on which they show; see `selfspec.inference.certify.faults`.

Letters: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from selfspec.drawing import draw_often
from selfspec.draws import ScreenedDraws
from selfspec.inference.certify.certificate import SCREENED, CertifySettings, screened_part, verdicts
from selfspec.inference.certify.models import tiny_prompts, wide_model
from selfspec.inference.certify.planting import Fault, Outcome, instead
from selfspec.screen import _KNOWN, Screened
from selfspec.target import Target

_SETTINGS = CertifySettings(sampled_prompts=2, screened_draws=200, top_k=30)


def _never_refused(original: Any) -> Any:
    """A token proposed by the bound is taken at once."""

    def draw(
        self: Screened, row: int, temperature: float, numbers: Callable[[int], Tensor], finish: Any = torch.positive
    ) -> int:
        upper = self._most(row, finish)
        known = upper.topk(_KNOWN).indices
        upper[known] = self._exact(row, known, finish)
        return int(draw_often(((upper - upper.max()) / temperature).exp(), numbers(1))[0])

    return draw


def _warmer(original: Any) -> Any:
    return lambda self, row, temperature, *rest: original(self, row, 1.5 * temperature, *rest)


def _below_the_logits(original: Any) -> Any:
    """The bound leaves too little room on the side that counts."""
    return lambda self, row, *rest: (
        original(self, row, *rest)
        - 3 * self.size[row] * self.largest[row] * torch.cat([part.error for part in self.screen.parts])
    )


def _half_of_them(original: Any) -> Any:
    """Too few candidates for a top k."""

    def top(self: Screened, row: int, count: int, *rest: Any) -> Any:
        tokens, logits = original(self, row, count, *rest)
        kept = logits.topk(max(count // 2, 1)).indices.sort().values
        return tokens[kept], logits[kept]

    return top


def _likeliest_lost(original: Any) -> Any:
    """The likeliest token is not among the candidates."""

    def top(self: Screened, row: int, count: int, *rest: Any) -> Any:
        tokens, logits = original(self, row, count, *rest)
        kept = torch.arange(len(tokens)) != logits.argmax()
        return tokens[kept], logits[kept]

    return top


def _another_row(original: Any) -> Any:
    return lambda self, row, node: original(self, 0, node)


def _of_the_next(original: Any) -> Any:
    """The product of bytes, once it was trusted, is that of other tokens."""

    def most(self: Screened, *given: Any) -> Tensor:
        found: Tensor = original(self, *given).roll(1)
        return found

    return most


SCREENED_FAULTS = tuple(
    Fault(name, SCREENED, "", plant)
    for name, plant in {
        "a proposed token is never refused": instead(Screened, "draw", _never_refused),
        "a draw at another temperature": instead(Screened, "draw", _warmer),
        "a bound that lies below the logits": instead(Screened, "_most", _below_the_logits),
        "bounds of the wrong tokens": instead(Screened, "_most", _of_the_next),
        "half of the top k is missed": instead(Screened, "top", _half_of_them),
        "the likeliest token is no candidate": instead(Screened, "top", _likeliest_lost),
        "a token of another row": instead(ScreenedDraws, "_at", _another_row),
    }.items()
)


def screened_self_test(faults: Sequence[Fault], faultless: bool = True) -> Iterator[Outcome]:
    """The part on draws without all logits, without a fault and with each; nothing where it cannot be tried."""
    if not faults and not faultless:
        return
    target = Target(wide_model())
    prompts = [prompt * 2 for prompt in tiny_prompts(3)[1:]]
    try:
        if not target.draws:
            return
        if faultless:
            failed = _failed(target, prompts)
            yield Outcome("no fault, draws without all logits", not failed, failed or "passes")
        for fault in faults:
            with fault.plant():
                failed = _failed(target, prompts)
            yield Outcome(fault.name, bool(failed), f"caught by {failed}" if failed else "NOT caught")
    finally:
        target.release()


def _failed(target: Target, prompts: Sequence[list[int]]) -> str:
    found = verdicts({SCREENED: screened_part(target, prompts, _SETTINGS)})
    return "; ".join(line for line, passed in found if not passed)
