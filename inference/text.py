"""From tokens to text, one token at a time: no half characters, no part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CONTEXT = 6
"""Tokens before the new one that tell how it is written (whether a space belongs before it)."""
_LONGEST = 32
"""Tokens that may wait for the rest of a character; no character has so many."""
UNFINISHED = "\ufffd"

Segment = tuple[str, int]
"""A piece of text and where it came from: the depth at which it was drafted, 0 for the target."""


class Detokenizer:
    """Text of a growing list of tokens. A character whose bytes are not all there yet waits for them.

    Args:
        tokenizer: of the model.
        before: the prompt's tokens; their end tells how the first new token is written.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.window = list(before[-_CONTEXT:])
        self.shown = len(self._decode().rstrip(UNFINISHED))

    def _decode(self) -> str:
        text: str = self.tokenizer.decode(self.window, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def add(self, token: int) -> str:
        """The text that this token completes."""
        self.window.append(token)
        text = self._decode()
        whole = text.rstrip(UNFINISHED)
        if whole != text and len(self.window) > _LONGEST:
            whole = text[:-1]
        said, self.shown = whole[self.shown :], max(self.shown, len(whole))
        if whole == text and len(self.window) > 2 * _CONTEXT:
            self.window = self.window[-_CONTEXT:]
            self.shown = len(self._decode())
        elif len(self.window) > 2 * _LONGEST:
            self.window = self.window[-_LONGEST:]
            self.shown = len(self._decode()) - 1
        return said

    def finish(self) -> str:
        """What is left: characters that will never be whole."""
        text = self._decode()
        said, self.shown = text[self.shown :], len(text)
        return said


class TextStream:
    """Text that can be said, token by token, up to the first stop string.

    Args:
        tokenizer: of the model.
        before: the prompt's tokens.
        stops: strings that end the text and do not belong to it.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self.detokenizer = Detokenizer(tokenizer, before)
        self.stops = list(stops)
        self.stopped = False
        self._held: list[Segment] = []

    def add(self, token: int, origin: int = 0) -> list[Segment]:
        """What can be said after this token. Sets `stopped` when a stop string is complete."""
        return self._say(self.detokenizer.add(token), origin)

    def finish(self) -> list[Segment]:
        """What was held back when the text has ended otherwise."""
        said = self._say(self.detokenizer.finish(), 0)
        if not self.stopped:
            said += self._release(len(self._text()))
        return said

    def _text(self) -> str:
        return "".join(text for text, _ in self._held)

    def _say(self, text: str, origin: int) -> list[Segment]:
        if self.stopped or not text:
            return []
        self._held.append((text, origin))
        held = self._text()
        found = [place for place in (held.find(stop) for stop in self.stops) if place >= 0]
        if found:
            self.stopped = True
            return self._release(min(found))
        return self._release(len(held) - max((_begun(held, stop) for stop in self.stops), default=0))

    def _release(self, count: int) -> list[Segment]:
        said = []
        while count > 0:
            text, origin = self._held.pop(0)
            said.append((text[:count], origin))
            if len(text) > count:
                self._held.insert(0, (text[count:], origin))
            count -= len(text)
        return said


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` could be the beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
