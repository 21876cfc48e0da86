"""The built-in corpus: the Python standard library of the running interpreter, on every machine, nothing to download.

The split is by top-level module (a package goes to one side as a whole), by a hash of its name, so it is the same in
every run and on every machine with the same Python.
"""

from __future__ import annotations

import ast
import hashlib
import logging
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from selfspec.errors import ConfigError, DataError

STDLIB = "stdlib"
SPLITS = ("train", "held-out", "all")

_HELD_OUT = 0.1
# Tests and installed packages are not the library; encodings, pydoc_data and lib2to3 are tables; the rest are demos.
_SKIP = {
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idle_test", "idlelib", "lib2to3", "lib-dynload",
    "pydoc_data", "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snippet:
    """The beginning of a piece of code, for a model to go on with.

    Args:
        name: file and lines it comes from, for instance `json/decoder.py:284-301`.
        text: ends with a line end.
        tokens: how many tokens the given tokenizer makes of it.
    """

    name: str
    text: str
    tokens: int


def stable_fraction(key: str) -> float:
    """A number in [0, 1) from a hash of the key; the same everywhere and always."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big") / 2**48


def in_split(key: str, split: str, seed: int = 0) -> bool:
    """Whether what is called `key` belongs to `train`, `held-out` or `all`. A tenth of all keys is held out.

    Another seed holds out another tenth.

    Raises:
        ConfigError: no such split.
    """
    if split not in SPLITS:
        raise ConfigError(f"split {split!r} is unknown; use one of {', '.join(SPLITS)}")
    fraction = stable_fraction(f"{seed}:{key}" if seed else key)
    return split == "all" or (fraction < _HELD_OUT) == (split == "held-out")


def stdlib_files() -> list[tuple[str, Path]]:
    """Names relative to the library's folder and paths, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in _SKIP]
        for file in files:
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):
                path = Path(folder, file)
                found.append((path.relative_to(root).as_posix(), path))
    return sorted(found)


def stdlib_sources(split: str = "train") -> Iterator[tuple[str, str]]:
    """Names and text of the library's files; files that are not UTF-8 are left out, and how many is logged."""
    skipped = 0
    for name, path in stdlib_files():
        if not in_split(_module(name), split):
            continue
        try:
            yield name, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            skipped += 1
    if skipped:
        _log.warning("standard library: %d files are not UTF-8 and were left out", skipped)


def _module(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def stdlib_snippets(
    split: str,
    n: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    min_tokens: int = 60,
    max_tokens: int = 200,
) -> list[Snippet]:
    """Code prompts: a snippet starts at a function or class and ends at a line end inside it.

    At most one snippet is taken from each file as long as there are enough files.

    Args:
        split: `train`, `held-out` or `all`.
        n: how many.
        seed: picks files, functions and lengths.
        tokenizer: counts tokens, its beginning-of-text token left out.
        min_tokens: the fewest tokens of a snippet.
        max_tokens: the most.

    Raises:
        DataError: the library has fewer than `n` such places.
    """
    pools: list[list[Snippet]] = []
    found = 0
    for name, source in sorted(stdlib_sources(split), key=lambda item: stable_fraction(f"{seed}:{item[0]}")):
        pools.append(_snippets_of(name, source, seed, tokenizer, min_tokens, max_tokens, 1 + n // 20))
        found += bool(pools[-1])
        if found >= n:
            break
    rounds = [pool[turn] for turn in range(1 + n // 20) for pool in pools if turn < len(pool)]
    if len(rounds) < n:
        raise DataError(
            f"asked for {n} snippets of {min_tokens} to {max_tokens} tokens, found {len(rounds)}; ask for fewer"
        )
    return rounds[:n]


def _snippets_of(
    name: str, source: str, seed: int, tokenizer: PreTrainedTokenizerBase, low: int, high: int, most: int
) -> list[Snippet]:
    lines = source.splitlines(keepends=True)
    spans = sorted(_blocks(source), key=lambda span: stable_fraction(f"{seed}:{name}:{span[0]}"))
    found: list[Snippet] = []
    for first, body, last in spans:
        snippet = _cut(name, lines, first, body, last, seed, tokenizer, low, high)
        if snippet is not None:
            found.append(snippet)
        if len(found) == most:
            break
    return found


def _blocks(source: str) -> list[tuple[int, int, int]]:
    """First line, first line of the body, and last line (counted from 1) of every function and class."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    blocks = []
    for node in ast.walk(tree):
        if isinstance(node, kinds):
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            blocks.append((start, node.body[0].lineno, node.end_lineno or node.lineno))
    return blocks


def _cut(
    name: str,
    lines: Sequence[str],
    first: int,
    body: int,
    last: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    low: int,
    high: int,
) -> Snippet | None:
    """A prefix of one block that ends at a line end after its body began and before its last line."""
    wanted = low + stable_fraction(f"length:{seed}:{name}:{first}") * (high - low)
    best: Snippet | None = None
    end = body
    text = "".join(lines[first - 1 : end])
    while end < last and len(text) < 12 * high:
        tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        if tokens > high:
            break
        if tokens >= low and lines[end - 1].strip():
            best = Snippet(f"{name}:{first}-{end}", text, tokens)
            if tokens >= wanted:
                break
        text += lines[end]
        end += 1
    return best
