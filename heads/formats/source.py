"""A foreign checkpoint, read strictly: what was not used and not named is an error, and nothing in it is executed.

Files are looked at before they are believed: shapes come from headers, an index may name files of its own folder only,
pickles are unpacked with `weights_only=True` from archives that hold what they claim to hold.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from selfspec.checkpoint import json_object
from selfspec.errors import CheckpointError

CONFIG = "config.json"
PICKLES = (".bin", ".pt", ".pth")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_NOT_WEIGHTS = ("optimizer", "scheduler", "rng_state", "training_args", "training_state", "token_map")
_AGAIN = "copy or download it again"

T = TypeVar("T")
Effect = Literal["told", "lossy", "fatal"]


@dataclass(frozen=True)
class Note:
    """Something that did not come over.

    Args:
        what: name of a tensor or a field.
        why: the reason.
        effect: `told`: drafts are the same without it; `lossy`: they differ, so it must be asked for; `fatal`: there
            is no way.
    """

    what: str
    why: str
    effect: Effect = "told"

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


class Fields:
    """The fields of a JSON object; remembers which were read."""

    def __init__(self, values: dict[str, Any], place: str) -> None:
        self.values = values
        self.place = place
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def take(self, key: str, wanted: type[T], default: T) -> T:
        """The value of a field, or a default where it is missing or null.

        Raises:
            CheckpointError: it is of another type.
        """
        self._read.add(key)
        value = self.values.get(key)
        if value is None:
            return default
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise CheckpointError(f"{self.place}: {key} is {value!r}, wanted {wanted.__name__}")
        return value

    def need(self, key: str, wanted: type[T]) -> T:
        """The value of a field that must be there."""
        if self.values.get(key) is None:
            raise CheckpointError(f"{self.place} has no {key}; it is needed to rebuild the head")
        return self.take(key, wanted, wanted())

    def inner(self, key: str) -> Fields:
        """The fields of a nested object; empty if it is missing or null."""
        return Fields(self.take(key, dict, {}), f"{self.place}, {key}")

    def skip(self, keys: Iterable[str]) -> None:
        """Fields that say nothing about what the head computes."""
        self._read.update(keys)

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuse the checkpoint unless the field is missing, null or one of these values."""
        self._read.add(key)
        value = self.values.get(key)
        if value is not None and value not in allowed:
            raise CheckpointError(
                f"{self.place}: {key} is {value!r}, which no head here can do (known: {', '.join(map(repr, allowed))})"
            )

    def unread(self) -> list[str]:
        """Fields that nobody asked for."""
        return sorted(set(self.values) - self._read)


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint: where it is and what it will be."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass
class Source:
    """One folder. `take` and `drop` account for tensors, `config` for fields, `close` asks for the rest.

    Args:
        folder: holds `config.json` and weights.
        config: its fields.
        entries: its tensors by name, as the files' headers describe them.
        notes: what was left out, and why.
    """

    folder: Path
    config: Fields
    entries: dict[str, Entry]
    notes: list[Note] = field(default_factory=list)
    _left: set[str] = field(default_factory=set)
    _pickles: dict[Path, dict[str, Tensor]] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: str | Path) -> Source:
        """Read the config and the headers of all weight files.

        Raises:
            CheckpointError: no folder, no weights, a damaged file, or one that asks for more than it holds.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder with a checkpoint")
        path = folder / CONFIG
        config = json_object(path, _AGAIN) if path.is_file() else {}
        source = cls(folder, Fields(config, str(path)), {})
        for file in _weight_files(folder):
            found = _safetensors_entries(file) if file.suffix == ".safetensors" else source._pickle_entries(file)
            twice = sorted(set(found) & set(source.entries))
            if twice:
                raise CheckpointError(f"{file} and {source.entries[twice[0]].file} both hold {twice[0]}; remove one")
            source.entries.update(found)
        source._left = set(source.entries)
        return source

    def _pickle_entries(self, file: Path) -> dict[str, Entry]:
        self._pickles[file] = tensors = _unpickle(file)
        return {
            name: Entry(file, tuple(value.shape), str(value.dtype).removeprefix("torch."))
            for name, value in tensors.items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that must be there."""
        if name not in self.entries:
            raise CheckpointError(f"{self.folder} lacks the tensor {name}; copy or download it again")
        return self.entries[name].shape

    def matching(self, pattern: str) -> list[re.Match[str]]:
        """Names that match a whole pattern, sorted."""
        found = (re.fullmatch(pattern, name) for name in sorted(self.entries))
        return [match for match in found if match is not None]

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor, contiguous and on the CPU; read only once its shape is the wanted one.

        Raises:
            CheckpointError: missing, or of another shape.
        """
        found = self.shape(name)
        if found != shape:
            raise CheckpointError(f"{self.folder}: {name} is {list(found)}, the rest of the head wants {list(shape)}")
        self._left.discard(name)
        file = self.entries[name].file
        if file in self._pickles:
            return self._pickles[file][name].contiguous()
        try:
            with safe_open(str(file), framework="pt") as opened:
                value: Tensor = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged or cut off ({error}); copy or download it again") from error
        return value

    def number_list(self, name: str) -> Tensor | None:
        """The whole numbers `[Q]` int64 of a file beside the weights, None if it is not there."""
        path = self.folder / name
        if not path.is_file():
            return None
        values = _load_pickle(path)
        numbers = values.tolist() if isinstance(values, Tensor) else values
        if not isinstance(numbers, list) or not all(isinstance(number, int) for number in numbers):
            raise CheckpointError(f"{path} holds {type(values).__name__}, wanted a list of token ids")
        return torch.tensor(numbers, dtype=torch.long)

    def drop(self, name: str, why: str, effect: Effect = "told") -> None:
        """Leave a tensor out, if it is there, and say so."""
        if name in self.entries:
            self._left.discard(name)
            self.notes.append(Note(name, why, effect))

    def drop_matching(self, pattern: str, why: str, effect: Effect = "told") -> None:
        """Leave all tensors out whose names match, as one note."""
        names = [match.string for match in self.matching(pattern) if match.string in self._left]
        self._left.difference_update(names)
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.notes.append(Note(names[0] + more, why, effect))

    def note(self, what: str, why: str, effect: Effect = "told") -> None:
        """Something else to say."""
        self.notes.append(Note(what, why, effect))

    def close(self) -> list[Note]:
        """All notes; unread fields among them as lossy, since what they ask for is not done.

        Raises:
            CheckpointError: a tensor was neither used nor left out by name.
        """
        if self._left:
            shown = sorted(self._left)
            raise CheckpointError(
                f"{self.folder} holds tensors that this format does not have: {', '.join(shown[:8])}"
                f"{f' and {len(shown) - 8} more' if len(shown) > 8 else ''}; it is of another kind than it looks"
            )
        unknown = [Note(f"field {key}", "not understood", "lossy") for key in self.config.unread()]
        return self.notes + unknown


def _weight_files(folder: Path) -> list[Path]:
    for index in _INDEXES:
        if (folder / index).is_file():
            return _indexed(folder / index)
    found = {path for path in folder.iterdir() if path.is_file() and not path.name.startswith((*_NOT_WEIGHTS, "."))}
    for suffixes in ((".safetensors",), PICKLES):
        files = sorted(path for path in found if path.suffix in suffixes)
        if files:
            return files
    raise CheckpointError(f"{folder} holds no weights (*.safetensors, {', '.join('*' + end for end in PICKLES)})")


def _indexed(path: Path) -> list[Path]:
    places = json_object(path, _AGAIN).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CheckpointError(f"{path} maps no tensors to files; copy or download it again")
    files = []
    for name in sorted(set(places.values())):
        if {PurePosixPath(name).name, PureWindowsPath(name).name} != {name} or name in ("", ".", ".."):
            raise CheckpointError(f"{path} names the file {name!r}; an index may only name files beside it")
        if Path(name).suffix not in (".safetensors", *PICKLES) or not (path.parent / name).is_file():
            raise CheckpointError(f"{path} names {name!r}, which is not there or not a file of weights")
        files.append(path.parent / name)
    return files


def _safetensors_entries(file: Path) -> dict[str, Entry]:
    try:
        with safe_open(str(file), framework="pt") as opened:
            parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: Entry(file, tuple(p.get_shape()), str(p.get_dtype())) for name, p in parts.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or cut off ({error}); copy or download it again") from error


def _load_pickle(file: Path) -> Any:
    """Tensors and plain values, mapped from the file rather than read into memory."""
    size = file.stat().st_size
    if not zipfile.is_zipfile(file):
        raise CheckpointError(
            f"{file} is no archive as torch.save has written since torch 1.6; load it with weights_only=True where you "
            "trust it, and save it again"
        )
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(f"{file} is damaged or cut off ({error}); copy or download it again") from error
    if any(r.compress_type != zipfile.ZIP_STORED for r in records) or sum(r.file_size for r in records) > size:
        raise CheckpointError(f"{file} claims more data than its {size} bytes; torch.save does not write such files")
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{file} is damaged, or holds more than tensors ({reason})") from error


def _unpickle(file: Path) -> dict[str, Tensor]:
    size, values = file.stat().st_size, _load_pickle(file)
    if not isinstance(values, dict) or not values:
        raise CheckpointError(f"{file} holds {type(values).__name__}, wanted a state dict of tensors by name")
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise CheckpointError(f"{file}: {name!r} is {type(value).__name__}, wanted tensors by name only")
        if value.is_sparse or value.is_quantized or value.numel() * value.element_size() > size:
            raise CheckpointError(
                f"{file}: {name} claims {list(value.shape)}, more than the file holds, or is not dense"
            )
    return values
