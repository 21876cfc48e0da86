"""Rows that join and leave a running batch between rounds, each with its own prompt, sampling, stops and seed.

The round is the engine's: propose, verify, accept, emit, keep, observe. What differs is that every row picks its own
token from the target (`accept.accept_chosen`), drawing once per committed token from a generator of its own, while
drafts are asked for guesses made without chance. So what a row writes depends neither on its neighbours nor on the
draft, as far as the target's scores do not: exactly in float32, up to near-ties in low precision.

Letters: B rows, N tree nodes, P prompt tokens, V vocabulary, K rows asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from selfspec import hf
from selfspec.accept import Accepted, accept_chosen
from selfspec.draft import Budget, Draft, DraftState, Needs, Sampling, Verified
from selfspec.inference.output import origins
from selfspec.inference.prompt import Prompt, verified_path, verified_prompt
from selfspec.inference.request import Request
from selfspec.inference.stopping import Stopper
from selfspec.scoring import History, Processors
from selfspec.stats import Stats
from selfspec.target import Target, TargetOutput
from selfspec.tree import DraftTree

ROOM = 64
"""Slots of a row beyond its text, for the nodes of a tree."""


@dataclass(frozen=True)
class Likely:
    """The target's own log-probabilities at one place, before any processor.

    Args:
        chosen: of the token that was committed.
        top: the likeliest tokens and theirs, the likeliest first.
    """

    chosen: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class News:
    """What one round adds to a row.

    Args:
        tokens: the committed tokens.
        origins: for each the depth at which it was drafted, 0 if the target gave it.
        likely: for each the target's log-probabilities, if they were asked for.
        ended: `stop` (an end token), `length`, or None while the row goes on.
    """

    tokens: list[int]
    origins: list[int]
    likely: list[Likely]
    ended: str | None


class Listener(Protocol):
    """Who reads a row's tokens. Called on the thread that runs the batch, and must not raise."""

    def take(self, news: News) -> bool:
        """Take in new tokens; True ends the row (a stop string was found)."""


@dataclass(eq=False)
class Row:
    """One text in the making.

    Args:
        request: one prompt (`[1, P]`, unpadded), its processors and stopping criteria, and a generator of its own.
        listener: gets the tokens.
        top: how many of the likeliest tokens to report with each token; None reports nothing.
    """

    request: Request
    listener: Listener
    top: int | None = None
    history: History = field(init=False)
    processors: Processors = field(init=False)
    stopper: Stopper = field(init=False)
    stats: Stats = field(init=False)

    def __post_init__(self) -> None:
        ids = self.request.input_ids
        self.stopper = Stopper(self.request.stopping)
        self.processors = Processors(self.request.processors)
        self.history = History(ids, max(self.stopper.room(ids.shape[1]) or 0, 0) + ROOM)
        self.stats = Stats(rows=1)

    @property
    def reserved(self) -> int:
        """Slots of the cache that this row may come to need."""
        return (self.stopper.max_length or self.history.lengths[0]) + ROOM

    def pick(self, scores: Tensor) -> int:
        """The target's token from processed scores `[V]`."""
        if not self.request.do_sample:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self.request.generator))

    def commit(self, tokens: list[int]) -> str | None:
        """Take in the tokens of a round up to the row's stop, behind which they are cut off; see `News.ended`."""
        keep, ended = self.stopper.cut(self.history, 0, tokens)
        del tokens[keep:]
        self.history.append(0, tokens)
        if not ended:
            return None
        return "stop" if tokens[-1] in self.stopper.end_tokens else "length"

    def tell(self, tokens: list[int], drafted: int, likely: list[Likely], ended: str | None) -> bool:
        """Tell the listener of committed tokens, `drafted` of them guessed; whether the row is over."""
        news = News(tokens, origins(drafted, len(tokens)), likely[: len(tokens)], ended)
        return self.listener.take(news) or ended is not None


class Plain:
    """No guesses: plain decoding in the same batches."""

    kind = "none"
    needs = Needs()

    def begin(self, verified: Verified) -> Roots:
        """Remember the newest tokens."""
        return Roots(verified.root)

    def observe(self, state: Roots, verified: Verified) -> Roots:
        """Remember the newest tokens."""
        return Roots(verified.root)

    def propose(self, state: Roots, budget: Budget, sampling: Sampling, generator: Any) -> DraftTree:
        """The root alone."""
        return DraftTree.root_only(state.root)


