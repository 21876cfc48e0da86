"""A folder of shards with a manifest: written shard by shard, so a killed run goes on where it was.

Layout: `manifest.json`, `shard-00000.safetensors`, `shard-00001.safetensors`, .. and, once all are there,
`counts.safetensors`. Several processes may fill one folder: each takes shards that no other has taken.

Tensors of a shard, R rows of T tokens in all, one row after another:
    lengths      [R] int32, tokens of each row
    input_ids    [T] int32
    learn        [T] bool, true for text to learn from
    predictions  [T] int32, optional: the target's first choice after each token
    top_ids, top_logits   [T, K] int32 and float32, optional: its likeliest tokens and their log-probabilities
    top_rest     [T] float32, with them: the log-probability of all other tokens together
    hidden       [T, D] bfloat16 or float8, optional: the target's last hidden state, after the final norm
    layer_<k>    likewise, the input of block k
    <name>.scale [T] float32, what float8 values are multiplied with
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from selfspec.checkpoint import write_json
from selfspec.errors import ConfigError, DataError
from selfspec.outputs import whole_file
from selfspec.train.features import SCALE, restored

MANIFEST, COUNTS = "manifest.json", "counts.safetensors"
FORMAT = 2
_NOTES = "notes"


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
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / ".open.lock"):
            self._open()

    def _open(self) -> None:
        path = self.folder / MANIFEST
        if path.is_file():
            _refuse_other(self.folder, read_manifest(self.folder)["identity"], self.identity)
        elif any(not p.name.startswith(".") for p in self.folder.iterdir()):
            raise DataError(f"{self.folder} is not empty and holds no {MANIFEST}; give a new folder")
        else:
            write_json(path, {"format": FORMAT, "complete": False, "identity": self.identity})

    @contextmanager
    def taken(self, index: int) -> Iterator[bool]:
        """Take a shard to write; false if it is there, or another process writes it. The system frees what dies."""
        if self.has(index):
            yield False
            return
        lock = FileLock(self.folder / f".shard-{index:05d}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            yield False
            return
        try:
            yield not self.has(index)
        finally:
            lock.release()

    def has(self, index: int) -> bool:
        """Whether a shard is there, whole."""
        return self._shard(index).is_file()

    def tokens(self, index: int) -> int:
        """How many tokens a shard holds."""
        return StoredShard(self._shard(index)).tokens

    def _shard(self, index: int) -> Path:
        return self.folder / f"shard-{index:05d}.safetensors"

    def write(self, index: int, tensors: Mapping[str, Tensor], notes: Mapping[str, int]) -> None:
        """Write a shard under a temporary name, then rename it.

        Args:
            index: of the shard, which this process has taken.
            tensors: as at the top of this module.
            notes: numbers that `finish` adds up over all shards.
        """
        for left in self.folder.glob(f".*-{self._shard(index).name}"):
            left.unlink(missing_ok=True)
        with whole_file(self._shard(index)) as work:
            save_file(dict(tensors), work, metadata={_NOTES: json.dumps(dict(notes))})
            with work.open("rb") as file:
                os.fsync(file.fileno())

    def finish(self, shards: int, vocab_size: int, notes: Mapping[str, Any]) -> dict[str, Any]:
        """Count tokens, write the manifest's last form, and return it. All shards must be there."""
        with FileLock(self.folder / ".open.lock"):
            return self._finish([StoredShard(self._shard(i)) for i in range(shards)], vocab_size, notes)

    def _finish(self, shards: list[StoredShard], vocab_size: int, notes: Mapping[str, Any]) -> dict[str, Any]:
        text, predicted = torch.zeros(vocab_size, dtype=torch.long), torch.zeros(vocab_size, dtype=torch.long)
        totals = {"rows": 0, "tokens": 0, "learned": 0}
        for shard in shards:
            ids, learn = shard.whole("input_ids"), shard.whole("learn")
            text += _count(ids[learn], vocab_size, shard.path)
            if "predictions" in shard.columns:
                predicted += _count(shard.whole("predictions"), vocab_size, shard.path)
            found = {"rows": len(shard), "tokens": shard.tokens, "learned": int(learn.sum()), **shard.notes}
            for name, value in found.items():
                totals[name] = totals.get(name, 0) + value
        columns = shards[0].columns
        counts = {"text": text} | ({"predictions": predicted} if "predictions" in columns else {})
        with whole_file(self.folder / COUNTS) as work:
            save_file(counts, work)
        size = sum(shard.path.stat().st_size for shard in shards)
        known = {"columns": columns, "shards": len(shards), "bytes": size}
        manifest = {"format": FORMAT, "complete": True, "identity": self.identity, **totals, **known, **notes}
        write_json(self.folder / MANIFEST, manifest)
        for lock in self.folder.glob(".shard-*.lock"):
            lock.unlink(missing_ok=True)
        return manifest


