"""What a training run will take: disk, memory and time, from a few of its own batches before it starts.

A step of training is timed as it will be: batches of the run through target and head, backward, and an optimiser's
step on a copy of the weights. Nothing of the run changes: weights, gradients and order stay as they were. Once the
run is under way its own speed gives a better forecast (`Forecasting`).
"""

from __future__ import annotations

import copy
import logging
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Args

from selfspec.head import DraftHead
from selfspec.train.data import Fillers, collate
from selfspec.train.settings import DistillConfig

if TYPE_CHECKING:
    from selfspec.train.trainer import HeadTrainer

_BATCHES = 5
_BETTER_AFTER = 60.0
_ADAM = 3  # weights and two moments, float32 each
_log = logging.getLogger(__name__)
Say = Callable[[str], object]


def dataset_bytes(config: DistillConfig, hidden_size: int, tokens: int | None = None) -> int:
    """Bytes on disk of a dataset of so many tokens (`max_tokens` if not given), with all that is stored of them."""
    features = len(config.layers) + config.hidden
    wide = hidden_size * 2 if config.feature_dtype == "bfloat16" else hidden_size + 4
    each = 4 + 1 + 4 * config.predictions + 8 * config.top_logits + 4 * (config.top_logits > 0) + features * wide
    return (config.max_tokens if tokens is None else tokens) * each


def forecast(trainer: HeadTrainer) -> dict[str, Any]:
    """Before training.

    Returns:
        `hours` of the training loop (None if nothing but an interrupt ends it), `steps`, `seconds_per_step` (its share
        of evaluations included), `disk_bytes` of checkpoints and head, and `memory_bytes` of one process: what is in
        use now, what the optimiser will add, and on an accelerator the peak of the batches tried. On CPUs the peak of
        activations is not seen and left out.
    """
    device, head = trainer.args.device, trainer.head
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    both, forward = _seconds(trainer)
    seconds = both * trainer.args.gradient_accumulation_steps + _optimiser_seconds(head)
    if trainer.held_out is not None and trainer.args.eval_steps:  # measurements of loss and accuracy, spread over steps
        batches = len(trainer.batches) * sum(trainer.held_out.lengths) / sum(trainer.rows.lengths)
        seconds += forward * batches / trainer.args.eval_steps
    weights = sum(p.numel() * 4 for p in head.parameters() if p.requires_grad)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _tensor_bytes(trainer)
    result: dict[str, Any] = {"seconds_per_step": seconds, "steps": trainer.progress.steps}
    result["hours"] = hours(trainer, seconds)
    result["memory_bytes"] = peak + 3 * weights  # gradients and two moments
    result["disk_bytes"] = (2 * _ADAM + 1) * weights  # two checkpoints and the head
    return result


def announce(trainer: HeadTrainer) -> dict[str, Any]:
    """Tell the forecast, let a better one follow, and return what will hold both."""
    result = forecast(trainer)
    if trainer.args.process_index == 0:
        _log.info("%s", words(result))
    trainer.add_callback(Forecasting(trainer, result, lambda text: _log.info("%s", text)))
    return result


def hours(trainer: HeadTrainer, seconds_per_step: float, done: int = 0, before: float = 0.0) -> float | None:
    """Hours of the whole training loop with `done` steps taken in `before` seconds, evaluations included."""
    settings, steps = trainer.settings, trainer.progress.steps
    found = None if steps is None else before + (steps - done) * seconds_per_step
    limit = None if settings.max_minutes is None else settings.max_minutes * 60
    known = [value for value in (found, limit) if value is not None]
    return min(known) / 3600 if known else None


def words(result: dict[str, Any]) -> str:
    """A line for people."""
    time_text = "no end" if result["hours"] is None else f"{60 * result['hours']:.1f} minutes"
    steps = "steps until the time is over" if result["steps"] is None else f"{result['steps']} steps"
    return (
        f"forecast: {time_text} of training ({steps}, {result['seconds_per_step']:.3g} s each), "
        f"{result['memory_bytes'] / 1e9:.2f} GB of memory, {result['disk_bytes'] / 1e9:.3f} GB on disk"
    )


class Forecasting(TrainerCallback):
    """A better forecast from the first minute of training itself, told once.

    Args:
        trainer: of the run.
        result: of `forecast`; the better one is added to it under `after_the_first_minute`.
        say: takes a line for people.
    """

    def __init__(self, trainer: HeadTrainer, result: dict[str, Any], say: Say) -> None:
        self.trainer, self.result, self.say = trainer, result, say
        self.begun = 0.0
        self.first = 0

    def on_step_end(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Look at the clock; the first step warms up and does not count."""
        now = time.monotonic()
        if not self.begun:
            self.begun, self.first = now, state.global_step
        elif "after_the_first_minute" not in self.result and now - self.begun >= _BETTER_AFTER:
            pace = (now - self.begun) / (state.global_step - self.first)
            total = hours(self.trainer, pace, state.global_step, self.trainer.progress.seconds)
            better = self.result | {"seconds_per_step": pace, "hours": total}
            self.result["after_the_first_minute"] = {"seconds_per_step": pace, "hours": total}
            if state.is_world_process_zero:
                self.say(words(better))


def _seconds(trainer: HeadTrainer) -> tuple[float, float]:
    """Of a batch read, moved, passed forward and back, and of one passed forward alone; means over the epoch."""
    batches, rows = list(trainer.batches), Fillers(trainer.rows)
    count = min(_BATCHES, len(batches))
    chosen = [batches[i * len(batches) // count] for i in range(count)]
    both: list[float] = []
    forward: list[float] = []
    kept = [(p, p.grad) for p in trainer.head.parameters()]
    training = trainer.head.training
    trainer.head.train()
    try:
        for place, batch in enumerate([chosen[0], *chosen]):  # the first one warms up
            start = time.monotonic()
            inputs = trainer._prepare_inputs(collate([rows[row] for row in batch]))
            with trainer.accelerator.autocast():
                loss = trainer.trained(**inputs)["loss"]
            float(loss.detach())  # waits for the device
            middle = time.monotonic()
            loss.backward()
            if trainer.args.device.type == "cuda":
                torch.cuda.synchronize(trainer.args.device)
            if place:
                both.append(time.monotonic() - start)
                forward.append(middle - start)
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
        trainer.head.train(training)
    return statistics.mean(both), statistics.mean(forward)


def _optimiser_seconds(head: DraftHead) -> float:
    """One step of AdamW on copies of the weights."""
    copies = [copy.deepcopy(p).detach().requires_grad_() for p in head.parameters() if p.requires_grad]
    for parameter in copies:
        parameter.grad = torch.zeros_like(parameter)
    optimiser = torch.optim.AdamW(copies, lr=0.0)
    optimiser.step()
    start = time.monotonic()
    optimiser.step()
    return time.monotonic() - start


def _tensor_bytes(trainer: HeadTrainer) -> int:
    tensors = [*trainer.head.target.model.parameters(), *trainer.head.parameters(), *trainer.head.buffers()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_meta}
    return sum(storages.values())
