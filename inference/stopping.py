"""Stopping exactly where plain decoding stops, however many tokens a round commits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria

from selfspec.scoring import HOW_TO_DECLARE, History, declares_row_independence

_TREAT_ROWS_ALIKE = (MaxTimeCriteria, StopStringCriteria)


class Stopper:
    """Judges every newly committed token, in order.

    Args:
        criteria: as `generate` builds them. Length and end tokens are read off them; all others are called once per
            token with the row's tokens so far (`[1, S]`), in order, so a criterion may keep state of a single row.
    """

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        lengths = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
        self.max_length: int | None = min(lengths) if lengths else None
        ends: list[Tensor] = [c.eos_token_id for c in criteria if isinstance(c, EosTokenCriteria)]
        self.end_tokens = {int(t) for end in ends for t in end.flatten().tolist()}
        self.has_end_tokens = bool(ends)
        self.others = [c for c in criteria if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria))]

    def obstacles(self, batch: int, with_scores: bool) -> list[str]:
        """Names of what cannot be asked row by row as plain decoding asks it.

        Args:
            batch: rows of the call.
            with_scores: whether plain decoding would show the scores so far to the criteria.
        """
        own = [type(c).__name__ for c in self.others if type(c) not in _TREAT_ROWS_ALIKE]
        found = [f"criterion {name} with output_scores (it might read them)" for name in own if with_scores]
        if batch == 1:
            return found
        if self.others and not self.has_end_tokens:
            found.append("several prompts with a stopping criterion but no end token")
        alone = [type(c).__name__ for c in self.others if not _row_by_row(c)]
        return found + [f"criterion {name} on several prompts ({HOW_TO_DECLARE})" for name in alone]

    def room(self, length: int) -> int | None:
        """How many more tokens a row of this length may get; None without a limit."""
        return None if self.max_length is None else self.max_length - length

    def cut(self, history: History, row: int, tokens: Sequence[int]) -> tuple[int, bool]:
        """How many of the new tokens count, and whether the row ends with the last of them.

        Args:
            history: the row's committed tokens; the new ones are not in it yet.
            row: which row.
            tokens: the new tokens.
        """
        before = history.lengths[row]
        for count, token in enumerate(tokens, start=1):
            if token in self.end_tokens or (self.max_length is not None and before + count >= self.max_length):
                return count, True
            if self.others:
                past = history.past(row, tokens[:count])
                # A criterion may answer with a Python bool; transformers takes that too.
                if any(bool(torch.as_tensor(criterion(past, None)).all()) for criterion in self.others):
                    return count, True
        return len(tokens), False


def _row_by_row(criterion: object) -> bool:
    return type(criterion) in _TREAT_ROWS_ALIKE or declares_row_independence(criterion)
