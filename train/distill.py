"""Training text from the target: it labels text at hand, or writes (the engine of `selfspec distill`).

`label` reads text in one parallel pass; `write` continues prompts token by token and costs about ten times as much per
token. Both give rows of at most `length` tokens that never cross documents, each starting like a prompt (with the
tokenizer's beginning-of-text token), and optionally what the target thought at each place.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from selfspec.draft import Needs
from selfspec.errors import ConfigError, DataError
from selfspec.fingerprint import fingerprint
from selfspec.target import Target
from selfspec.train.rows import Row, label_rows, prompt_rows
from selfspec.train.settings import DistillConfig
from selfspec.train.shards import ShardFolder
from selfspec.train.write import Picking, write

_log = logging.getLogger(__name__)


def distill(
    target: Target, tokenizer: PreTrainedTokenizerBase, config: DistillConfig, folder: str | Path, progress: bool = True
) -> dict[str, Any]:
    """Make a dataset, or go on with one that was begun with the same settings, or find it finished.

    Args:
        target: the model that labels or writes.
        tokenizer: its tokenizer.
        config: what to make.
        folder: where; see `selfspec.train.shards` for the layout.
        progress: show a progress bar.

    Returns:
        The manifest.

    Raises:
        ConfigError: impossible settings, or the folder was made with others.
        DataError: bad or no input.
    """
    config.check()
    rows, dropped = _plan(target, tokenizer, config)
    shards = ShardFolder(folder, identity(target, tokenizer, config, rows))
    total = sum(len(row.ids) + _room(row, config) for row in rows)
    with tqdm(total=total, unit="tok", unit_scale=True, desc=config.mode, disable=not progress) as bar:
        for index, part in enumerate(_in_shards(rows, config)):
            if shards.has(index):
                bar.update(shards.tokens(index))
                bar.initial = bar.n  # tokens/s of this run only
                continue
            if config.mode == "write":
                part = _written(target, tokenizer, config, part, bar)
            shards.write(index, _dataset(_read(target, config, part, bar), config))
    manifest = shards.finish(target.vocab_size, {"dropped_rows": dropped})
    share = manifest["learned"] / max(manifest["tokens"], 1)
    _log.info(
        "%s: %d rows, %d tokens, %.0f%% of them to learn from", folder, len(rows), manifest["tokens"], 100 * share
    )
    return manifest


def identity(
    target: Target, tokenizer: PreTrainedTokenizerBase, config: DistillConfig, rows: Sequence[Row]
) -> dict[str, Any]:
    """Everything the content depends on."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.asarray(row.ids, dtype=np.int32).tobytes() + bytes(row.learn) + b"|")
    return {
        "target": fingerprint(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "tokenizer": tokenizer_hash(tokenizer),
        "input": digest.hexdigest(),
        "settings": config.content(),
    }


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the vocabulary, the special tokens and the chat template."""
    vocab = sorted(tokenizer.get_vocab().items())
    parts = [vocab, tokenizer.special_tokens_map, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def _plan(target: Target, tokenizer: PreTrainedTokenizerBase, config: DistillConfig) -> tuple[list[Row], int]:
    limit = target.max_positions
    if limit is not None and config.length > limit:
        raise ConfigError(f"length {config.length} is beyond the {limit} positions the target is made for")
    rows, dropped = (prompt_rows if config.mode == "write" else label_rows)(tokenizer, config)
    if not rows:
        raise DataError(
            f"source {config.source!r}, split {config.split!r}: no usable rows ({dropped} were dropped); give more or "
            "longer text (a tenth of the files, or of the lines of a .jsonl file, is held out of training)"
        )
    if dropped:
        _log.warning("%s: %d rows without anything to learn from were dropped", config.source, dropped)
    return rows, dropped


def _room(row: Row, config: DistillConfig) -> int:
    return min(config.max_new_tokens, config.length - len(row.ids)) if config.mode == "write" else 0


def _in_shards(rows: Sequence[Row], config: DistillConfig) -> Iterator[list[Row]]:
    part: list[Row] = []
    size = 0
    for row in rows:
        part.append(row)
        size += len(row.ids) + _room(row, config)
        if size >= config.shard_tokens:
            yield part
            part, size = [], 0
    if part:
        yield part


def _batches(rows: Sequence[Row], most: int, by_rows: bool = False) -> Iterator[list[int]]:
    """Indices of rows of like length, so that little is padding, with at most so many tokens (or rows) in a batch."""
    batch: list[int] = []
    for index in sorted(range(len(rows)), key=lambda i: len(rows[i].ids)):
        if batch and (len(batch) + 1) * (1 if by_rows else len(rows[index].ids)) > most:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _written(
    target: Target, tokenizer: PreTrainedTokenizerBase, config: DistillConfig, rows: list[Row], bar: tqdm[Any]
) -> list[Row]:
    picking = Picking(config.temperature, config.top_k, config.top_p)
    ends = end_tokens(target, tokenizer)
    result = list(rows)
    for batch in _batches(rows, config.batch_rows, by_rows=True):
        room = [_room(rows[i], config) for i in batch]
        prompts, seeds = [rows[i].ids for i in batch], [rows[i].seed for i in batch]
        for i, new in zip(batch, write(target, prompts, max(room), picking, seeds, ends), strict=True):
            new = new[: _room(rows[i], config)]
            result[i] = Row(rows[i].ids + new, rows[i].learn + [True] * len(new))
            bar.update(len(result[i].ids))
    return result


def end_tokens(target: Target, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a text: those of the model's generation config and the tokenizer's."""
    config = getattr(target.model, "generation_config", None)
    known = getattr(config, "eos_token_id", None)
    ids = set(known if isinstance(known, (list, tuple)) else [known]) | {tokenizer.eos_token_id}
    return tuple(sorted(i for i in ids if i is not None))


def _read(target: Target, config: DistillConfig, rows: list[Row], bar: tqdm[Any]) -> list[Row]:
    """The rows with what the target thinks of them (copies: the plan must not fill up with features)."""
    if not (config.predictions or config.hidden or config.layers):
        if config.mode == "label":
            bar.update(sum(len(row.ids) for row in rows))
        return rows
    rows = [replace(row, features={}) for row in rows]
    for batch in _batches(rows, config.batch_tokens):
        part = [rows[i] for i in batch]
        longest = max(len(row.ids) for row in part)
        tokens = torch.tensor([row.ids + [0] * (longest - len(row.ids)) for row in part], device=target.device)
        real = torch.tensor([[1] * len(row.ids) + [0] * (longest - len(row.ids)) for row in part], device=target.device)
        needs = Needs(config.hidden or config.predictions, tuple(config.layers))
        features = target.features(tokens, None if bool(real.all()) else real, needs)
        _store(target, config, part, features.hidden, features.layers)
        if config.mode == "label":
            bar.update(sum(len(row.ids) for row in part))
    return rows


def _store(
    target: Target, config: DistillConfig, rows: list[Row], hidden: Tensor | None, layers: tuple[Tensor, ...]
) -> None:
    for place, row in enumerate(rows):
        count = len(row.ids)
        if config.predictions and hidden is not None:
            row.predictions = first_choices(target, hidden[place, :count]).tolist()
        if config.hidden and hidden is not None:
            row.features["hidden"] = as_bytes(hidden[place, :count])
        for layer, values in zip(config.layers, layers, strict=True):
            row.features[f"layer_{layer}"] = as_bytes(values[place, :count])


def first_choices(target: Target, hidden: Tensor, chunk: int = 256) -> Tensor:
    """The most likely next token at each place, `[T, D]` to `[T]` int64, without `[T, V]` in memory at once."""
    head = target.model.get_output_embeddings()
    with torch.no_grad():
        return torch.cat([target.finish_logits(head(part)).argmax(-1) for part in hidden.split(chunk)])


def as_bytes(values: Tensor) -> bytes:
    """`[T, D]` as bfloat16 bytes."""
    return values.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()


def _dataset(rows: list[Row], config: DistillConfig) -> Dataset:
    columns: dict[str, list[Any]] = {"input_ids": [r.ids for r in rows], "learn": [r.learn for r in rows]}
    kinds: dict[str, Any] = {"input_ids": List(Value("int32")), "learn": List(Value("bool"))}
    if config.predictions:
        columns["predictions"], kinds["predictions"] = [r.predictions for r in rows], List(Value("int32"))
    for name in (["hidden"] if config.hidden else []) + [f"layer_{k}" for k in config.layers]:
        columns[name], kinds[name] = [r.features[name] for r in rows], Value("large_binary")
    return Dataset.from_dict(columns, features=Features(kinds))
