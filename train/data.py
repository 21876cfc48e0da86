"""Rows of datasets to batches for heads.

Letters: B rows, T places, D hidden size. A row of n + 1 tokens has n places: place t pairs token t, which went through
the target, with token t + 1. A batch is what `begin` gets at decoding, padded on the right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Sampler

from selfspec.draft import Needs, TopTokens, Verified
from selfspec.errors import ConfigError, DataError
from selfspec.target import Target
from selfspec.train.packing import packed_features
from selfspec.train.shards import StoredText

IGNORED = -100
TOP = ["top_ids", "top_logits", "top_rest"]
"""Columns of what the target says next, see `selfspec.train.features.thoughts`."""
_BUCKET = 32


def feature_columns(needs: Needs) -> list[str]:
    """Names of the dataset columns that hold what a head needs."""
    return (["hidden"] if needs.hidden else []) + [f"layer_{k}" for k in needs.layers]


class TrainingRows(TorchDataset[dict[str, Tensor]]):
    """Rows of several datasets in one, each repeated by its weight.

    Args:
        parts: text as `load_shards` gives it, and how often each row is used per epoch.
        needs: features to read, if every part has them.
        hidden_size: D.

    Raises:
        DataError: no rows, features of another size, or parts that hold likeliest tokens and others that do not.
    """

    def __init__(self, parts: Sequence[tuple[StoredText, float]], needs: Needs, hidden_size: int) -> None:
        self.columns = feature_columns(needs)
        if not all(set(self.columns) <= set(text.columns) for text, _ in parts):
            self.columns = []
        for text, _ in parts:
            wrong = {name: text.widths[name] for name in self.columns if text.widths[name] != hidden_size}
            if wrong:
                raise DataError(f"{text.folder} holds features of the sizes {wrong}, the target has {hidden_size}")
        self.columns += _top_columns([text for text, _ in parts])
        self.parts = [text for text, _ in parts]
        self.index = [(p, row) for p, (text, weight) in enumerate(parts) for row in _repeated(len(text), weight)]
        if not self.index:
            raise DataError("the training data is empty; raise max_tokens or the weights")
        self.lengths = [self.parts[part].lengths[row] for part, row in self.index]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        """`input_ids` [n] int64, `learn` [n] bool, features [n, D] bfloat16 and `TOP` under their column names."""
        part, row = self.index[place]
        item = self.parts[part].row(row, ["input_ids", "learn", *self.columns])
        return item | {"input_ids": item["input_ids"].long()}


def _top_columns(parts: Sequence[StoredText]) -> list[str]:
    """`TOP` if all parts have these columns, nothing if none has."""
    held = {str(text.folder): text.widths.get("top_ids", 0) for text in parts}
    if not any(held.values()):
        return []
    if len(set(held.values())) > 1:
        raise DataError(f"the sources store different numbers of likeliest tokens: {held}; set one top_logits for all")
    old = [str(text.folder) for text in parts if not set(TOP) <= set(text.columns)]
    if old:
        raise DataError(f"{old[0]} was made by another version, without {TOP[-1]}; delete it, and make the data again")
    return TOP


def _repeated(rows: int, weight: float) -> Iterator[int]:
    for place in range(round(rows * weight)):
        yield place % rows


class Fillers(TorchDataset[dict[str, Tensor]]):
    """Rows by their numbers; row `~n` is row n with nothing to learn."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        if place >= 0:
            item: dict[str, Tensor] = self.rows[place]
            return item
        item = dict(self.rows[~place])
        return item | {"learn": torch.zeros_like(item["learn"])}