@dataclass(frozen=True, eq=False)
class Roots(DraftState):
    """The newest token of each row `[B]`."""

    root: Tensor

    def select(self, rows: Tensor) -> Roots:
        """The state of some rows."""
        return Roots(self.root[rows])

    @property
    def joins(self) -> bool:
        """See `DraftState.joins`."""
        return True

    def join(self, other: Roots) -> Roots:
        """See `DraftState.join`."""
        return Roots(torch.cat([self.root, other.root]))


class Batch:
    """Rows that share the passes of the target. Making one reads the prompts and takes the first tokens.

    Args:
        target: the door to the model.
        draft: shared; its state is the batch's own.
        rows: at least one; just one if the target can follow chains only.
        stats: where rounds are counted and timed.
        nodes: the most nodes of a tree, the root included; None leaves it to the draft.
        chunk: read prompts in pieces of so many tokens.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft,
        rows: Sequence[Row],
        stats: Stats,
        nodes: int | None = None,
        chunk: int | None = None,
    ) -> None:
        self.target = target
        self.draft = draft
        self.rows = list(rows)
        self.stats = stats
        self.nodes = nodes
        self.state: Any = None
        self.roots: list[int] = []
        self.cache = target.new_cache(len(self.rows), self._capacity())
        with torch.no_grad():
            self._read(chunk)

    def _capacity(self) -> int:
        return max(row.reserved for row in self.rows)

    @property
    def cost(self) -> int:
        """Slots of the cache that this batch may come to need."""
        return cost([row.reserved for row in self.rows])

    def _read(self, chunk: int | None) -> None:
        prompts = [row.request.input_ids[0] for row in self.rows]
        tokens, counts = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True), [len(p) for p in prompts]
        prompt = Prompt(tokens, counts, None, None, (tokens, counts), None, tokens.shape[1])
        with self.stats.timed("prefill"):
            out = self.target.prefill(tokens, counts, self.cache, self.draft.needs, chunk=chunk)
            tree = DraftTree.root_only(torch.zeros(len(counts), dtype=torch.long, device=tokens.device))
            accepted = self._accept(tree, out)
        self.stats.rows += len(counts)
        first = [found[0] for found in accepted.tokens]
        going = self._emit(accepted, out, tree, first=True)
        if going:
            with self.stats.timed("observe"):
                shown = self.cache if self.draft.needs.cache else None
                self.state = self.draft.begin(verified_prompt(prompt, out, first, self.draft.needs, shown))
        self._go_on_with(going)

    def round(self) -> None:
        """One pass of the target over a tree of guesses, and all that follows from it."""
        with torch.no_grad():
            with self.stats.timed("propose"):
                tree = self._propose()
            with self.stats.timed("verify"):
                out = self.target.verify(tree, self.cache, self.draft.needs)
            with self.stats.timed("accept"):
                accepted = self._accept(tree, out)
            with self.stats.timed("emit"):
                going = self._emit(accepted, out, tree)
            with self.stats.timed("keep"):
                self.cache.keep([path[: len(t)] for path, t in zip(accepted.paths, accepted.tokens, strict=True)])
            with self.stats.timed("observe"):
                if going:
                    shown = self.cache if self.draft.needs.cache else None
                    self.state = self.draft.observe(self.state, verified_path(tree, out, accepted, shown))
                self._go_on_with(going)

    def _propose(self) -> DraftTree:
        roots, depth = torch.tensor(self.roots, device=self.target.device), self._deepest()
        if depth < 1:
            return DraftTree.root_only(roots)
        tree = self.draft.propose(self.state, Budget(self.nodes, depth), Sampling(), None)
        tree.check(roots, self.target.vocab_size)
        if self.target.chain_only:
            tree = tree.trunk()
        tree = replace(tree.limit_depth(depth), drawn=None)
        return tree if self.nodes is None else tree.limit_nodes(self.nodes)

    def _deepest(self) -> int:
        if self.cache.record is not None and self.cache.record.overdue:
            return 0
        rooms = [row.stopper.room(row.history.lengths[0]) for row in self.rows]
        deepest = max(ROOM if room is None else room - 1 for room in rooms)
        limit = self.target.drafting_limit
        return deepest if limit is None else min(deepest, limit - 1 - max(self.cache.lengths))

    def _accept(self, tree: DraftTree, out: TargetOutput) -> Accepted:
        tokens = tree.token_lists

        def scores(rows: list[int], paths: list[list[int]]) -> Tensor:
            raw = out.logits[rows, [path[-1] for path in paths]]
            if not any(self.rows[row].request.processors for row in rows):
                return raw.float()
            extras = [[tokens[row][node] for node in path[1:]] for row, path in zip(rows, paths, strict=True)]
            return torch.cat(
                [
                    self.rows[row].processors(self.rows[row].history, [0], [extra], raw[i : i + 1])
                    for i, (row, extra) in enumerate(zip(rows, extras, strict=True))
                ]
            )

        def pick(rows: list[int], found: Tensor) -> list[int]:
            if not any(self.rows[row].request.do_sample for row in rows):
                return found.argmax(-1).tolist()
            return [self.rows[row].pick(found[i]) for i, row in enumerate(rows)]

        return accept_chosen(tree, scores, pick)

    def _emit(self, accepted: Accepted, out: TargetOutput, tree: DraftTree, first: bool = False) -> list[int]:
        """Commit tokens up to each row's stop; returns the rows that go on. Cuts `accepted.tokens` in place."""
        going, real, depth = [], tree.real().sum(1).tolist(), tree.depths()
        for b, (row, path, tokens) in enumerate(zip(self.rows, accepted.paths, accepted.tokens, strict=True)):
            likely = [] if row.top is None else _likely(out.logits[b, path], tokens, row.top)
            ended = row.commit(tokens)
            drafted = min(len(path) - 1, len(tokens))
            for stats in (self.stats, row.stats):
                if first:
                    stats.count_first()
                else:
                    stats.count_round(real[b] - 1, depth[b], drafted, len(tokens))
            if not row.tell(list(tokens), drafted, likely, ended):
                going.append(b)
        self.roots = [tokens[-1] for tokens in accepted.tokens]
        return going

    def _go_on_with(self, going: Sequence[int]) -> None:
        if going and len(going) < len(self.rows):
            self.cache.select(going)
            self.state = self.state.select(torch.tensor(going, device=self.target.device))
            self.roots = [self.roots[b] for b in going]
        self.rows = [self.rows[b] for b in going]

    def drop(self, leaving: Sequence[Row]) -> None:
        """Go on without these rows."""
        gone = {id(row) for row in leaving}
        going = [b for b, row in enumerate(self.rows) if id(row) not in gone]
        if len(going) < len(self.rows):
            self._go_on_with(going)

    def joins(self, other: Batch) -> bool:
        """Whether the rows of another batch could go on in this one."""
        mine = getattr(self.state, "joins", False) and getattr(other.state, "joins", False)
        return bool(mine) and self.cache.joins and self.target.chain_only is None

    def join(self, other: Batch) -> None:
        """Take in the rows of another batch, which is used up.

        Raises:
            UnsupportedGeneration: `joins` is false.
        """
        self.state = self.state.join(other.state)
        self.rows += other.rows
        self.cache.join(other.cache, self._capacity())
        self.roots += other.roots


def cost(reserved: Sequence[int]) -> int:
    """Slots of the cache of a batch whose rows reserve so many each: a batch is as wide as its widest row."""
    return len(reserved) * max(reserved, default=0)


def longest_text(target: Target) -> int | None:
    """The longest text whose scores depend on nothing but itself; None without a bound.

    Beyond it positions run out, or the model changes its rotary frequencies with the longest text of a pass.
    """
    limits = [target.max_positions, hf.dynamic_rope_from(target.config), hf.rope_switch(target.config)]
    return min((limit for limit in limits if limit is not None), default=None)


def _likely(logits: Tensor, tokens: Sequence[int], top: int) -> list[Likely]:
    """From raw logits `[K, V]` at the places of `tokens`."""
    scores = logits[: len(tokens)].float().log_softmax(-1)
    values, ids = scores.topk(min(top, scores.shape[-1]), dim=-1)
    rows = zip(tokens, scores, ids.tolist(), values.tolist(), strict=True)
    return [Likely(float(own[token]), list(zip(i, v, strict=True))) for token, own, i, v in rows]
