"""One call of each kind of decoder on one prompt, timed alike.

`plain` is this package's decoder without a draft, drafts go through the engine that a patched `generate` calls, and
`transformers` is the unpatched `generate`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from selfspec.draft import Draft
from selfspec.inference.engine import decode
from selfspec.inference.guard.policy import GuardStats
from selfspec.inference.guard.setup import Guarding
from selfspec.inference.plain import decode_plain
from selfspec.inference.request import Request, Result
from selfspec.stats import Stats
from selfspec.target import Target


@dataclass(frozen=True, eq=False)
class Sample:
    """One run on one prompt.

    Args:
        tokens: the new tokens.
        first: how many of them came with the prefill.
        prefill: seconds.
        total: seconds of the whole call.
        cpu: processor seconds of the whole call.
        stats: rounds and acceptance.
        staged: whether `stats` holds the time by stage.
        guard: what the guard did; None without one.
    """

    tokens: list[int]
    first: int
    prefill: float
    total: float
    cpu: float
    stats: Stats
    staged: bool = True
    guard: GuardStats | None = None

    @property
    def seconds(self) -> float:
        """Without the prefill."""
        return self.total - self.prefill

    @property
    def rate(self) -> float:
        """Tokens per second after the prefill; 0 when the prefill already ended the text."""
        made = len(self.tokens) - self.first
        return made / self.seconds if made and self.seconds > 0 else 0.0


@dataclass(frozen=True, eq=False)
class Job:
    """One prompt, ready for every run."""

    target: Target
    prompt: list[int]
    request: Request
    arguments: dict[str, Any]
    seed: int


Runner = Callable[[Job], Sample]


def draft_runner(draft: Draft, nodes: int | None = None) -> Runner:
    """A run that decodes with a draft, on trees of at most `nodes` nodes."""
    return lambda job: _timed(job, lambda request: decode(job.target, draft, replace(request, nodes=nodes)))


def guarded_runner(draft: Draft, guarding: Guarding) -> Runner:
    """A run that decodes as a patched model does: under a guard that goes on from what earlier calls taught it.

    Args:
        draft: what guesses.
        guarding: prepared; otherwise the first call measures costs.
    """

    def run(job: Job) -> Sample:
        done: list[GuardStats] = []

        def steered(request: Request) -> Result:
            request = replace(request, nodes=guarding.nodes)
            guard = guarding.start(request)
            result = decode(job.target, draft, request, guard)
            if guard is not None:
                guarding.finish(guard, request.do_sample)
                done.append(guard.stats)
            return result

        sample = _timed(job, steered)
        return replace(sample, guard=done[0] if done else None)

    return run


def prepare(target: Target, prompt: list[int], arguments: dict[str, Any]) -> Request:
    """The request that transformers' own preparation of `generate(**arguments)` leads to."""
    return prepare_batch(target, [prompt], arguments)


def prepare_batch(target: Target, prompts: Sequence[list[int]], arguments: dict[str, Any]) -> Request:
    """The same for several prompts, padded on the left."""
    found: list[Request] = []

    def capture(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        **rest: Any,
    ) -> Tensor:
        config = generation_config
        found.append(
            Request(
                input_ids,
                attention_mask=mask if len(prompts) > 1 else None,
                processors=logits_processor,
                stopping=stopping_criteria,
                do_sample=bool(config.do_sample),
                temperature=1.0 if config.temperature is None else float(config.temperature),
                pad_token_id=None if config._pad_token_tensor is None else int(config._pad_token_tensor),
            )
        )
        return input_ids

    pad, longest = target.model.generation_config.pad_token_id, max(map(len, prompts))
    rows = [[pad or 0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    real = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    ids, mask = (torch.tensor(part, device=target.device) for part in (rows, real))
    unpatched_generate(target)(ids, attention_mask=mask, custom_generate=capture, **arguments)
    return found[0]


def unpatched_generate(target: Target) -> Callable[..., Any]:
    """The unpatched `generate`, whatever the model at hand carries."""
    model: Any = target.model
    method: Callable[..., Any] = type(model).generate.__get__(model)
    return method


def run_plain(job: Job) -> Sample:
    """Plain decoding on a prompt."""
    return _timed(job, lambda request: decode_plain(job.target, request))


def _timed(job: Job, run: Callable[[Request], Result]) -> Sample:
    generator = torch.Generator(job.target.device).manual_seed(job.seed)
    request = replace(job.request, generator=generator)
    start, cpu = now(job.target), time.process_time()
    result = run(request)
    total, cpu = now(job.target) - start, time.process_time() - cpu
    tokens = result.sequences[0, len(job.prompt) :].tolist()
    return Sample(tokens, 1, result.stats.seconds["prefill"], total, cpu, result.stats)


class _FirstStep:
    """A stopping criterion that never stops; it notes when the first step was over and how many tokens it gave."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.at = 0.0
        self.length = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if not self.length:
            self.at, self.length = now(self.target), input_ids.shape[1]
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def run_transformers(job: Job, **extra: Any) -> Sample:
    """transformers' `generate` on a prompt; its preparation of the call is part of its prefill."""
    target, passes = job.target, [0]
    first = _FirstStep(target)
    ids = torch.tensor([job.prompt], device=target.device)
    arguments = {**job.arguments, **extra, "stopping_criteria": [first]}
    handle = target.model.register_forward_pre_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    try:
        with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
            torch.manual_seed(job.seed)
            start, cpu = now(target), time.process_time()
            out = unpatched_generate(target)(ids, attention_mask=torch.ones_like(ids), **arguments)
            total, cpu = now(target) - start, time.process_time() - cpu
    finally:
        handle.remove()
    tokens = out[0, len(job.prompt) :].tolist()
    came_first = first.length - len(job.prompt)
    made, rounds = len(tokens) - came_first, passes[0] - 1
    stats = Stats(rows=1, rounds=rounds, new_tokens=len(tokens), committed=made, accepted=max(made - rounds, 0))
    return Sample(tokens, came_first, first.at - start, total, cpu, stats, staged=False)


def now(target: Target) -> float:
    """The clock, once the device has done all it was asked to."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()
