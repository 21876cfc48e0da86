"""One round, for all who decode in rounds: choose, propose, verify, accept, emit, keep, observe.

`engine.Generation` runs it for one call, `batching.Batch` for rows of many. They say how tokens are picked, where a row
stops, and what is done with a committed token.

Letters: B rows (those still going), N tree nodes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from selfspec.accept import Accepted
from selfspec.cache import SlotCache
from selfspec.draft import Budget
from selfspec.host import on_device, waits
from selfspec.inference.choices import OFF, Choice, Pilot, Round
from selfspec.inference.drafting import Drafters
from selfspec.inference.prompt import Prompt, verified_path, verified_prompt
from selfspec.screen import Screened
from selfspec.stats import Stats
from selfspec.target import Target
from selfspec.target_output import TargetOutput
from selfspec.tree import DraftTree


class Rounds(ABC):
    """Rows on one cache of the target, and the drafts that follow them.

    Args:
        target: the door to the model.
        drafters: the drafts.
        rows: whatever stands for a row.
        capacity: slots of the cache to allocate at once.
        stats: where rounds are counted and timed.
        nodes: the most nodes of a tree, the root included; None leaves it to the draft.
        pilot: chooses the size of each round; None asks the draft for a tree in every round.
    """

    def __init__(
        self,
        target: Target,
        drafters: Drafters,
        rows: Sequence[Any],
        capacity: int,
        stats: Stats,
        nodes: int | None,
        pilot: Pilot | None,
    ) -> None:
        self.target = target
        self.drafters = drafters
        self.rows = list(rows)
        target.begin()
        self.cache: SlotCache = target.new_cache(len(self.rows), capacity)
        self.stats = stats
        self.nodes = nodes
        self.pilot = pilot
        self.reads_once = waits(target.device) and not target.chain_only
        self.roots = [0] * len(self.rows)

    @abstractmethod
    def _ask(self, draft: int, budget: Budget) -> DraftTree:
        """Guesses of one draft."""

    @abstractmethod
    def _rooms(self) -> list[int]:
        """Per row how many more tokens it may get, or a large number without a limit."""

    @abstractmethod
    def _wants_likeliest(self) -> bool:
        """Whether nothing is asked of the target but its likeliest token at each node."""

    def _draws_from(self, tree: DraftTree, out: TargetOutput) -> Screened | None:
        """What the target's tokens are drawn from where the walk goes, if nothing else is asked of it; else None."""
        return None

    @abstractmethod
    def _known_picks(self, tree: DraftTree, logits: Tensor) -> Tensor | None:
        """The target's token at every node, `[B, N]`, where the accept rule asks for no more than that, else None."""

    @abstractmethod
    def _accept(self, tree: DraftTree, out: TargetOutput, picks: list[list[int]] | None) -> Accepted:
        """The path of each row; `picks` are the fetched tokens of `_known_picks`."""

    @abstractmethod
    def _emit(self, accepted: Accepted, out: TargetOutput, tree: DraftTree | None) -> list[int]:
        """Commit tokens up to each row's stop; returns the rows that go on. Cuts `accepted.tokens` in place.

        `tree` is what was verified, None after the prompt.
        """

    @torch.no_grad()
    def read(self, prompt: Prompt, chunk: int | None) -> None:
        """Read the prompts, take the first tokens from the target, and start the drafts."""
        needs = self.drafters.needs
        with self.stats.timed("prefill"):
            out = self.target.prefill(
                prompt.tokens, prompt.counts, self.cache, needs, embeds=prompt.embeds, chunk=chunk
            )
            tree = DraftTree.root_only(on_device(self.roots, self.target.device))
            accepted = self._accept(tree, out, self._read_once(tree, out))
        first = [tokens[0] for tokens in accepted.tokens]
        going = self._emit(accepted, out, None)
        if going:
            with self.stats.timed("observe"):
                self.drafters.begin(verified_prompt(prompt, out, first, needs, self._shown_cache()))
        self._go_on_with(going)

    def _shown_cache(self) -> SlotCache | None:
        return self.cache if self.drafters.needs.cache else None

    @torch.no_grad()
    def round(self) -> None:
        """One pass of the target over a tree of guesses, and all that follows from it."""
        begun, drafting = time.perf_counter(), self._drafting()
        rows, context, depth = len(self.rows), max(self.cache.lengths), self._deepest()
        choice = self._choose(rows, context, depth)
        with self.stats.timed("propose"):
            tree = self._propose(choice, depth)
        with self.stats.timed("verify"):
            safe = tree.within(self.target.vocab_size) if self.reads_once else tree
            out = self.target.verify(safe, self.cache, self.drafters.needs)
            picks = self._read_once(tree, out)  # here, since on an accelerator it is what ends the pass
        with self.stats.timed("accept"):
            accepted = self._accept(tree, out, picks)
        with self.stats.timed("emit"):
            going = self._emit(accepted, out, tree)
        with self.stats.timed("keep"):
            self.cache.keep([path[: len(t)] for path, t in zip(accepted.paths, accepted.tokens, strict=True)])
        with self.stats.timed("observe"):
            if going:
                self.drafters.observe(verified_path(tree, out, accepted, self._shown_cache()), choice.draft)
            self._go_on_with(going)
        if self.pilot is not None:
            gains = [len(tokens) for tokens in accepted.tokens]
            seconds = time.perf_counter() - begun
            drafted = None if self.reads_once else self._drafting() - drafting
            self.pilot.learn(choice, Round(rows, context, tree.nodes, tree.shape.max_depth, gains, seconds, drafted))

    def _drafting(self) -> float:
        """Seconds spent in drafts so far."""
        return self.stats.seconds["propose"] + self.stats.seconds["observe"]

    def _choose(self, rows: int, context: int, depth: int) -> Choice:
        if depth < 1:
            return OFF
        return Choice(0, self.nodes) if self.pilot is None else self.pilot.choose(rows, context, depth)

    def _propose(self, choice: Choice, deepest: int) -> DraftTree:
        if choice.draft is None:
            return DraftTree.root_only(on_device(self.roots, self.target.device))
        depth = deepest if choice.depth is None else min(choice.depth, deepest)
        budget = Budget(choice.nodes, depth)
        tree = self._ask(choice.draft, budget)
        tree.check_sizes(self.target.vocab_size)
        if self.reads_once and tree.nodes <= min(depth + 1, budget.nodes or tree.nodes):
            return tree  # its values are checked when they are read, with the target's answer
        tree.fetch()
        tree.check_values(self.roots, self.target.vocab_size)
        if self.target.chain_only:
            tree = tree.trunk()
        tree = tree.limit_depth(depth)
        return tree if budget.nodes is None else tree.limit_nodes(budget.nodes)

    def _deepest(self) -> int:
        """The depth beyond which no row could commit a node, for want of tokens to write or of exact positions."""
        if self.cache.record is not None and self.cache.record.overdue:
            return 0
        deepest = max(self._rooms()) - 1
        limit = self.target.drafting_limit
        return deepest if limit is None else min(deepest, limit - 1 - max(self.cache.lengths))

    def _read_once(self, tree: DraftTree, out: TargetOutput) -> list[list[int]] | None:
        """The target's token at every node, `[B][N]`, where it is known without a walk; else the logits are made.

        On an accelerator this fetches and checks the tree as well. On CPUs reading what the walk reaches is cheaper,
        but for a head that finds the likeliest tokens without all logits.
        """
        likeliest = out.likeliest() if self._wants_likeliest() else None
        if not self.reads_once:
            if likeliest is not None:
                return list(likeliest.tolist())
            if self._draws_from(tree, out) is None:
                _ = out.logits  # made now, so that their time counts to the pass
            return None
        known = self._known_picks(tree, out.logits)
        picks = tree.fetch([] if known is None else [known.to(tree.tokens.device)])
        tree.check_values(self.roots, self.target.vocab_size)
        return picks[0] if picks else None

    def _go_on_with(self, going: Sequence[int]) -> None:
        """Drop the rows that ended, so that they stop costing."""
        if going and len(going) < len(self.rows):
            self.cache.select(going)
            self.drafters.select(going)
            self.roots = [self.roots[row] for row in going]
        self.rows = [self.rows[row] for row in going]