def collate(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """A batch.

    Returns:
        `tokens` and `next_tokens` [B, T] int64, `counts` [B] int64, `labels` [B, T] int64 (the next token where there
        is something to learn, else -100; the first place has no teacher before it), the features [B, T, D], and `TOP`.
    """
    ids = [row["input_ids"] for row in rows]
    labels = [torch.where(row["learn"][1:], row["input_ids"][1:], IGNORED) for row in rows]
    batch = {
        "tokens": pad_sequence([i[:-1] for i in ids], batch_first=True),
        "next_tokens": pad_sequence([i[1:] for i in ids], batch_first=True),
        "counts": torch.tensor([len(i) - 1 for i in ids]),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }
    batch["labels"][:, 0] = IGNORED
    for name in rows[0]:
        if name not in ("input_ids", "learn"):
            batch[name] = pad_sequence([row[name][:-1] for row in rows], batch_first=True)
    return batch


def to_verified(batch: Mapping[str, Any], needs: Needs, target: Target, pack: bool = False) -> Verified:
    """The record a head reads; features that the batch lacks come from a pass of the target, without gradient.

    With `pack` that pass reads the rows one after another in one, without padding between them.
    """
    tokens, counts = batch["tokens"], batch["counts"]
    if all(name in batch for name in feature_columns(needs)):
        hidden = batch.get("hidden") if needs.hidden else None
        layers = tuple(batch[f"layer_{k}"] for k in needs.layers)
    elif pack and not target.chain_only:
        rows = [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
        read = packed_features(target, rows, needs)
        kept = [part.hidden[0] for part in read if part.hidden is not None]
        hidden = pad_sequence(kept, batch_first=True) if kept else None
        layers = tuple(pad_sequence([p.layers[k][0] for p in read], batch_first=True) for k in range(len(needs.layers)))
    else:
        real = torch.arange(tokens.shape[1], device=tokens.device) < counts.unsqueeze(1)
        output = target.features(tokens, None if bool(real.all()) else real.long(), needs)
        hidden, layers = output.hidden, output.layers
    top = TopTokens(*(batch[name] for name in TOP)) if TOP[0] in batch else None
    return Verified(tokens, batch["next_tokens"], counts, hidden, layers, top=top)


class TokenBatches(Sampler[list[int]]):
    """Batches of rows of like length with at most `max_tokens` tokens, padding included, in a new order every epoch.

    All processes get the same number of batches. Where rows do not suffice, a process gets one to learn nothing from:
    its number is negative (`~row`), see `Fillers`.

    Args:
        lengths: of the rows.
        max_tokens: per batch; a longer row is a batch of its own.
        seed: with the epoch, decides the order.
        rank: this process.
        world: processes.
        parts: how many processes share the rows of one batch.
    """

    def __init__(
        self, lengths: Sequence[int], max_tokens: int, seed: int, rank: int = 0, world: int = 1, parts: int = 1
    ) -> None:
        if max_tokens < 1 or not 0 <= rank < world or world % parts:
            raise ConfigError(
                f"batches of {max_tokens} tokens for process {rank} of {world}, {parts} to a batch, cannot be made"
            )
        # Rows of one bucket count alike, so every epoch has the same number of batches.
        self.buckets = -(-np.asarray(lengths) // _BUCKET)
        self.max_tokens, self.seed = max_tokens, seed
        self.groups, self.parts = world // parts, parts
        self.group, self.part = divmod(rank, parts)
        self.filler = ~int(np.argmin(lengths))
        self.epoch = 0
        self._length = -(-len(self._batches(0)) // self.groups)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._batches(self.epoch)
        for place in range(self.group, len(self) * self.groups, self.groups):
            mine = batches[place][self.part :: self.parts] if place < len(batches) else []
            yield mine or [self.filler]

    def _batches(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.buckets), generator=generator).numpy()
        order = order[np.argsort(self.buckets[order], kind="stable")]
        batches: list[list[int]] = []
        batch: list[int] = []
        for row in order.tolist():
            if batch and (len(batch) + 1) * int(self.buckets[row]) * _BUCKET > self.max_tokens:
                batches.append(batch)
                batch = []
            batch.append(row)
        batches.append(batch)
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
