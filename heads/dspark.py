"""DSpark: a block drafter whose guesses know the guess before them, and which knows how far it can be trusted.

DeepSeek-AI 2026, "DSpark" (arXiv 2607.05147): DFlash's block and context, and two small heads on top.

Markov head: `logits_j = output(h_j) + W2 W1[x_{j-1}]`, of low rank; x_0 is the block's first token. The block is still
one pass; only this sum is made depth by depth, so branches of a tree differ below their fork.
Confidence head: `c_j = sigmoid(s_j (w h_j + b) + t_j)` estimates the chance that slot j is accepted if all before it
are. It reads the block alone, so the depth of a tree is known before any token is drawn and sampling stays lossless.
Scale s_j and shift t_j belong to a depth (calibration by position) and are learned with the rest, by binary cross
entropy against A = sum min(p, q), the acceptance of a drawn token; that loss is smallest at A itself.

Ours: with a reduced vocabulary W1 has a row per draft token and one for all others, unless `markov_all_tokens` asks for
the target's vocabulary, as published heads have it.

Letters: B rows, K guesses, k beams, D hidden size, Q draft vocabulary, P places, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.draft import Budget, Sampling
from selfspec.draft_output import DraftOutput
from selfspec.errors import ConfigError
from selfspec.heads.dflash import BlockState, DFlash
from selfspec.heads.dflash_config import DFlashConfig
from selfspec.heads.losses import HeadScore, Teacher, acceptance, learn
from selfspec.heads.trees import CandidatePool
from selfspec.registry import register
from selfspec.target import Target
from selfspec.tree import DraftTree, TreeShape
from selfspec.vocab import DraftVocab


@dataclass(kw_only=True)
class DSparkConfig(DFlashConfig):
    """As DFlash's, and:

    Args:
        markov_rank: R.
        markov_all_tokens: W1 has a row per token of the target.
        stop_below: guess no deeper than the estimated chance that all guesses so far are accepted stays at this or
            more; 0 never stops early.
        confidence_weight: of the confidence head's loss.
    """

    loss: str = "ce_tv"
    markov_rank: int = 64
    markov_all_tokens: bool = False
    stop_below: float = 0.05
    confidence_weight: float = 1.0


class MarkovHead(nn.Module):
    """Token before to what it adds to the logits."""

    def __init__(self, tokens: int, columns: int, rank: int) -> None:
        super().__init__()
        self.before = nn.Embedding(tokens, rank)
        self.after = nn.Linear(rank, columns, bias=False)

    def embed(self, tokens: Tensor, vocab: DraftVocab) -> Tensor:
        """Target ids `[...]` to `[..., R]`."""
        if self.before.num_embeddings == vocab.target_size:
            return self.before(tokens)
        column = torch.searchsorted(vocab.ids, tokens).clamp_max(vocab.size - 1)
        return self.before(column.where(vocab.ids[column] == tokens, vocab.size))


class _Corrected:
    """The output head with the Markov head's part, on `[..., D + R]`."""

    def __init__(self, output: DraftOutput, markov: MarkovHead) -> None:
        self.output, self.markov, self.vocab = output, markov, output.vocab

    def __call__(self, joined: Tensor, stack: int | None = None) -> Tensor:
        rank = self.markov.before.embedding_dim
        hidden, before = joined[..., :-rank], joined[..., -rank:]
        return self.output(hidden, stack) + self.markov.after(before)


