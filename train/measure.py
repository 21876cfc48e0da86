"""How fast a head trains here: tokens per second and peak memory, beside the target's forward pass alone.

Three loops over the same batches: `floor` only runs the target and keeps nothing; `online` trains the head on features
of the target made in the same step; `offline` trains it on features from disk. The rows have as many tokens as a
recipe's batches, so what is measured is what a run of that recipe does. The loops take turns, so that a machine that
slows down slows all of them.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from selfspec.errors import ConfigError
from selfspec.head import DraftHead
from selfspec.target import Target
from selfspec.train import distill
from selfspec.train.arguments import precise, training_arguments
from selfspec.train.data import TokenBatches, TrainingRows, collate
from selfspec.train.recipe import Evaluation, Recipe
from selfspec.train.run import draft_vocabulary, make_data, new_head
from selfspec.train.shards import load_shards
from selfspec.train.trainer import HeadTrainer

_WARM = 2


def measure(
    recipe: Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, steps: int = 8, repeats: int = 3
) -> dict[str, Any]:
    """Time all three loops in this process, in turns.

    Args:
        recipe: of the head; its data is read, not written by the target, whatever its mode.
        model: the target.
        tokenizer: the target's.
        steps: optimiser steps to time in each repetition, after two that are not.
        repeats: how often each loop is timed.

    Returns:
        `kind` of head, `steps`, `repeats`, `batch_tokens`, `device`, `dtype` of the target, `precision` in which the
        head computes, `threads`, and `runs`: per loop `tokens` (real ones, without padding) and `seconds` of all
        repetitions together, `tokens_per_s` (the median repetition), `slowest` and `fastest` (the same of the extreme
        ones), `share_of_floor` (of the floor's median) and `peak_bytes` (of the accelerator, or the resident memory of
        the process on CPUs, the target included).

    Raises:
        ConfigError, DataError: as `train` does; also no step or no repetition to time.
    """
    if steps < 1 or repeats < 1:
        raise ConfigError(f"cannot time {repeats} x {steps} steps; give at least one of each")
    target = Target(model)
    try:
        with tempfile.TemporaryDirectory() as work, _quiet():
            return _measured(recipe, target, tokenizer, steps, repeats, Path(work))
    finally:
        target.release()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the lines about the few rows that are made to be timed."""
    log = logging.getLogger(distill.__name__)
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)


def _measured(
    recipe: Recipe, target: Target, tokenizer: PreTrainedTokenizerBase, steps: int, repeats: int, work: Path
) -> dict[str, Any]:
    tokens = recipe.optimisation.batch_tokens * 4 // max(len(recipe.data), 1)
    sources = [
        replace(s, mode="label", source=s.source or "stdlib", max_tokens=min(s.max_tokens, tokens), weight=1.0)
        for s in recipe.data
    ]
    small = replace(recipe, data=sources, data_folder=str(work / "data"), evaluation=Evaluation(tokens=0, prompts=0))
    rows = {stored: _rows(replace(small, store_features=stored), target, tokenizer) for stored in (False, True)}
    found: dict[str, list[dict[str, float]]] = {"floor": [], "online": [], "offline": []}
    for turn in range(repeats):
        for name, runs in found.items():
            head, read = rows[name == "offline"]
            loop = _floor if name == "floor" else _training
            runs.append(loop(recipe, head, read, steps, work / f"{name}-{turn}"))
    summed = {name: _summed(runs) for name, runs in found.items()}
    for values in summed.values():
        values["share_of_floor"] = values["tokens_per_s"] / summed["floor"]["tokens_per_s"]
    return {
        "kind": recipe.draft["kind"],
        "steps": steps,
        "repeats": repeats,
        "batch_tokens": recipe.optimisation.batch_tokens,
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "precision": "bfloat16" if precise(recipe.optimisation, target.device) else "float32",
        "threads": torch.get_num_threads(),
        "runs": summed,
    }


def _rows(recipe: Recipe, target: Target, tokenizer: PreTrainedTokenizerBase) -> tuple[DraftHead, TrainingRows]:
    """A head and what it is to read."""
    head = new_head(recipe, target)
    data = make_data(recipe, target, tokenizer, head, progress=False)
    head.output.set_vocab(draft_vocabulary(recipe, data, target, tokenizer))
    return head, TrainingRows([(load_shards(p), w) for p, w in data.train], head.needs, target.hidden_size)


def _summed(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The repetitions of one loop."""
    speeds = [run["tokens"] / run["seconds"] for run in runs]
    return {
        "tokens": sum(run["tokens"] for run in runs),
        "seconds": sum(run["seconds"] for run in runs),
        "tokens_per_s": statistics.median(speeds),
        "slowest": min(speeds),
        "fastest": max(speeds),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
    }


def _floor(recipe: Recipe, head: DraftHead, rows: TrainingRows, steps: int, folder: Path) -> dict[str, float]:
    """The target's forward pass over the batches that a run would see."""
    target = head.target
    args = training_arguments(recipe.optimisation, folder, target.device, 1, 1, 0)
    per_step = args.gradient_accumulation_steps
    batches = TokenBatches(rows.lengths, max(recipe.optimisation.batch_tokens // per_step, 1), recipe.optimisation.seed)
    stream = _endless(DataLoader(rows, batch_sampler=batches, collate_fn=collate))
    seen = 0
    with _peak(target.device) as peak:
        for step in range(-_WARM, steps):
            if step == 0:
                _wait(target.device)
                began, seen = time.perf_counter(), 0
            for _ in range(per_step):
                batch = {name: value.to(target.device) for name, value in next(stream).items()}
                real = torch.arange(batch["tokens"].shape[1], device=target.device) < batch["counts"].unsqueeze(1)
                target.features(batch["tokens"], None if bool(real.all()) else real.long(), head.needs)
                seen += int(batch["counts"].sum())
        _wait(target.device)
        seconds = time.perf_counter() - began
    return {"tokens": seen, "seconds": seconds, "peak_bytes": peak()}


class _Clock(TrainerCallback):
    """Starts after the warm-up and counts tokens."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.began = 0.0
        self.tokens = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == _WARM:
            _wait(self.device)
            self.began, self.tokens = time.perf_counter(), 0


def _training(recipe: Recipe, head: DraftHead, rows: TrainingRows, steps: int, folder: Path) -> dict[str, float]:
    settings = replace(recipe.optimisation, epochs=None, max_minutes=None, max_steps=steps + _WARM)
    device = head.target.device
    args = training_arguments(settings, folder, device, steps + _WARM, steps + _WARM + 1, 0)
    args.save_strategy = "no"
    clock = _Clock(device)

    class Counting(HeadTrainer):
        def compute_loss(self, model: Any, inputs: Any, *rest: Any, **kwargs: Any) -> Any:
            clock.tokens += int(inputs["counts"].sum())
            return super().compute_loss(model, inputs, *rest, **kwargs)

    trainer = Counting(head, rows, None, settings, args, show=False)
    trainer.add_callback(clock)
    with _peak(device) as peak:
        trainer.train()
        _wait(device)
        seconds = time.perf_counter() - clock.began
    return {"tokens": clock.tokens, "seconds": seconds, "peak_bytes": peak()}


def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def _peak(device: torch.device) -> Iterator[Callable[[], int]]:
    """The most memory in use since the block began."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device)
        return
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")  # VmHWM starts again; see proc(5)
    yield lambda: _resident(status)


def _resident(status: Path) -> int:
    if not status.exists():
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = (line.split() for line in status.read_text().splitlines())
    return next(int(words[1]) * 1024 for words in lines if words[0] == "VmHWM:")
