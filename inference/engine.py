"""The decode loop: prefill, then rounds of propose, verify, accept, emit, keep, observe until every row has ended.

Letters: B rows (those still going), N tree nodes, T tokens a round commits, D hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec import hf
from selfspec.accept import Accepted, accept, picked_at_once
from selfspec.cache import SlotCache
from selfspec.draft import Budget, Draft
from selfspec.host import on_device, waits
from selfspec.inference.choices import OFF, Choice, Pilot, Round
from selfspec.inference.drafting import Drafters, Pick, parts_of
from selfspec.inference.kept import KeptRows
from selfspec.inference.output import Output
from selfspec.inference.prompt import verified_path, verified_prompt
from selfspec.inference.request import Request, Result
from selfspec.inference.stopping import Stopper
from selfspec.scoring import History, Processors, TreeScores, picked_everywhere, sampling_of
from selfspec.stats import Stats
from selfspec.target import Target
from selfspec.tree import DraftTree
from selfspec.walk import TorchChance

_ROOM_FOR_NODES = 64
_NO_LIMIT = 4096


def decode(target: Target, draft: Draft | Pick, request: Request, pilot: Pilot | None = None) -> Result:
    """Generate with a draft; the output is that of plain decoding.

    Nothing outlives the call but the result: draft and target are shared, their state is not.

    Args:
        target: the model.
        draft: what guesses, or several drafts for the pilot to pick from.
        request: prompts and how to go on from them.
        pilot: chooses the size of each round; None asks the draft for a tree in every round.
    """
    output = Output(request)
    try:
        with torch.no_grad():
            generation = Generation(target, draft, request, output, pilot)
            generation.prefill()
            while generation.rows:
                generation.round()
            return generation.result()
    finally:
        output.end_stream()


class Generation:
    """The state of one call. `rows[i]` is the prompt that row i of the running batch belongs to."""

    def __init__(
        self, target: Target, draft: Draft | Pick, request: Request, output: Output, pilot: Pilot | None = None
    ) -> None:
        self.target = target
        self.pilot = pilot
        self.drafters = Drafters(parts_of(draft), eager=pilot is None)
        self.request = request
        self.sampling = sampling_of(request.processors, request.do_sample, request.temperature)
        self.chance = TorchChance(request.generator, target.device)
        self.stopper = Stopper(request.stopping)
        self.processors = Processors(request.processors)
        self.reads_once = waits(target.device) and not target.chain_only
        self.stats = Stats(rows=request.input_ids.shape[0])
        self.output = output
        self.rows = list(range(request.input_ids.shape[0]))
        self.prompt = request.prompt()
        room = self.stopper.room(request.input_ids.shape[1])
        self.history = History(request.input_ids, (_NO_LIMIT if room is None else max(room, 0)) + _ROOM_FOR_NODES)
        capacity = self.prompt.width + min(_NO_LIMIT if room is None else max(room, 0), _NO_LIMIT) + _ROOM_FOR_NODES
        self.cache = target.new_cache(len(self.rows), capacity)
        if request.cache is not None and self.prompt.past is not None:
            past = self.prompt.past
            self.cache.load(hf.rows_of(request.cache, past), past.sum(1).tolist())
        self.kept = KeptRows(self.prompt) if request.keep_cache else None
        self.roots = [0] * len(self.rows)

    def prefill(self) -> None:
        """Read the prompts, take the first token from the target, and start the draft."""
        prompt, needs, chunk = self.prompt, self.drafters.needs, self.request.chunk
        with self.stats.timed("prefill"):
            out = self.target.prefill(
                prompt.tokens, prompt.counts, self.cache, needs, embeds=prompt.embeds, chunk=chunk
            )
            tree = DraftTree.root_only(torch.zeros(len(self.rows), dtype=torch.long, device=prompt.tokens.device))
            accepted = self._accept(tree, out.logits, self._read_once(tree, out.logits))
        self.stats.new_tokens += len(self.rows)
        first = [tokens[0] for tokens in accepted.tokens]
        going = self._emit(accepted, count=False)
        if going:
            with self.stats.timed("observe"):
                self.drafters.begin(verified_prompt(prompt, out, first, needs, self._shown_cache()))
        self._continue_with(going)

    def _shown_cache(self) -> SlotCache | None:
        return self.cache if self.drafters.needs.cache else None

    def round(self) -> None:
        """One pass of the target over a tree of guesses, and all that follows from it."""
        begun = time.perf_counter()
        rows, context, depth = len(self.rows), max(self.cache.lengths), self._deepest()
        choice = self._choose(rows, context, depth)
        with self.stats.timed("propose"):
            tree = self._propose(choice, depth)
        with self.stats.timed("verify"):
            safe = tree.within(self.target.vocab_size) if self.reads_once else tree
            out = self.target.verify(safe, self.cache, self.drafters.needs)
            picks = self._read_once(tree, out.logits)  # here, since on an accelerator it is what ends the pass
        with self.stats.timed("accept"):
            accepted = self._accept(tree, out.logits, picks)
        with self.stats.timed("emit"):
            going = self._emit(accepted, count=True, tree=tree)
        with self.stats.timed("keep"):
            self.cache.keep([path[: len(t)] for path, t in zip(accepted.paths, accepted.tokens, strict=True)])
        with self.stats.timed("observe"):
            if going:
                self.drafters.observe(verified_path(tree, out, accepted, self._shown_cache()), choice.draft)
            self._continue_with(going)
        if self.pilot is not None:
            gains = [len(tokens) for tokens in accepted.tokens]
            seconds = time.perf_counter() - begun
            self.pilot.learn(choice, Round(rows, context, tree.nodes, tree.shape.max_depth, gains, seconds))

    def _choose(self, rows: int, context: int, depth: int) -> Choice:
        if depth < 1:
            return OFF
        if self.pilot is None:
            return Choice(0, self.request.nodes)
        return self.pilot.choose(rows, context, depth)

    def _propose(self, choice: Choice, deepest: int) -> DraftTree:
        roots = on_device(self.roots, self.target.device)
        if choice.draft is None:
            return DraftTree.root_only(roots)
        depth = deepest if choice.depth is None else min(choice.depth, deepest)
        budget = Budget(choice.nodes, depth)
        tree = self.drafters.propose(choice.draft, budget, self.sampling, self.request.generator)
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
        rooms = [self.stopper.room(length) for length in self.history.lengths]
        deepest = max(_NO_LIMIT if room is None else room - 1 for room in rooms)
        limit = self.target.drafting_limit
        if limit is not None:
            deepest = min(deepest, limit - 1 - max(self.cache.lengths))
        return deepest

    def _accept(self, tree: DraftTree, logits: Tensor, picks: list[list[int]] | None) -> Accepted:
        request = self.request
        scores = TreeScores(logits, tree.token_lists, self.history, self.processors, request.keep_scores)
        accepted = accept(tree, scores, request.do_sample, self.chance, request.accept, picks)
        self.output.remember(self.rows, accepted, logits, scores)
        return accepted

    def _read_once(self, tree: DraftTree, logits: Tensor) -> list[list[int]] | None:
        """On an accelerator, fetch and check the tree, and with it the target's token at every node.

        Returns:
            The tokens, `[B][N]`; None where the accept rule asks for more than them, and on CPUs, where reading what
            the walk reaches is cheaper.
        """
        if not self.reads_once:
            return None
        request, found = self.request, []
        chosen = picked_at_once(tree, request.do_sample, request.accept)
        if chosen and not self.processors.read_the_past and not request.keep_scores:
            chance = self.chance if request.do_sample else None
            found = [picked_everywhere(logits, self.history, self.processors, chance).to(tree.tokens.device)]
        picks = tree.fetch(found)
        tree.check_values(self.roots, self.target.vocab_size)
        return picks[0] if picks else None

    def _emit(self, accepted: Accepted, count: bool, tree: DraftTree | None = None) -> list[int]:
        """Commit tokens up to each row's stop; returns the batch rows that go on. Cuts `accepted.tokens` in place."""
        going = []
        shape = None if tree is None else tree.shape.host
        for row, tokens in enumerate(accepted.tokens):
            keep, ended = self.stopper.cut(self.history, row, tokens)
            del tokens[keep:]
            self.history.append(row, tokens)
            drafted = min(len(accepted.paths[row]) - 1, keep)
            if count and shape is not None:
                self.stats.count_round(shape.guesses(row), shape.deepest(row), drafted, keep)
            self.output.commit(self.rows[row], tokens, ended, drafted)
            if not ended:
                going.append(row)
        self.output.stream()
        self.roots = [tokens[-1] for tokens in accepted.tokens]
        return going

    def _continue_with(self, going: Sequence[int]) -> None:
        """Drop the rows that ended, so that they stop costing."""
        if self.kept is not None:
            for row in sorted(set(range(len(self.rows))) - set(going)):
                self.kept.take(self.cache, row, self.rows[row])
        if going and len(going) < len(self.rows):
            self.cache.select(going)
            self.history.select(going)
            self.drafters.select(going)
            self.roots = [self.roots[row] for row in going]
        self.rows = [self.rows[row] for row in going]

    def result(self) -> Result:
        """What the call returns."""
        sequences = self.output.sequences()
        scores, logits = self.output.recorded()
        cache = None
        if self.kept is not None:
            cache = self.kept.whole(self.target, sequences[:, self.request.input_ids.shape[1] :])
        return Result(sequences, self.stats, scores, logits, cache, self.output.origins)
