"""A conversation in one process: answers as they are decided, and what was read once is not read again."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from selfspec.errors import ConfigError
from selfspec.hf import config_of, shortened
from selfspec.inference.text import TextStream

Write = Callable[[str, int], None]
"""Takes a piece of text and the depth at which it was drafted, 0 for the target."""


class Chat:
    """Turns of a conversation with one model, patched or not.

    Args:
        model: answers.
        tokenizer: of the model; without a chat template the model goes on with the text as it stands.
        write: gets the answers.
        system: what the template puts first; None for nothing.
        arguments: of `generate`, `max_new_tokens` among them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        write: Write,
        system: str | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer: Any = tokenizer
        self.write = write
        self.templated = bool(tokenizer.chat_template)
        if system is not None and not self.templated:
            raise ConfigError("the model has no chat template, so there is no place for a system message; leave it out")
        self._system = system
        self._arguments = {"max_new_tokens": 512, **(arguments or {})}
        self._interrupted = False
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.messages: list[dict[str, str]] = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})
        self.tokens: list[int] = []
        self._cache: Any = None

    def interrupt(self) -> None:
        """End the answer at hand after the next token; may be called from a signal handler."""
        self._interrupted = True

    def say(self, text: str) -> str:
        """One turn: hand on the answer as it comes, and return it.

        Raises:
            ConfigError: the conversation is longer than the model can read, or its template refuses it.
        """
        prompt = self._prompt(text)
        limit = getattr(config_of(self.model), "max_position_embeddings", None)
        room = self._arguments["max_new_tokens"] if limit is None else limit - len(prompt)
        if room < 1:
            raise ConfigError(f"the conversation has {len(prompt)} tokens, the model is made for {limit}; begin anew")
        self._interrupted = False
        stream = _Stream(TextStream(self.tokenizer, prompt), self.write)
        ids = torch.tensor([prompt], device=self.model.device)
        out: Any = self.model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=stream,
            return_dict_in_generate=True,
            stopping_criteria=StoppingCriteriaList([_Interrupt(self)]),
            **self._arguments | {"max_new_tokens": min(self._arguments["max_new_tokens"], room)},
            **self._kept(prompt),
        )
        self.tokens = out.sequences[0].tolist()
        self._cache = out.cache
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": stream.text}]
        return stream.text

    def _prompt(self, text: str) -> list[int]:
        if not self.templated:
            more = self.tokenizer(text, add_special_tokens=not self.tokens)["input_ids"]
            return [*self.tokens, *more]
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            out = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"the model's chat template does not take this conversation: {error}") from error
        return list(out["input_ids"])

    def _kept(self, prompt: list[int]) -> dict[str, Any]:
        """The cache of earlier turns, as far as the prompt is what it holds.

        A template may write an earlier answer in another way than the model did; from there on all is read anew.
        """
        cache, self._cache = self._cache, None  # an error on the way would leave it half-filled
        if cache is None:
            return {}
        length = cache.get_seq_length()
        pairs = enumerate(zip(self.tokens[:length], prompt[:-1], strict=False))
        same = next((place for place, (old, new) in pairs if old != new), min(length, len(prompt) - 1))
        usable = same > 0 and (same == length or shortened(cache, same))
        return {"cache": cache} if usable else {}


@contextmanager
def stopped_by_ctrl_c(chat: Chat) -> Iterator[None]:
    """Ctrl-C ends the answer; a second one is a KeyboardInterrupt as ever. For the main thread."""

    def handle(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        chat.interrupt()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _Interrupt(StoppingCriteria):
    row_independent = True

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((input_ids.shape[0],), self.chat._interrupted, dtype=torch.bool, device=input_ids.device)


class _Stream(BaseStreamer):
    """Turns tokens into text; the first call brings the prompt."""

    def __init__(self, text: TextStream, write: Write) -> None:
        self.text = ""
        self._stream = text
        self._write = write
        self._depth = 0
        self._prompt = True

    def origin(self, depths: list[int]) -> None:
        """See `Request.streamer`."""
        self._depth = depths[0]

    def put(self, value: Tensor) -> None:
        """Take in the prompt, then one token per call."""
        if self._prompt:
            self._prompt = False
            return
        for token in value.flatten().tolist():
            self._say(self._stream.add(token, self._depth))

    def end(self) -> None:
        """Say what was held back."""
        self._say(self._stream.finish())

    def _say(self, segments: list[tuple[str, int]]) -> None:
        for piece, depth in segments:
            self.text += piece
            self._write(piece, depth)
