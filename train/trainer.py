"""transformers.Trainer for a draft head: only the head trains and is saved, the frozen target stays outside.

Letters: B rows, T places, K depths.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from selfspec.checkpoint import fill, save_head, write_json
from selfspec.errors import ConfigError, TrainingError
from selfspec.head import DraftHead
from selfspec.train.callbacks import Epochs, GradientGuard, ProgressBar, Stopping
from selfspec.train.data import TokenBatches, TrainingRows, collate, to_verified
from selfspec.train.recipe import Optimisation
from selfspec.train.schedule import Progress

PROGRESS = "progress.json"
_ENDLESS = 1_000_000_000


class TrainedHead(nn.Module):
    """The head as Trainer wants a model: a batch in, a loss out. The target is no submodule of it."""

    accepts_loss_kwargs = True

    def __init__(self, head: DraftHead) -> None:
        super().__init__()
        self.head = head

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
        result = self.head.loss(verified, labels >= 0, num_items_in_batch)
        return {"loss": result.loss.float(), "correct": result.correct, "seen": result.seen}


class HeadTrainer(Trainer):
    """Trains one head.

    Args:
        head: in float32, on the target's device.
        train_rows: what to learn from.
        eval_rows: held-out rows, for loss and accuracy per depth.
        settings: of the optimisation.
        args: of Trainer; see `training_arguments`.
        show: show a progress bar.
    """

    def __init__(
        self,
        head: DraftHead,
        train_rows: TrainingRows,
        eval_rows: TrainingRows | None,
        settings: Optimisation,
        args: TrainingArguments,
        show: bool = True,
    ) -> None:
        freeze(head)
        self.head, self.trained = head, TrainedHead(head)
        self.settings = settings
        self.rows, self.held_out = train_rows, eval_rows
        self.batches = TokenBatches(
            train_rows.lengths,
            micro_tokens(settings, args.world_size),
            settings.seed,
            args.process_index,
            args.world_size,
        )
        self.progress = Progress(settings, self._planned_steps(args))
        super().__init__(
            model=self.trained, args=args, train_dataset=train_rows, eval_dataset=eval_rows, data_collator=collate
        )
        if self.is_fsdp_enabled or (self.is_deepspeed_enabled and _zero_stage(self) > 2):
            raise ConfigError("heads are small: use plain data parallelism, or DeepSpeed ZeRO up to stage 2")
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        self.forecast: dict[str, Any] = {}
        self.stopping = Stopping(self.progress)
        for added in (Epochs(self.batches), GradientGuard(self), self.stopping, ProgressBar(self.progress, show)):
            self.add_callback(added)

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
        return DataLoader(self.rows, batch_sampler=self.batches, collate_fn=collate)

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
        self._save_checkpoint(self.model_wrapped, None)
        raise TrainingError(
            f"the {what} is not finite at step {step}; the weights before it are in {self._newest_checkpoint()}. Lower "
            "optimisation.lr, clip harder (grad_clip), or set precision=float32"
        )

    def _newest_checkpoint(self) -> Path:
        return Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"

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
            for batch in DataLoader(self.held_out, batch_sampler=batches, collate_fn=collate):
                batch = self._prepare_inputs(batch)
                labels += int((batch["labels"] >= 0).sum())
                with self.accelerator.autocast():
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

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        if self.args.should_save:
            folder = Path(output_dir or str(self.args.output_dir))
            folder.mkdir(parents=True, exist_ok=True)
            save_head(self.head, folder)
            write_json(folder / PROGRESS, {"seconds": self.progress.seconds})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        fill(self.head, folder)
        self.progress.begin(json.loads((folder / PROGRESS).read_text())["seconds"])


def freeze(head: DraftHead) -> None:
    """Make sure that the target does not train, and is no part of what does.

    Raises:
        TrainingError: the head holds parameters of the target, or none that train.
    """
    model = head.target.model
    model.requires_grad_(False)
    model.eval()
    frozen = {id(p) for p in model.parameters()}
    shared = [name for name, p in head.named_parameters() if id(p) in frozen]
    if shared:
        raise TrainingError(
            f"the head holds parameters of the target: {shared}; borrow them as buffers that are not saved"
        )
    if not any(p.requires_grad for p in head.parameters()):
        raise TrainingError(f"the {head.kind!r} head has no parameter that trains")


def micro_tokens(settings: Optimisation, world: int) -> int:
    """Tokens per forward pass and process."""
    share = -(-settings.batch_tokens // world)
    return min(settings.micro_tokens or share, share)


def accumulation(settings: Optimisation, world: int) -> int:
    """Forward passes per optimiser step and process."""
    return max(round(settings.batch_tokens / (world * micro_tokens(settings, world))), 1)


def precise(settings: Optimisation, device: torch.device) -> bool:
    """Whether to compute in bfloat16 (autocast)."""
    if settings.precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    return settings.precision == "bfloat16"


def training_arguments(
    settings: Optimisation, folder: Path, device: torch.device, log_every: int, save_every: int, evaluate_every: int
) -> TrainingArguments:
    """Trainer's arguments for these settings."""
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=device.type == "cpu",
        learning_rate=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.betas[0],
        adam_beta2=settings.betas[1],
        max_grad_norm=settings.grad_clip,
        bf16=precise(settings, device),
        seed=settings.seed,
        max_steps=1,  # set when the data is known
        logging_steps=log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if evaluate_every else "no",
        eval_steps=evaluate_every or None,
        save_strategy="steps",
        save_steps=save_every,
        save_total_limit=2,
        label_names=["labels"],
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
        report_to="none",
        disable_tqdm=True,
    )
    args.gradient_accumulation_steps = accumulation(settings, args.world_size)
    if args.n_gpu > 1:  # several devices are used through processes, never through DataParallel
        args._n_gpu = 1
    return args


def _zero_stage(trainer: Trainer) -> int:
    plugin = trainer.accelerator.state.deepspeed_plugin
    return int(plugin.zero_stage) if plugin else 0
