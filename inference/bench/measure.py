"""Plain decoding, transformers' `generate` and drafts side by side: same prompts, same stop rules, interleaved.

What is measured
    Each prompt is decoded once by every run, in an order that rotates from prompt to prompt, after one warm-up call per
    run that is counted nowhere. `plain` is this package's decoder without a draft, drafts go through the engine that a
    patched `generate` calls, `transformers` is the unpatched `generate`.
    `seconds` and `tokens_per_s` leave the prefill out (it is in `prefill_seconds`); what a draft does with the prompt
    counts as decoding. `tokens_per_s` is tokens after the prefill over seconds.
    `cpu_seconds` is the processor time of whole calls; on a busy machine it says more than the wall clock.
    How figures are made of it: `selfspec.inference.bench.figures`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedModel

from selfspec import registry
from selfspec._version import __version__
from selfspec.changes import refuse_change
from selfspec.draft import Draft
from selfspec.errors import ConfigError
from selfspec.inference.bench.bound import cost_curve
from selfspec.inference.bench.figures import (
    ASSISTED,
    EARLY_EXIT,
    PLAIN,
    TRANSFORMERS,
    TRANSFORMERS_NGRAM,
    UNDRAFTED,
    Run,
    by_task,
    summaries,
)
from selfspec.inference.bench.guarded import GUARDED, guard_figures, guardings, measured_now
from selfspec.inference.runs import (
    Job,
    Sample,
    draft_runner,
    guarded_runner,
    prepare,
    run_plain,
    run_transformers,
)
from selfspec.inference.undrafted import Undrafted
from selfspec.inference.verdict import Difference, compare
from selfspec.provenance import device_name
from selfspec.resolve import resolve_draft
from selfspec.target import Target

_NGRAM_TOKENS = 10
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
        assistant: a smaller transformers model of the same tokenizer; also run assisted generation with it.
        early_exit: also run transformers' generation with its own early exit after so many layers.
        bound: measure what passes cost by themselves, and what speed would follow if nothing else took time.
        guard: "raw" asks drafts in every round, "guard" as a patched model does, "both" has a run of each.
        known: chances of acceptance by depth that the guard starts from, by name of the draft.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    warmup_tokens: int = 8
    baselines: bool = True
    nodes: int | Mapping[str, int] | None = None
    max_seconds: float | None = None
    assistant: PreTrainedModel | None = None
    early_exit: int | None = None
    bound: bool = False
    guard: Literal["raw", "guard", "both"] = "raw"
    known: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 2:
            raise ConfigError(f"max_new_tokens={self.max_new_tokens} leaves nothing to measure; give at least 2")
        if self.temperature < 0:
            raise ConfigError(
                f"temperature={self.temperature} is negative; 0 is greedy, 1 the model's own distribution"
            )

    def nodes_of(self, name: str) -> int | None:
        """The most nodes per tree of a draft's run."""
        name = name.removesuffix(GUARDED)
        return self.nodes.get(name) if isinstance(self.nodes, Mapping) else self.nodes

    def generate_arguments(self, max_new_tokens: int) -> dict[str, Any]:
        """Arguments of `generate`; every run takes its processors and stopping criteria from them."""
        neutral = {"top_p": 1.0, "top_k": 0 if self.temperature else 50, "temperature": self.temperature or 1.0}
        return {"do_sample": self.temperature > 0, "max_new_tokens": max_new_tokens, **neutral}


