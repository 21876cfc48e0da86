"""Rows that join and leave a running batch between rounds, each with its own prompt, sampling, stops and seed.

The round is the engine's: propose, verify, accept, emit, keep, observe. What differs is that every row picks its own
token from the target (`accept.accept_chosen`), drawing once per committed token from a generator of its own, while
drafts are asked for guesses made without chance. So what a row writes depends neither on its neighbours nor on the
draft, as far as the target's scores do not: exactly in float32, up to near-ties in low precision.

Letters: B rows, N tree nodes, P prompt tokens, V vocabulary, K rows asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from selfspec import hf
from selfspec.accept import Accepted, accept_chosen
from selfspec.draft import Budget, Draft, Sampling
from selfspec.draws import ScreenedDraws
from selfspec.errors import UnsupportedGeneration
from selfspec.inference.choices import Pilot
from selfspec.inference.drafting import Drafters
from selfspec.inference.prompt import Prompt
from selfspec.inference.rounds import Rounds
from selfspec.inference.rows import ROOM, Likely, Row
from selfspec.scoring import picked_everywhere
from selfspec.screen import Screened
from selfspec.stats import Stats
from selfspec.target import Target
from selfspec.target_output import TargetOutput
from selfspec.tree import DraftTree


class Batch(Rounds):
    """Rows that share the passes of the target. Making one reads the prompts and takes the first tokens.

    Args:
        target: the door to the model.
        draft: shared; its state is the batch's own.
        rows: at least one; just one if the target can follow chains only.
        stats: where rounds are counted and timed.
        nodes: the most nodes of a tree, the root included; None leaves it to the draft.
        chunk: read prompts in pieces of so many tokens.
        pilot: chooses the size of each round; None asks the draft for a tree in every round.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft,
        rows: Sequence[Row],
        stats: Stats,
        nodes: int | None = None,
        chunk: int | None = None,
        pilot: Pilot | None = None,
    ) -> None:
        self.rows: list[Row] = list(rows)
        for row in self.rows:
            row.draws = row.request.wants_draws and row.top is None and target.draws
        drafters = Drafters([draft], eager=pilot is None)
        super().__init__(target, drafters, rows, self._capacity(), stats, nodes, pilot)
        prompts = [row.request.input_ids[0] for row in self.rows]
        tokens, counts = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True), [len(p) for p in prompts]
        self.read(Prompt(tokens, counts, None, None, (tokens, counts), None, tokens.shape[1]), chunk)
        self.stats.rows += len(counts)

    def _capacity(self) -> int:
        return max(row.reserved for row in self.rows)

    @property
    def cost(self) -> int:
        """Slots of the cache that this batch may come to need."""
        return cost([row.reserved for row in self.rows])

    def _ask(self, draft: int, budget: Budget) -> DraftTree:
        return replace(self.drafters.propose(draft, budget, Sampling(), None), drawn=None)

    def _rooms(self) -> list[int]:
        rooms = [row.stopper.room(row.history.lengths[0]) for row in self.rows]
        return [ROOM + 1 if room is None else room for room in rooms]

    def _wants_likeliest(self) -> bool:
        return not any(row.request.do_sample or row.request.processors or row.top is not None for row in self.rows)

    def _draws_from(self, tree: DraftTree, out: TargetOutput) -> Screened | None:
        return out.screened_all if all(row.draws for row in self.rows) else None

    def _known_picks(self, tree: DraftTree, logits: Tensor) -> Tensor | None:
        """None where a row reads its own past, or draws: once per committed token, so that its seed fits any tree."""
        if any(row.request.do_sample or row.processors.read_the_past for row in self.rows):
            return None
        return torch.cat(
            [picked_everywhere(logits[b : b + 1], row.history, row.processors, None) for b, row in enumerate(self.rows)]
        )

    def _accept(self, tree: DraftTree, out: TargetOutput, picks: list[list[int]] | None) -> Accepted:
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

        drawing = self._drawing(tree, out)

        def take(rows: list[int], paths: list[list[int]]) -> list[int]:
            found = {
                row: drawing[row]([row], [path])[0] for row, path in zip(rows, paths, strict=True) if row in drawing
            }
            others = [(row, path) for row, path in zip(rows, paths, strict=True) if row not in drawing]
            if others:
                rest = [row for row, _ in others]
                found |= dict(zip(rest, pick(rest, scores(rest, [path for _, path in others])), strict=True))
            return [found[row] for row in rows]

        return accept_chosen(tree, take, picks)

    def _drawing(self, tree: DraftTree, out: TargetOutput) -> dict[int, ScreenedDraws]:
        """What draws the tokens of rows that need no logits. They draw alike beside rows that do: seeds hold."""
        drawn = [(b, row) for b, row in enumerate(self.rows) if row.draws]
        screened = out.screened_all if drawn else None
        if screened is None:
            return {}
        return {b: ScreenedDraws(out, screened, tree.nodes, row.request.processors, row.chance) for b, row in drawn}

    def _emit(self, accepted: Accepted, out: TargetOutput, tree: DraftTree | None) -> list[int]:
        going, shape = [], None if tree is None else tree.shape.host
        for b, (row, path, tokens) in enumerate(zip(self.rows, accepted.paths, accepted.tokens, strict=True)):
            likely = [] if row.top is None else _likely(out.logits[b, path], tokens, row.top)
            ended = row.commit(tokens)
            drafted = min(len(path) - 1, len(tokens))
            for stats in (self.stats, row.stats):
                if shape is None:
                    stats.count_first()
                else:
                    stats.count_round(shape.guesses(b), shape.deepest(b), drafted, len(tokens))
            if not row.tell(list(tokens), drafted, likely, ended):
                going.append(b)
        self.roots = [tokens[-1] for tokens in accepted.tokens]
        return going

    def drop(self, leaving: Sequence[Row]) -> None:
        """Go on without these rows."""
        gone = {id(row) for row in leaving}
        going = [b for b, row in enumerate(self.rows) if id(row) not in gone]
        if len(going) < len(self.rows):
            self._go_on_with(going)

    def joins(self, other: Batch) -> bool:
        """Whether the rows of another batch could go on in this one."""
        return self.drafters.joins and self.cache.joins and self.target.chain_only is None

    def join(self, other: Batch) -> None:
        """Take in the rows of another batch, which is used up.

        Raises:
            UnsupportedGeneration: `joins` is false.
        """
        if not self.joins(other):
            raise UnsupportedGeneration("these batches cannot become one; let them go on side by side")
        self.drafters.join(other.drafters)
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
