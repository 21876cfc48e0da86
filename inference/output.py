"""Collecting what rows commit: sequences, scores, and the stream."""

from __future__ import annotations

import torch
from torch import Tensor

from selfspec.accept import Accepted
from selfspec.inference.request import Request
from selfspec.scoring import TreeScores


def origins(drafted: int, count: int) -> list[int]:
    """Where the `count` tokens of a round came from: the draft's guess at depth 1, 2, ..., then 0 for the target."""
    return [*range(1, drafted + 1), *[0] * (count - drafted)]


class Output:
    """New tokens of every prompt, in the order of the prompts, whatever rows are still running."""

    def __init__(self, request: Request) -> None:
        self.request = request
        batch = request.input_ids.shape[0]
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.origins: list[list[int]] = [[] for _ in range(batch)]
        self.ended = [False] * batch
        self._scores: list[list[Tensor]] = [[] for _ in range(batch)]
        self._logits: list[list[Tensor]] = [[] for _ in range(batch)]
        self._streamed = 0
        self._open = request.streamer is not None

    def remember(self, rows: list[int], accepted: Accepted, scores: TreeScores) -> None:
        """Record scores and logits at every node of the accepted paths, if they were asked for."""
        for row, path in enumerate(accepted.paths):
            for place in range(len(path)):
                if self.request.keep_logits:
                    self._logits[rows[row]].append(scores.logits[row, path[place]].to(torch.float32, copy=True))
                if scores.kept is not None:
                    self._scores[rows[row]].append(scores.kept[row, path[place]].clone())

    def commit(self, prompt: int, tokens: list[int], ended: bool, drafted: int = 0) -> None:
        """Take in a row's new tokens, of which the first `drafted` were guessed by the draft."""
        self.tokens[prompt] += tokens
        self.origins[prompt] += origins(drafted, len(tokens))
        self.ended[prompt] = ended

    def stream(self) -> None:
        """Hand on every position that all rows have reached, as plain decoding would, one token per row at a time."""
        if not self._open or self.request.streamer is None:
            return
        running = [len(t) for t, ended in zip(self.tokens, self.ended, strict=True) if not ended]
        ready = min(running) if running else max(map(len, self.tokens))
        told = getattr(self.request.streamer, "origin", None)
        for place in range(self._streamed, ready):
            if told is not None:
                told([found[place] if place < len(found) else 0 for found in self.origins])
            self.request.streamer.put(torch.tensor([self._at(tokens, place) for tokens in self.tokens]))
        self._streamed = max(ready, self._streamed)

    def end_stream(self) -> None:
        """Close the stream, once."""
        if self._open and self.request.streamer is not None:
            self._open = False
            self.request.streamer.end()

    def _at(self, tokens: list[int], place: int) -> int:
        return tokens[place] if place < len(tokens) else self._pad()

    def _pad(self) -> int:
        return 0 if self.request.pad_token_id is None else self.request.pad_token_id

    def sequences(self) -> Tensor:
        """`[B, S]` int64: prompts and new tokens, padded on the right."""
        prompt = self.request.input_ids
        longest = max(map(len, self.tokens))
        rows = [tokens + [self._pad()] * (longest - len(tokens)) for tokens in self.tokens]
        return torch.cat([prompt, torch.tensor(rows, dtype=prompt.dtype, device=prompt.device)], dim=1)

    def recorded(self) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """Scores and logits, one `[B, V]` per new token; None where they were not asked for."""
        scores = self._stacked(self._scores) if self.request.keep_scores else None
        return scores, self._stacked(self._logits) if self.request.keep_logits else None

    def _stacked(self, kept: list[list[Tensor]]) -> tuple[Tensor, ...]:
        longest = max(map(len, self.tokens))
        blank = torch.zeros_like(kept[0][0])
        return tuple(
            torch.stack([row[i] if i < len(t) else blank for row, t in zip(kept, self.tokens, strict=True)])
            for i in range(longest)
        )