def bench(
    target: Target,
    drafts: dict[str, Draft],
    prompts: Sequence[list[int]],
    settings: BenchSettings,
    progress: Callable[[str], None] | None = None,
    tasks: Sequence[str | None] = (),
) -> dict[str, Any]:
    """Measure; the fields of the result are those of `selfspec bench --json`.

    Args:
        target: the model, not patched.
        drafts: name of the run to draft.
        prompts: token ids of each prompt.
        settings: what all runs share.
        progress: called with a run's name after each of its calls (warm-ups first, then prompts).
        tasks: of each prompt, where prompts are of several kinds.
    """
    check_prompts(target, prompts, settings)
    target.screen(prompts[0])
    runs = _runs(target, drafts, settings, prompts[0])
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
    found = _circumstances(target, prompts, settings)
    context = sorted(map(len, prompts))[len(prompts) // 2] + settings.max_new_tokens // 2
    whole = settings.temperature > 0
    curve = cost_curve(target, prompts[0], context, whole=whole) if settings.bound and not any(target.states) else None
    found["cost_curve"] = None if curve is None else {str(size): cost for size, cost in curve.items()}
    found["runs"] = summaries(runs, settings.temperature == 0, settings.seed, curve)
    for run in found["runs"]:
        run["nodes"] = settings.nodes_of(run["name"])
        run["guard"] = guard_figures(next(made.samples for made in runs if made.name == run["name"]))
        for row in run["per_prompt"]:
            row["task"] = tasks[row["prompt"]] if tasks else None
    return found | {"tasks": by_task(found["runs"], settings.seed)}


def check_prompts(target: Target, prompts: Sequence[list[int]], settings: BenchSettings) -> None:
    """Raise ConfigError when there are none or one is too long for the model; warn past what it is made for."""
    if not prompts:
        raise ConfigError("there are no prompts to measure on; give at least one")
    said = target.too_long(max(map(len, prompts)) + settings.max_new_tokens - 1)  # the last token is not read
    if said is not None and target.has_position_table:
        raise ConfigError(f"the longest prompt makes {said}; shorten it or lower max_new_tokens")
    if said is not None:
        warnings.warn(f"selfspec: the longest prompt makes {said}", UserWarning, stacklevel=2)


def bench_with_progress(
    target: Target,
    drafts: dict[str, Draft],
    prompts: Sequence[list[int]],
    settings: BenchSettings,
    tasks: Sequence[str | None] = (),
) -> dict[str, Any]:
    """The same with a progress bar on stderr."""
    check_prompts(target, prompts, settings)
    calls = len(_runs(target, drafts, settings)) * (len(prompts) + 1)
    with tqdm(total=calls, desc="bench", unit="call") as bar:

        def tell(name: str) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update()

        return bench(target, drafts, prompts, settings, tell, tasks)


def rotated(runs: list[Run], index: int) -> list[Run]:
    """The runs, starting with another one for each prompt."""
    start = index % len(runs)
    return runs[start:] + runs[:start]


def _tell(progress: Callable[[str], None] | None, run: Run) -> None:
    if progress is not None:
        progress(run.name)


def _runs(
    target: Target, drafts: dict[str, Draft], settings: BenchSettings, text: Sequence[int] | None = None
) -> list[Run]:
    """All runs; with a text, costs that a guard needs are measured on it now, before anything is timed."""
    runs = [Run(PLAIN, run_plain)]
    if target.screens and settings.temperature == 0:
        runs.append(Run(UNDRAFTED, draft_runner(Undrafted(), None)))
    if settings.baselines:
        runs += [
            Run(TRANSFORMERS, run_transformers),
            Run(TRANSFORMERS_NGRAM, lambda job: run_transformers(job, prompt_lookup_num_tokens=_NGRAM_TOKENS)),
        ]
    if settings.assistant is not None:
        runs.append(Run(ASSISTED, lambda job: run_transformers(job, assistant_model=settings.assistant)))
    if settings.early_exit is not None:
        runs.append(Run(EARLY_EXIT, lambda job: run_transformers(job, assistant_early_exit=settings.early_exit)))
    taken = {run.name for run in runs} & set(drafts)
    if taken:
        raise ConfigError(f"a draft cannot be called {', '.join(sorted(taken))}: that is a baseline's name")
    steered = guardings(target, drafts, settings.nodes_of, settings.known) if settings.guard != "raw" else {}
    for name, draft in drafts.items():
        if settings.guard != "guard":
            runs.append(Run(name, draft_runner(draft, settings.nodes_of(name))))
        if name in steered:
            if text is not None:
                measured_now(steered[name], text, {1}, settings.temperature > 0)
            runs.append(Run(name + GUARDED, guarded_runner(draft, steered[name])))
    return runs


# Runs


def _job(target: Target, prompt: list[int], settings: BenchSettings, index: int, max_new_tokens: int) -> Job:
    arguments = settings.generate_arguments(max_new_tokens)
    request = prepare(target, prompt, arguments)
    return Job(target, prompt, request, arguments, settings.seed + index)


def _difference(job: Job, plain: Sample, other: Sample) -> Difference | None:
    return compare(job.target, job.prompt, plain.tokens, other.tokens, job.request.processors)


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


def resolve_drafts(names: Sequence[str], target: Target) -> dict[str, Draft]:
    """Drafts by run name: the method's name, or the last part of a folder or Hub id.

    Raises:
        SelfspecError: a draft that cannot be loaded onto this target.
    """
    found: dict[str, Draft] = {}
    for given in names:
        method = given.partition(":")[0]
        name = method if method in registry.kinds() else Path(given).name
        made = resolve_draft(given, target)
        refuse_change(made, allowed=False)  # all runs share one target
        found[given if name in found else name] = made
    return found
