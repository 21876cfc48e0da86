"""From a client's wish to jobs for the scheduler: prompts to tokens, limits, seeds, processors."""

from __future__ import annotations

import asyncio
import copy
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from selfspec.inference.batching import longest_text
from selfspec.inference.rows import ROOM, Row
from selfspec.inference.runs import prepare
from selfspec.inference.serve.answers import Answer, Event
from selfspec.inference.serve.metrics import Metrics
from selfspec.inference.serve.protocol import Ask, ChatAsk, CompletionAsk
from selfspec.inference.serve.scheduler import Job, Refused, Scheduler
from selfspec.inference.text import TextStream

_SEEDS = 1 << 63


class Adjust(LogitsProcessor):
    """OpenAI's `presence_penalty`, `frequency_penalty` and `logit_bias`, on the scores before the temperature.

    Penalties count tokens of the answer, not of the prompt, as OpenAI's formula does.

    Args:
        prompt: tokens of the prompt.
        presence: taken off every token that has occurred.
        frequency: taken off once per occurrence.
        bias: added, by token.
    """

    row_independent = True

    def __init__(self, prompt: int, presence: float, frequency: float, bias: dict[int, float]) -> None:
        self.prompt = prompt
        self.presence = presence
        self.frequency = frequency
        self.bias = bias

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[B, V]` after the tokens `[B, S]`."""
        answer = input_ids[:, self.prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        scores = scores - self.frequency * counts - self.presence * (counts > 0)
        if self.bias:
            places = torch.tensor(list(self.bias), device=scores.device)
            values = torch.tensor(list(self.bias.values()), device=scores.device, dtype=scores.dtype)
            scores = scores.index_add(1, places, values.expand(scores.shape[0], -1))
        return scores


@dataclass(eq=False)
class Order:
    """All choices of one request, and the queue that their events go to."""

    jobs: list[Job]
    answers: list[Answer]
    queue: asyncio.Queue[Event]
    prompts: list[str]
    prompt_tokens: int
    going: int = field(init=False)

    def __post_init__(self) -> None:
        self.going = len(self.answers)


class Kitchen:
    """Makes jobs of requests.

    Args:
        scheduler: runs them.
        tokenizer: of the model.
        metrics: of the server.
        longest: the most tokens of prompt and answer together; None takes what the model and the limits allow.
        choices: the most answers to one request.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: PreTrainedTokenizerBase,
        metrics: Metrics,
        longest: int | None = None,
        choices: int = 16,
    ) -> None:
        self.scheduler = scheduler
        self.metrics = metrics
        bounds = [longest, longest_text(scheduler.target), scheduler.limits.tokens - ROOM]
        self.longest = min(bound for bound in bounds if bound is not None)
        self.choices = choices
        self.chats = bool(tokenizer.chat_template)
        # One for the model's thread, one for all others: a tokenizer serves one thread at a time.
        self._decoder: Any = tokenizer
        self._encoder: Any = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()

    async def order(self, ask: Ask) -> Order:
        """Put a request into the queue.

        Raises:
            Refused: prompts that cannot be read or are too long, too many choices, a full queue.
        """
        loop = asyncio.get_running_loop()
        prompts = await asyncio.to_thread(self._prompts, ask)
        copies = ask.n or 1
        if len(prompts) * copies > self.choices:
            raise Refused(f"{len(prompts) * copies} answers to one request; ask for at most {self.choices}", "invalid")
        queue: asyncio.Queue[Event] = asyncio.Queue()
        order = Order([], [], queue, [text for _, text in prompts], sum(len(ids) for ids, _ in prompts))
        seed = secrets.randbelow(_SEEDS) if ask.seed is None else ask.seed
        for ids, _ in prompts:
            for _ in range(copies):
                index = len(order.answers)
                answer = Answer(index, TextStream(self._decoder, ids, ask.stops), loop, queue, self.metrics)
                answer.job = self._job(ask, ids, answer, (seed + index) % _SEEDS)
                order.answers.append(answer)
                order.jobs.append(answer.job)
        order.going = len(order.answers)
        self.scheduler.submit(order.jobs)
        self.metrics.prompt_tokens.inc(order.prompt_tokens)
        return order

    def _job(self, ask: Ask, ids: list[int], answer: Answer, seed: int) -> Job:
        room = self.longest - len(ids)
        new = room if ask.wanted is None else ask.wanted
        if new > room or room < 1:
            raise Refused(
                f"the prompt has {len(ids)} tokens and {max(new, 1)} more were asked for; this server's limit is "
                f"{self.longest} together",
                "too_long",
            )
        target = self.scheduler.target
        bias = ask.logit_bias or {}
        wrong = [token for token in bias if token >= target.vocab_size]
        if wrong:
            raise Refused(f"logit_bias names token {wrong[0]}, the model has {target.vocab_size}", "invalid")

        def make() -> Row:
            arguments = ask.sampling(target.model.generation_config) | {"max_new_tokens": new}
            presence, frequency = ask.presence_penalty or 0.0, ask.frequency_penalty or 0.0
            if presence or frequency or bias:
                arguments["logits_processor"] = [Adjust(len(ids), presence, frequency, bias)]
            generator = torch.Generator(target.device).manual_seed(seed)
            return Row(replace(prepare(target, ids, arguments), generator=generator), answer, ask.top)

        return Job(make, answer, len(ids) + new + ROOM, len(ids))

    def _prompts(self, ask: Ask) -> list[tuple[list[int], str]]:
        """Token ids and text of each prompt."""
        with self._lock:
            if isinstance(ask, ChatAsk):
                return [(self._render(ask), "")]
            assert isinstance(ask, CompletionAsk)
            return [self._read(prompt, ask.echo) for prompt in ask.prompts]

    def _render(self, ask: ChatAsk) -> list[int]:
        if not self.chats:
            raise Refused(
                "this model has no chat template, so it cannot be asked in messages; use /v1/completions", "invalid"
            )
        messages = [message.plain() for message in ask.messages]
        try:
            out = self._encoder.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise Refused(f"the model's chat template does not take these messages: {error}", "invalid") from error
        return self._checked(out["input_ids"])

    def _read(self, prompt: str | Sequence[int], echo: bool) -> tuple[list[int], str]:
        ids = self._encoder(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        if not echo:
            return self._checked(ids), ""
        return self._checked(ids), prompt if isinstance(prompt, str) else str(self._encoder.decode(ids))

    def _checked(self, ids: Sequence[int]) -> list[int]:
        size = self.scheduler.target.vocab_size
        wrong = [token for token in ids if not 0 <= token < size]
        if wrong:
            raise Refused(f"the prompt holds token {wrong[0]}, the model has {size}", "invalid")
        if not ids:
            raise Refused("the prompt is empty; give at least one token", "invalid")
        return list(ids)
