"""A second, smaller causal model drafts (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2).

Greedy decoding follows the small model's likeliest continuations, as a tree grown by its own confidence (Li et al.
2024, EAGLE-2, section 4). When the target samples, nodes are drawn from the small model: siblings without replacement,
on a tree whose form is fixed beforehand (Chen et al. 2024, Sequoia, section 3.1), so that every node is a draw from the
q it is judged by.

Letters: B rows, T places, N tree nodes, n nodes of one level, V target vocabulary, Q columns the two models share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.cache import SlotCache
from selfspec.draft import Budget, DraftState, Needs, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.heads.trees import CandidatePool, best_choices, cut_choices
from selfspec.models import load_target
from selfspec.registry import register
from selfspec.target import Target
from selfspec.tokenizers import check_same_tokens, tokenizer_of
from selfspec.tree import DraftTree, Drawn, Path, TreeShape, shape_from_choices

_ROOM = 512
_RANKS = (0.7, 0.12, 0.05, 0.03)
"""How often the sibling of each rank is the one accepted; only their order of magnitude matters."""
_LAST = Needs()


@dataclass(kw_only=True)
class DraftModelConfig:
    """Configuration of a draft model.

    Args:
        model: folder or Hub id of the small model.
        nodes: nodes of a tree, the root included, unless the budget says otherwise.
        depth: levels of guesses.
        top_k: children per node; 1 drafts a chain.
        draws: when the target samples, draw from the small model instead of taking its likeliest tokens.
        temperature: of the small model's q; None takes the target's, and so on for the next three.
        sampling_top_k: how many tokens of q stay; 0 is all.
        sampling_top_p: the likeliest tokens of q that hold this mass stay; 1 is all.
        dtype: of the small model; `auto` takes what the device is fast at.
    """

    model: str = ""
    nodes: int = 8
    depth: int = 5
    top_k: int = 3
    draws: bool = True
    temperature: float | None = None
    sampling_top_k: int | None = None
    sampling_top_p: float | None = None
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if min(self.nodes, self.depth, self.top_k) < 1:
            raise ConfigError(
                f"nodes {self.nodes}, depth {self.depth} and top_k {self.top_k} of a draft model must be at least 1"
            )
        if self.temperature is not None and self.temperature <= 0:
            raise ConfigError(f"the draft's temperature is {self.temperature}, wanted above 0; draws=False is greedy")
        if self.sampling_top_k is not None and self.sampling_top_k < 0:
            raise ConfigError(f"sampling_top_k is {self.sampling_top_k}, wanted 0 (all) or more")
        if self.sampling_top_p is not None and not 0 < self.sampling_top_p <= 1:
            raise ConfigError(f"sampling_top_p is {self.sampling_top_p}, wanted above 0 and at most 1")

    @classmethod
    def from_argument(cls, argument: str) -> DraftModelConfig:
        """From what stands after `draft-model:`, a folder or Hub id."""
        return cls(model=argument)

    def q_sampling(self, target: Sampling) -> Sampling:
        """How q is shaped, given how the target's p is."""
        return replace(
            target,
            temperature=target.temperature if self.temperature is None else self.temperature,
            top_k=target.top_k if self.sampling_top_k is None else self.sampling_top_k,
            top_p=target.top_p if self.sampling_top_p is None else self.sampling_top_p,
        )


@dataclass(eq=False)
class DraftModelState(DraftState):
    """The small model's cache of all committed tokens but the newest, that one `[B]`, and the logits after it `[B, Q]`.

    The newest token's keys and values stand behind the committed slots already: it is the root of the next tree. There
    are no logits once the text is longer than the small model can read.
    """

    cache: SlotCache
    root: Tensor
    logits: Tensor | None

    def select(self, rows: Tensor) -> DraftModelState:
        """The state of some rows."""
        self.cache.select(rows.tolist())
        return DraftModelState(self.cache, self.root[rows], None if self.logits is None else self.logits[rows])

    @property
    def joins(self) -> bool:
        """See `DraftState.joins`; a state that has stopped drafting keeps to itself, or it would stop the others."""
        return self.logits is not None and self.cache.joins

    def join(self, other: DraftModelState) -> DraftModelState:
        """See `DraftState.join`."""
        assert self.logits is not None and other.logits is not None
        self.cache.join(other.cache)
        root = torch.cat([self.root, other.root])
        return DraftModelState(self.cache, root, torch.cat([self.logits, other.logits]))


