"""The drafts of one generation: what each is shown, and when.

A draft that is not asked for guesses need not do any work: what the target reads in the meantime is kept (tokens and
the few hidden states that the draft asked for) and handed over in one piece when the draft is next wanted.

Rows may join while a generation runs. Each draft then has shares of the batch: rows that it began together, or will.
Shares become one as soon as their states can be joined; until then each has its own guesses, side by side in one tree.

Letters: B rows, T places, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from selfspec.draft import Budget, Draft, Needs, Sampling, Verified, all_needs, joined, only_needed, rows_of
from selfspec.errors import ConfigError
from selfspec.host import on_device
from selfspec.tree import DraftTree, TreeShape

MOST_KEPT = 1 << 26
"""Bytes of hidden states kept for a draft; when there are more, it is shown them."""
_LOOSE = 64


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


@dataclass(eq=False)
class _Share:
    """Rows that a draft began together, or will.

    Args:
        rows: how many.
        unseen: what the draft has still to be shown of them, in order.
        state: the draft's; None before it has begun.
        begun: whether it has.
        loose: how many of the newest pieces of `unseen` are single rounds.
    """

    rows: int
    unseen: list[Verified] = field(default_factory=list)
    state: Any = None
    begun: bool = False
    loose: int = 0

    def add(self, seen: Verified) -> None:
        """Keep a round for later; rounds are packed now and then, so that long waits leave few pieces."""
        self.unseen.append(seen)
        self.loose += 1
        if self.loose == _LOOSE:
            self.unseen[-_LOOSE:] = [joined(self.unseen[-_LOOSE:])]
            self.loose = 0

    def missed(self) -> Verified:
        """All of it in one piece, which is handed over."""
        found = joined(self.unseen)
        self.unseen, self.loose = [], 0
        return found

    def select(self, rows: Sequence[int], device: torch.device) -> None:
        """Go on with some rows."""
        if len(rows) == self.rows:
            return
        self.rows = len(rows)
        self.unseen = [rows_of(part, rows) for part in self.unseen]
        if self.begun:
            self.state = self.state.select(on_device(rows, device))


class _Follower:
    """One draft and its shares of the batch, in the order of rows."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.shares: list[_Share] = []
        self.kept = 0

    def show(self, seen: Verified) -> None:
        """Keep what the target has read."""
        for share, part in self._parts(seen):
            share.add(part)
        self.kept += sum(part.untyped_storage().nbytes() for part in (seen.hidden, *seen.layers) if part is not None)

    def observe(self, seen: Verified) -> None:
        """Take in at once what was committed; nothing may be missing."""
        for share, part in self._parts(seen):
            share.state = self.draft.observe(share.state, part)

    def _parts(self, seen: Verified) -> list[tuple[_Share, Verified]]:
        if len(self.shares) == 1:
            return [(self.shares[0], seen)]
        found, start = [], 0
        for share in self.shares:
            found.append((share, rows_of(seen, range(start, start + share.rows))))
            start += share.rows
        return found

    def catch_up(self) -> None:
        """Show the draft what it missed, all new rows in one piece, and join what can be joined."""
        done: list[_Share] = []
        for begun, group in groupby(self.shares, lambda share: share.begun):
            shares = list(group)
            if not begun:
                prompts = stacked([share.missed() for share in shares])
                shares = [_Share(sum(share.rows for share in shares), [], self.draft.begin(prompts), True)]
            for share in shares:
                if share.unseen:
                    share.state = self.draft.observe(share.state, share.missed())
                if done and _join(done[-1].state, share.state):
                    done[-1].state = done[-1].state.join(share.state)
                    done[-1].rows += share.rows
                else:
                    done.append(share)
        self.shares, self.kept = done, 0

    def propose(self, budget: Budget, sampling: Sampling, generator: torch.Generator | None) -> DraftTree:
        """Guesses for all rows."""
        self.catch_up()
        trees = [self.draft.propose(share.state, budget, sampling, generator) for share in self.shares]
        return trees[0] if len(trees) == 1 else side_by_side(trees)

    def select(self, rows: Sequence[int], device: torch.device) -> None:
        """Go on with some rows, given in order."""
        start, kept = 0, []
        for share in self.shares:
            stop = start + share.rows
            mine = [row - start for row in rows if start <= row < stop]
            start = stop
            if mine:
                share.select(mine, device)
                kept.append(share)
        self.shares = kept