@register("dspark")
class DSpark(DFlash):
    """DFlash with a Markov head and a confidence head."""

    config_class = DSparkConfig
    config: DSparkConfig

    def __init__(self, config: DSparkConfig, target: Target) -> None:
        super().__init__(config, target)
        if config.markov_rank < 1 or not 0 <= config.stop_below < 1:
            raise ConfigError(
                f"DSpark wants a rank of 1 or more and stop_below in [0, 1), got {config.markov_rank} and "
                f"{config.stop_below}"
            )
        columns = self.output.vocab.size
        every = config.markov_all_tokens or columns == config.vocab_size
        self.markov = MarkovHead(config.vocab_size if every else columns + 1, columns, config.markov_rank)
        self.confidence = nn.Linear(config.hidden_size, 1)
        self.calibration = nn.Parameter(torch.tensor([[1.0, 0.0]]).repeat(self._depths, 1))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """As DFlash, with heads that say nothing yet."""
        super().reset_parameters(generator)
        with torch.no_grad():
            self.markov.after.weight.zero_()
            self.markov.before.weight.mul_(self.config.markov_rank**-0.5 / 0.02)
            self.confidence.weight.zero_()
            self.calibration.copy_(torch.tensor([1.0, 0.0]))

    # Decoding

    def _confidence(self, said: Tensor) -> Tensor:
        """Slots `[B, K, D]` to the logits of their acceptance, `[B, K]` float32."""
        raw = self.confidence(said).squeeze(-1).float()
        scale, shift = self.calibration[: said.shape[1]].float().unbind(-1)
        return raw * scale + shift

    def _depths_worth(self, said: Tensor) -> list[int]:
        """Per row how deep to guess."""
        survival = self._confidence(said).sigmoid().cumprod(1)
        return (survival >= self.config.stop_below).sum(1).tolist()

    @torch.no_grad()
    def propose(
        self, state: BlockState, budget: Budget, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """A tree, or a drawn chain, no deeper than the confidence head trusts the block."""
        guesses = budget.guesses(self.config.tree_nodes)
        depth = min(self._depths, budget.depth, guesses)
        if depth < 1:
            return DraftTree.root_only(state.root)
        said = self._draft(state, depth)
        worth = self._depths_worth(said)
        if max(worth) < 1:
            return DraftTree.root_only(state.root)
        base = self.output(said[:, : max(worth)]).float()
        if sampling.do_sample and self.config.draw:
            tree = self._drawn_after(state.root, base, sampling, generator)
        else:
            tree = self._grown(state.root, base, guesses)
        return _cut(tree, worth)

    def _after(self, tokens: Tensor) -> Tensor:
        return self.markov.after(self.markov.embed(tokens, self.output.vocab)).float()

    def _grown(self, root: Tensor, base: Tensor, guesses: int) -> DraftTree:
        pool = CandidatePool(root.shape[0], self.config.tree_top_k, root.device)
        tokens = root.unsqueeze(1)
        for level in base.unbind(1):
            columns, _ = pool.grow(level.unsqueeze(1) + self._after(tokens))
            if pool.settled(guesses):
                break
            tokens = self.output.vocab.to_target(columns)
        columns, shape = pool.best(guesses)
        return DraftTree(torch.cat([root.unsqueeze(1), self.output.vocab.to_target(columns)], 1), shape)

    def _drawn_after(
        self, root: Tensor, base: Tensor, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        token, columns, probs = root, [], []
        for level in base.unbind(1):
            q = sampling.probs(level + self._after(token))
            column = torch.multinomial(q, 1, generator=generator).squeeze(1)
            token = self.output.vocab.to_target(column)
            columns.append(column)
            probs.append(q)
        return self._chain(root, torch.stack(columns, 1), torch.stack(probs, 1))

    # Training

    def _learn(self, said: Tensor, before: Tensor, depth: int, teacher: Teacher, weight: Tensor) -> HeadScore:
        """As DFlash, given the text's token before; and the confidence head against the acceptance that results."""
        joined = torch.cat([said, self.markov.embed(before, self.output.vocab).to(said)], -1)
        output = _Corrected(self.output, self.markov)
        score = learn(output, joined, teacher, weight, self.config)
        accepted = acceptance(output, joined, teacher)
        scale, shift = self.calibration[depth - 1].float()
        trust = self.confidence(said).squeeze(-1).float() * scale + shift
        surprise = F.binary_cross_entropy_with_logits(trust, accepted, reduction="none")
        return replace(score, loss=score.loss + self.config.confidence_weight * (weight * surprise).sum())


def _cut(tree: DraftTree, worth: Sequence[int]) -> DraftTree:
    """The tree with no row deeper than `worth` says; the tree is no deeper than the largest of these."""
    if min(worth) == max(worth):
        return tree
    limit = torch.tensor(worth, device=tree.tokens.device).unsqueeze(1)
    shape = tree.shape
    return replace(tree, shape=TreeShape(shape.parents.expand_as(tree.tokens), shape.depth <= limit))
