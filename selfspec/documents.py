"""What models are asked and what they learn from, read in one way for training and inference.

Sources: JSONL and Parquet files, plain text, folders and globs of these, datasets saved by `datasets`, and
`dataset:ID?config=..&split=..&revision=..` (an id on the Hub, or a folder). A record (a line, a row) holds one of

    text            text to go on from, or to learn from
    prompt          text to be continued
    messages        a conversation: `role` and `content`, and what the chat template knows besides (`tool_calls`, ..)
    conversations   the same, or ShareGPT's `from` and `value`
    turns           what a user says, turn by turn

and beside a conversation perhaps `system` (text), `tools` (a list, or the same as JSON), `chat_template_kwargs`; beside
any of them `category` (text), the kind of task.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from selfspec.errors import DataError

FIELDS = ("text", "prompt", "messages", "conversations", "turns")
DATASET = "dataset:"

_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
_THOUGHTS = ("reasoning_content", "thinking")
_TABLES = (".jsonl", ".parquet")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Document:
    """One piece of input.

    Args:
        name: where it comes from, for messages: a file, or file and line.
        kind: `text`, `prompt` or `messages`.
        text: of a text or a prompt.
        messages: of a conversation, as the chat template takes them.
        tools: descriptions of tools, as the chat template takes them.
        options: more for the chat template, as `enable_thinking`.
        category: the kind of task, where the record says.
    """

    name: str
    kind: str
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    category: str | None = None

    def digest(self) -> bytes:
        """A hash of everything but the name and the category."""
        parts = [self.kind, self.text, self.messages, self.tools, self.options]
        return hashlib.sha256(json.dumps(parts, default=str).encode()).digest()

    def split_key(self) -> str:
        """What decides on the side of a split: the opening, without case, spaces and punctuation.

        All turns of a conversation stand on one side, and so do conversations that begin with the same question.
        """
        asked = [m["content"] for m in self.messages if m["role"] == "user"] or [self.text]
        opening = asked[0] if isinstance(asked[0], str) else json.dumps(asked[0])
        plain = "".join(c for c in unicodedata.normalize("NFKC", opening).casefold() if c.isalnum())
        return hashlib.sha256((plain or opening).encode()).hexdigest()


def read_source(source: str, choose: str = "", turn: int | None = None) -> Iterator[tuple[str, Document]]:
    """Documents of a source in a fixed order, each with the key that decides on its side of a split.

    Args:
        source: see the top of this module.
        choose: the field to read where records hold several of them; empty: there must be one.
        turn: which user turn of `turns` is used alone, counted from 0; None takes all.

    Raises:
        DataError: nothing there, or bad input; the message names file and line.
    """
    if source.startswith(DATASET) or _is_saved(Path(source)):
        for document in _documents(_dataset_rows(source), source, choose, turn):
            yield document.split_key(), document
        return
    skipped = 0
    for path, name in source_files(source):
        if path.suffix in _TABLES:
            rows = _jsonl_rows(path) if path.suffix == ".jsonl" else _parquet_rows(path)
            for document in _documents(rows, str(path), choose, turn):
                yield document.split_key(), document
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            if str(path) == source:
                raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
            skipped += 1
            continue
        if text.strip():
            yield name, Document(str(path), "text", text)
    if skipped:
        _log.warning("%s: %d files are not UTF-8 and were left out", source, skipped)


def source_files(source: str) -> list[tuple[Path, str]]:
    """Paths and names relative to the source, sorted; hidden files are left out.

    Raises:
        DataError: there are none.
    """
    root = Path(source)
    if root.is_file():
        return [(root, root.name)]
    if root.is_dir():
        paths = [p for p in root.rglob("*") if not any(part.startswith(".") for part in p.relative_to(root).parts)]
    else:
        paths = [Path(p) for p in glob.glob(source, recursive=True)]
        root = Path(".")
    files = sorted(
        (p, p.relative_to(root).as_posix() if p.is_relative_to(root) else p.name) for p in paths if p.is_file()
    )
    if not files:
        raise DataError(f"no files at {source!r}; give a file, a folder, a glob, or dataset:ID")
    return files


def _documents(rows: Iterator[tuple[str, Any]], source: str, choose: str, turn: int | None) -> Iterator[Document]:
    empty = True
    for where, values in rows:
        empty = False
        yield parse_record(values, where, choose, turn)
    if empty:
        raise DataError(f"{source} holds no records; each must be an object with one of {', '.join(FIELDS)}")


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:  # as bytes: a text file would also cut lines at U+2028 inside strings
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                values = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where}: not valid JSON ({error}); each line must be one JSON object") from error
            yield where, values


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches(batch_size=256):
            for values in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", values
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error


def _is_saved(folder: Path) -> bool:
    return (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file()


def _dataset_rows(source: str) -> Iterator[tuple[str, Any]]:
    name, _, query = source.removeprefix(DATASET).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if not name or set(options) - {"config", "split", "revision"}:
        raise DataError(f"{source!r}: wanted dataset:ID?config=..&split=..&revision=.. (the id is enough)")
    for number, values in enumerate(_load_dataset(source, name, options), 1):
        yield f"{source}:{number}", values


def _load_dataset(source: str, name: str, options: Mapping[str, str]) -> Any:
    from datasets import Dataset, load_dataset, load_from_disk

    split = options.get("split")
    try:
        if _is_saved(Path(name)):
            found: Any = load_from_disk(name)
        else:
            revision = options.get("revision")
            found = load_dataset(name, options.get("config"), split=split, revision=revision)
    except (OSError, ValueError) as error:
        raise DataError(f"{source!r} cannot be loaded: {str(error).splitlines()[0]}") from error
    if isinstance(found, Dataset):
        return found
    if split in found:
        return found[split]
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    raise DataError(f"{source!r} has the splits {', '.join(map(str, found))}; choose one with ?split=..")


# Records


def parse_record(values: Any, where: str, choose: str = "", turn: int | None = None) -> Document:
    """One record.

    Raises:
        DataError: it is not of a known form; the message begins with `where`.
    """
    given = [name for name in FIELDS if isinstance(values, dict) and values.get(name) is not None]
    if choose and choose in given:
        given = [choose]
    if len(given) != 1:
        came = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise DataError(
            f"{where}: wanted an object with exactly one of {', '.join(FIELDS)}, got {came}; where there are several, "
            "choose one with `column`"
        )
    name, value = given[0], values[given[0]]
    category = values["category"] if isinstance(values.get("category"), str) else None
    if name in ("text", "prompt") and not isinstance(value, list):
        if not isinstance(value, str) or not value:
            raise DataError(f"{where}: `{name}` must be a string that is not empty, got {value!r}")
        return Document(where, name, value, category=category)
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: `{name}` must be a list that is not empty, got {value!r}")
    if name == "turns":
        messages = [{"role": "user", "content": text} for text in _turns(value, where, turn)]
    else:
        messages = [_message(message, where) for message in value]
    if isinstance(values.get("system"), str) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": values["system"]})
    if not any(message["content"] for message in messages):
        raise DataError(f"{where}: the conversation is empty; give at least one character")
    options = _loaded(values.get("chat_template_kwargs") or {}, dict, where, "chat_template_kwargs")
    tools = _loaded(values.get("tools") or [], list, where, "tools")
    return Document(where, "messages", "", tuple(messages), tuple(tools), dict(options), category)


def _turns(value: list[Any], where: str, turn: int | None) -> list[str]:
    chosen = value if turn is None else value[turn : turn + 1] if turn >= 0 else []
    if not chosen or not all(isinstance(text, str) for text in chosen):
        place = "" if turn is None else f" at place {turn}"
        raise DataError(f"{where}: `turns` has no text{place}; it holds {len(value)} entries")
    return list(chosen)


def _loaded(value: Any, kind: type, where: str, name: str) -> Any:
    """A list or mapping, which tables often hold as JSON."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise DataError(f"{where}: `{name}` is not valid JSON ({error})") from error
    if not isinstance(found, kind):
        raise DataError(f"{where}: `{name}` must be a {kind.__name__}, or one as JSON, got {value!r}")
    return found


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a message must have `role` and `content`, got {value!r}")
    message = {key: part for key, part in value.items() if part is not None}  # Arrow fills up missing keys
    if "from" in message and "role" not in message:
        message["role"] = message.pop("from")
        message["content"] = message.pop("value", None)
    role, content = message.get("role"), message.get("content")
    if content is None and message.get("tool_calls"):
        content = message["content"] = ""
    if not isinstance(role, str) or not isinstance(content, (str, list)):
        raise DataError(f"{where}: a message must have `role` and `content` as strings, got {value!r}")
    if isinstance(content, list):
        message["content"] = _parts(content, where)
    message["role"] = _ROLES.get(role, role)
    thoughts = [message[key] for key in _THOUGHTS if isinstance(message.get(key), str)]
    return message | {key: thoughts[0] for key in _THOUGHTS if thoughts}  # templates differ in what they call it


def _parts(content: list[Any], where: str) -> str:
    other = [part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content]
    if any(kind != "text" for kind in other):
        raise DataError(f"{where}: a message holds parts of the kinds {other}; only text can be read")
    return "".join(part["text"] for part in content)
