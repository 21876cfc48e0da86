"""A folder of dataset shards with a manifest: written whole shard by whole shard, so a killed run goes on where it was.

Layout: `manifest.json`, `shard-00000/`, `shard-00001/`, .. (each a `datasets` dataset, see `load_from_disk`) and, once
all are there, `counts.safetensors`.

Columns of a shard, T tokens in a row:
    input_ids    T int32
    learn        T bool, true for text to learn from
    predictions  T int32, optional: the target's first choice after each token
    hidden       T * D bfloat16 as bytes, optional: the target's last hidden state, after the final norm
    layer_<k>    likewise, the input of block k
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import (
    Dataset,
    are_progress_bars_disabled,
    concatenate_datasets,
    disable_progress_bars,
    enable_progress_bars,
    load_from_disk,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from selfspec.checkpoint import write_json
from selfspec.errors import ConfigError, DataError

MANIFEST, COUNTS = "manifest.json", "counts.safetensors"
FORMAT = 1


class ShardFolder:
    """A resumable dataset on disk.

    Args:
        folder: created if needed.
        identity: everything the content depends on. A folder made from anything else is refused.

    Raises:
        ConfigError: the folder was made with other settings; the message lists the differences.
        DataError: the folder holds something else.
    """

    def __init__(self, folder: str | Path, identity: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.identity = json.loads(json.dumps(identity))
        self._open()

    def _open(self) -> None:
        path = self.folder / MANIFEST
        if path.is_file():
            _refuse_other(self.folder, read_manifest(self.folder)["identity"], self.identity)
        elif self.folder.is_dir() and any(not p.name.startswith(".") for p in self.folder.iterdir()):
            raise DataError(f"{self.folder} is not empty and holds no {MANIFEST}; give a new folder")
        else:
            write_json(path, {"format": FORMAT, "complete": False, "identity": self.identity})
        for left in self.folder.glob(".shard-*"):
            shutil.rmtree(left, ignore_errors=True)

    def has(self, index: int) -> bool:
        """Whether a shard is there, whole."""
        return self._shard(index).is_dir()

    def tokens(self, index: int) -> int:
        """How many tokens a shard holds."""
        return int(sum(len(row) for row in _load(self._shard(index)).with_format("numpy")["input_ids"]))

    def _shard(self, index: int) -> Path:
        return self.folder / f"shard-{index:05d}"

    def write(self, index: int, rows: Dataset) -> None:
        """Write a shard under a temporary name, then rename it."""
        work = self.folder / f".shard-{index:05d}"
        with _quiet():
            rows.save_to_disk(work)
        for path in work.iterdir():
            _to_disk(path)
        os.replace(work, self._shard(index))

    def finish(self, vocab_size: int, notes: Mapping[str, Any]) -> dict[str, Any]:
        """Count tokens, write the manifest's last form, and return it."""
        data = _concatenated(self.folder)
        text, predicted = torch.zeros(vocab_size, dtype=torch.long), torch.zeros(vocab_size, dtype=torch.long)
        learned = 0
        for batch in data.select_columns([c for c in data.column_names if _is_ids(c)]).with_format("numpy").iter(256):
            ids = np.concatenate(list(batch["input_ids"]))
            learn = np.concatenate(list(batch["learn"]))
            learned += int(learn.sum())
            text += _count(ids[learn], vocab_size)
            if "predictions" in batch:
                predicted += _count(np.concatenate(list(batch["predictions"])), vocab_size)
        counts = {"text": text} | ({"predictions": predicted} if "predictions" in data.column_names else {})
        work = self.folder / f".{COUNTS}"
        save_file(counts, work)
        os.replace(work, self.folder / COUNTS)
        sizes = {"rows": len(data), "tokens": _total(data), "learned": learned, "columns": data.column_names}
        manifest = {"format": FORMAT, "complete": True, "identity": self.identity, **sizes, **notes}
        write_json(self.folder / MANIFEST, manifest)
        return manifest


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a dataset folder.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    path = Path(folder) / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is not a dataset made by `selfspec distill` ({error})") from error
    if values.get("format") != FORMAT:
        raise DataError(
            f"{path} has format {values.get('format')!r}, this selfspec reads {FORMAT}; make the data again"
        )
    return dict(values)


def load_shards(folder: str | Path) -> Dataset:
    """All rows of a finished folder, memory-mapped.

    Raises:
        DataError: the folder is unfinished or not a dataset folder.
    """
    if not read_manifest(folder)["complete"]:
        raise DataError(f"{folder} is not finished; run the same `selfspec distill` command again to go on")
    return _concatenated(Path(folder))


def load_counts(folder: str | Path) -> dict[str, Tensor]:
    """`text` and perhaps `predictions`, `[V]` int64 each: how often every token occurs."""
    return load_file(Path(folder) / COUNTS)


def _concatenated(folder: Path) -> Dataset:
    shards = [_load(path) for path in sorted(folder.glob("shard-*"))]
    if not shards:
        raise DataError(f"{folder} holds no rows")
    return concatenate_datasets(shards)


def _load(path: Path) -> Dataset:
    loaded = load_from_disk(str(path))
    assert isinstance(loaded, Dataset)
    return loaded


def _is_ids(column: str) -> bool:
    return column in ("input_ids", "learn", "predictions")


def _count(ids: Any, size: int) -> Tensor:
    return torch.from_numpy(np.bincount(ids, minlength=size).astype(np.int64))


def _total(data: Dataset) -> int:
    return int(sum(len(ids) for batch in data.select_columns(["input_ids"]).iter(1024) for ids in batch["input_ids"]))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars of `datasets`, which would break up ours."""
    hidden = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            enable_progress_bars()


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _refuse_other(folder: Path, there: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    found = list(differences(there, now))
    if found:
        raise ConfigError(
            f"{folder} was made with other settings: " + "; ".join(found) + ". Give another folder, or delete it"
        )


def differences(there: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    """What differs between two nested mappings, in words."""
    for key in sorted({*there, *now}):
        old, new = there.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key} is {old!r} there and {new!r} now"
