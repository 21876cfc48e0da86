"""The attention masks of a tree pass, built here and nowhere else.

A boolean mask under eager attention is added as 0/1 without a word, so the form of the mask is decided here too.
Letters: B rows, N tree nodes (or tokens in a line), S visible slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selfspec.cache import Slots
from selfspec.errors import UnsupportedModel
from selfspec.hf import MASKED_ATTENTION, Chunk
from selfspec.tree import TreeShape


def tree_positions(shape: TreeShape, slots: Slots) -> Tensor:
    """`[B, N]` int64: committed length plus depth."""
    return slots.lengths_tensor().unsqueeze(1) + shape.depth


def visible(shape: TreeShape, slots: Slots, window: int | None) -> Tensor:
    """`[B or 1, N, S]` bool: which slots of the view each node attends to.

    A node sees the committed tokens and its own ancestors, as far as the window reaches back from its position.
    """
    first, end = slots.view(window, shape.nodes)
    if slots.uniform and shape.parents.shape[0] == 1:
        return _visible_uniform(shape, slots.lengths[0], first, end, window)
    lengths = slots.lengths_tensor().unsqueeze(1)
    behind = torch.arange(first, end, device=lengths.device).unsqueeze(0) - lengths
    batch, nodes = lengths.shape[0], shape.nodes
    inside = ((behind >= 0) & (behind < nodes)).unsqueeze(1)
    node = behind.clamp(0, nodes - 1).unsqueeze(1).expand(batch, nodes, -1)
    depth = shape.depth.expand(batch, nodes)
    seen = shape.ancestors.expand(batch, -1, -1).gather(2, node) & inside
    if window is None:
        return seen | (behind < 0).unsqueeze(1)
    place = torch.where(behind < 0, behind, depth.gather(1, behind.clamp(0, nodes - 1)))
    reach = reaches(lengths.unsqueeze(2) + depth.unsqueeze(2), (lengths + place).unsqueeze(1), window)
    return (seen | (behind < 0).unsqueeze(1)) & reach


def _visible_uniform(shape: TreeShape, length: int, first: int, end: int, window: int | None) -> Tensor:
    nodes = shape.nodes
    mask = torch.ones(1, nodes, end - first, dtype=torch.bool, device=shape.parents.device)
    mask[:, :, length - first :] = shape.ancestors
    if window is not None and length + nodes > window:  # else the window reaches back to the first token
        committed = torch.arange(first, length, device=mask.device)
        nodes_at = length + shape.depth[0]
        mask &= reaches(nodes_at.unsqueeze(1), torch.cat([committed, nodes_at]), window)
    return mask


def visible_again(count: int, slots: Slots, window: int | None) -> Tensor:
    """`[B, T, S]` bool: what the last T committed tokens of each row see when they are read anew behind the cache.

    Each sees the committed tokens before those T, and the T as they stand behind the committed slots.
    """
    first, end = slots.view(window, count)
    behind = torch.arange(first, end, device=slots.device).unsqueeze(0) - slots.lengths_tensor().unsqueeze(1)
    place = torch.where(behind < 0, behind + count, behind).unsqueeze(1)
    there = ((behind < -count) | ((behind >= 0) & (behind < count))).unsqueeze(1)
    line = torch.arange(count, device=slots.device).unsqueeze(-1)
    seen = there & (place <= line)
    if window is None:
        return seen
    start = slots.lengths_tensor().view(-1, 1, 1) - count
    return seen & reaches(start + line, start + place, window)


def reaches(query: Tensor, key: Tensor, window: int) -> Tensor:
    """Whether a window allows a token at one position to see a token at another, earlier one."""
    if isinstance(window, Chunk):
        return query // window == key // window
    return query - key < window


def visible_line(tokens: int, slots: Slots, window: int | None) -> Tensor:
    """`[B, N, S]` bool: which slots of the view each of N tokens behind the committed ones attends to."""
    first, end = slots.view(window, tokens)
    place = slots.index(tokens).unsqueeze(-1)
    slot = torch.arange(first, end, device=place.device)
    seen = slot <= place
    return seen if window is None else seen & reaches(place, slot, window)


def block_diagonal(counts: Sequence[int], window: int | None, device: torch.device) -> Tensor:
    """`[1, P, P]` bool: what tokens of independent texts that follow each other in one row attend to."""
    block = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).to(device)
    place = torch.cat([torch.arange(count) for count in counts]).to(device)
    seen = (block.unsqueeze(1) == block) & (place.unsqueeze(1) >= place)
    return (seen if window is None else seen & reaches(place.unsqueeze(1), place, window)).unsqueeze(0)


def as_attention_mask(seen: Tensor, attention: str, dtype: torch.dtype) -> Tensor:
    """`[B, N, S]` bool to the `[B, 1, N, S]` mask that this attention back end takes."""
    if attention == "sdpa":
        return seen.unsqueeze(1)
    if attention not in MASKED_ATTENTION:  # set after the model was patched
        raise UnsupportedModel(
            f"attention back end {attention!r} takes no tree mask; use set_attn_implementation('sdpa')"
        )
    zero = torch.zeros((), dtype=dtype, device=seen.device)
    return torch.where(seen, zero, torch.finfo(dtype).min).unsqueeze(1)
