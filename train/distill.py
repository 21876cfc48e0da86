"""Training text from the target: it labels text at hand, or writes (the engine of `selfspec distill`).

`label` reads text in one parallel pass; `write` continues prompts token by token and costs about ten times as much per
token. Both give rows of at most `length` tokens that never cross documents, each starting like a prompt (with the
tokenizer's beginning-of-text token), and optionally what the target thought at each place. Any number of processes may
work on one folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from selfspec.documents import DATASET, source_files
from selfspec.draft import Draft, Needs
from selfspec.errors import ConfigError, DataError
from selfspec.fingerprint import fingerprint
from selfspec.resolve import resolve_draft
from selfspec.target import Target
from selfspec.train.answer import write_rows
from selfspec.train.corpus import STDLIB, stdlib_files
from selfspec.train.features import stored, thoughts
from selfspec.train.forecast import dataset_bytes
from selfspec.train.packing import packed_features
from selfspec.train.rows import Plan, Row, plan_rows, planned_tokens
from selfspec.train.settings import DistillConfig
from selfspec.train.shards import MANIFEST, ShardFolder, read_manifest
from selfspec.train.traffic import TRAFFIC
from selfspec.train.write import batches, end_tokens

_PAUSE = 0.5
_log = logging.getLogger(__name__)


def distill(
    target: Target, tokenizer: PreTrainedTokenizerBase, config: DistillConfig, folder: str | Path, progress: bool = True
) -> dict[str, Any]:
    """Make a dataset, or go on with one that was begun with the same settings, or find it finished.

    Processes that call this for one folder at the same time share the work; each returns when all of it is done.

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
    known, state = identity(target, tokenizer, config), source_state(config.source)
    done = _finished(Path(folder), known, state)
    if done is not None:
        return done
    plan = _plan(target, tokenizer, config)
    shards = ShardFolder(folder, known | {"input": _input(plan.rows)})
    parts = list(_in_shards(plan.rows, config))
    draft = resolve_draft(config.draft, target) if config.draft and config.mode == "write" else None
    total = sum(len(row.ids) + planned_tokens(row, config) for row in plan.rows)
    needed = dataset_bytes(config, target.hidden_size, total)
    _demand_space(shards.folder, needed, len(parts) and sum(map(shards.has, range(len(parts)))) / len(parts))
    with tqdm(total=total, unit="tok", unit_scale=True, desc=config.mode, disable=not progress) as bar:
        _fill(shards, parts, bar, lambda part: _made(target, tokenizer, config, part, draft, bar))
    manifest = shards.finish(len(parts), target.vocab_size, plan.notes() | {"seen": state, "forecast_bytes": needed})
    _report(folder, manifest)
    return manifest


def _demand_space(folder: Path, needed: int, done: float) -> None:
    """Refuse to begin what the disk cannot hold."""
    missing, free = int(needed * (1 - done)), shutil.disk_usage(folder).free
    _log.info("%s: at most %.3f GB to write, %.1f GB are free", folder, missing / 1e9, free / 1e9)
    if missing > free:
        raise ConfigError(
            f"{folder} needs up to {missing / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free; lower max_tokens, "
            "store fewer layers, set feature_dtype=float8, or give another folder"
        )


def _fill(shards: ShardFolder, parts: Sequence[list[Row]], bar: tqdm[Any], make: Any) -> None:
    """Make what is missing; wait for what others are making, and take over what they leave behind."""
    missing = list(range(len(parts)))
    while missing:
        made = False
        for index in missing:
            with shards.taken(index) as mine:
                if mine:
                    shards.write(index, *make(parts[index]))
                    made = True
            if shards.has(index) and not made:
                bar.update(shards.tokens(index))
                bar.initial = bar.n  # tokens/s of this process only
        missing = [index for index in missing if not shards.has(index)]
        if missing and not made:
            time.sleep(_PAUSE)


def _report(folder: str | Path, manifest: Mapping[str, Any]) -> None:
    share = 100 * manifest["learned"] / max(manifest["tokens"], 1)
    text = f"{folder}: {manifest['rows']} rows, {manifest['tokens']} tokens, {share:.0f}% of them to learn from"
    for name, what in (
        ("dropped_rows", "rows without anything to learn from, or without room, left out"),
        ("cut_rows", f"rows cut at the longest length, {manifest.get('cut_tokens', 0)} tokens with them"),
        ("cut_answers", "answers cut at max_new_tokens or at the longest length"),
        ("unanswered", "answers not written, because their conversation was too long"),
    ):
        if manifest.get(name):
            text += f"; {manifest[name]} {what}"
    _log.info("%s", text)


# What is made of what


