"""Plain decoding, one token per pass: slow, obvious, and the judge of everything else."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.accept import NO_DISTRIBUTION
from selfspec.draft import Needs
from selfspec.drawing import NO_TOKEN
from selfspec.errors import UnsupportedGeneration
from selfspec.host import on_device
from selfspec.inference.output import Output
from selfspec.inference.request import Request, Result
from selfspec.inference.stopping import Stopper
from selfspec.scoring import History, Processors
from selfspec.stats import Stats
from selfspec.target import Target
from selfspec.tree import DraftTree
from selfspec.walk import TorchChance


def decode_plain(target: Target, request: Request) -> Result:
    """Generate without a draft. All rows run until the last one has ended, as in `generate`; scores are not kept."""
    output = Output(request)
    try:
        with torch.no_grad():
            return _decode(target, request, output)
    finally:
        output.end_stream()


def _decode(target: Target, request: Request, output: Output) -> Result:
    stopper, processors = Stopper(request.stopping), Processors(request.processors)
    chance, stats = TorchChance(request.generator, target.device), Stats(rows=request.input_ids.shape[0])
    prompt = request.prompt()
    counts = prompt.counts
    room = max(stopper.room(request.input_ids.shape[1]) or 1, 1)
    history = History(request.input_ids, room)
    cache = target.new_cache(len(counts), max(counts) + room)
    everyone = list(range(len(counts)))

    def pick(logits: Tensor) -> list[int]:
        scores = processors(history, everyone, [[] for _ in everyone], logits[:, -1])
        found: list[int] = (chance.token(scores.softmax(-1)) if request.do_sample else scores.argmax(-1)).tolist()
        if NO_TOKEN in found:
            raise UnsupportedGeneration(NO_DISTRIBUTION)
        return found

    with stats.timed("prefill"):  # with the first token, as in the engine: on an accelerator its value ends the pass
        picked = pick(target.prefill(prompt.tokens, counts, cache, Needs()).logits)
    while True:
        with stats.timed("emit"):
            for row in (r for r in everyone if not output.ended[r]):
                _, ended = stopper.cut(history, row, [picked[row]])
                output.commit(row, [picked[row]], ended)
                stats.count_plain(first=len(output.tokens[row]) == 1)
            for row in everyone:
                history.append(row, [picked[row]])
            output.stream()
        if all(output.ended):
            return Result(output.sequences(), stats)
        with stats.timed("verify"):
            root = on_device(picked, prompt.tokens.device)
            logits = target.verify(DraftTree.root_only(root), cache, Needs()).logits
            cache.commit([1] * len(picked))
        with stats.timed("accept"):
            picked = pick(logits)
