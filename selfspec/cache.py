"""The target's key-value cache: storage allocated ahead, written in place, a length per row.

Letters: B rows, H key-value heads, S slots, d head size, N tree nodes, A accepted places (the root included).

Row b holds its committed tokens in slots 0..length[b]-1, without padding. A tree pass writes its N nodes behind them;
`keep` moves the accepted ones into place and forgets the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from selfspec.errors import UnsupportedGeneration
from selfspec.hf import Cache, CacheLayerMixin, LinearAttentionLayer, Window
from selfspec.host import on_device
from selfspec.recurrent import StateRecord

RowKeys = list[tuple[Tensor, Tensor] | None]
"""Keys and values of one row, `[H, S, d]` each, per layer; None for a layer that reads another's."""

_SPARE = 64
"""Slots allocated behind the longest row when caches are joined."""


class Slots:
    """Lengths of the rows, shared by all layers of a cache, and what follows from them for the pass at hand.

    `behind` is how many uncommitted slots after the committed ones hold nodes of a draft that this pass may look at.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device) -> None:
        self.lengths = [0] * batch
        self.capacity = capacity
        self.device = device
        self.behind = 0
        self._index: Tensor | None = None
        self._tensor: Tensor | None = None

    @property
    def uniform(self) -> bool:
        """Whether all rows have one length."""
        return min(self.lengths) == max(self.lengths)

    def lengths_tensor(self) -> Tensor:
        """`[B]` int64 on the device; not to be written to."""
        if self._tensor is None:
            self._tensor = on_device(self.lengths, self.device)
        return self._tensor

    def index(self, new: int) -> Tensor:
        """`[B, new]` int64: the slots that `new` tokens of each row go to."""
        if self._index is None or self._index.shape[1] != new:
            start = self.lengths_tensor().unsqueeze(1) + self.behind
            self._index = start + torch.arange(new, device=self.device)
        return self._index

    def view(self, window: int | None, new: int) -> tuple[int, int]:
        """First and end slot that a pass over `new` tokens can see in a layer with this window."""
        end = max(self.lengths) + self.behind + new
        if window is None:
            return 0, end
        return max(0, min(self.lengths) - window + 1), end

    def set_behind(self, nodes: int) -> None:
        """Say how many nodes of a draft stand behind the committed slots."""
        self.behind = nodes
        self._index = None

    def advance(self, counts: Sequence[int]) -> None:
        """Commit `counts[b]` more slots of each row."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.index_changed()

    def index_changed(self) -> None:
        """Forget what was derived from the lengths."""
        self._index = self._tensor = None

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.lengths = [self.lengths[row] for row in rows]
        self.index_changed()


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, `[B, H, capacity, d]`, of which the first `lengths[b]` slots are committed."""

    is_compileable = False
    is_croppable = False
    stored_keys: Tensor
    stored_values: Tensor

    def __init__(self, slots: Slots, window: int | None) -> None:
        super().__init__()
        self.slots = slots
        self.window = window
        self.is_sliding = window is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate storage shaped after the first keys and values."""
        self._allocate(key_states, value_states)

    def _allocate(self, key_states: Tensor, value_states: Tensor) -> None:
        self.stored_keys = self._storage(key_states)
        self.stored_values = self._storage(value_states)
        self.is_initialized = True

    def _storage(self, like: Tensor) -> Tensor:
        # Zeros, not empty: rows of a batch see each other's unwritten slots under a mask, and 0 * NaN would be NaN.
        batch, heads, _, size = like.shape
        return like.new_zeros(batch, heads, self.slots.capacity, size)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write `[B, H, N, d]` behind the committed slots; return what this pass may look at."""
        new = key_states.shape[-2]
        first, end = self.slots.view(self.window, new)
        if not self.is_initialized:
            self._make_room(end)
            self._allocate(key_states, value_states)
        elif end > self.stored_keys.shape[-2]:
            self._make_room(end)
            self.stored_keys, self.stored_values = self._grown(self.stored_keys), self._grown(self.stored_values)
        self._write(self.stored_keys, key_states)
        self._write(self.stored_values, value_states)
        return self.stored_keys[:, :, first:end], self.stored_values[:, :, first:end]

    def _make_room(self, end: int) -> None:
        if end > self.slots.capacity:
            self.slots.capacity = max(end, 2 * self.slots.capacity)

    def _grown(self, storage: Tensor) -> Tensor:
        grown = self._storage(storage)
        grown[:, :, : storage.shape[2]] = storage
        return grown

    def _write(self, storage: Tensor, new: Tensor) -> None:
        count = new.shape[-2]
        if self.slots.uniform:
            start = self.slots.lengths[0] + self.slots.behind
            storage[:, :, start : start + count] = new
        else:
            storage.scatter_(2, _spread(self.slots.index(count).to(new.device), new), new)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots `source` to `target` (`[B, A]` each, equal where nothing moves)."""
        for storage in (self.stored_keys, self.stored_values):
            if storage.shape[0] == 1:
                storage[0, :, target[0]] = storage[0, :, source[0]]
                continue
            shape = storage[:, :, : source.shape[1]]
            storage.scatter_(2, _spread(target, shape), storage.gather(2, _spread(source, shape)))

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        if self.is_initialized:
            self.stored_keys, self.stored_values = self.stored_keys[rows], self.stored_values[rows]

    def join(self, other: SlotLayer, capacity: int) -> None:
        """Append the rows of another layer, in storage of `capacity` slots."""
        self.stored_keys = _below(self.stored_keys, other.stored_keys, capacity)
        self.stored_values = _below(self.stored_values, other.stored_values, capacity)

    def get_seq_length(self) -> int:
        """Tokens of the longest row before this pass."""
        return max(self.slots.lengths) + self.slots.behind

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of visible slots and the first of them."""
        first, end = self.slots.view(self.window, query_length)
        return end - first, first

    def get_max_length(self) -> int:
        """-1: storage grows when it must."""
        return -1


def _spread(index: Tensor, like: Tensor) -> Tensor:
    batch, heads, _, size = like.shape
    return index[:, None, :, None].expand(batch, heads, index.shape[1], size)


def _below(upper: Tensor, lower: Tensor, capacity: int) -> Tensor:
    _, heads, _, size = upper.shape
    joined = upper.new_zeros(upper.shape[0] + lower.shape[0], heads, capacity, size)
    for part, rows in ((upper, slice(0, upper.shape[0])), (lower, slice(upper.shape[0], None))):
        width = min(capacity, part.shape[2])
        joined[rows, :, :width] = part[:, :, :width]
    return joined


def _columns(stored: Tensor, columns: Sequence[Tensor], width: int) -> Tensor:
    batch, heads, _, size = stored.shape
    found = stored.new_zeros(batch, heads, width, size)
    for row, places in enumerate(columns):
        found[row, :, places.to(stored.device)] = stored[row, :, : places.numel()]
    return found


class SlotStateLayer(LinearAttentionLayer, SlotLayer):  # type: ignore[override]
    """Keys and values beside a recurrent state, in one layer (Falcon-H1)."""

    def __init__(self, slots: Slots, window: int | None, states: int) -> None:
        SlotLayer.__init__(self, slots, window)
        LinearAttentionLayer.__init__(self, number_of_states=states)


def _layer(slots: Slots, window: Window, states: int) -> Any:
    if isinstance(window, type):
        return LinearAttentionLayer(number_of_states=states) if states else window()
    return SlotStateLayer(slots, window, states) if states else SlotLayer(slots, window)


class SlotCache(Cache):
    """The cache handed to the target's `forward`.

    Args:
        windows: per layer which keys it keeps.
        batch: B.
        capacity: slots to allocate at once; more are added by doubling if ever needed.
        device: where the lengths live (keys and values follow the layers).
        states: per layer the number of recurrent states; None when there are none. With them B must be 1.
    """

    def __init__(
        self,
        windows: Sequence[Window],
        batch: int,
        capacity: int,
        device: torch.device,
        states: Sequence[int] | None = None,
    ) -> None:
        self.slots = Slots(batch, capacity, device)
        counts = states or [0] * len(windows)
        super().__init__(layers=[_layer(self.slots, w, n) for w, n in zip(windows, counts, strict=True)])
        carriers = [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)]
        self.record = StateRecord(carriers) if carriers else None

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row."""
        pending = 0 if self.record is None else len(self.record.pending)
        return [length + pending for length in self.slots.lengths]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest row that the next pass builds on."""
        return max(self.slots.lengths)

    def _stores(self) -> list[SlotLayer]:
        return [layer for layer in self.layers if isinstance(layer, SlotLayer) and layer.is_initialized]

    def commit(self, counts: Sequence[int]) -> None:
        """Keep the first `counts[b]` of the tokens just written."""
        self.slots.advance(counts)

    @contextmanager
    def drafting(self, nodes: int) -> Iterator[None]:
        """Passes in this block write after `nodes` nodes of a draft, which stand behind the committed slots.

        Nothing is committed; when the block ends the cache is as before, but for the uncommitted slots.
        """
        before = self.slots.behind
        self.slots.set_behind(nodes)
        try:
            yield
        finally:
            self.slots.set_behind(before)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep these nodes of the tree just written, in path order (the root, node 0, first); drop all others.

        Args:
            paths: per row the accepted nodes, ascending.
        """
        if self.record is not None:
            self.slots.advance([self.record.keep(len(path)) for path in paths])
            return
        moved = [next((i for i, node in enumerate(path) if node != i), len(path)) for path in paths]
        first, longest = min(moved), max(map(len, paths))
        if any(place < len(path) for place, path in zip(moved, paths, strict=True)):
            filled = [[*path, *range(len(path), longest)][first:] for path in paths]
            base = self.slots.lengths_tensor().unsqueeze(1)
            source = base + on_device(filled, base.device)
            target = base + torch.arange(first, longest, device=base.device)
            for layer in self._stores():
                layer.move(source.to(layer.stored_keys.device), target.to(layer.stored_keys.device))
        self.slots.advance([len(path) for path in paths])

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        for layer in self._stores():
            layer.select(on_device(rows, layer.stored_keys.device))
        self.slots.select(rows)

    @property
    def joins(self) -> bool:
        """Whether all that the layers keep are keys and values, which `join` can put one below the other."""
        return self.record is None

    def join(self, other: SlotCache, capacity: int = 0) -> None:
        """Take in the rows of another cache of the same model, behind one's own.

        Args:
            other: a cache that has read something; it must not be used afterwards.
            capacity: slots to keep allocated; at least what is committed and a little more.

        Raises:
            UnsupportedGeneration: a layer that keeps more than keys and values (`joins` is false).
        """
        if not (self.joins and other.joins):
            raise UnsupportedGeneration("this model's cache cannot take in rows of another generation")
        lengths = [*self.lengths, *other.lengths]
        capacity = max(capacity, max(lengths) + _SPARE)
        for mine, theirs in zip(self._stores(), other._stores(), strict=True):
            mine.join(theirs, capacity)
        self.slots.lengths, self.slots.capacity = lengths, capacity
        self.slots.index_changed()

    def row(self, row: int) -> RowKeys:
        """Copies of one row's committed keys and values."""
        length = self.lengths[row]
        return [
            (layer.stored_keys[row, :, :length].clone(), layer.stored_values[row, :, :length].clone())
            if isinstance(layer, SlotLayer) and layer.is_initialized
            else None
            for layer in self.layers
        ]

    def load(self, rows: Sequence[RowKeys], lengths: Sequence[int]) -> None:
        """Fill an empty cache: per row and layer keys and values `[H, S, d]` of its committed tokens."""
        self.slots.capacity = max(self.slots.capacity, *lengths)
        for index, layer in enumerate(self.layers):
            for number, row in enumerate(rows):
                pair = row[index]
                if not isinstance(layer, SlotLayer) or pair is None:
                    continue
                if not layer.is_initialized:
                    layer.lazy_initialization(*(part.expand(len(rows), *part.shape) for part in pair))
                layer.stored_keys[number, :, : lengths[number]] = pair[0]
                layer.stored_values[number, :, : lengths[number]] = pair[1]
        self.slots.lengths = list(lengths)
        self.slots.index_changed()

    def spread(self, columns: Sequence[Tensor], width: int) -> list[tuple[Tensor, Tensor] | None]:
        """Keys and values `[B, H, width, d]` per layer, row b's token i in column `columns[b][i]`, zeros elsewhere."""
        pairs: list[tuple[Tensor, Tensor] | None] = []
        for layer in self.layers:
            if not isinstance(layer, SlotLayer) or not layer.is_initialized:
                pairs.append(None)
                continue
            keys, values = (_columns(stored, columns, width) for stored in (layer.stored_keys, layer.stored_values))
            pairs.append((keys, values))
        return pairs
