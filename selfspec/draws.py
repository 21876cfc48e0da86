"""Drawing the target's own tokens without all its logits, see `selfspec.screen`.

Letters: C candidates, N tree nodes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as lp

from selfspec.drawing import NO_TOKEN
from selfspec.screen import Screened
from selfspec.target_output import TargetOutput
from selfspec.walk import TorchChance

_LOOK_AT_WHAT_IS_LEFT = (
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.MinPLogitsWarper,
    lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper,
    lp.EtaLogitsWarper,
)


def drawable(processors: LogitsProcessorList) -> bool:
    """Whether a token can be drawn under these processors without all logits.

    That is: temperatures and nothing else, or a top-k which all others follow that look at what it has left.
    """
    kinds = [type(processor) for processor in processors if type(processor) is not lp.TemperatureLogitsWarper]
    return not kinds or (kinds[0] is lp.TopKLogitsWarper and all(kind in _LOOK_AT_WHAT_IS_LEFT for kind in kinds))


class ScreenedDraws:
    """Draws where the walk goes; see `walk.NodeTokens`.

    Under a top-k, candidates are found with their logits, and the processors and one uniform number do with them what
    they would do with all, so a seed gives the same token. Without, tokens are drawn by rejection.

    Args:
        out: what the pass over the tree gave.
        screened: its scores, of node n in row b at b * N + n.
        nodes: N.
        processors: `drawable` ones.
        chance: where randomness comes from.
    """

    def __init__(
        self, out: TargetOutput, screened: Screened, nodes: int, processors: LogitsProcessorList, chance: TorchChance
    ) -> None:
        self.out, self.screened, self.nodes, self.processors, self.chance = out, screened, nodes, processors, chance
        self.top_k = next((p.top_k for p in processors if type(p) is lp.TopKLogitsWarper), None)
        self.temperature = math.prod(p.temperature for p in processors) if self.top_k is None else 1.0

    def __call__(self, rows: list[int], paths: list[list[int]]) -> list[int]:
        """A token for each row, at the last node of its path."""
        return [self._at(row, path[-1]) for row, path in zip(rows, paths, strict=True)]

    def _at(self, row: int, node: int) -> int:
        place = row * self.nodes + node
        if self.top_k is None:
            token = self.screened.draw(place, self.temperature, self.chance.numbers, self.out.finished)
            return self._picked(self.out.logits[row, node]) if token is None else token
        found = self.screened.top(place, self.top_k, self.out.finished)
        if found is None:
            return self._picked(self.out.logits[row, node])
        tokens, logits = found
        index = self._picked(logits)
        return index if index == NO_TOKEN else int(tokens[index])

    def _picked(self, scores: Tensor) -> int:
        """An index into scores `[C]`."""
        nothing: Any = torch.zeros(1, 1, dtype=torch.long)
        processed: Any = self.processors(nothing, scores.float().unsqueeze(0))
        return int(self.chance.token(processed.softmax(-1)))
