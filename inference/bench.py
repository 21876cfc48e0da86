"""Plain decoding, transformers' `generate` and drafts side by side: same prompts, same stop rules, interleaved.

What is measured
    Each prompt is decoded once by every run, in an order that rotates from prompt to prompt, after one warm-up call per
    run that is counted nowhere. `plain` is this package's decoder without a draft, drafts go through the engine that a
    patched `generate` calls, `transformers` is the unpatched `generate`.
    `seconds` and `tokens_per_s` leave the prefill out (it is in `prefill_seconds`); what a draft does with the prompt
    counts as decoding. `tokens_per_s` is tokens after the prefill over seconds.
    `cpu_seconds` is the processor time of whole calls; on a busy machine it says more than the wall clock.
    Speed-ups are medians over prompts of paired ratios of `tokens_per_s`, with a 95% bootstrap interval.
    `engine_share` is the time of a round spent neither in the target's pass (verify) nor in the draft (propose and
    observe): accepting, emitting, keeping the cache, and everything not timed by name.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tqdm import tqdm

from selfspec import registry
from selfspec._version import __version__
from selfspec.draft import Draft
from selfspec.errors import ConfigError
from selfspec.inference.runs import (
    Job,
    Runner,
    Sample,
    draft_runner,
    prepare,
    run_plain,
    run_transformers,
)
from selfspec.inference.verdict import Difference, compare, overall
from selfspec.resolve import resolve_draft
from selfspec.stats import Stats
from selfspec.target import Target

PLAIN = "plain"
TRANSFORMERS = "transformers"
TRANSFORMERS_NGRAM = "transformers-prompt-lookup"
_NGRAM_TOKENS = 10
_RESAMPLES = 2000
_FEWEST = 3


@dataclass(frozen=True)
class BenchSettings:
    """What all runs share.

    Args:
        max_new_tokens: per prompt; fewer only where the end token comes first.
        temperature: 0 is greedy.
        seed: of sampling; prompt i uses seed + i in every run.
        warmup_tokens: length of the warm-up call.
        baselines: also run transformers' own `generate`, with and without its prompt lookup.
        nodes: the most nodes per tree, for all drafts or by name; None leaves it to the draft.
        max_seconds: start no further prompt after this time, once three are done; None is no limit.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    warmup_tokens: int = 8
    baselines: bool = True
    nodes: int | Mapping[str, int] | None = None
    max_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 2:
            raise ConfigError(f"max_new_tokens={self.max_new_tokens} leaves nothing to measure; give at least 2")
        if self.temperature < 0:
            raise ConfigError(
                f"temperature={self.temperature} is negative; 0 is greedy, 1 the model's own distribution"
            )

    def nodes_of(self, name: str) -> int | None:
        """The most nodes per tree of a draft's run."""
        return self.nodes.get(name) if isinstance(self.nodes, Mapping) else self.nodes

    def generate_arguments(self, max_new_tokens: int) -> dict[str, Any]:
        """Arguments of `generate`; every run takes its processors and stopping criteria from them."""
        neutral = {"top_p": 1.0, "top_k": 0 if self.temperature else 50, "temperature": self.temperature or 1.0}
        return {"do_sample": self.temperature > 0, "max_new_tokens": max_new_tokens, **neutral}


@dataclass(eq=False)
class _Run:
    name: str
    runner: Runner
    samples: list[Sample] = field(default_factory=list)
    differences: list[Difference | None] = field(default_factory=list)


