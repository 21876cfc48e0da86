"""What one optimiser step reads, and how processes share it: a run may go on with another number of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from selfspec.errors import ConfigError
from selfspec.train.recipe import Optimisation

PROGRESS = "progress.json"
_WHOLE = ("single", "ddp")
"""Strategies whose checkpoints are the same."""


@dataclass(frozen=True)
class Steps:
    """The batches of a step. They decide the order of the data, whatever the number of processes.

    Args:
        tokens: the most tokens of a batch.
        batches: per step, over all processes.
    """

    tokens: int
    batches: int

    @classmethod
    def of(cls, settings: Optimisation, world: int) -> Steps:
        """Those of a run that so many processes begin."""
        share = -(-settings.batch_tokens // world)
        tokens = min(settings.micro_tokens or share, share)
        return cls(tokens, world * max(round(settings.batch_tokens / (world * tokens)), 1))

    def shared(self, world: int) -> tuple[int, int]:
        """How many batches each process reads one after another in a step, and how many processes share one batch.

        Raises:
            ConfigError: the processes would read unequally much.
        """
        if self.batches % world == 0:
            return self.batches // world, 1
        if world % self.batches == 0:
            return 1, world // self.batches
        raise ConfigError(
            f"a step of this run is {self.batches} batches of {self.tokens} tokens, which {world} processes cannot "
            f"share evenly; go on with a number of processes that divides {self.batches} or is a multiple of it, or "
            "begin anew with restart=true"
        )


@dataclass(frozen=True)
class Begun:
    """How the run works that left a checkpoint.

    Args:
        seconds: of training so far.
        processes: how many wrote the checkpoint.
        strategy: see `Optimisation`.
        steps: of the run.
    """

    seconds: float
    processes: int
    strategy: str
    steps: Steps

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def read(cls, checkpoint: Path) -> Begun:
        """From a checkpoint.

        Raises:
            ConfigError: the file is missing, damaged or of another version of selfspec.
        """
        try:
            values = json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8"))
            return cls(**{**values, "steps": Steps(**values["steps"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{checkpoint / PROGRESS} is damaged or was written by another version of selfspec "
                f"({type(error).__name__}: {error}); begin anew with restart=true"
            ) from error


def steps_of_run(checkpoint: Path | None, settings: Optimisation, world: int, strategy: str) -> Steps:
    """The steps of the run that goes on from a checkpoint, or begins where there is none.

    Raises:
        ConfigError: these processes cannot go on from it.
    """
    if checkpoint is None:
        return Steps.of(settings, world)
    begun = Begun.read(checkpoint)
    same = begun.strategy == strategy or {begun.strategy, strategy} <= set(_WHOLE)
    if not same or (strategy.startswith("zero") and begun.processes != world):
        raise ConfigError(
            f"{checkpoint} was written by {begun.processes} process(es) under the strategy {begun.strategy}, and "
            f"{world} under {strategy} cannot read its optimizer state; go on as it was begun, or begin anew with "
            "restart=true"
        )
    begun.steps.shared(world)
    return begun.steps
