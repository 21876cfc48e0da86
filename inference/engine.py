"""The decode loop: prefill, then rounds of propose, verify, accept, emit, keep, observe until every row has ended.

Letters: B rows (those still going), N tree nodes, T tokens a round commits, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec import hf
from selfspec.accept import Accepted, accept, picked_at_once
from selfspec.draft import Budget, Draft
from selfspec.draws import ScreenedDraws
from selfspec.inference.choices import Pilot
from selfspec.inference.drafting import Drafters, Pick, parts_of
from selfspec.inference.kept import KeptRows
from selfspec.inference.output import Output
from selfspec.inference.request import Request, Result
from selfspec.inference.rounds import Rounds
from selfspec.inference.stopping import Stopper
from selfspec.scoring import History, Processors, TreeScores, picked_everywhere, sampling_of
from selfspec.screen import Screened
from selfspec.stats import Stats
from selfspec.target import Target
from selfspec.target_output import TargetOutput
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


class Generation(Rounds):
    """The state of one call. `rows[i]` is the prompt that row i of the running batch belongs to."""

    def __init__(
        self, target: Target, draft: Draft | Pick, request: Request, output: Output, pilot: Pilot | None = None
    ) -> None:
        self.request = request
        self.sampling = sampling_of(request.processors, request.do_sample, request.temperature)
        self.chance = TorchChance(request.generator, target.device)
        self.stopper = Stopper(request.stopping)
        self.processors = Processors(request.processors)
        self.draws = request.wants_draws
        self.output = output
        self.prompt = request.prompt()
        batch, width = request.input_ids.shape
        room = self.stopper.room(width)
        room = _NO_LIMIT if room is None else max(room, 0)
        self.history = History(request.input_ids, room + _ROOM_FOR_NODES)
        capacity = self.prompt.width + min(room, _NO_LIMIT) + _ROOM_FOR_NODES
        drafters = Drafters(parts_of(draft), eager=pilot is None)
        super().__init__(target, drafters, range(batch), capacity, Stats(rows=batch), request.nodes, pilot)
        if request.cache is not None and self.prompt.past is not None:
            past = self.prompt.past
            self.cache.load(hf.rows_of(request.cache, past), past.sum(1).tolist())
        self.kept = KeptRows(self.prompt) if request.keep_cache else None

    def prefill(self) -> None:
        """Read the prompts, take the first token from the target, and start the draft."""
        self.read(self.prompt, self.request.chunk)

    def _ask(self, draft: int, budget: Budget) -> DraftTree:
        return self.drafters.propose(draft, budget, self.sampling, self.request.generator)

    def _rooms(self) -> list[int]:
        rooms = [self.stopper.room(length) for length in self.history.lengths]
        return [_NO_LIMIT + 1 if room is None else room for room in rooms]

    def _wants_likeliest(self) -> bool:
        return self.request.wants_likeliest

    def _draws_from(self, tree: DraftTree, out: TargetOutput) -> Screened | None:
        return out.screened if self.draws and tree.drawn is None else None

    def _known_picks(self, tree: DraftTree, logits: Tensor) -> Tensor | None:
        request = self.request
        if not picked_at_once(tree, request.do_sample, request.accept):
            return None
        if self.processors.read_the_past or request.keep_scores:
            return None
        return picked_everywhere(logits, self.history, self.processors, self.chance if request.do_sample else None)

    def _accept(self, tree: DraftTree, out: TargetOutput, picks: list[list[int]] | None) -> Accepted:
        request = self.request
        scores = TreeScores(out, tree.token_lists, self.history, self.processors, request.keep_scores)
        draws = None
        if picks is None and (screened := self._draws_from(tree, out)) is not None:
            draws = ScreenedDraws(out, screened, tree.nodes, request.processors, self.chance)
        accepted = accept(tree, scores, request.do_sample, self.chance, request.accept, picks, draws)
        self.output.remember(self.rows, accepted, scores)
        return accepted

    def _emit(self, accepted: Accepted, out: TargetOutput, tree: DraftTree | None) -> list[int]:
        going = []
        shape = None if tree is None else tree.shape.host
        for row, tokens in enumerate(accepted.tokens):
            keep, ended = self.stopper.cut(self.history, row, tokens)
            del tokens[keep:]
            self.history.append(row, tokens)
            drafted = min(len(accepted.paths[row]) - 1, keep)
            if shape is None:
                self.stats.count_first()
            else:
                self.stats.count_round(shape.guesses(row), shape.deepest(row), drafted, keep)
            self.output.commit(self.rows[row], tokens, ended, drafted)
            if not ended:
                going.append(row)
        self.output.stream()
        self.roots = [tokens[-1] for tokens in accepted.tokens]
        return going

    def _go_on_with(self, going: Sequence[int]) -> None:
        if self.kept is not None:
            for row in sorted(set(range(len(self.rows))) - set(going)):
                self.kept.take(self.cache, row, self.rows[row])
        if going and len(going) < len(self.rows):
            self.history.select(going)
        super()._go_on_with(going)

    def result(self) -> Result:
        """What the call returns."""
        sequences = self.output.sequences()
        scores, logits = self.output.recorded()
        cache = None
        if self.kept is not None:
            cache = self.kept.whole(self.target, sequences[:, self.request.input_ids.shape[1] :])
        return Result(sequences, self.stats, scores, logits, cache, self.output.origins)