def identity(target: Target, tokenizer: PreTrainedTokenizerBase, config: DistillConfig) -> dict[str, Any]:
    """Everything the content depends on, but for the input."""
    return {
        "target": fingerprint(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "tokenizer": tokenizer_hash(tokenizer),
        "settings": config.content(),
    }


def _input(rows: Sequence[Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.asarray(row.ids, dtype=np.int32).tobytes() + bytes(row.learn) + b"|")
        if row.dialogue is not None:
            digest.update(row.dialogue.document.digest())
    return digest.hexdigest()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the vocabulary, the special tokens and the chat template."""
    vocab = sorted(tokenizer.get_vocab().items())
    parts = [vocab, tokenizer.special_tokens_map, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()


def source_state(source: str) -> str | None:
    """Changes when the source does: from names, sizes and times of files. None if that cannot be told."""
    if source.startswith(DATASET):
        folder = source.removeprefix(DATASET).partition("?")[0]
        if not Path(folder).is_dir():
            return source if "revision=" in source else None
        source = folder
    if not source:
        return ""
    if source == STDLIB:  # without installed packages, which lie in the same folder
        files = [(path, name) for name, path in stdlib_files()]
    else:
        files = source_files(source.removeprefix(TRAFFIC))
    facts = [(name, (found := path.stat()).st_size, found.st_mtime_ns) for path, name in files]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _finished(folder: Path, known: Mapping[str, Any], state: str | None) -> dict[str, Any] | None:
    """The manifest of a folder that needs no second look: finished, of these settings, of a source as it is now."""
    if state is None or not (folder / MANIFEST).is_file():
        return None
    manifest = read_manifest(folder)
    there = {name: value for name, value in manifest["identity"].items() if name != "input"}
    same = manifest["complete"] and manifest.get("seen") == state and there == json.loads(json.dumps(known))
    return manifest if same else None


def _plan(target: Target, tokenizer: PreTrainedTokenizerBase, config: DistillConfig) -> Plan:
    said = target.too_long(config.length)
    if said is not None and target.has_position_table:
        raise ConfigError(f"length {config.length} makes {said}; lower it")
    if said is not None:
        _log.warning("length %d makes %s", config.length, said)
    if config.pack and target.chain_only:
        raise ConfigError(f"rows cannot be packed: {target.chain_only}; leave `pack` out")
    plan = plan_rows(tokenizer, config, end_tokens(target, tokenizer))
    if not plan.rows:
        raise DataError(
            f"source {config.source!r}, split {config.split!r}: no usable rows ({plan.dropped} were dropped); give "
            "more or longer text (a tenth of the files, or of the records of a file, is held out of training)"
        )
    if plan.dropped:
        _log.warning("%s: %d rows without anything to learn from were dropped", config.source, plan.dropped)
    return plan


def _in_shards(rows: Sequence[Row], config: DistillConfig) -> Iterator[list[Row]]:
    part: list[Row] = []
    size = 0
    for row in rows:
        part.append(row)
        size += len(row.ids) + planned_tokens(row, config)
        if size >= config.shard_tokens:
            yield part
            part, size = [], 0
    if part:
        yield part


# One shard


def _made(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    config: DistillConfig,
    rows: list[Row],
    draft: Draft | None,
    bar: tqdm[Any],
) -> tuple[dict[str, Tensor], dict[str, int]]:
    notes: dict[str, int] = {}
    if config.mode == "write":
        rows, notes = write_rows(target, config, rows, end_tokens(target, tokenizer), draft, bar.update)
    else:
        bar.update(sum(len(row.ids) for row in rows))
    found = _read(target, config, rows)
    tensors = {
        "lengths": torch.tensor([len(row.ids) for row in rows], dtype=torch.int32),
        "input_ids": torch.tensor([token for row in rows for token in row.ids], dtype=torch.int32),
        "learn": torch.tensor([flag for row in rows for flag in row.learn]),
    }
    return tensors | {name: torch.cat([part[name] for part in found]) for name in found[0]}, notes


def _read(target: Target, config: DistillConfig, rows: list[Row]) -> list[dict[str, Tensor]]:
    """What the target thinks of each row, as it is stored."""
    found: list[dict[str, Tensor]] = [{} for _ in rows]
    think = config.predictions or config.top_logits > 0
    needs = Needs(config.hidden or think, tuple(config.layers))
    if not needs.hidden and not needs.layers:
        return found
    for batch in batches([len(row.ids) for row in rows], config.batch_tokens, padded=not config.pack):
        for place, (hidden, layers) in zip(batch, _pass(target, config, [rows[i] for i in batch], needs), strict=True):
            if think and hidden is not None:
                known = thoughts(target, hidden, config.top_logits)
                found[place] |= known if config.predictions else {k: v for k, v in known.items() if k != "predictions"}
            if config.hidden and hidden is not None:
                found[place] |= stored("hidden", hidden, config.feature_dtype)
            for layer, values in zip(config.layers, layers, strict=True):
                found[place] |= stored(f"layer_{layer}", values, config.feature_dtype)
    return found


def _pass(
    target: Target, config: DistillConfig, rows: list[Row], needs: Needs
) -> Iterator[tuple[Tensor | None, list[Tensor]]]:
    """Per row the last hidden state, if needed, and the tapped layers, `[T, D]` each."""
    if config.pack:
        for part in packed_features(target, [row.ids for row in rows], needs):
            yield None if part.hidden is None else part.hidden[0], [layer[0] for layer in part.layers]
        return
    longest = max(len(row.ids) for row in rows)
    tokens = torch.tensor([row.ids + [0] * (longest - len(row.ids)) for row in rows], device=target.device)
    real = torch.tensor([[1] * len(row.ids) + [0] * (longest - len(row.ids)) for row in rows], device=target.device)
    features = target.features(tokens, None if bool(real.all()) else real, needs)
    for place, row in enumerate(rows):
        count = len(row.ids)
        hidden = None if features.hidden is None else features.hidden[place, :count]
        yield hidden, [layer[place, :count] for layer in features.layers]
