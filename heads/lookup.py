"""Prompt lookup: what followed the last few tokens earlier in the text may follow again (Saxena 2023).

Several earlier places become branches of one tree. No weights, and nothing is read from the target. Places are found by
the last few tokens (`match="ngram"`) or by the longest suffix of any length (`match="suffix"`: Hu et al. 2024, SAM
Decoding); a corpus of the user's own may be looked up beside the text (He et al. 2023, REST).
Letters: B rows, N tree nodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfspec.draft import Budget, DraftState, Needs, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.heads.suffixes import Corpus, SuffixHistory
from selfspec.registry import register
from selfspec.target import Target
from selfspec.tokenizers import tokenizer_of
from selfspec.tree import DraftTree, TreeShape

_DEEPEST = 32
"""The longest continuation read from a corpus."""


@dataclass(kw_only=True)
class LookupConfig:
    """Configuration of prompt lookup.

    Args:
        match: `ngram` finds places by the last `max_ngram` tokens, the newest first; `suffix` by the longest suffix
            that occurred before, whatever its length.
        max_ngram: longest suffix to look for with `ngram`.
        min_ngram: shortest suffix that counts as a match.
        nodes: nodes of a tree, the root included, unless the budget says otherwise.
        branches: how many earlier places may contribute to one tree.
        trunk: share of the guesses given to the best continuation.
        corpus: texts to look up beside the prompt and the output: a text file, a JSONL file with `text` or `tokens`
            (ids) per line, or lists of token ids. Where its match is longer than the text's own, it comes first.
        corpus_match: longest suffix to look for in the corpus.
    """

    match: str = "ngram"
    max_ngram: int = 4
    min_ngram: int = 1
    nodes: int = 12
    branches: int = 4
    trunk: float = 0.7
    corpus: str | list[list[int]] | None = None
    corpus_match: int = 16

    @classmethod
    def from_argument(cls, argument: str) -> LookupConfig:
        """From what stands after `lookup:`, a corpus file."""
        return cls(corpus=argument)

    def __post_init__(self) -> None:
        if self.match not in ("ngram", "suffix"):
            raise ConfigError(f"lookup matches by 'ngram' or by 'suffix', got {self.match!r}")
        if self.corpus_match < self.min_ngram:
            raise ConfigError(f"corpus_match {self.corpus_match} is below min_ngram {self.min_ngram}")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ConfigError(f"n-grams from {self.min_ngram} to {self.max_ngram} make no range of lengths")
        if self.nodes < 1 or self.branches < 1 or not 0 < self.trunk <= 1:
            raise ConfigError(
                f"prompt lookup wants nodes and branches >= 1 and 0 < trunk <= 1, got {self.nodes}, {self.branches} "
                f"and {self.trunk}"
            )


class NgramHistory:
    """The tokens of one row, and for every n-gram the places where it ended, newest first.

    The places of one n-gram form a linked list (a hash chain as in LZ77), so a new token costs one step per length.
    """

    def __init__(self, config: LookupConfig) -> None:
        self.config = config
        self.tokens: list[int] = []
        self._newest: dict[tuple[int, ...], int] = {}
        self._older: list[list[int]] = [[] for _ in range(config.max_ngram + 1)]

    def extend(self, tokens: list[int]) -> None:
        """Add tokens to the text."""
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for length in range(self.config.min_ngram, self.config.max_ngram + 1):
                gram = tuple(self.tokens[end - length : end]) if length <= end else None
                self._older[length].append(self._newest.get(gram, 0) if gram else 0)
                if gram:
                    self._newest[gram] = end

    def matches(self) -> Iterator[int]:
        """Ends of earlier occurrences of the text's suffix, longest suffix first, then newest first, each once."""
        seen = {len(self.tokens)}
        for length in range(self.config.max_ngram, self.config.min_ngram - 1, -1):
            end = self._older[length][-1]
            while end:
                if end not in seen:
                    seen.add(end)
                    yield end
                end = self._older[length][end - 1]


History = NgramHistory | SuffixHistory


def continuation(tokens: list[int], end: int, count: int) -> list[int]:
    """The `count` tokens after place `end`; past the newest token the copy goes on with itself."""
    copied = tokens[end : end + count]
    while len(copied) < count:
        copied.append(copied[len(copied) - (len(tokens) - end)])
    return copied