def _join(mine: Any, other: Any) -> bool:
    return bool(getattr(mine, "joins", False) and getattr(other, "joins", False))


class Drafters:
    """Drafts, their states, and what each has still to be shown.

    Args:
        drafts: at least one.
        eager: show a draft at once what the target has read, whether or not it guesses next.
    """

    def __init__(self, drafts: Sequence[Draft], eager: bool) -> None:
        self.eager = eager
        self.needs: Needs = all_needs([draft.needs for draft in drafts]) if len(drafts) > 1 else drafts[0].needs
        self._followers = [_Follower(draft) for draft in drafts]

    def begin(self, prompt: Verified) -> None:
        """Show every draft the prompt."""
        self._device = prompt.tokens.device
        for follower in self._followers:
            follower.shares = [_Share(prompt.tokens.shape[0])]
            self._show(follower, self._view(follower, prompt, None))

    def propose(self, number: int, budget: Budget, sampling: Sampling, generator: torch.Generator | None) -> DraftTree:
        """Guesses of one draft, which first sees what it has missed."""
        return self._followers[number].propose(budget, sampling, generator)

    def observe(self, verified: Verified, guessed: int | None) -> None:
        """Take in what was committed; `guessed` is the draft whose tree it came from, None if there was none."""
        for i, follower in enumerate(self._followers):
            if i == guessed or (self.eager and all(share.begun for share in follower.shares)):
                follower.observe(self._view(follower, verified, verified.nodes))
            else:
                self._show(follower, self._view(follower, verified, None))

    def _show(self, follower: _Follower, seen: Verified) -> None:
        follower.show(seen)
        if self.eager or follower.kept > MOST_KEPT:
            follower.catch_up()

    def _view(self, follower: _Follower, verified: Verified, nodes: Tensor | None) -> Verified:
        return only_needed(verified, follower.draft.needs, self.needs, nodes)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with some rows, given in order."""
        for follower in self._followers:
            follower.select(rows, self._device)

    @property
    def joins(self) -> bool:
        """Whether rows of another batch can be taken in: not where states hold on to the target's cache."""
        return not self.needs.cache

    def join(self, other: Drafters) -> None:
        """Take in the rows of another batch of the same drafts, behind one's own. Drafts that wait go on waiting."""
        for mine, theirs in zip(self._followers, other._followers, strict=True):
            mine.shares += theirs.shares
            mine.kept += theirs.kept
            if self.eager or mine.kept > MOST_KEPT:
                mine.catch_up()


def stacked(parts: Sequence[Verified]) -> Verified:
    """What was read of several batches as that of one: rows one below the other, padded on the right."""
    if len(parts) == 1:
        return parts[0]
    longest = max(part.tokens.shape[1] for part in parts)

    def stack(values: Sequence[Tensor]) -> Tensor:
        return torch.cat([pad(v, (0, 0) * (v.ndim - 2) + (0, longest - v.shape[1])) for v in values])

    hidden = [part.hidden for part in parts if part.hidden is not None]
    made = Verified(
        stack([part.tokens for part in parts]),
        stack([part.next_tokens for part in parts]),
        torch.cat([part.counts for part in parts]),
        stack(hidden) if hidden else None,
        tuple(stack(layer) for layer in zip(*(part.layers for part in parts), strict=True)),
    )
    vars(made).update(count_list=[count for part in parts for count in part.count_list])
    return made


def side_by_side(trees: Sequence[DraftTree]) -> DraftTree:
    """Trees of several batches as one of all rows, the smaller ones filled up with nodes that are not real.

    What drawn nodes were drawn from is left out: the caller has to take all of them for chosen ones.
    """
    nodes = max(tree.nodes for tree in trees)
    tokens = [pad(tree.tokens, (0, nodes - tree.nodes)) for tree in trees]
    parents = [pad(tree.parents.expand_as(tree.tokens), (0, nodes - tree.nodes)) for tree in trees]
    real = [pad(tree.real(), (0, nodes - tree.nodes)) for tree in trees]
    return DraftTree(torch.cat(tokens), TreeShape(torch.cat(parents), torch.cat(real)))
