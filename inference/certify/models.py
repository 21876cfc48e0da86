"""A tiny target and drafts for the self-test of `certify`, built in code.

Letters: B rows, N tree nodes, V vocabulary, Q draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedModel

from selfspec.draft import Budget, DraftState, Needs, Sampling, Verified
from selfspec.tree import DraftTree, Drawn, TreeShape

VOCAB, WIDE_VOCAB = 32, 33_000
_WINDOW, _WIDTH = 16, 128


def tiny_model(seed: int = 0) -> PreTrainedModel:
    """A random float32 model with sliding windows, two layers and 32 tokens."""
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        sliding_window=_WINDOW,
        max_position_embeddings=256,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    return _random(config, seed)


def _random(config: MistralConfig, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def wide_model(seed: int = 0) -> PreTrainedModel:
    """A random float32 model with so many tokens that its output head is screened.

    Logits have a standard deviation of 4: some tokens are likely, and those that are not share a third of the
    probability. Every other row of the head has one entry much larger than the rest, so its bytes are coarse and what
    its bound leaves open matters.
    """
    config = MistralConfig(
        vocab_size=WIDE_VOCAB,
        hidden_size=_WIDTH,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=1,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    model: Any = _random(config, seed)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(WIDE_VOCAB, _WIDTH, generator=generator)
    coarse = torch.arange(0, WIDE_VOCAB, 2)
    weight[coarse, torch.randint(0, _WIDTH, (len(coarse),), generator=generator)] *= 40.0
    model.lm_head.weight.data.copy_(weight * (4.0 / weight.norm(dim=1, keepdim=True)))
    found: PreTrainedModel = model
    return found


def tiny_prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Random prompts of several lengths, longer and shorter than the window."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [6 + 7 * (i % 4) for i in range(count)]
    return [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in lengths]


@dataclass(eq=False)
class _Texts(DraftState):
    rows: list[list[int]]

    def select(self, rows: Tensor) -> _Texts:
        return _Texts([self.rows[row] for row in rows.tolist()])


HandedOver = Callable[[Tensor, Tensor], Tensor]
"""Draft logits and the q drawn from, `[Q]` each, to the q that is handed over."""


class Peek:
    """Asks the target itself in fresh passes, and spoils the answer a little, so that guesses are right now and then.

    Args:
        model: the target.
        widths: children per level; the first child of a level goes on.
        draw: draw children when sampling; otherwise choose the likeliest.
        with_replacement: of siblings.
        token_ids: the draft's vocabulary; None is all.
        handed_over: what is said to be q; the truth if left out.
        said_with_replacement: what is said of the siblings; the truth if left out.
        said_ids: what is said to be the draft's vocabulary; the truth if left out.
    """

    kind = "peek"
    needs = Needs()

    def __init__(
        self,
        model: PreTrainedModel,
        widths: Sequence[int],
        draw: bool = True,
        with_replacement: bool = True,
        token_ids: Tensor | None = None,
        handed_over: HandedOver | None = None,
        said_with_replacement: bool | None = None,
        said_ids: Tensor | None = None,
    ) -> None:
        self.model = model
        self.widths = list(widths)
        self.draw = draw
        self.with_replacement = with_replacement
        self.token_ids = token_ids
        self.handed_over: HandedOver = handed_over or (lambda logits, q: q)
        self.said_with_replacement = with_replacement if said_with_replacement is None else said_with_replacement
        self.said_ids = token_ids if said_ids is None else said_ids
        self._read: dict[tuple[int, ...], Tensor] = {}  # the same few contexts come again and again
        self.spoil = 0.7 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))

    def begin(self, verified: Verified) -> _Texts:
        """Remember the prompts."""
        rows = zip(verified.tokens.tolist(), verified.counts.tolist(), verified.root.tolist(), strict=True)
        return _Texts([tokens[:count] + [root] for tokens, count, root in rows])

    def observe(self, state: _Texts, verified: Verified) -> _Texts:
        """Remember what was committed."""
        news = zip(state.rows, verified.next_tokens.tolist(), verified.counts.tolist(), strict=True)
        return _Texts([row + tokens[:count] for row, tokens, count in news])

    def propose(
        self, state: _Texts, budget: Budget, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """A trunk with siblings."""
        widths = self.widths[: budget.depth]
        rows = [self._row(text, widths, sampling, generator) for text in state.rows]
        parents, trunk = [-1], 0
        for width in widths:
            parents += [trunk] * width
            trunk = len(parents) - width
        tokens = torch.tensor([tokens for tokens, _ in rows])
        drawn = None
        if self.draw and sampling.do_sample:
            drawn = Drawn(torch.stack([q for _, q in rows]), None, self.said_with_replacement, self.said_ids)
        return DraftTree(tokens, TreeShape(torch.tensor([parents])), drawn)

    def _row(self, text: list[int], widths: list[int], sampling: Sampling, generator: Any) -> tuple[list[int], Tensor]:
        size = VOCAB if self.token_ids is None else self.token_ids.numel()
        tokens, path, trunk = [text[-1]], list(text), 0
        probs = torch.full((1 + sum(widths), size), 1.0 / size)
        for width in widths:
            logits = self._guess(path)
            q = sampling.probs(logits)
            if self.draw and sampling.do_sample:
                columns = torch.multinomial(q, width, self.with_replacement, generator=generator)
            else:
                columns = logits.topk(width).indices
            probs[trunk] = self.handed_over(logits, q)
            trunk = len(tokens)
            tokens += (columns if self.token_ids is None else self.token_ids[columns]).tolist()
            path = [*path, tokens[trunk]]
        return tokens, probs

    def _guess(self, path: list[int]) -> Tensor:
        key = tuple(path)
        if key not in self._read:
            model: Any = self.model
            with torch.no_grad():
                self._read[key] = model(input_ids=torch.tensor([path]), use_cache=False).logits[0, -1]
        spoiled = self._read[key] + self.spoil[path[-1]]
        return spoiled if self.token_ids is None else spoiled[self.token_ids]