def overlap(tokens: list[int], end: int, most: int) -> int:
    """How many tokens before place `end` are those at the end of the text, counted up to `most`."""
    length = 0
    while length < min(end, most) and tokens[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


@dataclass(eq=False)
class LookupState(DraftState):
    """One history per row."""

    rows: list[History]
    device: torch.device

    def select(self, rows: Tensor) -> LookupState:
        """The state of some rows."""
        return LookupState([self.rows[row] for row in rows.tolist()], self.device)

    @property
    def joins(self) -> bool:
        """See `DraftState.joins`."""
        return True

    def join(self, other: LookupState) -> LookupState:
        """See `DraftState.join`."""
        return LookupState([*self.rows, *other.rows], self.device)


class _Trie:
    """Continuations merged at their common beginnings. Node 0 is the root."""

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self._children: dict[tuple[int, int], int] = {}

    def insert(self, tokens: list[int], room: int) -> None:
        """Add a path from the root, creating at most `room` nodes."""
        node = 0
        for token in tokens:
            child = self._children.get((node, token))
            if child is None:
                if room <= 0:
                    return
                room -= 1
                child = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(node)
                self._children[node, token] = child
            node = child


@register("lookup")
class Lookup:
    """The n-gram draft."""

    kind: str
    config_class = LookupConfig
    needs = Needs()

    def __init__(self, config: LookupConfig | None = None, tokenizer: Any = None) -> None:
        self.config = config or LookupConfig()
        self.corpus: Corpus | None = None
        if self.config.corpus is not None:
            documents = read_corpus(self.config.corpus, tokenizer)
            self.corpus = Corpus(documents, self.config.corpus_match, _DEEPEST)

    @classmethod
    def from_target(
        cls, config: LookupConfig | None = None, target: Target | None = None, generator: torch.Generator | None = None
    ) -> Lookup:
        """As other methods; of the target, only the tokenizer is wanted, for a corpus of text."""
        if target is None or config is None or config.corpus is None:
            return cls(config)
        made = cls(config, tokenizer_of(target.model) if isinstance(config.corpus, str) else None)
        made.check_target(target)
        return made

    def check_target(self, target: Target) -> None:
        """Raise ConfigError if the corpus holds tokens that the target does not have."""
        if self.corpus is not None and self.corpus.largest >= target.vocab_size:
            raise ConfigError(
                f"the corpus holds token {self.corpus.largest}, the target has {target.vocab_size} tokens; make its "
                "ids with the target's tokenizer"
            )

    def begin(self, verified: Verified) -> LookupState:
        """Index the prompt."""
        histories = [self._history() for _ in range(verified.tokens.shape[0])]
        for history, first in zip(histories, verified.tokens[:, 0].tolist(), strict=True):
            history.extend([first])
        return self.observe(LookupState(histories, verified.tokens.device), verified)

    def _history(self) -> History:
        return SuffixHistory(self.config.min_ngram) if self.config.match == "suffix" else NgramHistory(self.config)

    def observe(self, state: LookupState, verified: Verified) -> LookupState:
        """Index the accepted tokens."""
        rows = zip(state.rows, verified.next_lists, verified.count_list, strict=True)
        for history, tokens, count in rows:
            history.extend(tokens[:count])
        return state

    def propose(self, state: LookupState, budget: Budget, sampling: Sampling, generator: Any) -> DraftTree:
        """A trie of what followed before; the root alone where nothing matches."""
        guesses = budget.guesses(self.config.nodes)
        return _batch([self._trie(history, guesses, budget.depth) for history in state.rows], state.device)

    def _trie(self, history: History, guesses: int, depth: int) -> _Trie:
        trie = _Trie(history.tokens[-1])
        depth = min(depth, guesses)
        if depth < 1:
            return trie
        best: list[int] = []
        for path in self._paths(history, depth):
            room = guesses + 1 - len(trie.tokens)
            trie.insert(path, min(room, ceil(self.config.trunk * guesses)) if not best else room)
            best = best or path
        trie.insert(best, guesses + 1 - len(trie.tokens))
        return trie

    def _paths(self, history: History, depth: int) -> Iterator[list[int]]:
        """Continuations, the likeliest first."""
        ends = [end for _, end in zip(range(self.config.branches), history.matches(), strict=False)]
        own = (continuation(history.tokens, end, depth) for end in ends)
        if self.corpus is None:
            yield from own
            return
        recent = history.tokens[-self.config.corpus_match :]
        length, first, end = self.corpus.find(recent, self.config.min_ngram)
        found = self.corpus.continuations(length, first, end, depth) if length else []
        if ends and overlap(history.tokens, ends[0], self.config.corpus_match) >= length:
            yield from own
            yield from map(list, found)
        else:
            yield from map(list, found)
            yield from own


def read_corpus(corpus: str | list[list[int]], tokenizer: Any) -> list[list[int]]:
    """The token ids of a corpus, one list per document.

    Args:
        corpus: see `LookupConfig`.
        tokenizer: of the target, for text; None where there is none.

    Raises:
        ConfigError: no such file, a line that holds neither text nor ids, or text without a tokenizer.
    """
    if not isinstance(corpus, str):
        return corpus
    path = Path(corpus)
    if not path.is_file():
        raise ConfigError(f"the corpus {corpus!r} is no file; give a text file, a JSONL file, or lists of token ids")
    content = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return [_encode(content, tokenizer, corpus)]
    return [_document(line, number, tokenizer, corpus) for number, line in enumerate(content.splitlines(), 1) if line]


def _document(line: str, number: int, tokenizer: Any, name: str) -> list[int]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"line {number} of the corpus {name!r} is not JSON: {error}") from error
    tokens = values.get("tokens") if isinstance(values, dict) else None
    if isinstance(tokens, list) and all(isinstance(token, int) and token >= 0 for token in tokens):
        return tokens
    if isinstance(values, dict) and isinstance(values.get("text"), str):
        return _encode(values["text"], tokenizer, name)
    raise ConfigError(f"line {number} of the corpus {name!r} holds neither `text` nor `tokens` (a list of ids)")


def _encode(text: str, tokenizer: Any, name: str) -> list[int]:
    if tokenizer is None:
        raise ConfigError(
            f"the corpus {name!r} is text, and the target's tokenizer is not at hand; give token ids, or pass "
            "Lookup(config, tokenizer) to patch"
        )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _batch(tries: list[_Trie], device: torch.device) -> DraftTree:
    """Trees of several sizes as one batch; missing nodes are marked as not real."""
    sizes = [len(trie.tokens) for trie in tries]
    nodes = max(sizes)
    tokens = torch.tensor(
        [trie.tokens + [trie.tokens[0]] * (nodes - size) for trie, size in zip(tries, sizes, strict=True)]
    )
    parents = torch.tensor([trie.parents + [0] * (nodes - size) for trie, size in zip(tries, sizes, strict=True)])
    real = None
    if min(sizes) < nodes:
        real = (torch.arange(nodes) < torch.tensor(sizes).unsqueeze(1)).to(device)
    return DraftTree(tokens.to(device), TreeShape(parents.to(device), real))
