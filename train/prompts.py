"""Prompts and text to learn from: JSONL, text and source files, folders, globs, or the built-in corpus.

A JSONL line holds one of
    {"text": "..."}                                  text to learn from
    {"prompt": "..."}                                to be continued by the target
    {"messages": [{"role": ..., "content": ...}]}    a conversation, through the target's own chat template
    {"turns": ["...", "..."]}                        what a user says, turn by turn; likewise
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from selfspec.errors import DataError
from selfspec.train.corpus import STDLIB, in_split, stdlib_sources

FIELDS = ("text", "prompt", "messages", "turns")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Document:
    """One piece of input.

    Args:
        name: where it comes from, for messages: a file, or file and line.
        kind: `text`, `prompt` or `messages`.
        text: of a text or a prompt.
        messages: of a conversation, as the chat template takes them.
    """

    name: str
    kind: str
    text: str = ""
    messages: tuple[dict[str, str], ...] = ()

    def digest(self) -> bytes:
        """A hash of everything but the name."""
        return hashlib.sha256(json.dumps([self.kind, self.text, self.messages]).encode()).digest()


@dataclass(frozen=True)
class Encoded:
    """Token ids and, for each, whether it is text to learn from. Both lists have one length."""

    ids: list[int]
    learn: list[bool]


def read_documents(source: str, split: str = "all", turn: int = 0) -> Iterator[Document]:
    """Documents of a source, in a fixed order.

    Args:
        source: `stdlib`, a file, a folder (all files in it), or a glob. `.jsonl` files are read line by line.
        split: `train`, `held-out` or `all`; by hash of a file's name, or of a JSONL line.
        turn: which user turn of `turns` is used, counted from 0.

    Raises:
        DataError: nothing there, or bad input; the message names file and line.
    """
    if source == STDLIB:
        for name, text in stdlib_sources(split):
            yield Document(name, "text", text)
        return
    skipped = 0
    for path, name in _files(source):
        if path.suffix == ".jsonl":
            yield from _lines(path, split, turn)
        elif in_split(name, split):
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                if str(path) == source:
                    raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
                skipped += 1
                continue
            if text.strip():
                yield Document(str(path), "text", text)
    if skipped:
        _log.warning("%s: %d files are not UTF-8 and were left out", source, skipped)


def _files(source: str) -> list[tuple[Path, str]]:
    """Paths and names relative to the source, sorted; hidden files are left out."""
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
        raise DataError(f"no files at {source!r}; give a file, a folder, a glob, or {STDLIB!r}")
    return files


def _lines(path: Path, split: str, turn: int) -> Iterator[Document]:
    empty = True
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            empty = False
            where = f"{path}:{number}"
            try:
                values = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where}: not valid JSON ({error}); each line must be one JSON object") from error
            if in_split(hashlib.sha256(line.strip()).hexdigest(), split):
                yield _document(values, where, turn)
    if empty:
        raise DataError(f"{path} holds no lines; each line must be one JSON object with one of {', '.join(FIELDS)}")


def _document(values: Any, where: str, turn: int) -> Document:
    given = [name for name in FIELDS if isinstance(values, dict) and values.get(name) is not None]
    if len(given) != 1:
        came = sorted(values) if isinstance(values, dict) else type(values).__name__
        raise DataError(f"{where}: wanted an object with exactly one of {', '.join(FIELDS)}, got {came}")
    value = values[given[0]]
    if given[0] in ("text", "prompt"):
        if not isinstance(value, str) or not value:
            raise DataError(f"{where}: `{given[0]}` must be a string that is not empty, got {value!r}")
        return Document(where, given[0], value)
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: `{given[0]}` must be a list that is not empty, got {value!r}")
    if given[0] == "turns":
        if not 0 <= turn < len(value) or not isinstance(value[turn], str):
            raise DataError(f"{where}: `turns` has no text at place {turn}; it holds {len(value)} entries")
        return Document(where, "messages", messages=({"role": "user", "content": value[turn]},))
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise DataError(f"{where}: a message must have `role` and `content` as strings, got {message!r}")
    return Document(where, "messages", messages=tuple({"role": m["role"], "content": m["content"]} for m in value))


def prefix_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the tokenizer puts before a text: its beginning-of-text token, or nothing."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    return list(full[: full.index(bare[0])]) if bare and bare[0] in full else []


def encode_prompt(document: Document, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt, ready for the target to go on; an answer at the end of a conversation is left out.

    Raises:
        DataError: a conversation without a chat template.
    """
    if document.kind != "messages":
        return prefix_ids(tokenizer) + list(tokenizer(document.text, add_special_tokens=False)["input_ids"])
    messages = list(document.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError(f"{document.name}: the conversation holds nothing to answer")
    return _bare(tokenizer, _render(document, messages, tokenizer, ask=True))


def encode_text(document: Document, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """Token ids to learn from. In a conversation only the assistant's words count, in a text everything.

    The tokenizer's prefix (beginning of text) is left out of texts, so that pieces can be cut; templates write theirs.

    Raises:
        DataError: a conversation without chat template or without an answer, or a prompt with no text.
    """
    if document.kind == "prompt":
        raise DataError(f"{document.name} is a prompt, there is no text to label; use mode 'write', or give `text`")
    if document.kind == "text":
        ids = list(tokenizer(document.text, add_special_tokens=False)["input_ids"])
        return Encoded(ids, [True] * len(ids))
    return _conversation(document, tokenizer)


def _conversation(document: Document, tokenizer: PreTrainedTokenizerBase) -> Encoded:
    """The mask comes from rendering the conversation up to each answer, so templates need no generation tags."""
    messages = list(document.messages)
    whole = _render(document, messages, tokenizer, ask=False)
    spans = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(document, messages[:place], tokenizer, ask=True)
        after = _render(document, messages[: place + 1], tokenizer, ask=False)
        if not whole.startswith(before) or not after.startswith(before) or not whole.startswith(after.rstrip()):
            raise DataError(
                f"{document.name}: the chat template renders message {place + 1} differently when more follow, so its "
                "place cannot be found; give the conversation as `text`, or one answer per line"
            )
        spans.append((len(before), len(after)))
    if not spans:
        raise DataError(f"{document.name}: the conversation has no assistant message to learn from; use mode 'write'")
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    learn = [any(start < end and first < stop and end > first for first, stop in spans if start < stop)
             for start, end in encoded["offset_mapping"]]  # fmt: skip
    return Encoded(list(encoded["input_ids"]), learn)


def _render(document: Document, messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, ask: bool) -> str:
    if not tokenizer.chat_template:
        raise DataError(
            f"{document.name} is a conversation, but the target's tokenizer has no chat template (a base model?); give "
            "`prompt` or `text` instead, or a target that was trained to chat"
        )
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask))


def _bare(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
