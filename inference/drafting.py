"""The drafts of one generation: what each is shown, and when.

A draft that is not asked for guesses need not do any work: what the target reads in the meantime is kept (tokens and
the few hidden states that the draft asked for) and handed over in one piece when the draft is next wanted.

Letters: B rows, K rows kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from selfspec.draft import Budget, Draft, Needs, Sampling, Verified, all_needs, joined, only_needed, rows_of
from selfspec.errors import ConfigError
from selfspec.host import on_device
from selfspec.tree import DraftTree

MOST_KEPT = 1 << 26
"""Bytes of hidden states kept for a draft; when there are more, it is shown them."""


class Pick:
    """Several drafts of which one guesses at a time; which one is the guard's choice, round by round.

    Args:
        parts: the drafts.

    Raises:
        ConfigError: there are none.
    """

    def __init__(self, parts: Sequence[Draft]) -> None:
        if not parts:
            raise ConfigError("there is no draft to pick from; give at least one")
        self.parts = list(parts)
        self.kind = f"pick({','.join(part.kind for part in parts)})"


def parts_of(draft: Draft | Pick) -> list[Draft]:
    """The drafts to choose from."""
    return list(draft.parts) if isinstance(draft, Pick) else [draft]


class Drafters:
    """Drafts, their states, and what each has still to be shown.

    Args:
        drafts: at least one.
        eager: show a draft at once what the target has read, whether or not it guesses next.
    """

    def __init__(self, drafts: Sequence[Draft], eager: bool) -> None:
        self.drafts = list(drafts)
        self.eager = eager
        self.needs: Needs = all_needs([draft.needs for draft in drafts]) if len(drafts) > 1 else drafts[0].needs
        self._states: list[Any] = [None] * len(drafts)
        self._begun = [False] * len(drafts)
        self._unseen: list[list[Verified]] = [[] for _ in drafts]
        self._kept = [0] * len(drafts)

    def begin(self, prompt: Verified) -> None:
        """Show every draft the prompt."""
        self._device = prompt.tokens.device
        for i in range(len(self.drafts)):
            self._show(i, prompt)

    def propose(self, number: int, budget: Budget, sampling: Sampling, generator: torch.Generator | None) -> DraftTree:
        """Guesses of one draft, which first sees what it has missed."""
        self._catch_up(number)
        tree: DraftTree = self.drafts[number].propose(self._states[number], budget, sampling, generator)
        return tree

    def observe(self, verified: Verified, guessed: int | None) -> None:
        """Take in what was committed; `guessed` is the draft whose tree it came from, None if there was none."""
        for i, draft in enumerate(self.drafts):
            if i == guessed or (self.eager and self._begun[i]):
                self._states[i] = draft.observe(self._states[i], self._view(i, verified, verified.nodes))
            else:
                self._show(i, verified)

    def _show(self, i: int, verified: Verified) -> None:
        seen = self._view(i, verified, None)
        self._unseen[i].append(seen)
        states = [part for part in (seen.hidden, *seen.layers) if part is not None]
        self._kept[i] += sum(part.untyped_storage().nbytes() for part in states)
        if self.eager or self._kept[i] > MOST_KEPT:
            self._catch_up(i)

    def _catch_up(self, i: int) -> None:
        if not self._unseen[i]:
            return
        missed = joined(self._unseen[i])
        draft = self.drafts[i]
        self._states[i] = draft.observe(self._states[i], missed) if self._begun[i] else draft.begin(missed)
        self._begun[i] = True
        self._unseen[i], self._kept[i] = [], 0

    def _view(self, i: int, verified: Verified, nodes: Tensor | None) -> Verified:
        return only_needed(verified, self.drafts[i].needs, self.needs, nodes)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some rows."""
        for i, begun in enumerate(self._begun):
            if begun:
                self._states[i] = self._states[i].select(on_device(rows, self._device))
        self._unseen = [[rows_of(part, rows) for part in unseen] for unseen in self._unseen]
