"""The one interface every draft method implements, and the records that pass through it.

Letters: B rows, N tree nodes, T newly committed tokens, D hidden size of the target, L tapped layers.

A user's own object with `kind`, `needs`, `begin`, `propose` and `observe` is accepted wherever a named draft is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from selfspec.cache import SlotCache
from selfspec.errors import UnsupportedGeneration
from selfspec.host import on_device
from selfspec.tree import DraftTree


@dataclass(frozen=True)
class Needs:
    """Which of the target's features a draft reads.

    Args:
        hidden: the last hidden state, after the final norm (what the output head reads).
        layers: indices into transformers' `hidden_states`: k is the input of block k, 0 the embedding output.
        cache: the target's own cache, for drafts that run a part of the target (see `Verified.cache`).
    """

    hidden: bool = False
    layers: tuple[int, ...] = ()
    cache: bool = False


@dataclass(frozen=True)
class Budget:
    """What one round may cost.

    Args:
        nodes: the most nodes the tree may have, the root included (a larger one is cut); None leaves it to the draft.
        depth: the deepest node that could still be committed in any row.
    """

    nodes: int | None = None
    depth: int = 1 << 30

    def guesses(self, usual: int) -> int:
        """How many nodes may be guessed, where the draft's own tree would have `usual` nodes, the root included."""
        return (usual if self.nodes is None else self.nodes) - 1


