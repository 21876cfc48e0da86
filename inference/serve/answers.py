"""From tokens to what clients read: one `Answer` per choice, and OpenAI's objects around them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from selfspec.inference.rows import Likely, News
from selfspec.inference.serve.metrics import Metrics
from selfspec.inference.serve.scheduler import Job, Refused
from selfspec.inference.text import Segment, TextStream


@dataclass(frozen=True)
class Said:
    """A token with its log-probabilities, as text."""

    token: str
    likely: Likely
    top: list[tuple[str, float]]


@dataclass(frozen=True)
class Event:
    """What happened to one choice."""

    index: int
    segments: list[Segment] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    finish: str | None = None
    error: Refused | None = None


class Answer:
    """One choice. The model's thread calls `take` and `fail`; events go to a queue of the event loop.

    Args:
        index: of the choice.
        text: detokenises.
        loop: the event loop that reads the queue.
        queue: shared by all choices of a request.
        metrics: of the server.
    """

    def __init__(
        self,
        index: int,
        text: TextStream,
        loop: asyncio.AbstractEventLoop,
        queue: asyncio.Queue[Event],
        metrics: Metrics,
    ) -> None:
        self.index = index
        self.tokens = 0
        self.job: Job | None = None
        self._text = text
        self._loop = loop
        self._queue = queue
        self._metrics = metrics
        self._began = time.monotonic()
        self._over = False

    def take(self, news: News) -> bool:
        """Take in a round's tokens; True when a stop string ends the text, or nobody listens any more."""
        if self.tokens == 0:
            self._metrics.first.observe(time.monotonic() - self._began)
        segments: list[Segment] = []
        said: list[Said] = []
        for place, (token, origin) in enumerate(zip(news.tokens, news.origins, strict=True)):
            self.tokens += 1
            if news.likely:
                said.append(self._name(token, news.likely[place]))
            if news.ended == "stop" and place == len(news.tokens) - 1:
                break  # the end token is no text
            segments += self._text.add(token, origin)
            if self._text.stopped:
                break
        finish = "stop" if self._text.stopped else news.ended
        if finish is not None and not self._text.stopped:
            segments += self._text.finish()
            finish = "stop" if self._text.stopped else finish
        if finish is not None:
            self._end(finish)
        return not self._send(Event(self.index, segments, said, finish)) or finish is not None

    def fail(self, error: Refused) -> None:
        """The text ends here, without an end."""
        if not self._over:
            self._end(error.reason)
            self._send(Event(self.index, error=error))

    def _end(self, reason: str) -> None:
        self._over = True
        self._metrics.finished.labels(reason).inc()
        self._metrics.tokens.inc(self.tokens)
        self._metrics.whole.observe(time.monotonic() - self._began)

    def _send(self, event: Event) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)
        except RuntimeError:  # the event loop is gone
            return False
        return True

    def _name(self, token: int, likely: Likely) -> Said:
        tokenizer = self._text.detokenizer.tokenizer
        return Said(
            str(tokenizer.decode([token])),
            likely,
            [(str(tokenizer.decode([other])), value) for other, value in likely.top],
        )


class Reply:
    """OpenAI's objects for one request.

    Args:
        kind: `chat.completion` or `text_completion`.
        model: the served name.
        answers: all choices.
        prompt_tokens: over all prompts.
        origins: report where each piece of text came from.
    """

    def __init__(self, kind: str, model: str, answers: Sequence[Answer], prompt_tokens: int, origins: bool) -> None:
        self.chat = kind == "chat.completion"
        self.kind = kind
        self.answers = list(answers)
        self.prompt_tokens = prompt_tokens
        self.origins = origins
        self._fixed = {
            "id": ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
        }

    def usage(self) -> dict[str, Any]:
        """Tokens, and what speculation did for them."""
        written = sum(answer.tokens for answer in self.answers)
        stats = [answer.job.row.stats for answer in self.answers if answer.job is not None and answer.job.row]
        rounds, committed = sum(s.rounds for s in stats), sum(s.committed for s in stats)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
            "speculation": {
                "rounds": rounds,
                "drafted_tokens": sum(s.proposed for s in stats),
                "accepted_tokens": sum(s.accepted for s in stats),
                "tokens_per_round": committed / rounds if rounds else 0.0,
            },
        }

    def first(self, index: int) -> dict[str, Any]:
        """The chunk that opens a choice of a chat."""
        return self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def chunk(self, event: Event) -> dict[str, Any]:
        """A chunk of a stream."""
        text = "".join(part for part, _ in event.segments)
        choice: dict[str, Any] = {"index": event.index, "finish_reason": event.finish}
        if self.chat:
            choice["delta"] = {"content": text} if text else {}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(event.said) if event.said else None
        if self.origins:
            choice["origins"] = [list(segment) for segment in event.segments]
        return self._chunk(choice)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._fixed | {"object": self._name_of_chunks(), "choices": [choice]}

    def _name_of_chunks(self) -> str:
        return "chat.completion.chunk" if self.chat else self.kind

    def last(self) -> dict[str, Any]:
        """The chunk with the usage."""
        return self._fixed | {"object": self._name_of_chunks(), "choices": [], "usage": self.usage()}

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        """The answer in one piece, from all events."""
        choices = [self._choice(i, [e for e in events if e.index == i]) for i in range(len(self.answers))]
        return self._fixed | {"object": self.kind, "choices": choices, "usage": self.usage()}

    def _choice(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        segments = [segment for event in events for segment in event.segments]
        said = [one for event in events for one in event.said]
        text = "".join(part for part, _ in segments)
        choice: dict[str, Any] = {"index": index, "finish_reason": events[-1].finish}
        choice |= {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice["logprobs"] = self._logprobs(said) if said else None
        return choice | ({"origins": [list(segment) for segment in segments]} if self.origins else {})

    def _logprobs(self, said: Sequence[Said]) -> dict[str, Any]:
        if self.chat:
            return {"content": [_entry(one.token, one.likely.chosen) | {"top_logprobs": _tops(one)} for one in said]}
        return {
            "tokens": [one.token for one in said],
            "token_logprobs": [one.likely.chosen for one in said],
            "top_logprobs": [dict(one.top) for one in said],
            "text_offset": None,
        }


def _entry(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}


def _tops(one: Said) -> list[dict[str, Any]]:
    return [_entry(token, value) for token, value in one.top]
