"""Several prompts at once: tokens per second of whole batches, against transformers' own batched `generate`.

Batches are groups of prompts in their order; a last group that is not full is left out. Every run decodes every batch
once, in an order that rotates, after one warm-up call. Rows that end early stop counting; all seconds count, the
prefill too, since batched prefills of ragged prompts are part of serving them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from selfspec.draft import Draft
from selfspec.errors import ConfigError
from selfspec.inference.bench.figures import PLAIN, TRANSFORMERS, bootstrap, ratios
from selfspec.inference.bench.guarded import GUARDED, measured_now
from selfspec.inference.engine import decode
from selfspec.inference.guard.setup import Guarding
from selfspec.inference.plain import decode_plain
from selfspec.inference.request import Request
from selfspec.inference.runs import now, prepare_batch, unpatched_generate
from selfspec.stats import Stats
from selfspec.target import Target


@dataclass(frozen=True, eq=False)
class _Decoded:
    rows: list[list[int]]
    seconds: float
    cpu: float
    stats: Stats | None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.rows))


_Runner = Callable[[Request], tuple[Tensor, Stats | None]]


def throughput(
    target: Target,
    drafts: dict[str, Draft],
    prompts: Sequence[list[int]],
    batch: int,
    arguments: dict[str, Any],
    nodes: int | None = None,
    seed: int = 0,
    steered: Mapping[str, Guarding] | None = None,
    raw: bool = True,
) -> dict[str, Any]:
    """Measure batches of one size.

    Args:
        target: the model, not patched.
        drafts: name of the run to draft.
        prompts: token ids; at least `batch` of them.
        batch: rows.
        arguments: of `generate`, `max_new_tokens` among them.
        nodes: the most nodes per tree; None leaves it to the draft.
        seed: of sampling and of the intervals.
        steered: by name of the draft, what steers its guarded run; drafts that are missing have none.
        raw: also run drafts without a guard.

    Returns:
        `batch`, `batches` (how many) and `runs`: each with `name`, `tokens`, `seconds`, `cpu_seconds`, `tokens_per_s`,
        `speedup` over `transformers` (median of paired ratios) with its interval, `tokens_per_round` (per row;
        null where rounds are not counted) and `identical_rows` to `transformers` (null when sampling).

    Raises:
        ConfigError: fewer prompts than rows.
    """
    groups = [list(prompts[i : i + batch]) for i in range(0, len(prompts) - batch + 1, batch)]
    if not groups:
        raise ConfigError(
            f"{len(prompts)} prompts do not fill a batch of {batch}; give more prompts or a smaller batch"
        )
    target.screen(prompts[0])
    runs = _runners(target, drafts if raw else {}, arguments, nodes, seed)
    for name, guarding in (steered or {}).items():
        sampled = bool(arguments.get("do_sample"))
        measured_now(guarding, groups[0][0], {1, 1 << (batch - 1).bit_length()}, sampled)
        runs[name + GUARDED] = _guarded(target, drafts[name], guarding)
    found: dict[str, list[_Decoded]] = {name: [] for name in runs}
    names = list(runs)
    for turn, group in enumerate([groups[0], *groups]):
        request = prepare_batch(target, group, arguments)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            decoded = _timed(target, request, runs[name], seed + turn)
            if turn:  # the first is the warm-up
                found[name].append(decoded)
    return {"batch": batch, "batches": len(groups), "runs": [_figures(n, found, arguments, seed) for n in names]}


def _runners(
    target: Target, drafts: dict[str, Draft], arguments: dict[str, Any], nodes: int | None, seed: int
) -> dict[str, _Runner]:
    def of_transformers(request: Request) -> tuple[Tensor, None]:
        with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
            torch.manual_seed(seed)
            mask = request.attention_mask
            return unpatched_generate(target)(request.input_ids, attention_mask=mask, **arguments), None

    def plainly(request: Request) -> tuple[Tensor, Stats]:
        result = decode_plain(target, request)
        return result.sequences, result.stats

    def with_draft(draft: Draft) -> _Runner:
        def run(request: Request) -> tuple[Tensor, Stats]:
            result = decode(target, draft, replace(request, nodes=nodes))
            return result.sequences, result.stats

        return run

    runs: dict[str, _Runner] = {TRANSFORMERS: of_transformers}
    if target.chain_only is None:
        runs[PLAIN] = plainly
    return runs | {name: with_draft(draft) for name, draft in drafts.items()}


def _guarded(target: Target, draft: Draft, guarding: Guarding) -> _Runner:
    def run(request: Request) -> tuple[Tensor, Stats]:
        request = replace(request, nodes=guarding.nodes)
        guard = guarding.start(request)
        result = decode(target, draft, request, guard)
        if guard is not None:
            guarding.finish(guard, request.do_sample)
        return result.sequences, result.stats

    return run


def _timed(target: Target, request: Request, run: _Runner, seed: int) -> _Decoded:
    generator = torch.Generator(target.device).manual_seed(seed)
    start, cpu = now(target), time.process_time()
    sequences, stats = run(replace(request, generator=generator))
    seconds, cpu = now(target) - start, time.process_time() - cpu
    width, ends = request.input_ids.shape[1], _end_tokens(request)
    rows = [_until_end(row, ends) for row in sequences[:, width:].tolist()]
    return _Decoded(rows, seconds, cpu, stats)


def _end_tokens(request: Request) -> set[int]:
    ends: list[Tensor] = [c.eos_token_id for c in request.stopping if hasattr(c, "eos_token_id")]
    return {int(token) for end in ends for token in end.flatten().tolist()}


def _until_end(row: list[int], ends: set[int]) -> list[int]:
    return next((row[: place + 1] for place, token in enumerate(row) if token in ends), row)


def _figures(name: str, found: dict[str, list[_Decoded]], arguments: dict[str, Any], seed: int) -> dict[str, Any]:
    mine, theirs = found[name], found[TRANSFORMERS]
    tokens, seconds = sum(d.tokens for d in mine), sum(d.seconds for d in mine)
    against = ratios(*([d.tokens / d.seconds for d in part] for part in (mine, theirs)))
    total = Stats()
    for decoded in mine:
        total.add(decoded.stats or Stats())
    same = [a == b for d, t in zip(mine, theirs, strict=True) for a, b in zip(d.rows, t.rows, strict=True)]
    return {
        "name": name,
        "tokens": tokens,
        "seconds": seconds,
        "cpu_seconds": sum(d.cpu for d in mine),
        "tokens_per_s": tokens / seconds,
        "baseline": TRANSFORMERS,
        "speedup": float(np.median(against)) if against else None,
        "speedup_interval": bootstrap(against, seed),
        "tokens_per_round": total.tokens_per_round if total.rounds else None,
        "accepted_per_round": total.accepted_per_round if total.rounds else None,
        "identical_rows": None if arguments.get("do_sample") else f"{sum(same)}/{len(same)}",
    }
