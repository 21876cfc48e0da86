"""The longest suffix of a growing text that occurred before (suffix automaton), and a corpus to look it up in.

Automata for drafting: Hu et al. 2024 (SAM Decoding, section 3.1); a corpus as source of drafts: He et al. 2023 (REST,
section 3). Automaton: Blumer et al. 1985. Suffix array by doubling: Manber and Myers 1990.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

_RECENT = 8
"""How many of the longest suffixes remember their newest place; shorter ones keep an older place."""
_SAMPLES = 64
END = -1
"""Stands between the documents of a corpus."""


class SuffixHistory:
    """The tokens of one row and the automaton of all their substrings: a new token costs amortised constant time.

    Args:
        min_match: shortest suffix that counts as a match.
    """

    def __init__(self, min_match: int) -> None:
        self.min_match = min_match
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._length = [0]
        self._link = [-1]
        self._end = [0]
        self._last = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the text."""
        for token in tokens:
            self._note_ends()
            self.tokens.append(token)
            self._add(token)

    def _note_ends(self) -> None:
        """The suffixes of the text so far end here, too; said now, so that a search never finds the text's own end."""
        state = self._link[self._last]
        for _ in range(_RECENT):
            if state <= 0:
                return
            self._end[state] = len(self.tokens)
            state = self._link[state]

    def _new(self, length: int, following: dict[int, int], link: int, end: int) -> int:
        self._length.append(length)
        self._next.append(following)
        self._link.append(link)
        self._end.append(end)
        return len(self._length) - 1

    def _add(self, token: int) -> None:
        new = self._new(self._length[self._last] + 1, {}, 0, len(self.tokens))
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._split(state, token)
        self._last = new

    def _split(self, state: int, token: int) -> int:
        """The state of the longest string of `state` followed by `token`, made if it is not alone in its state."""
        found = self._next[state][token]
        if self._length[state] + 1 == self._length[found]:
            return found
        copy = self._new(self._length[state] + 1, dict(self._next[found]), self._link[found], self._end[found])
        while state >= 0 and self._next[state].get(token) == found:
            self._next[state][token] = copy
            state = self._link[state]
        self._link[found] = copy
        return copy

    def matches(self) -> Iterator[int]:
        """Ends of earlier occurrences of the text's suffixes, longest suffix first, each end once."""
        seen = set()
        state = self._link[self._last]
        while state > 0 and self._length[state] >= self.min_match:
            if self._end[state] not in seen:
                seen.add(self._end[state])
                yield self._end[state]
            state = self._link[state]


class Corpus:
    """Token sequences of the user's own, indexed once and only read afterwards, by any number of generations.

    Args:
        documents: token ids; no match and no continuation crosses the end of a document.
        max_match: longest suffix to look for.
        depth: longest continuation.
    """

    def __init__(self, documents: Sequence[Sequence[int]], max_match: int, depth: int) -> None:
        self.max_match = max_match
        self.depth = depth
        parts = [np.asarray([*document, END], dtype=np.int64) for document in documents if len(document)]
        self._size = sum(map(len, parts))
        filler = np.full(max_match + depth, END, dtype=np.int64)
        self.tokens = np.concatenate([*parts, filler])
        self.largest = int(self.tokens.max(initial=END))
        self.order = _suffix_array(self.tokens[: self._size], max_match + depth)

    def find(self, text: Sequence[int], min_match: int) -> tuple[int, int, int]:
        """The longest suffix of `text` that occurs: its length and the range of places in `order`; length 0 if none."""
        low, high, best = min_match, min(self.max_match, len(text)), (0, 0, 0)
        while low <= high:
            length = (low + high) // 2
            first, end = self._range(text[len(text) - length :])
            if first < end:
                best, low = (length, first, end), length + 1
            else:
                high = length - 1
        return best

    def _range(self, pattern: Sequence[int]) -> tuple[int, int]:
        first, end = 0, self._size
        for place, token in enumerate(pattern):

            def key(index: int, place: int = place) -> int:
                return int(self.tokens[self.order[index] + place])

            places = range(first, end)
            first, end = (
                first + bisect_left(places, token, key=key),
                first + bisect_right(places, token, key=key),
            )
            if first >= end:
                break
        return first, end

    def continuations(self, length: int, first: int, end: int, depth: int) -> list[tuple[int, ...]]:
        """What follows a match: beginnings of continuations, the most frequent first, parents before children.

        Args:
            length: of the match.
            first: see `find`.
            end: see `find`; of many places an even sample is read.
            depth: the longest continuation wanted, at most that of the corpus.
        """
        picked = np.unique(np.linspace(first, end - 1, num=min(end - first, _SAMPLES)).astype(np.int64))
        starts = self.order[picked] + length
        follow = self.tokens[starts[:, None] + np.arange(min(depth, self.depth))]
        counts: Counter[tuple[int, ...]] = Counter()
        for row in follow.tolist():
            stop = row.index(END) if END in row else len(row)
            counts.update(tuple(row[:n]) for n in range(1, stop + 1))
        return sorted(counts, key=lambda path: (-counts[path], len(path), path))


def _suffix_array(tokens: np.ndarray, depth: int) -> np.ndarray:
    """Places of `tokens` in the order of what stands there, as far as `depth` tokens tell."""
    size = len(tokens)
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    order, reach = np.argsort(rank, kind="stable"), 1
    while reach < depth and size:
        ahead = np.zeros(size, dtype=np.int64)
        ahead[: max(size - reach, 0)] = rank[reach:] + 1
        key = rank * (size + 1) + ahead
        order = np.argsort(key, kind="stable")
        steps = np.concatenate([[0], np.cumsum(np.diff(key[order]) != 0)])
        rank[order] = steps
        reach *= 2
        if steps[-1] == size - 1:
            break
    return order
