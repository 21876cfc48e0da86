"""transformers.Trainer for a draft head: only the head trains and is saved, the frozen target stays outside.

Letters: B rows, T places, K depths.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from selfspec.checkpoint import WEIGHTS, fill, save_head, write_json
from selfspec.errors import TrainingError
from selfspec.head import DraftHead
from selfspec.train.arguments import freeze, precise
from selfspec.train.callbacks import Divergence, Epochs, GradientGuard, ProgressBar, SameWeights, Stopping
from selfspec.train.data import Fillers, TokenBatches, TrainingRows, collate, to_verified
from selfspec.train.recipe import Optimisation
from selfspec.train.resume import newest_checkpoint
from selfspec.train.schedule import Progress
from selfspec.train.sharding import (
    for_writing,
    load_whole,
    optimizer_state,
    set_optimizer_state,
    shard,
    whole,
)
from selfspec.train.steps import PROGRESS, Begun, Steps, steps_of_run

OPTIMIZER = "optimizer.pt"
_WRITING = ("PytorchStreamWriter", "iostream")
"""In the messages of RuntimeErrors that torch.save raises when a disk is full."""
_ENDLESS = 1_000_000_000


class TrainedHead(nn.Module):
    """The head as Trainer wants a model: a batch in, a loss out. The target is no submodule of it."""

    accepts_loss_kwargs = True

    def __init__(self, head: DraftHead, settings: Optimisation, device: torch.device) -> None:
        super().__init__()
        self.head = head
        self.device_type, self.precise = device.type, precise(settings, device)
        self.offload = settings.offload_activations

    def forward(
        self,
        tokens: Tensor,
        next_tokens: Tensor,
        counts: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | None = None,
        **features: Tensor,
    ) -> dict[str, Tensor]:
        """Loss (scalar float32), `correct` and `seen` ([K] float32). Arguments as `collate` makes them.

        `num_items_in_batch` is the number of labels in the whole step, over all processes and accumulated batches.
        """
        batch = {"tokens": tokens, "next_tokens": next_tokens, "counts": counts, **features}
        verified = to_verified(batch, self.head.needs, self.head.target)
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.precise), self._saved():
            result = self.head.loss(verified, labels >= 0, num_items_in_batch)
        return {"loss": result.loss.float(), "correct": result.correct, "seen": result.seen}

    def _saved(self) -> AbstractContextManager[Any]:
        """Where what the backward pass needs waits for it."""
        return save_on_cpu() if self.offload and self.training else nullcontext()


class HeadTrainer(Trainer):
    """Trains one head.

    Args:
        head: in float32, on the target's device.
        train_rows: what to learn from.
        eval_rows: held-out rows, for loss and accuracy per depth.
        settings: of the optimisation.
        args: of Trainer; see `training_arguments`.
        show: show a progress bar.
        strategy: how several processes share the work, see `selfspec.train.distributed`.
        steps: of the run that goes on, where one does; those that `args` were made with.
    """

    def __init__(
        self,
        head: DraftHead,
        train_rows: TrainingRows,
        eval_rows: TrainingRows | None,
        settings: Optimisation,
        args: TrainingArguments,
        show: bool = True,
        strategy: str = "ddp",
        steps: Steps | None = None,
    ) -> None:
        freeze(head)
        self.head, self.trained = head, TrainedHead(head, settings, args.device)
        self.settings = settings
        self.rows, self.held_out = train_rows, eval_rows
        self.steps = steps or Steps.of(settings, args.world_size)
        _, parts = self.steps.shared(args.world_size)
        self.batches = TokenBatches(
            train_rows.lengths, self.steps.tokens, settings.seed, args.process_index, args.world_size, parts
        )
        self.progress = Progress(settings, self._planned_steps(args))
        super().__init__(
            model=self.trained, args=args, train_dataset=train_rows, eval_dataset=eval_rows, data_collator=collate
        )
        self.strategy = strategy
        self._spread(args)
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.forecast: dict[str, Any] = {}
        self.stopping = Stopping(self.progress)
        watchers = (GradientGuard(self), SameWeights(self), Divergence(self))
        for added in (Epochs(self.batches), *watchers, self.stopping, ProgressBar(self.progress, show)):
            self.add_callback(added)

    def _spread(self, args: TrainingArguments) -> None:
        """Shard the head as the strategy says, and see that Trainer does what it says too."""
        stage = int(self.strategy[4:]) if self.strategy.startswith("zero") else 0
        if self.is_fsdp_enabled or _zero_stage(self) != stage:
            raise TrainingError(
                f"the strategy is {self.strategy}, but accelerate is set up for "
                f"{self.accelerator.distributed_type.value} with ZeRO stage {_zero_stage(self)}; start a new process, "
                "in which nothing uses accelerate before"
            )
        self.is_distributed_loading_by_transformers = self.strategy == "fsdp"  # Trainer then wraps nothing around it
        if self.strategy == "fsdp":
            shard(self.trained, args.device)

    @contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        """Trainer's `no_sync` for FSDP2, which asks the model for a configuration that heads do not have."""
        cast(FSDPModule, self.trained).set_requires_gradient_sync(False)
        try:
            yield
        finally:
            cast(FSDPModule, self.trained).set_requires_gradient_sync(True)

    @contextmanager
    def whole_head(self) -> Iterator[DraftHead]:
        """The head with all its weights, whatever the strategy. All processes must take part."""
        with whole(self.trained):
            yield self.head

    def _planned_steps(self, args: TrainingArguments) -> int | None:
        per_epoch = -(-len(self.batches) // args.gradient_accumulation_steps)
        epochs = self.settings.epochs
        limits = [self.settings.max_steps, None if epochs is None else math.ceil(epochs * per_epoch)]
        planned = [limit for limit in limits if limit is not None]
        args.max_steps = min(planned, default=_ENDLESS)
        return min(planned, default=None)

    # Data

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches of this process; sharded here, not by accelerate, which would pad and reorder them."""
        return DataLoader(Fillers(self.rows), batch_sampler=self.batches, collate_fn=collate)

    # Optimisation

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; however it ends, signals go back to whoever had them."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self.stopping.restore()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, with the parameters that the head wants trained more slowly in groups of their own."""
        optimizer = super().create_optimizer(*args, **kwargs)
        for start, share in self.head.learning_rates().items():
            slow = {id(p) for name, p in self.head.named_parameters() if name.startswith(start)}
            for group in list(optimizer.param_groups):
                chosen = [p for p in group["params"] if id(p) in slow]
                if chosen:
                    group["params"] = [p for p in group["params"] if id(p) not in slow]
                    optimizer.add_param_group({**group, "params": chosen, "lr": share * group["lr"]})
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LRScheduler:
        """The learning rate of `Progress`."""
        if self.lr_scheduler is None:
            chosen = optimizer or self.optimizer
            assert chosen is not None
            self.lr_scheduler = LambdaLR(chosen, lambda step: self.progress.factor(step))
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, but a loss that is not finite ends the run with the last good weights saved.

        Raises:
            TrainingError: naming the step.
        """
        self.head.at(self.progress.share(self.state.global_step) if model.training else 1.0)
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        value = loss[0] if isinstance(loss, tuple) else loss
        self.demand_finite(torch.isfinite(value.detach()).all(), "loss")
        return loss

    def demand_finite(self, finite: Tensor, what: str) -> None:
        """Save and raise TrainingError on all processes unless `finite` (a bool scalar) holds on all of them."""
        if self.accelerator.num_processes > 1:
            finite = self.accelerator.gather(finite.view(1)).all()
        if bool(finite):
            return
        step = self.state.global_step + 1
        self.stop_for_good(f"the {what} is not finite at step {step}")

    def stop_for_good(self, reason: str) -> NoReturn:
        """Save the weights if they are finite, and raise TrainingError with the reason and where good weights are."""
        with self.whole_head() as head:
            finite = all(bool(torch.isfinite(p).all()) for p in head.parameters())
        if finite:
            self._save_checkpoint(self.model_wrapped, None)
        found = newest_checkpoint(Path(str(self.args.output_dir)))
        kept = f"the last good weights are in {found}" if found else "there is no checkpoint yet"
        raise TrainingError(
            f"{reason}; {kept}. Lower optimisation.lr, clip harder (grad_clip), or set precision=float32"
        )

    # Evaluation

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Loss per label and accuracy per depth on the held-out rows, logged as `eval_loss`, `eval_accuracy_1`, ..."""
        metrics = self.measure()
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def measure(self) -> dict[str, float]:
        """As `evaluate`, without logging."""
        if self.held_out is None:
            return {}
        batches = TokenBatches(
            self.held_out.lengths, self.batches.max_tokens, 0, self.args.process_index, self.args.world_size
        )
        self.head.eval()
        one = torch.ones((), device=self.args.device)
        total: Tensor | None = None
        labels = 0
        with torch.no_grad():
            for batch in DataLoader(Fillers(self.held_out), batch_sampler=batches, collate_fn=collate):
                batch = self._prepare_inputs(batch)
                labels += int((batch["labels"] >= 0).sum())
                out = self.trained(**batch, num_items_in_batch=one)
                sums = torch.cat([out["loss"].view(1), out["correct"].float(), out["seen"].float()])
                total = sums if total is None else total + sums
        assert total is not None
        total = self.accelerator.reduce(torch.cat([total, total.new_tensor([labels])]), "sum")
        depths = (len(total) - 2) // 2
        correct, seen = total[1 : 1 + depths], total[1 + depths : -1]
        metrics = {"eval_loss": float(total[0] / total[-1].clamp_min(1))}
        for depth, share in enumerate((correct / seen.clamp_min(1)).tolist(), 1):
            metrics[f"eval_accuracy_{depth}"] = share
        return metrics

    # Saving

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, SafetensorError, RuntimeError) as error:  # two packages have errors of their own for this
            if isinstance(error, RuntimeError) and not any(word in str(error) for word in _WRITING):
                raise
            raise TrainingError(
                f"the checkpoint of step {self.state.global_step} could not be written to {self.args.output_dir} "
                f"({str(error).splitlines()[0]}); those before it are whole, and the same command goes on from them"
            ) from error

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The head, complete, by one process. All processes must take part."""
        folder = Path(output_dir or str(self.args.output_dir))
        with self.whole_head() as head:
            if self.args.should_save:
                save_head(head, folder)
                begun = Begun(self.progress.seconds, self.args.world_size, self.strategy, self.steps)
                write_json(folder / PROGRESS, begun.to_dict())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.strategy == "fsdp":
            state = optimizer_state(self.trained, _plain(self.optimizer))
            if self.args.should_save:
                torch.save(state, os.path.join(output_dir, OPTIMIZER))
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))  # type: ignore[union-attr]
        else:
            super()._save_optimizer_and_scheduler(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()  # the state file, written next, says that all files are there

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        if self.strategy == "fsdp":
            weights = load_file(folder / WEIGHTS)
            load_whole(self.trained, {f"head.{name}": value for name, value in weights.items()})
        else:
            fill(self.head, folder)

    def take(self, folder: Path) -> None:
        """Replace the weights by those of a saved head. All processes must take part."""
        with for_writing(self.trained):
            self._load_from_checkpoint(str(folder))
        self.head.after_load()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        kept = steps_of_run(Path(checkpoint), self.settings, self.args.world_size, self.strategy)
        if kept != self.steps:
            raise TrainingError(f"{checkpoint} is of a run with {kept}, this one has {self.steps}; give those to both")
        if self.strategy == "fsdp":
            state = torch.load(os.path.join(checkpoint, OPTIMIZER), weights_only=True)
            set_optimizer_state(self.trained, _plain(self.optimizer), state)
            scheduler = torch.load(os.path.join(checkpoint, "scheduler.pt"), weights_only=True)
            self.lr_scheduler.load_state_dict(scheduler)  # type: ignore[union-attr]
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
        self.head.after_load()
        self.progress.begin(Begun.read(Path(checkpoint)).seconds)


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Without accelerate's wrapper."""
    inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _zero_stage(trainer: Trainer) -> int:
    plugin = trainer.accelerator.state.deepspeed_plugin
    return int(plugin.zero_stage) if plugin else 0