class StoredShard:
    """One shard. The header is read and checked at once, rows when they are asked for.

    Raises:
        DataError: the file is cut off, or its tensors do not fit each other.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None
        self._owner = 0
        try:
            file = self._opened()
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            self.notes = {str(k): int(v) for k, v in json.loads((file.metadata() or {}).get(_NOTES, "{}")).items()}
            self._lengths = (
                file.get_tensor("lengths").numpy() if len(shapes.get("lengths", ())) == 1 else np.array([-1])
            )
        except (SafetensorError, OSError, ValueError, AttributeError) as error:
            raise DataError(f"{path} is damaged or cut off ({error}); delete it, and run the command again") from error
        self.tokens = int(self._lengths.sum())
        wrong = {n: s for n, s in shapes.items() if n != "lengths" and (not s or s[0] != self.tokens or len(s) > 2)}
        if (self._lengths < 1).any() or wrong or not {"input_ids", "learn"} <= set(shapes):
            raise DataError(
                f"{path} holds {len(self._lengths)} rows of {self.tokens} tokens, which its tensors do not fit: "
                f"{wrong or sorted(shapes)}; delete it, and run the command again"
            )
        self.widths = {name: shape[1] for name, shape in shapes.items() if len(shape) == 2}
        self.columns = sorted(name for name in shapes if name != "lengths" and not name.endswith(SCALE))
        self._scaled = {name for name in shapes if name + SCALE in shapes}
        self._ends = np.cumsum(self._lengths)

    def _opened(self) -> Any:
        if self._file is None or self._owner != os.getpid():  # every process reads through a handle of its own
            self._file, self._owner = safe_open(str(self.path), framework="pt"), os.getpid()
        return self._file

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_file": None}

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        found: list[int] = self._lengths.tolist()
        return found

    def whole(self, name: str) -> Tensor:
        """A tensor of all rows."""
        values: Tensor = self._opened().get_tensor(name)
        return values

    def row(self, index: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Some tensors of one row; features as bfloat16."""
        end = int(self._ends[index])
        start = end - int(self._lengths[index])
        file = self._opened()
        found = {}
        for name in names:
            scale = file.get_slice(name + SCALE)[start:end] if name in self._scaled else None
            found[name] = restored(file.get_slice(name)[start:end], scale)
        return found


class StoredText:
    """All rows of a finished folder.

    Args:
        folder: see `load_shards`.
        without: columns to do as if they were not there.
    """

    def __init__(self, folder: Path, without: Iterable[str] = ()) -> None:
        self.folder = folder
        paths = sorted(folder.glob("shard-*.safetensors"))
        self.shards = [StoredShard(path) for path in paths]
        if not self.shards:
            raise DataError(f"{folder} holds no rows")
        self.columns = [name for name in self.shards[0].columns if name not in set(without)]
        for shard in self.shards:
            if (shard.columns, shard.widths) != (self.shards[0].columns, self.shards[0].widths):
                raise DataError(f"{shard.path} has other columns than {paths[0].name}; make the data again")
        self.widths = self.shards[0].widths
        self.lengths = [length for shard in self.shards for length in shard.lengths]
        self._first = np.cumsum([0, *(len(shard) for shard in self.shards)])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """All columns of a row."""
        return self.row(index, self.columns)

    def row(self, index: int, names: Iterable[str]) -> dict[str, Tensor]:
        """Some columns of a row."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        shard = int(np.searchsorted(self._first, index, side="right")) - 1
        return self.shards[shard].row(index - int(self._first[shard]), names)


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
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        came = values.get("format") if isinstance(values, dict) else type(values).__name__
        raise DataError(f"{path} has format {came!r}, this selfspec reads {FORMAT}; make the data again")
    return dict(values)


def load_shards(folder: str | Path) -> StoredText:
    """All rows of a finished folder, read from disk as they are asked for.

    Raises:
        DataError: the folder is unfinished, damaged, or not a dataset folder.
    """
    manifest = read_manifest(folder)
    if not manifest["complete"]:
        raise DataError(f"{folder} is not finished; run the same `selfspec distill` command again to go on")
    text = StoredText(Path(folder))
    if (len(text), sum(text.lengths)) != (manifest["rows"], manifest["tokens"]):
        raise DataError(
            f"{folder} holds {len(text)} rows of {sum(text.lengths)} tokens, its manifest speaks of {manifest['rows']} "
            f"and {manifest['tokens']}; a shard is missing or too many: copy it again"
        )
    return text


def load_counts(folder: str | Path) -> dict[str, Tensor]:
    """`text` and perhaps `predictions`, `[V]` int64 each: how often every token occurs."""
    return load_file(Path(folder) / COUNTS)


def _count(ids: Tensor, size: int, path: Path) -> Tensor:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise DataError(f"{path} holds token {int(ids.max())}, the target knows {size}; delete it and run again")
    return torch.bincount(ids.long(), minlength=size)


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
