"""Settings of a draft for this model and this machine: search for the most tokens per second on calibration prompts.

Any draft method that has what `Tunable` lists can be tuned. optuna proposes values (tree-structured Parzen
estimator); each trial decodes the prompts one after another and is given up as soon as it lags behind the median of
the trials before it. The method's defaults are the first trial, so the result is never worse than they are.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from selfspec.draft import Draft
from selfspec.errors import ConfigError
from selfspec.fingerprint import fingerprint
from selfspec.inference.bench import BenchSettings
from selfspec.inference.runs import Job, Sample, draft_runner, prepare, run_plain
from selfspec.target import Target
from selfspec.vocab import most_frequent

_COMPARED_PROMPTS = 3


class Tunable(Protocol):
    """A draft method (the class) whose settings can be searched."""

    kind: str

    def knobs(self, target: Target) -> dict[str, tuple[Any, ...]]:
        """What may be set, and the values to choose from."""

    def start(self, target: Target) -> dict[str, Any]:
        """The values to try first: those of the method's defaults, or near them."""

    def tuned(self, base: Any, values: Mapping[str, Any]) -> Any:
        """A configuration with these values; what they leave open is as in `base`."""

    def shuffled(self, values: Mapping[str, Any], chance: random.Random) -> dict[str, Any] | None:
        """Other values of the same cost, by chance; None where there are none to compare with."""

    def from_target(self, config: Any, target: Target) -> Draft:
        """A draft."""


@dataclass(frozen=True)
class TuneSettings:
    """How to search.

    Args:
        max_new_tokens: per prompt and trial.
        max_seconds: start no trial after this time.
        max_trials: nor after this many, those of earlier calls included.
        random_sets: how many random values of the best ones' cost to compare with at the end.
        seed: of optuna and of the random values.
    """

    max_new_tokens: int = 32
    max_seconds: float = 600.0
    max_trials: int = 1000
    random_sets: int = 20
    seed: int = 0


