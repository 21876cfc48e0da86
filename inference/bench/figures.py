"""Figures of `bench` from its samples: rates, paired speed-ups with intervals, acceptance, time by stage, bounds.

Speed-ups are medians over prompts of paired ratios of `tokens_per_s`, with a 95% bootstrap interval (percentile method;
Efron and Tibshirani 1993, chapter 13).
`engine_share` is the time of a round spent neither in the target's pass (verify) nor in the draft (propose and
observe): accepting, emitting, keeping the cache, and everything not timed by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import stats as theory

from selfspec.inference.bench.bound import bound
from selfspec.inference.runs import Runner, Sample
from selfspec.inference.verdict import Difference, overall
from selfspec.stats import Stats

PLAIN = "plain"
TRANSFORMERS = "transformers"
TRANSFORMERS_NGRAM = "transformers-prompt-lookup"
ASSISTED = "transformers-assisted"
EARLY_EXIT = "transformers-early-exit"
UNDRAFTED = "no-draft"
"""This package's rounds without a draft: plain decoding that makes no logits it does not need."""
BASELINES = (PLAIN, UNDRAFTED, TRANSFORMERS, TRANSFORMERS_NGRAM, ASSISTED, EARLY_EXIT)
_RESAMPLES = 2000


@dataclass(eq=False)
class Run:
    """One decoder and what it did on each prompt.

    Args:
        name: in results.
        runner: decodes one prompt.
        samples: per prompt.
        differences: per prompt, where its greedy text parts from plain decoding's.
    """

    name: str
    runner: Runner
    samples: list[Sample] = field(default_factory=list)
    differences: list[Difference | None] = field(default_factory=list)


def summaries(
    runs: Sequence[Run], greedy: bool, seed: int, curve: dict[int, float] | None = None
) -> list[dict[str, Any]]:
    """One entry per run, the first of which is the baseline; see docs/measuring.md for the fields.

    Args:
        runs: with a sample of every prompt each.
        greedy: texts were compared.
        seed: of the resampling.
        curve: seconds of a pass by its nodes, if they were measured.
    """
    baselines = [run for run in runs if run.name in (PLAIN, TRANSFORMERS)]
    best = [max(run.samples[i].rate for run in baselines) for i in range(len(runs[0].samples))]
    plain = [sample.rate for sample in runs[0].samples]
    return [_summary(run, plain, best, greedy, seed, curve) for run in runs]


def _summary(
    run: Run, plain: list[float], best: list[float], greedy: bool, seed: int, curve: dict[int, float] | None
) -> dict[str, Any]:
    total = Stats()
    for sample in run.samples:
        total.add(sample.stats)
    seconds = sum(s.seconds for s in run.samples)
    decoded = sum(len(s.tokens) - s.first for s in run.samples)
    rates = [s.rate for s in run.samples]
    against_plain, against_best = ratios(rates, plain), ratios(rates, best)
    staged = all(s.staged for s in run.samples)
    return {
        "name": run.name,
        "tokens": sum(len(s.tokens) for s in run.samples),
        "decoded_tokens": decoded,
        "seconds": seconds,
        "prefill_seconds": sum(s.prefill for s in run.samples),
        "total_seconds": sum(s.total for s in run.samples),
        "cpu_seconds": sum(s.cpu for s in run.samples),
        "tokens_per_s": decoded / seconds if seconds > 0 else 0.0,
        "tokens_per_s_quartiles": _quantiles([r for r in rates if r], (0.25, 0.75)),
        "baseline": PLAIN,
        "speedup": _median(against_plain),
        "speedup_interval": bootstrap(against_plain, seed),
        "speedup_best_baseline": _median(against_best),
        "speedup_best_baseline_interval": bootstrap(against_best, seed),
        "tokens_per_round": total.tokens_per_round,
        "accepted_per_round": total.accepted_per_round,
        "accepted_by_depth": total.accepted_by_depth if total.rounds else [],
        "conditional_by_depth": total.conditional_by_depth,
        "rounds": total.rounds,
        "proposed": total.proposed,
        "accepted": total.accepted,
        "committed": total.committed,
        "identical": overall(run.differences) if greedy else None,
        "differences": [{"prompt": i, **d.to_dict()} for i, d in enumerate(run.differences) if d is not None],
        "stage_seconds": dict(total.seconds) if staged else None,
        "engine_share": engine_share(total.seconds, seconds) if staged else None,
        "bound": bound(total, seconds, curve) if staged else None,
        "per_prompt": [_row(i, s, plain[i]) for i, s in enumerate(run.samples)],
    }


def _row(index: int, sample: Sample, plain: float) -> dict[str, Any]:
    return {
        "prompt": index,
        "tokens": len(sample.tokens),
        "seconds": sample.seconds,
        "prefill_seconds": sample.prefill,
        "cpu_seconds": sample.cpu,
        "tokens_per_s": sample.rate,
        "speedup": sample.rate / plain if plain else None,
        "tokens_per_round": sample.stats.tokens_per_round,
        "accepted_per_round": sample.stats.accepted_per_round,
        "rounds": sample.stats.rounds,
        "committed": sample.stats.committed,
    }


def ratios(rates: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Paired ratios, prompts left out where either run had nothing to decode after the prefill."""
    return [rate / base for rate, base in zip(rates, baseline, strict=True) if rate and base]


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None


def _quantiles(values: Sequence[float], at: tuple[float, ...]) -> list[float] | None:
    return [float(q) for q in np.quantile(values, at)] if values else None


def bootstrap(values: Sequence[float], seed: int = 0) -> list[float] | None:
    """95% percentile interval of the median over prompts; None below two prompts."""
    if len(values) < 2:
        return None
    found = theory.bootstrap(
        (np.asarray(values),),
        np.median,
        n_resamples=_RESAMPLES,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return [float(found.confidence_interval.low), float(found.confidence_interval.high)]


def by_task(runs: Sequence[dict[str, Any]], seed: int) -> dict[str, dict[str, Any]]:
    """Per task and run: prompts, speed-up over the first run with its interval, and tokens per round.

    Prompts without a task are left out; the result is empty where there are no tasks.
    """
    tasks = dict.fromkeys(row["task"] for row in runs[0]["per_prompt"] if row["task"] is not None)
    return {
        task: {run["name"]: _of_task([r for r in run["per_prompt"] if r["task"] == task], seed) for run in runs}
        for task in tasks
    }


def _of_task(rows: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    speedups = [row["speedup"] for row in rows if row["speedup"]]
    rounds, committed = sum(row["rounds"] for row in rows), sum(row["committed"] for row in rows)
    return {
        "prompts": len(rows),
        "speedup": _median(speedups),
        "speedup_interval": bootstrap(speedups, seed),
        "tokens_per_round": committed / rounds if rounds else None,
    }


def engine_share(stages: dict[str, float], seconds: float) -> float | None:
    """Share of the time after the prefill that went neither into the target's pass nor into the draft."""
    models = stages["verify"] + stages["propose"] + stages["observe"]
    return max(seconds - models, 0.0) / seconds if seconds > 0 else None


def recommended(results: dict[str, Any]) -> str:
    """The draft with the highest median speed-up; `plain` when none beats decoding without a draft."""
    speedups = {run["name"]: run["speedup"] for run in results["runs"] if run["speedup"] is not None}
    least = max(1.0, speedups.get(UNDRAFTED, 0.0))
    paying = [run for run in results["runs"] if run["name"] not in BASELINES and speedups.get(run["name"], 0) > least]
    return str(max(paying, key=lambda run: run["speedup"])["name"]) if paying else PLAIN
