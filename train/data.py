"""Rows of datasets to batches for heads.

Letters: B rows, T places, D hidden size. A row of n + 1 tokens has n places: place t pairs token t, which went through
the target, with token t + 1. A batch is what `begin` gets at decoding, padded on the right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Sampler

from selfspec.draft import Needs, Verified
from selfspec.errors import ConfigError, DataError
from selfspec.target import Target

IGNORED = -100
_BUCKET = 32


def feature_columns(needs: Needs) -> list[str]:
    """Names of the dataset columns that hold what a head needs."""
    return (["hidden"] if needs.hidden else []) + [f"layer_{k}" for k in needs.layers]


class TrainingRows(TorchDataset[dict[str, Tensor]]):
    """Rows of several datasets in one, each repeated by its weight.

    Args:
        parts: datasets as `load_shards` gives them, and how often each row is used per epoch.
        needs: features to read, if every part has them.
        hidden_size: D.
    """

    def __init__(self, parts: Sequence[tuple[Dataset, float]], needs: Needs, hidden_size: int) -> None:
        self.columns = feature_columns(needs)
        if not all(set(self.columns) <= set(data.column_names) for data, _ in parts):
            self.columns = []
        self.parts = [data.select_columns(["input_ids", "learn", *self.columns]) for data, _ in parts]
        self.hidden_size = hidden_size
        self.index = [(p, row) for p, (data, weight) in enumerate(parts) for row in _repeated(len(data), weight)]
        if not self.index:
            raise DataError("the training data is empty; raise max_tokens or the weights")
        sizes = [_lengths(data) for data in self.parts]
        self.lengths = [sizes[part][row] for part, row in self.index]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        """`input_ids` [n] int64, `learn` [n] bool, and features [n, D] bfloat16 under their column names."""
        part, row = self.index[place]
        values = self.parts[part][row]
        item = {"input_ids": torch.tensor(values["input_ids"]), "learn": torch.tensor(values["learn"])}
        for name in self.columns:
            raw = torch.frombuffer(bytearray(values[name]), dtype=torch.bfloat16)
            item[name] = raw.view(-1, self.hidden_size)
        return item


def _repeated(rows: int, weight: float) -> Iterator[int]:
    for place in range(round(rows * weight)):
        yield place % rows


def _lengths(data: Dataset) -> list[int]:
    ids = data.select_columns(["input_ids"])
    return [len(row) for batch in ids.iter(1024) for row in batch["input_ids"]]


def collate(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """A batch.

    Returns:
        `tokens` and `next_tokens` [B, T] int64, `counts` [B] int64, `labels` [B, T] int64 (the next token where there
        is something to learn, else -100; the first place has no teacher before it), and the features [B, T, D].
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


def to_verified(batch: Mapping[str, Any], needs: Needs, target: Target) -> Verified:
    """The record a head reads; features that the batch lacks come from a pass of the target, without gradient."""
    tokens, counts = batch["tokens"], batch["counts"]
    if all(name in batch for name in feature_columns(needs)):
        hidden = batch.get("hidden") if needs.hidden else None
        layers = tuple(batch[f"layer_{k}"] for k in needs.layers)
    else:
        real = torch.arange(tokens.shape[1], device=tokens.device) < counts.unsqueeze(1)
        output = target.features(tokens, None if bool(real.all()) else real.long(), needs)
        hidden, layers = output.hidden, output.layers
    return Verified(tokens, batch["next_tokens"], counts, hidden, layers)


class TokenBatches(Sampler[list[int]]):
    """Batches of rows of like length with at most `max_tokens` tokens, padding included, in a new order every epoch.

    Args:
        lengths: of the rows.
        max_tokens: per batch; a longer row is a batch of its own.
        seed: with the epoch, decides the order.
        rank: this process.
        world: processes; all get the same number of batches, the last few of which may come twice.
    """

    def __init__(self, lengths: Sequence[int], max_tokens: int, seed: int, rank: int = 0, world: int = 1) -> None:
        if max_tokens < 1 or not 0 <= rank < world:
            raise ConfigError(f"batches of {max_tokens} tokens for process {rank} of {world} cannot be made")
        # Rows of one bucket count alike, so every epoch has the same number of batches.
        self.buckets = -(-np.asarray(lengths) // _BUCKET)
        self.max_tokens, self.seed, self.rank, self.world = max_tokens, seed, rank, world
        self.epoch = 0
        self._length = -(-len(self._batches(0)) // world)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._batches(self.epoch)
        batches += [batches[i % len(batches)] for i in range(len(self) * self.world - len(batches))]
        yield from batches[self.rank :: self.world]

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