@register("draft-model")
class DraftModel:
    """A small model with the target's tokenizer.

    Args:
        target: the small model.
        config: how it drafts.
        tokenizer: of the small model, for a check against the target's; None checks the sizes only.

    Raises:
        UnsupportedModel: the small model cannot read trees.
    """

    kind: str
    config_class = DraftModelConfig
    by_name = False
    needs = Needs()

    def __init__(
        self,
        target: Target,
        config: DraftModelConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.small = target
        self.config = config or DraftModelConfig()
        self.tokenizer = tokenizer
        self.vocab_size = target.vocab_size
        """V, once the target is known."""

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, **settings: Any
    ) -> DraftModel:
        """A draft from a model in memory; `settings` are fields of `DraftModelConfig`."""
        return cls(Target(model), DraftModelConfig(**settings), tokenizer)

    @classmethod
    def from_target(
        cls, config: DraftModelConfig, target: Target, generator: torch.Generator | None = None
    ) -> DraftModel:
        """Load the model that the configuration names, onto the target's device.

        Raises:
            ConfigError: no model is named, it cannot be loaded, or it has another tokenizer.
        """
        if not config.model:
            raise ConfigError("draft-model wants a small model: write draft-model:FOLDER (or a Hub id)")
        model, tokenizer = load_target(config.model, dtype=config.dtype, device=target.device)
        return cls(Target(model), config, tokenizer).check_target(target)

    def check_target(self, target: Target) -> DraftModel:
        """Itself, if it can draft for this target.

        Raises:
            ConfigError: another tokenizer, or vocabularies of different sizes whose tokenizers are not at hand.
        """
        mine, theirs = self.tokenizer or tokenizer_of(self.small.model), tokenizer_of(target.model)
        sizes = f"the draft model has {self.small.vocab_size} tokens, the target {target.vocab_size}"
        if mine is not None and theirs is not None:
            check_same_tokens(mine, theirs, sizes)
        elif self.small.vocab_size != target.vocab_size:
            raise ConfigError(
                f"{sizes}, and their tokenizers are not at hand to see whether the first "
                f"{min(self.small.vocab_size, target.vocab_size)} agree; use a draft model of the same tokenizer"
            )
        self.vocab_size = target.vocab_size
        return self

    @property
    def columns(self) -> int:
        """Q: padded vocabularies of one tokenizer may differ in size."""
        return min(self.small.vocab_size, self.vocab_size)

    # The Draft interface

    @torch.no_grad()
    def begin(self, verified: Verified) -> DraftModelState:
        """Read the prompt."""
        batch, places = verified.tokens.shape
        tokens, counts = _with_root(verified)
        cache = self.small.new_cache(batch, places + _ROOM)
        if max(counts) > self._longest:
            return DraftModelState(cache, verified.root, None)
        out = self.small.prefill(self._known(tokens), counts, cache, _LAST)
        cache.commit([-1] * batch)  # the newest token is the next root
        return DraftModelState(cache, verified.root, self._cut(out.logits[:, -1]))

    @torch.no_grad()
    def observe(self, state: DraftModelState, verified: Verified) -> DraftModelState:
        """Read the accepted tokens; what was drafted was never committed."""
        tokens, counts = _with_root(verified)
        if state.logits is None or max(map(sum, zip(state.cache.lengths, counts, strict=True))) > self._longest:
            return DraftModelState(state.cache, verified.root, None)
        chain = DraftTree(self._known(tokens), TreeShape.chain(tokens.shape[1] - 1, tokens.device))
        logits = self.small.verify(chain, state.cache, _LAST, written=1).logits
        state.cache.commit([count - 1 for count in counts])
        last = torch.tensor(counts, device=logits.device) - 2
        newest = logits[torch.arange(len(counts), device=logits.device), last]
        return DraftModelState(state.cache, verified.root, self._cut(newest))

    @torch.no_grad()
    def propose(
        self, state: DraftModelState, budget: Budget, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """A tree of the likeliest tokens, or of draws."""
        guesses = budget.guesses(self.config.nodes)
        left = self._longest - 1 - max(state.cache.lengths)
        depth = min(self.config.depth, budget.depth, guesses, left + 1)
        if depth < 1 or state.logits is None:
            return DraftTree.root_only(state.root)
        if sampling.do_sample and self.config.draws:
            return self._draw(state, state.logits, guesses, depth, self.config.q_sampling(sampling), generator)
        return self._choose(state, state.logits, guesses, depth)

    @property
    def _longest(self) -> int:
        """The longest text that the small model is made for."""
        return self.small.max_positions or 1 << 30

    # Chosen nodes

    def _choose(self, state: DraftModelState, logits: Tensor, guesses: int, depth: int) -> DraftTree:
        pool = CandidatePool(state.root.shape[0], min(self.config.top_k, self.columns), state.root.device)
        grown = DraftTree(state.root.unsqueeze(1), TreeShape(torch.full_like(state.root, -1).unsqueeze(1)))
        columns, origin = pool.grow(logits.unsqueeze(1))
        first = 0
        for _ in range(depth - 1):
            if pool.settled(guesses):
                break
            before = grown.nodes
            grown = _grown(grown, columns, first + origin)
            columns, origin = pool.grow(self._read(grown, state.cache, before))
            first = before
        columns, shape = pool.best(guesses)
        return DraftTree(torch.cat([state.root.unsqueeze(1), columns], 1), shape)

    def _read(self, tree: DraftTree, cache: SlotCache, written: int) -> Tensor:
        """Logits `[B, n, Q]` at the nodes of a tree that the small model has not read yet."""
        tree = DraftTree(self._known(tree.tokens), tree.shape)
        return self._cut(self.small.verify(tree, cache, _LAST, written).logits)

    # Drawn nodes

    def _draw(
        self,
        state: DraftModelState,
        logits: Tensor,
        guesses: int,
        depth: int,
        sampling: Sampling,
        generator: torch.Generator | None,
    ) -> DraftTree:
        shape, paths = _fixed_shape(guesses, depth, min(self.config.top_k, self.columns), state.root.device)
        batch = state.root.shape[0]
        tokens = state.root.unsqueeze(1).repeat(1, shape.nodes)
        real = torch.ones_like(tokens, dtype=torch.bool)
        probs = torch.zeros(batch, shape.nodes, self.columns, device=tokens.device)
        start, logits, level = 0, logits.unsqueeze(1), shape.depth[0]
        for step in range(int(level.max())):
            q = sampling.probs(logits)
            below = (level == step + 1).nonzero().squeeze(1)
            probs[:, start : start + q.shape[1]] = q
            width = 1 + max(paths[int(node)][-1] for node in below)
            drawn = _without_replacement(q, width, generator)
            for node in below.tolist():
                parent = int(shape.parents[0, node])
                tokens[:, node] = drawn[:, parent - start, paths[node][-1]]
                possible = q[:, parent - start].gather(1, tokens[:, node : node + 1]).squeeze(1) > 0
                real[:, node] = real[:, parent] & possible
            if step + 1 < int(level.max()):
                start, end = int(below[0]), int(below[-1]) + 1
                cut = DraftTree(tokens[:, :end], TreeShape(shape.parents[:, :end]))
                logits = self._read(cut, state.cache, start)
        flags = None if bool(real.all()) else real
        ids = None if self.columns == self.vocab_size else torch.arange(self.columns, device=tokens.device)
        return DraftTree(tokens, TreeShape(shape.parents, flags), Drawn(probs, None, False, ids))

    # Vocabularies

    def _cut(self, logits: Tensor) -> Tensor:
        """The columns that both models have."""
        return logits[..., : self.columns]

    def _known(self, tokens: Tensor) -> Tensor:
        """Tokens that the small model can read: padding columns of a larger target vocabulary stand for no text."""
        return tokens if self.vocab_size <= self.small.vocab_size else tokens.clamp(max=self.small.vocab_size - 1)


def _with_root(verified: Verified) -> tuple[Tensor, list[int]]:
    """What was read and the token after it: `[B, T + 1]` padded on the right, and each row's length."""
    tokens = torch.cat([verified.tokens[:, :1], verified.next_tokens], 1)
    return tokens, [count + 1 for count in verified.count_list]


def _grown(tree: DraftTree, tokens: Tensor, parents: Tensor) -> DraftTree:
    """The tree with `[B, n]` more nodes."""
    return DraftTree(torch.cat([tree.tokens, tokens], 1), TreeShape(torch.cat([tree.parents, parents], 1)))


def _fixed_shape(guesses: int, depth: int, top_k: int, device: torch.device) -> tuple[TreeShape, list[Path]]:
    """A tree that does not depend on what is drawn: `guesses` nodes, the likeliest to be reached."""
    choices = best_choices([_RANKS[:top_k]] * depth, guesses)
    shape, paths = shape_from_choices(cut_choices(choices, guesses, depth))
    return TreeShape(shape.parents.to(device)), paths


def _without_replacement(q: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """`count` draws per distribution, in order, each from q without the earlier ones: `[B, n, Q]` to `[B, n, count]`.

    The largest of q / E with exponential E are such draws (Efraimidis and Spirakis 2006). Where q has fewer tokens than
    `count`, tokens of probability 0 fill up.
    """
    noise = torch.empty_like(q).exponential_(generator=generator).clamp_min_(torch.finfo(q.dtype).tiny)
    return (q / noise).topk(count).indices
