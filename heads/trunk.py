"""One round of a self-draft: the guesses of its trunk, the tree they make, and the output head they go through.

Letters: B rows, N tree nodes, m trunk levels, k children per level, D hidden size, Q draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.draft import Sampling
from selfspec.draft_output import DraftOutput
from selfspec.target import Target
from selfspec.tree import Computed, DraftTree, Drawn, TreeShape


class WholeOutput:
    """The target's own output head, by reference."""

    def __init__(self, target: Target) -> None:
        self.target = target

    @property
    def token_ids(self) -> Tensor | None:
        """`[Q]`, the target's id of each column; None when columns are ids."""
        return None

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[B, n, D]` to logits `[B, n, V]`."""
        return self.target.head(hidden)

    def to_target(self, columns: Tensor) -> Tensor:
        """Columns are the target's ids."""
        return columns


class HeadOutput(WholeOutput):
    """The output head of a trained draft.

    Args:
        target: the target.
        output: the draft's.
    """

    def __init__(self, target: Target, output: DraftOutput) -> None:
        super().__init__(target)
        self._output = output

    @property
    def token_ids(self) -> Tensor | None:
        """`[Q]`."""
        return self._output.vocab.ids

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[B, n, D]` to logits `[B, n, Q]`."""
        logits: Tensor = self._output(hidden.to(self._output.rows.dtype))
        return logits

    def to_target(self, columns: Tensor) -> Tensor:
        """Draft columns to the target's ids."""
        return self._output.vocab.to_target(columns)


class ReducedOutput(HeadOutput):
    """Some rows of the target's output head.

    Args:
        target: the target.
        ids: `[Q]` distinct token ids.
    """

    def __init__(self, target: Target, ids: Tensor) -> None:
        super().__init__(target, DraftOutput(target, ids.numel(), own=False))
        self._output.vocab.to(ids.device)
        self._output.set_vocab(ids)


class Trunk:
    """The guesses of one round, level by level, and the tree they make.

    Args:
        root: `[B]`.
        children: k, the most per level.
        drawing: draw without replacement as the target samples; None takes the likeliest.
        generator: of the draws.
    """

    def __init__(
        self, root: Tensor, children: int, drawing: Sampling | None, generator: torch.Generator | None
    ) -> None:
        self.root = root
        self.children = children
        self.drawing = drawing
        self.generator = generator
        self.alive = torch.ones_like(root, dtype=torch.bool)
        self.columns: list[Tensor] = []
        self.real: list[Tensor] = []
        self.gains: list[Tensor] = []
        self.probs: list[Tensor] = []

    def add(self, logits: Tensor, threshold: Tensor) -> Tensor:
        """Guess the children of the trunk's last node.

        Args:
            logits: `[B, Q]`.
            threshold: `[B]`, the confidence below which a row ends after this level.

        Returns:
            Draft columns `[B, k]`, the one that goes on first.
        """
        logits = logits.to(self.root.device, torch.float32)
        children = min(self.children, logits.shape[-1])
        confidence = logits.softmax(-1).amax(-1)
        if self.drawing is not None:
            self.probs.append(self.drawing.probs(logits))
            scores = self.probs[-1].log()
            columns = (scores + self._gumbel(scores)).topk(children).indices
        else:
            scores = logits.log_softmax(-1)
            columns = scores.topk(children).indices
        gains = scores.gather(1, columns)
        possible = gains > -torch.inf  # all that may be drawn have been: what is left has no chance
        self.columns.append(columns)
        self.gains.append(gains)
        self.real.append(possible & self.alive.unsqueeze(1))
        self.alive = self.alive & possible[:, 0] & (confidence >= threshold)
        return columns

    def _gumbel(self, like: Tensor) -> Tensor:
        """Noise with which the top k are draws without replacement (Kool et al. 2019, section 2.3)."""
        uniform = torch.empty(like.shape, device=like.device).exponential_(generator=self.generator)
        return -uniform.clamp_min_(torch.finfo(uniform.dtype).tiny).log()

    def goes_on(self) -> bool:
        """Whether any row is confident enough to be drafted further."""
        return bool(self.alive.any())

    def lengths(self) -> list[int]:
        """Per row the levels of its trunk."""
        lengths: list[int] = torch.stack([real[:, 0] for real in self.real]).sum(0).tolist()
        return lengths

    def tree(self, guesses: int, output: WholeOutput, computed: Computed | None) -> DraftTree:
        """The root, the trunk, then side branches by level and rank."""
        levels, device = len(self.columns), self.root.device
        columns, real = torch.stack(self.columns, 1), torch.stack(self.real, 1)
        side, level = self._sides(guesses - levels)
        batch = self.root.shape[0]
        trunk = torch.arange(-1, levels, device=device).expand(batch, -1)
        parents = torch.cat([trunk, level], 1)
        tokens = torch.cat([columns[:, :, 0], columns[:, :, 1:].flatten(1).gather(1, side)], 1)
        flags = torch.cat([real[:, :, 0], real[:, :, 1:].flatten(1).gather(1, side)], 1)
        flags = torch.cat([torch.ones_like(flags[:, :1]), flags], 1)
        shape = TreeShape(parents, None if bool(flags.all()) else flags)
        tokens = torch.cat([self.root.unsqueeze(1), output.to_target(tokens)], 1)
        return DraftTree(tokens, shape, self._drawn(parents.shape[1], output), computed)

    def _sides(self, room: int) -> tuple[Tensor, Tensor]:
        """Which side branches to keep, `[B, s]` indices into levels x (k - 1), and the trunk node each hangs on."""
        gains = torch.stack(self.gains, 1)
        others = gains.shape[2] - 1
        count = min(max(room, 0), gains.shape[1] * others)
        if (
            self.drawing is not None or count == gains.shape[1] * others
        ):  # drawn ones: `children` made sure that all fit
            kept = torch.arange(gains.shape[1] * others, device=gains.device).expand(gains.shape[0], -1)
        else:
            before = torch.cat([torch.zeros_like(gains[:, :1, 0]), gains[:, :-1, 0].cumsum(1)], 1)
            scores = (before.unsqueeze(2) + gains[:, :, 1:]).masked_fill(
                ~torch.stack(self.real, 1)[:, :, 1:], -torch.inf
            )
            order = scores.flatten(1).sort(descending=True, stable=True).indices
            kept = order[:, :count].sort(1).values
        return kept, kept // max(others, 1)

    def _drawn(self, nodes: int, output: WholeOutput) -> Drawn | None:
        if self.drawing is None:
            return None
        probs = torch.stack(self.probs, 1)
        missing = probs.new_zeros(probs.shape[0], nodes - probs.shape[1], probs.shape[2])
        return Drawn(torch.cat([probs, missing], 1), None, False, output.token_ids)