@dataclass(eq=False)
class Tuned:
    """What was found.

    Args:
        draft: with the best settings.
        values: of its knobs.
        rate: tokens per second of the best trial.
        plain_rate: of plain decoding on the same prompts.
        trials: how many were made, given-up ones included, over all calls.
        random_rates: tokens per second of random values of the same cost, on the first prompts.
        again: the best values on those prompts, measured in turn with the random ones.
    """

    draft: Draft
    values: dict[str, Any]
    rate: float
    plain_rate: float
    trials: int
    random_rates: list[float] = field(default_factory=list)
    again: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Figures and settings for JSON."""
        mean = sum(self.random_rates) / len(self.random_rates) if self.random_rates else None
        return {
            "draft": self.draft.kind,
            "values": self.values,
            "tokens_per_s": self.rate,
            "plain_tokens_per_s": self.plain_rate,
            "speedup": self.rate / self.plain_rate if self.plain_rate else None,
            "trials": self.trials,
            "random_same_cost": {
                "sets": len(self.random_rates),
                "mean_tokens_per_s": mean,
                "found_tokens_per_s": self.again,
            },
        }


def tune(
    method: Tunable,
    base: Any,
    target: Target,
    prompts: Sequence[list[int]],
    journal: Path,
    settings: TuneSettings,
    progress: Callable[[int, float], None] | None = None,
) -> Tuned:
    """Search. A call with the same model, method, base settings and prompts goes on where an earlier one stopped.

    Args:
        method: the class of a draft method.
        base: its configuration; knobs are set over it. With `draft_vocab_size` and no `vocab_ids`, the draft vocabulary
            is the most frequent tokens of the prompts and of what the target writes after them.
        target: the model.
        prompts: token ids of each.
        journal: the file that holds the trials.
        settings: how to search.
        progress: called after each trial with the number of trials and the best rate so far.

    Raises:
        ConfigError: nothing to tune, no prompts, or optuna is not installed.
    """
    optuna = _optuna()
    if not hasattr(method, "knobs"):
        raise ConfigError(f"draft method {method.kind!r} has no settings to tune")
    if not prompts:
        raise ConfigError("there are no prompts to tune on; give at least one")
    jobs = [_job(target, prompt, settings, index) for index, prompt in enumerate(prompts)]
    plain = [run_plain(job) for job in jobs]
    _choose_vocabulary(base, target, prompts, plain)
    knobs = method.knobs(target)
    study = _study(optuna, journal, _study_name(method, base, target, prompts, settings, knobs), settings.seed)
    if not study.trials:
        study.enqueue_trial(method.start(target))
    deadline, best = time.monotonic() + settings.max_seconds, 0.0
    while _made(study) < settings.max_trials and (not best or time.monotonic() < deadline):
        study.optimize(lambda trial: _try(optuna, trial, method, base, target, jobs, knobs), n_trials=1)
        best = study.best_value
        if progress is not None:
            progress(_made(study), best)
    values = dict(study.best_params)
    draft = method.from_target(method.tuned(base, values), target)
    found = Tuned(draft, values, study.best_value, _rate(plain), _made(study))
    _compare(found, method, base, target, jobs[:_COMPARED_PROMPTS], settings)
    return found


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("tuning needs optuna; run: pip install 'selfspec[tune]'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _job(target: Target, prompt: list[int], settings: TuneSettings, seed: int) -> Job:
    arguments = BenchSettings(settings.max_new_tokens).generate_arguments(settings.max_new_tokens)
    return Job(target, prompt, prepare(target, prompt, arguments), arguments, seed)


def _choose_vocabulary(base: Any, target: Target, prompts: Sequence[list[int]], plain: Sequence[Sample]) -> None:
    size = getattr(base, "draft_vocab_size", 0)
    if not size or base.vocab_ids is not None:
        return
    counts = torch.zeros(target.vocab_size, dtype=torch.long)
    for tokens in [*prompts, *(sample.tokens for sample in plain)]:
        counts += torch.bincount(torch.tensor(tokens), minlength=target.vocab_size)
    base.vocab_ids = most_frequent(counts, size).tolist()


def _study_name(
    method: Tunable, base: Any, target: Target, prompts: Any, settings: TuneSettings, knobs: Mapping[str, Any]
) -> str:
    """Trials belong together when all that their rates depend on is the same."""
    machine = [torch.get_num_threads(), str(target.device), str(target.dtype)]
    what = [method.kind, base.to_dict(), fingerprint(target), prompts, settings.max_new_tokens, machine, sorted(knobs)]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _study(optuna: Any, journal: Path, name: str, seed: int) -> Any:
    journal.parent.mkdir(parents=True, exist_ok=True)
    backend = optuna.storages.journal.JournalFileBackend(str(journal))
    study = optuna.create_study(
        storage=optuna.storages.JournalStorage(backend),
        study_name=name,
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=0),
    )
    if _made(study):  # the seed must not repeat the trials of the first call
        study.sampler = optuna.samplers.TPESampler(seed=seed + _made(study))
    return study


def _made(study: Any) -> int:
    """Finished trials; one that is only planned, or was interrupted, does not count."""
    return sum(trial.state.is_finished() for trial in study.trials)


def _try(
    optuna: Any, trial: Any, method: Tunable, base: Any, target: Target, jobs: Sequence[Job], knobs: Mapping[str, Any]
) -> float:
    """Tokens per second of one choice of values."""
    values = {name: trial.suggest_categorical(name, choices) for name, choices in knobs.items()}
    draft = method.from_target(method.tuned(base, values), target)
    samples: list[Sample] = []
    for step, job in enumerate(jobs):
        samples.append(draft_runner(draft)(job))
        trial.report(_rate(samples), step)
        if step < len(jobs) - 1 and trial.should_prune():
            raise optuna.TrialPruned
    return _rate(samples)


def _rate(samples: Sequence[Sample]) -> float:
    """Tokens per second over all, the prefill left out."""
    tokens, seconds = sum(len(s.tokens) - s.first for s in samples), sum(s.seconds for s in samples)
    return tokens / seconds if seconds > 0 else 0.0


def _compare(
    found: Tuned, method: Tunable, base: Any, target: Target, jobs: Sequence[Job], settings: TuneSettings
) -> None:
    """Random values of the same cost beside the found ones, in turn, so that a slow moment of the machine hits both."""
    chance = random.Random(settings.seed)
    again: list[Sample] = []
    for _ in range(settings.random_sets):
        values = method.shuffled(found.values, chance)
        if values is None:
            return
        draft = method.from_target(method.tuned(base, values), target)
        found.random_rates.append(_rate([draft_runner(draft)(job) for job in jobs]))
        again += [draft_runner(found.draft)(job) for job in jobs]
    found.again = _rate(again) if again else None
