"""Does the guard keep its promise? Texts and drafts that do not pay, with and without it, beside plain decoding.

Every case decodes the same prompts three ways, plain, guarded and with the draft asked in every round, in an order that
rotates from prompt to prompt; ratios of tokens per second are paired. All texts have the same length, so that batches
stay whole. What the guard measures once per machine is done in the warm-up, as it is on disk in later runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from selfspec.draft import Draft
from selfspec.errors import ConfigError
from selfspec.inference.bench.figures import bootstrap, ratios
from selfspec.inference.engine import decode
from selfspec.inference.guard.policy import GuardStats
from selfspec.inference.guard.setup import Guarding
from selfspec.inference.plain import decode_plain
from selfspec.inference.request import Request, Result
from selfspec.inference.runs import now, prepare
from selfspec.target import Target

_WAYS = ("plain", "guarded", "raw")


@dataclass(frozen=True)
class GuardBenchSettings:
    """What all cases share.

    Args:
        max_new_tokens: per text; end tokens do not end it.
        temperatures: 0 is greedy.
        batches: numbers of texts decoded at once.
        groups: how many batches of prompts per case.
        prompt_tokens: length of every prompt.
        seed: of random prompts and of sampling.
    """

    max_new_tokens: int = 128
    temperatures: tuple[float, ...] = (1.5, 0.0)
    batches: tuple[int, ...] = (1, 8)
    groups: int = 10
    prompt_tokens: int = 64
    seed: int = 0


def bench_guard(
    target: Target,
    drafts: Mapping[str, Draft],
    prompts: Sequence[list[int]],
    settings: GuardBenchSettings,
    progress: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure all cases: every draft, temperature and batch size, on the prompts and on random tokens.

    Args:
        target: the model, not patched.
        drafts: by name.
        prompts: token ids; those shorter than `prompt_tokens` are left out.
        settings: what all cases share.
        progress: called with the name of each case when it begins.

    Raises:
        ConfigError: no prompt is long enough.
    """
    texts = [prompt[: settings.prompt_tokens] for prompt in prompts if len(prompt) >= settings.prompt_tokens]
    if not texts:
        raise ConfigError(f"no prompt has {settings.prompt_tokens} tokens; give longer ones or ask for fewer")
    draw = torch.Generator().manual_seed(settings.seed)
    shape = (len(texts), settings.prompt_tokens)
    arbitrary = torch.randint(target.vocab_size, shape, generator=draw).tolist()
    found = []
    for name, draft in drafts.items():
        for kind, source in (("prompts", texts), ("random tokens", arbitrary)):
            for temperature in settings.temperatures:
                for batch in settings.batches:
                    if progress is not None:
                        progress(f"{name}, {kind}, temperature {temperature:g}, batch {batch}")
                    case = _case(target, draft, source, temperature, batch, settings)
                    found.append({"draft": name, "text": kind, "temperature": temperature, "batch": batch, **case})
    return found


def _case(
    target: Target,
    draft: Draft,
    texts: Sequence[list[int]],
    temperature: float,
    batch: int,
    settings: GuardBenchSettings,
) -> dict[str, Any]:
    guarding, total = Guarding(target, draft), GuardStats()
    rates: dict[str, list[float]] = {way: [] for way in _WAYS}

    def run(way: str, request: Request) -> Result:
        if way == "plain":
            return decode_plain(target, request)
        guard = guarding.start(request) if way == "guarded" else None
        result = decode(target, draft, request, guard)
        if guard is not None:
            guarding.finish(guard, request.do_sample)
            total.add(guard.stats)
        return result

    for way in _WAYS:
        run(way, _request(target, texts, temperature, batch, 0, settings, 8))
    total = GuardStats()
    for group in range(settings.groups):
        for place in range(len(_WAYS)):
            way = _WAYS[(place + group) % len(_WAYS)]
            request = _request(target, texts, temperature, batch, group, settings, settings.max_new_tokens)
            start = now(target)
            result = run(way, request)
            seconds = now(target) - start - result.stats.seconds["prefill"]
            rates[way].append(batch * (settings.max_new_tokens - 1) / seconds)
    against = {way: ratios(rates[way], rates["plain"]) for way in _WAYS[1:]}
    return {
        "plain_tokens_per_s": float(np.median(rates["plain"])),
        **{way: float(np.median(values)) for way, values in against.items()},
        **{f"{way}_interval": bootstrap(values, settings.seed) for way, values in against.items()},
        "guard": total.to_dict(),
    }


def _request(
    target: Target,
    texts: Sequence[list[int]],
    temperature: float,
    batch: int,
    group: int,
    settings: GuardBenchSettings,
    new_tokens: int,
) -> Request:
    rows = [texts[(group * batch + row) % len(texts)] for row in range(batch)]
    arguments = {
        "do_sample": temperature > 0,
        "temperature": temperature or 1.0,
        "top_p": 1.0,
        "top_k": 0 if temperature else 50,
        "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens,
    }
    request = prepare(target, rows[0], arguments)
    generator = torch.Generator(target.device).manual_seed(settings.seed + group)
    return replace(request, input_ids=torch.tensor(rows, device=target.device), generator=generator)
