"""What happens between optimiser steps: stopping, the order of an epoch, a guard on gradients, the progress bar."""

from __future__ import annotations

import math
import signal
import threading
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import reduce
from tqdm import tqdm
from transformers import TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Args

from selfspec.train.data import TokenBatches
from selfspec.train.distributed import checksum, demand_equal
from selfspec.train.schedule import Progress
from selfspec.train.sharding import own_part

if TYPE_CHECKING:
    from selfspec.train.trainer import HeadTrainer

_PATIENCE = 3


class Epochs(TrainerCallback):
    """Gives every epoch its own order. Trainer itself reaches a sampler only through accelerate's wrappers."""

    def __init__(self, batches: TokenBatches) -> None:
        self.batches = batches

    def on_epoch_begin(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Choose the order."""
        self.batches.set_epoch(int(state.epoch or 0))


class GradientGuard(TrainerCallback):
    """Stops before gradients that are not finite spoil the weights."""

    def __init__(self, trainer: HeadTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Look at all gradients of the step; DeepSpeed keeps them to itself and skips steps that overflow."""
        gradients = [own_part(p.grad) for p in self.trainer.head.parameters() if p.grad is not None]
        if gradients:
            self.trainer.demand_finite(torch.stack([torch.isfinite(g).all() for g in gradients]).all(), "gradient")


class SameWeights(TrainerCallback):
    """Compares the weights of all processes after the first step: equal gradients make equal weights."""

    def __init__(self, trainer: HeadTrainer) -> None:
        self.trainer = trainer
        self.compared = False

    def on_step_end(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Compare once."""
        if self.compared or args.world_size == 1:
            return
        self.compared = True
        with self.trainer.whole_head() as head:
            sums = checksum(p for p in head.parameters() if p.requires_grad)
        demand_equal(sums, args.device, "weights")


class Divergence(TrainerCallback):
    """Stops a run whose loss, after having fallen, rises far above where it was: it seldom comes back."""

    def __init__(self, trainer: HeadTrainer) -> None:
        self.trainer = trainer
        self.best = math.inf
        self.high = 0

    def on_log(
        self, args: Args, state: State, control: Control, logs: dict[str, float] | None = None, **kwargs: Any
    ) -> None:
        """Look at the logged loss, which is the same on all processes."""
        limit = self.trainer.settings.divergence
        if not limit or logs is None or "loss" not in logs:
            return
        loss = logs["loss"]
        self.high = self.high + 1 if loss > limit * self.best else 0
        self.best = min(self.best, loss)
        if self.high >= _PATIENCE:
            self.trainer.stop_for_good(
                f"the loss is {loss:.3g} at step {state.global_step}, {loss / self.best:.1f} times what it was at its "
                f"best ({self.best:.3g}), {_PATIENCE} times in a row: training diverges"
            )


class Stopping(TrainerCallback):
    """Ends training when the minutes are over, or with a checkpoint to resume from on Ctrl-C or SIGTERM.

    Args:
        progress: of the run.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.received: int | None = None
        self.interrupted = False
        self._before: dict[int, Any] = {}

    def on_train_begin(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Start the clock and listen to signals."""
        self.progress.begin(self.progress.before)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        if self.received is not None:  # asked twice: do not wait for the step to end
            self.restore()
            raise KeyboardInterrupt
        self.received = number

    def restore(self) -> None:
        """Give signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def on_optimizer_step(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Agree with the other processes on the time and on whether to stop, before the next learning rate is set."""
        mine = torch.tensor([self.progress.measured_share(), float(self.received is not None)], device=args.device)
        if args.world_size > 1:
            mine = reduce(mine, "sum")
            mine[0] /= args.world_size
        share, stop = mine.tolist()
        self.progress.clock_share = share
        self.interrupted = bool(stop)

    def on_step_end(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Stop if it is time."""
        if self.interrupted:
            control.should_save = True
        if self.interrupted or self.progress.clock_share >= 1:
            control.should_training_stop = True

    def on_train_end(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Stop listening."""
        self.restore()


class ProgressBar(TrainerCallback):
    """One bar over the whole run, with the latest numbers; evaluations get a line of their own.

    Args:
        progress: of the run.
        show: whether to show anything.
    """

    def __init__(self, progress: Progress, show: bool) -> None:
        self.progress, self.show = progress, show
        self.bar: tqdm[Any] | None = None
        self.numbers: dict[str, str] = {}

    def on_train_begin(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Open the bar."""
        if self.show and state.is_world_process_zero:
            form = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
            self.bar = tqdm(total=100, desc="train", bar_format=form)

    def on_step_end(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Move the bar."""
        if self.bar is not None:
            self.bar.update(100 * self.progress.share(state.global_step) - self.bar.n)

    def on_log(
        self,
        args: Args,
        state: State,
        control: Control,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the latest numbers."""
        if self.bar is None or logs is None:
            return
        held_out = {k.removeprefix("eval_"): f"{v:.3f}" for k, v in logs.items() if k.startswith("eval_")}
        if held_out:
            self.bar.write(f"step {state.global_step}, held out: " + ", ".join(f"{k} {v}" for k, v in held_out.items()))
        if "loss" in logs:
            self.numbers = {"step": str(state.global_step), "loss": f"{logs['loss']:.3f}"}
            self.bar.set_postfix(self.numbers)

    def on_train_end(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None
