"""What the target has to read before it can speak: prompts without their padding, behind a cache of earlier turns.

Letters: B rows, P prompt tokens, C columns of cache and prompt together, E embedded places, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.accept import Accepted
from selfspec.cache import SlotCache
from selfspec.draft import Needs, Verified, last_of
from selfspec.errors import UnsupportedGeneration
from selfspec.host import on_device
from selfspec.target_output import TargetOutput
from selfspec.tree import DraftTree


@dataclass(frozen=True, eq=False)
class Prompt:
    """Prompts packed to the left, as positions count them.

    Args:
        tokens: `[B, P']` int64, what is to be read now, padded on the right; zeros where only embeddings are known.
        counts: how many of them are real, per row; at least 1.
        embeds: `[B, P', D]`, read instead of the tokens; None as a rule.
        past: `[B, C - P]` bool, the real columns of the cache taken over; None without one.
        text: `[B, C']` int64 and its lengths: the whole text from the first cached token on; None if not known.
        real: `[B, C]` bool, which columns hold tokens; None when all do.
        width: C.
    """

    tokens: Tensor
    counts: list[int]
    embeds: Tensor | None
    past: Tensor | None
    text: tuple[Tensor, list[int]] | None
    real: Tensor | None
    width: int

    def columns(self) -> list[Tensor]:
        """Per row the columns in `0..C-1` that hold its tokens, in order."""
        if self.real is None:
            return [torch.arange(self.width, device=self.tokens.device)] * len(self.counts)
        return [row.nonzero().squeeze(1) for row in self.real]


def read_prompt(input_ids: Tensor, mask: Tensor | None, embeds: Tensor | None = None, past: int = 0) -> Prompt:
    """Take the padding out, wherever it stands.

    Args:
        input_ids: `[B, P]` int64, the whole text or what comes after the cache; may be empty beside `embeds`.
        mask: `[B, C]`, 0 for padding, cached columns included; None where nothing is padding.
        embeds: `[B, E, D]`, the prompt in place of `input_ids`.
        past: columns of the cache taken over; needs a mask.

    Raises:
        UnsupportedGeneration: nothing to read, a mask of another size, or a row that ends in padding.
    """
    batch = input_ids.shape[0]
    new = input_ids.shape[1] if embeds is None else embeds.shape[1]
    if input_ids.ndim != 2 or batch == 0 or new == 0:
        raise UnsupportedGeneration(f"the prompt has shape {tuple(input_ids.shape)}; give at least one token per row")
    whole = past > 0 and mask is not None and mask.shape[1] == new
    width = new if whole else past + new
    text = input_ids if whole or (past == 0 and input_ids.shape[1] == new) else None
    read = input_ids[:, past:] if whole else input_ids
    if read.shape[1] != width - past:
        read = read.new_zeros(batch, width - past)
    if mask is None:
        return Prompt(read, [new] * batch, embeds, None, None if text is None else (text, [width] * batch), None, width)
    real = _checked(mask.bool(), width)
    tokens, counts = _packed(read, real[:, past:])
    packed = None if embeds is None else _packed(embeds, real)[0]
    known = None if text is None else _packed(text, real)
    return Prompt(tokens, counts, packed, real[:, :past] if past else None, known, real, width)


def _checked(real: Tensor, width: int) -> Tensor:
    if real.shape[1] != width:
        raise UnsupportedGeneration(f"the attention mask has {real.shape[1]} columns, wanted {width}")
    if not bool(real.any(1).all()):
        raise UnsupportedGeneration("a prompt of padding only; give at least one token per row")
    if not bool(real[:, -1].all()):
        raise UnsupportedGeneration("padding behind a prompt; pad on the left (padding_side='left')")
    return real


def _packed(values: Tensor, real: Tensor) -> tuple[Tensor, list[int]]:
    """`[B, P, ...]` with the real places of each row first, cut to the longest row, and how many there are."""
    if bool(real.all()):
        return values, [values.shape[1]] * values.shape[0]
    counts: list[int] = real.sum(1).tolist()
    order = real.long().argsort(dim=1, descending=True, stable=True)[:, : max(counts)]
    return values[torch.arange(values.shape[0], device=values.device).unsqueeze(1), order], counts


def verified_prompt(
    prompt: Prompt, out: TargetOutput, first: Sequence[int], needs: Needs, cache: SlotCache | None = None
) -> Verified:
    """What a draft sees at `begin`: as much of the text as tokens and features are known of.

    A draft that reads features sees what the target read in this call; one that reads tokens only sees cached text
    too. Where the prompt came as embeddings alone, only its last place is shown, with token 0 in it.
    """
    if prompt.text is None and prompt.embeds is not None:
        place = torch.tensor(prompt.counts) - 1
        one = torch.ones_like(place)
        following = torch.tensor(first, device=prompt.tokens.device).unsqueeze(1)
        hidden = None if out.hidden is None else last_of(out.hidden, place + 1).unsqueeze(1)
        layers = tuple(last_of(layer, place + 1).unsqueeze(1) for layer in out.layers)
        return Verified(torch.zeros_like(following), following, one.to(following.device), hidden, layers, cache=cache)
    tokens, lengths = prompt.tokens, prompt.counts
    if not needs.hidden and not needs.layers and prompt.text is not None:
        tokens, lengths = prompt.text
    counts = torch.tensor(lengths, device=tokens.device)
    following = tokens.roll(-1, dims=1)
    following[torch.arange(len(first), device=counts.device), counts - 1] = torch.tensor(first, device=tokens.device)
    return Verified(tokens, following, counts, out.hidden, out.layers, cache=cache)


def verified_path(tree: DraftTree, out: TargetOutput, accepted: Accepted, cache: SlotCache | None = None) -> Verified:
    """What a draft sees at `observe`: the accepted path of each row with the hidden states the target had there.

    Args:
        tree: what was proposed.
        out: the target's pass over it.
        accepted: paths may be longer than the committed tokens of a row, which count.
        cache: the target's, for drafts that need it.
    """
    longest = max(map(len, accepted.tokens))
    counts = [len(tokens) for tokens in accepted.tokens]
    paths = [path[:count] for path, count in zip(accepted.paths, counts, strict=True)]
    places = [path + [0] * (longest - len(path)) for path in paths]
    texts = [tokens + [0] * (longest - len(tokens)) for tokens in accepted.tokens]
    rows = [[*place, *text, count] for place, text, count in zip(places, texts, counts, strict=True)]
    nodes, following, committed = on_device(rows, tree.tokens.device).split([longest, longest, 1], 1)
    straight = all(path == list(range(longest)) for path in paths)

    def along(values: Tensor) -> Tensor:
        if straight:
            return values[:, :longest]
        where = nodes.to(values.device)
        return values[torch.arange(values.shape[0], device=values.device).unsqueeze(1), where]

    hidden = None if out.hidden is None else along(out.hidden)
    layers = tuple(along(layer) for layer in out.layers)
    verified = Verified(along(tree.tokens), following, committed.squeeze(1), hidden, layers, nodes, cache)
    vars(verified).update(count_list=counts, next_lists=texts, node_lists=places)
    return verified
