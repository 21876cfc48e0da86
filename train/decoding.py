"""Real speculative decoding while a head trains: measured every so many steps, and the best head kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Args

from selfspec.checkpoint import save_head
from selfspec.head import DraftHead

if TYPE_CHECKING:
    from selfspec.train.trainer import HeadTrainer

BEST = "best"
_FIGURE = "eval_tokens_per_round"


class Decoding(TrainerCallback):
    """Decodes held-out prompts every so many steps, logs the figures, and ends training when they no longer rise.

    Args:
        trainer: of the head.
        measure: gives what `evaluate` gives, for the head as it is.
        every: optimiser steps between measurements.
        patience: end training after so many measurements in a row without a better figure; 0 never does.
        everywhere: `measure` needs all processes (the target is spread over them); otherwise the first one works.
    """

    def __init__(
        self,
        trainer: HeadTrainer,
        measure: Callable[[DraftHead], dict[str, Any]],
        every: int,
        patience: int,
        everywhere: bool,
    ) -> None:
        self.trainer, self.measure = trainer, measure
        self.every, self.patience, self.everywhere = every, patience, everywhere

    def on_step_end(self, args: Args, state: State, control: Control, **kwargs: Any) -> None:
        """Measure if it is time."""
        if not self.every or state.global_step % self.every:
            return
        earlier = figures(state)
        figure = self._measured(state)
        if figure > max(earlier, default=0.0):
            with self.trainer.whole_head() as head:
                if state.is_world_process_zero:
                    save_head(head, best_folder(args))
            return
        if self.patience and len(earlier) - earlier.index(max(earlier)) >= self.patience:
            control.should_training_stop = True

    def _measured(self, state: State) -> float:
        results: list[Any] = [None]
        with self.trainer.whole_head() as head:
            if self.everywhere or state.is_world_process_zero:
                training = head.training
                head.eval()
                results = [self.measure(head)]
                head.train(training)
            if self.trainer.accelerator.num_processes > 1:
                broadcast_object_list(results)
        found = results[0]
        logs = {_FIGURE: found["tokens_per_round"], "eval_accepted_per_round": found["accepted_per_round"]}
        logs |= {f"eval_accepted_{depth}": share for depth, share in enumerate(found["accepted_by_depth"], 1)}
        self.trainer.log(logs)
        return float(found["tokens_per_round"])


def figures(state: State) -> list[float]:
    """Tokens per round of all measurements so far, interrupted runs included."""
    return [entry[_FIGURE] for entry in state.log_history if _FIGURE in entry]


def best_folder(args: Args) -> Path:
    """Where the head with the most tokens per round is kept while training goes on."""
    return Path(str(args.output_dir)) / BEST