def bench(
    target: Target,
    drafts: dict[str, Draft],
    prompts: Sequence[list[int]],
    settings: BenchSettings,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure; the fields of the result are those of `selfspec bench --json`.

    Args:
        target: the model, not patched.
        drafts: name of the run to draft.
        prompts: token ids of each prompt.
        settings: what all runs share.
        progress: called with a run's name after each of its calls (warm-ups first, then prompts).
    """
    check_prompts(target, prompts, settings)
    runs = _runs(drafts, settings)
    for run in runs:
        run.runner(_job(target, prompts[0], settings, 0, min(settings.warmup_tokens, settings.max_new_tokens)))
        _tell(progress, run)
    begun = time.monotonic()
    for index, prompt in enumerate(prompts):
        if settings.max_seconds is not None and index >= _FEWEST and time.monotonic() - begun > settings.max_seconds:
            prompts = prompts[:index]
            break
        job = _job(target, prompt, settings, index, settings.max_new_tokens)
        for run in rotated(runs, index):
            run.samples.append(run.runner(job))
            _tell(progress, run)
        if settings.temperature == 0:
            for run in runs:
                run.differences.append(_difference(job, runs[0].samples[-1], run.samples[-1]))
    return {**_circumstances(target, prompts, settings), "runs": _summaries(runs, settings)}


def check_prompts(target: Target, prompts: Sequence[list[int]], settings: BenchSettings) -> None:
    """Raise ConfigError when there are none, or one is too long for the model."""
    if not prompts:
        raise ConfigError("there are no prompts to measure on; give at least one")
    longest = max(map(len, prompts)) + settings.max_new_tokens
    if target.max_positions is not None and longest > target.max_positions:
        raise ConfigError(
            f"the longest prompt and its {settings.max_new_tokens} new tokens make {longest}, the model is made for "
            f"{target.max_positions}; shorten the prompt or lower max_new_tokens"
        )


def bench_with_progress(
    target: Target, drafts: dict[str, Draft], prompts: Sequence[list[int]], settings: BenchSettings
) -> dict[str, Any]:
    """The same with a progress bar on stderr."""
    check_prompts(target, prompts, settings)
    calls = len(_runs(drafts, settings)) * (len(prompts) + 1)
    with tqdm(total=calls, desc="bench", unit="call") as bar:

        def tell(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        return bench(target, drafts, prompts, settings, tell)


def rotated(runs: list[_Run], index: int) -> list[_Run]:
    """The runs, starting with another one for each prompt."""
    start = index % len(runs)
    return runs[start:] + runs[:start]


def _tell(progress: Callable[[str], None] | None, run: _Run) -> None:
    if progress is not None:
        progress(run.name)


def _runs(drafts: dict[str, Draft], settings: BenchSettings) -> list[_Run]:
    runs = [_Run(PLAIN, run_plain)]
    if settings.baselines:
        runs += [
            _Run(TRANSFORMERS, run_transformers),
            _Run(TRANSFORMERS_NGRAM, lambda job: run_transformers(job, prompt_lookup_num_tokens=_NGRAM_TOKENS)),
        ]
    taken = {run.name for run in runs} & set(drafts)
    if taken:
        raise ConfigError(f"a draft cannot be called {', '.join(sorted(taken))}: that is a baseline's name")
    return runs + [_Run(name, draft_runner(draft, settings.nodes_of(name))) for name, draft in drafts.items()]


# Runs


def _job(target: Target, prompt: list[int], settings: BenchSettings, index: int, max_new_tokens: int) -> Job:
    arguments = settings.generate_arguments(max_new_tokens)
    request = prepare(target, prompt, arguments)
    return Job(target, prompt, request, arguments, settings.seed + index)


def _difference(job: Job, plain: Sample, other: Sample) -> Difference | None:
    return compare(job.target, job.prompt, plain.tokens, other.tokens, job.request.processors)


# Figures


def _summaries(runs: list[_Run], settings: BenchSettings) -> list[dict[str, Any]]:
    baselines = [run for run in runs if run.name in (PLAIN, TRANSFORMERS)]
    best = [max(run.samples[i].rate for run in baselines) for i in range(len(runs[0].samples))]
    plain = [sample.rate for sample in runs[0].samples]
    return [_summary(run, plain, best, settings) for run in runs]


def _summary(run: _Run, plain: list[float], best: list[float], settings: BenchSettings) -> dict[str, Any]:
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
        "nodes": settings.nodes_of(run.name),
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
        "speedup_interval": bootstrap(against_plain, settings.seed),
        "speedup_best_baseline": _median(against_best),
        "speedup_best_baseline_interval": bootstrap(against_best, settings.seed),
        "tokens_per_round": total.tokens_per_round,
        "accepted_per_round": total.accepted_per_round,
        "accepted_by_depth": total.accepted_by_depth if total.rounds else [],
        "conditional_by_depth": total.conditional_by_depth,
        "rounds": total.rounds,
        "proposed": total.proposed,
        "accepted": total.accepted,
        "committed": total.committed,
        "identical": overall(run.differences) if settings.temperature == 0 else None,
        "differences": [{"prompt": i, **d.to_dict()} for i, d in enumerate(run.differences) if d is not None],
        "stage_seconds": dict(total.seconds) if staged else None,
        "engine_share": engine_share(total.seconds, seconds) if staged else None,
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
    drawn = np.random.default_rng(seed).choice(np.asarray(values), size=(_RESAMPLES, len(values)))
    return _quantiles(np.median(drawn, axis=1).tolist(), (0.025, 0.975))


def engine_share(stages: dict[str, float], seconds: float) -> float | None:
    """Share of the time after the prefill that went neither into the target's pass nor into the draft."""
    models = stages["verify"] + stages["propose"] + stages["observe"]
    return max(seconds - models, 0.0) / seconds if seconds > 0 else None


def recommended(results: dict[str, Any]) -> str:
    """The draft with the highest median speed-up; `plain` when none beats plain decoding."""
    drafts = [run for run in results["runs"] if run["name"] not in (PLAIN, TRANSFORMERS, TRANSFORMERS_NGRAM)]
    paying = [run for run in drafts if run["speedup"] is not None and run["speedup"] > 1]
    return str(max(paying, key=lambda run: run["speedup"])["name"]) if paying else PLAIN


# Circumstances


def _circumstances(target: Target, prompts: Sequence[list[int]], settings: BenchSettings) -> dict[str, Any]:
    return {
        "target": str(target.model.config._name_or_path),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "machine": device_name(target.device),
        "threads": torch.get_num_threads(),
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "versions": {"selfspec": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


def device_name(device: torch.device) -> str:
    """The name of the accelerator, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def resolve_drafts(names: Sequence[str], target: Target) -> dict[str, Draft]:
    """Drafts by run name: the method's name, or the last part of a folder or Hub id.

    Raises:
        SelfspecError: a draft that cannot be loaded onto this target.
    """
    found: dict[str, Draft] = {}
    for given in names:
        method = given.partition(":")[0]
        name = method if method in registry.kinds() else Path(given).name
        found[given if name in found else name] = resolve_draft(given, target)
    return found