@dataclass(frozen=True)
class Sampling:
    """How the target's tokens are picked in this generation, as far as drafts can follow it.

    Args:
        do_sample: sample; otherwise greedy.
        temperature: of the target's scores.
        top_k: how many tokens stay; 0 is all.
        top_p: the likeliest tokens that hold this mass stay; 1 is all.
        min_p: tokens less likely than this share of the likeliest go; 0 is none.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def probs(self, logits: Tensor) -> Tensor:
        """A draft's logits `[..., Q]` to the q it may draw from, `[..., Q]` float32, shaped as the target's scores are.

        Any q is lossless as long as children are drawn from the very q that is handed over in `Drawn`; one that is
        shaped like p is accepted more often.
        """
        scores = logits.float() / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k).values[..., -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        probs = scores.softmax(-1)
        if self.top_p < 1:
            ordered, order = probs.sort(descending=True)
            before = ordered.cumsum(-1) - ordered
            out = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= self.top_p)
            probs = probs.masked_fill(out & (probs < ordered[..., :1]), 0.0)
        if self.min_p > 0:
            probs = probs.masked_fill(probs < self.min_p * probs.amax(-1, keepdim=True), 0.0)
        return probs / probs.sum(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class TopTokens:
    """The target's likeliest tokens after each place, as training data may hold them.

    Args:
        ids: `[B, T, K]` integer, the likeliest first.
        log_p: `[B, T, K]` float32, log of their probabilities.
        rest: `[B, T]` float32, log of the probability of all other tokens together; minus infinity if there are none.
    """

    ids: Tensor
    log_p: Tensor
    rest: Tensor


@dataclass(frozen=True, eq=False)
class Verified:
    """What the target has just read: the prompt at `begin`, one accepted path at `observe`.

    Place t of a row holds the token that went through the target, the token that follows it, and the hidden states
    the target had there. The last following token is the next round's root; it is not in the target's cache yet.

    Args:
        tokens: `[B, T]` int64, padded on the right.
        next_tokens: `[B, T]` int64, the token after each.
        counts: `[B]` int64, how many places of each row are real; at least 1.
        hidden: `[B, T, D]`, after the final norm; None unless needed.
        layers: one `[B, T, D]` per tapped layer, in the order of `Needs.layers`.
        nodes: `[B, T]` int64, the node of the proposed tree each place came from (the root first); None at `begin`.
        cache: the target's cache, which holds the committed tokens but the newest (the engine keeps it and drops rows
            that ended); None unless needed. A draft may write behind the committed slots (`SlotCache.drafting`) and
            must leave all else as it is.
        top: what the target says next at each place, where training data hold it; None asks its output head.
    """

    tokens: Tensor
    next_tokens: Tensor
    counts: Tensor
    hidden: Tensor | None = None
    layers: tuple[Tensor, ...] = ()
    nodes: Tensor | None = None
    cache: SlotCache | None = None
    top: TopTokens | None = None

    @cached_property
    def count_list(self) -> list[int]:
        """`counts` on the host. The engine knows these lists; reading the tensors would make it wait for a device."""
        counts: list[int] = self.counts.tolist()
        return counts

    @cached_property
    def next_lists(self) -> list[list[int]]:
        """`next_tokens` on the host."""
        following: list[list[int]] = self.next_tokens.tolist()
        return following

    @cached_property
    def node_lists(self) -> list[list[int]]:
        """`nodes` on the host."""
        nodes: list[list[int]] = [] if self.nodes is None else self.nodes.tolist()
        return nodes

    @property
    def root(self) -> Tensor:
        """`[B]` int64: the newest committed token of each row."""
        return last_of(self.next_tokens, self.counts)


def last_of(values: Tensor, counts: Tensor) -> Tensor:
    """The last real entry of each row: `[B, T, ...]` and `[B]` to `[B, ...]`."""
    return values[torch.arange(values.shape[0], device=values.device), counts.to(values.device) - 1]


def all_needs(needs: Sequence[Needs]) -> Needs:
    """All that any of several drafts reads."""
    layers = tuple(sorted({layer for need in needs for layer in need.layers}))
    return Needs(any(n.hidden for n in needs), layers, any(n.cache for n in needs))


def changed(verified: Verified, **changes: Any) -> Verified:
    """The same with other fields; what the host knows of `counts` and `next_tokens` stays known."""
    made = replace(verified, **changes)
    vars(made).update(count_list=verified.count_list, next_lists=verified.next_lists)
    if made.nodes is verified.nodes:
        vars(made).update(node_lists=verified.node_lists)
    return made


def only_needed(verified: Verified, wanted: Needs, given: Needs, nodes: Tensor | None) -> Verified:
    """What one of several drafts asked for, of what was read for all of them; `nodes` are those of its own tree."""
    return changed(
        verified,
        hidden=verified.hidden if wanted.hidden else None,
        layers=tuple(verified.layers[given.layers.index(layer)] for layer in wanted.layers),
        nodes=nodes,
        cache=verified.cache if wanted.cache else None,
    )


def rows_of(verified: Verified, rows: Sequence[int]) -> Verified:
    """Some rows of what was read; a shared cache is left to its owner."""
    index = on_device(rows, verified.tokens.device)

    def cut(values: Tensor) -> Tensor:
        return values[index.to(values.device)]

    made = Verified(
        cut(verified.tokens),
        cut(verified.next_tokens),
        cut(verified.counts),
        None if verified.hidden is None else cut(verified.hidden),
        tuple(cut(layer) for layer in verified.layers),
        None if verified.nodes is None else cut(verified.nodes),
        verified.cache,
    )
    lists = {name: getattr(verified, name) for name in ("count_list", "next_lists")}
    vars(made).update({name: [values[row] for row in rows] for name, values in lists.items()})
    return made


def joined(parts: Sequence[Verified]) -> Verified:
    """Several stretches of text, read one after another, as one; node numbers do not outlive their tree."""
    if len(parts) == 1:
        return parts[0]
    starts = [0, *accumulate(part.tokens.shape[1] for part in parts)]
    batch = range(parts[0].tokens.shape[0])
    places = [
        [start + t for start, part in zip(starts, parts, strict=False) for t in range(part.count_list[row])]
        for row in batch
    ]
    counts = [len(row) for row in places]
    order = on_device([row + [0] * (max(counts) - len(row)) for row in places], parts[0].tokens.device)

    def packed(values: Sequence[Tensor]) -> Tensor:
        whole = torch.cat(list(values), 1)
        place = order.to(whole.device)
        return whole[torch.arange(place.shape[0], device=place.device).unsqueeze(1), place]

    hidden = [part.hidden for part in parts if part.hidden is not None]
    made = Verified(
        packed([part.tokens for part in parts]),
        packed([part.next_tokens for part in parts]),
        on_device(counts, order.device),
        packed(hidden) if hidden else None,
        tuple(packed(layer) for layer in zip(*(part.layers for part in parts), strict=True)),
        None,
        parts[-1].cache,
    )
    vars(made).update(count_list=counts)
    return made


class DraftState(ABC):
    """All that belongs to one generation; never kept on the draft itself."""

    @abstractmethod
    def select(self, rows: Tensor) -> DraftState:
        """The state of some rows (`[K]` int64), used when rows of a batch finish."""

    @property
    def joins(self) -> bool:
        """Whether rows of another generation with the same draft can be taken in (see `join`)."""
        return False

    def join(self, other: Any) -> DraftState:
        """The state of one's own rows followed by those of another state of the same draft, which is used up.

        Raises:
            UnsupportedGeneration: `joins` is false; such generations go on side by side.
        """
        raise UnsupportedGeneration(f"{type(self).__name__} cannot take in rows of another generation")


@runtime_checkable
class Draft(Protocol):
    """Guesses the next tokens.

    `propose` and `observe` may change the state they are given in place; the engine uses only what they return.
    """

    @property
    def kind(self) -> str:
        """A name for reports."""

    @property
    def needs(self) -> Needs:
        """Which of the target's features it reads."""

    def begin(self, verified: Verified) -> Any:
        """Read the prompt and return the state of a new generation.

        Behind a cache that the caller passed in, a draft that needs hidden states or layers is shown the part of the
        text that the target has read in this call; one that needs neither, all of it if the tokens are known. A prompt
        given as embeddings alone shows its last place only, with token 0 in it.
        """

    def propose(self, state: Any, budget: Budget, sampling: Sampling, generator: torch.Generator | None) -> DraftTree:
        """Guess a tree whose node 0 is the newest committed token of each row."""

    def observe(self, state: Any, verified: Verified) -> Any:
        """Take in what was committed and roll the state on. Equals `begin` on the longer prompt."""
