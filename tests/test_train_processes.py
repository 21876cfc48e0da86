"""Two processes on CPU train like one, under every strategy: about 20 s each. `make test-processes` runs the first.

Run by torchrun, this file is one of the processes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_train_run import Rows, new_head
from torch.distributed.tensor import DTensor

from selfspec import recipes
from selfspec.checkpoint import load_head
from selfspec.target import Target
from selfspec.train.arguments import training_arguments
from selfspec.train.distributed import Processes, connect, disconnect
from selfspec.train.recipe import Optimisation
from selfspec.train.sharding import shard_target
from selfspec.train.trainer import HeadTrainer

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[1]
STEPS, SAVED = 6, 4
# Sums over processes are taken in another order than in one: float32 rounding, grown by six steps of Adam.
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 1e-4


def rows() -> Rows:
    """Twelve rows in six batches; the rows of some batches hold nothing to learn."""
    ids = tiny.text(12, 24)
    learn = torch.ones_like(ids, dtype=torch.bool)
    learn[3:9] = False
    return Rows(ids, learn)


def trainer_in(folder: Path, joined: Processes, target: Target, **options: Any) -> HeadTrainer:
    settings = Optimisation(
        **{"lr": 3e-3, "batch_tokens": 128, "micro_tokens": 64, "epochs": 2.0, "precision": "float32", **options}
    )
    args = training_arguments(settings, folder, torch.device("cpu"), 1, SAVED, 0, joined.zero_stage)
    data = rows()
    return HeadTrainer(new_head("eagle", target), data, data, settings, args, False, joined.strategy)


def losses(trainer: HeadTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def launch(folder: Path, *arguments: str, processes: int = 2, **variables: str) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", port]
    if arguments[-1].endswith(".yaml"):
        command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
        command += ["--main_process_port", port, "--config_file", str(recipes.path("x").parent / arguments[-1])]
    command += [__file__, str(folder), *arguments]
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.run(
        command, timeout=400, env=os.environ | paths | variables, check=False, text=True, capture_output=True
    )


def one_process(folder: Path) -> HeadTrainer:
    trainer = trainer_in(folder, connect("cpu"), tiny.selfspec_target("llama"))
    trainer.train()
    assert trainer.state.global_step == STEPS
    return trainer


def compare(strategy: str, tmp_path: Path, *more: str) -> None:
    if strategy.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install 'selfspec[deepspeed]'")
    done = launch(tmp_path / "two", strategy, *more)
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads((tmp_path / "two" / "found.json").read_text())
    one = one_process(tmp_path / "one")
    assert (found["world"], found["strategy"]) == (2, strategy)
    assert found["losses"] == pytest.approx(losses(one), rel=LOSS_TOLERANCE) and len(found["losses"]) == STEPS
    assert found["eval_loss"] == pytest.approx(one.measure()["eval_loss"], rel=LOSS_TOLERANCE)
    two = load_head(tmp_path / "two" / "run" / f"checkpoint-{STEPS}", tiny.selfspec_target("llama"))
    for name, value in one.head.owned_state().items():
        assert torch.allclose(value, two.owned_state()[name], rtol=WEIGHT_TOLERANCE, atol=1e-5), name
    assert found["resumed_equal"]


@pytest.mark.nightly
def test_two_processes_train_like_one(tmp_path: Path) -> None:
    compare("ddp", tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "zero3"])
def test_sharded_heads_train_like_whole_ones(strategy: str, tmp_path: Path) -> None:
    compare(strategy, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_sharded_targets_teach_like_whole_ones(strategy: str, tmp_path: Path) -> None:
    compare(strategy, tmp_path, "sharded-target")


@pytest.mark.nightly
def test_accelerate_launch_with_a_shipped_configuration(tmp_path: Path) -> None:
    compare("zero2", tmp_path, "accelerate/zero2.yaml")


# What runs in each process


def main(folder: Path, strategy: str, shard_it: bool) -> None:
    joined = connect("cpu", "auto" if "ACCELERATE_DEEPSPEED_ZERO_STAGE" in os.environ else strategy)
    target = tiny.selfspec_target("llama")
    whole = sum(p.numel() for p in new_head("eagle", target).parameters() if p.requires_grad)
    if shard_it:
        shard_target(target, joined)
    trainer = trainer_in(folder / "run", joined, target)
    trainer.train()
    assert_sharded(trainer, whole)
    again = trainer_in(folder / "run", joined, target)
    again.train(resume_from_checkpoint=str(folder / "run" / f"checkpoint-{SAVED}"))
    found = {
        "world": torch.distributed.get_world_size(),
        "strategy": trainer.strategy,
        "losses": losses(trainer),
        "eval_loss": trainer.measure()["eval_loss"],
        "resumed_equal": True,
    }
    with trainer.whole_head() as one, again.whole_head() as other:
        for name, value in one.owned_state().items():
            found["resumed_equal"] &= torch.equal(value, other.owned_state()[name])
    if joined.state.is_main_process:
        (folder / "found.json").write_text(json.dumps(found))
    disconnect()


def assert_sharded(trainer: HeadTrainer, whole: int) -> None:
    """What the strategy spreads really lies in pieces."""
    first = next(p for p in trainer.head.parameters() if p.requires_grad)
    if trainer.strategy == "fsdp":
        assert isinstance(first, DTensor) and first.to_local().numel() < first.numel()
        return
    inner = trainer.optimizer.optimizer
    if trainer.strategy == "ddp":
        assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
        held = sum(state["exp_avg"].numel() for state in inner.state.values())
        assert held == whole
        return
    assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
    assert trainer.model_wrapped.zero_optimization_stage() == int(trainer.strategy[-1])
    held = sum(state["exp_avg"].numel() for state in inner.state.values())
    assert held < 0.6 * whole, "each process must hold about half of the optimizer's state"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "sharded-target" in sys.argv)
