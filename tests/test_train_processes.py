"""Two processes on CPU train like one, under every strategy: about 20 s each. `make test-processes` runs the first.

Run by torchrun, this file is one of the processes.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from test_recipes import prompts, scaled_down
from test_train_run import Rows, new_head
from torch.distributed.tensor import DTensor
from train_tools import tokenizer

from selfspec import patch, recipes, unpatch
from selfspec.checkpoint import load_head
from selfspec.head import DraftHead
from selfspec.target import Target
from selfspec.train.arguments import training_arguments
from selfspec.train.distributed import Processes, connect, disconnect
from selfspec.train.recipe import Optimisation, load_recipe
from selfspec.train.resume import newest_checkpoint
from selfspec.train.sharding import shard_target
from selfspec.train.steps import steps_of_run
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


def trainer_in(
    folder: Path, joined: Processes, target: Target, checkpoint: Path | None = None, **options: Any
) -> HeadTrainer:
    settings = Optimisation(
        **{"lr": 3e-3, "batch_tokens": 128, "micro_tokens": 64, "epochs": 2.0, "precision": "float32", **options}
    )
    steps = steps_of_run(checkpoint, settings, joined.state.num_processes, joined.strategy)
    args = training_arguments(settings, folder, torch.device("cpu"), 1, SAVED, 0, joined.zero_stage, steps=steps)
    data = rows()
    return HeadTrainer(new_head("eagle", target), data, data, settings, args, False, joined.strategy, steps)


def losses(trainer: HeadTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def launch(
    program: list[str], configuration: str = "", processes: int = 2, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Two processes of a program, by torchrun, or by `accelerate launch` with a shipped configuration."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", port]
    if configuration:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes)]
        command += ["--main_process_port", port, "--config_file", str(recipes.path("x").parent / configuration)]
    known = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    paths = {"PYTHONPATH": os.pathsep.join(known), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.run(
        [*command, *program],
        timeout=400, env=os.environ | paths | variables, check=False, text=True, capture_output=True,
    )  # fmt: skip


def launch_this(folder: Path, strategy: str, *more: str, configuration: str = "") -> dict[str, Any]:
    """What two processes of this file found."""
    done = launch([__file__, str(folder), strategy, *more], configuration)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    assert (found["world"], found["strategy"]) == (2, strategy)
    return found


def one_process(folder: Path) -> HeadTrainer:
    trainer = trainer_in(folder, connect("cpu"), tiny.selfspec_target("llama"))
    trainer.train()
    assert trainer.state.global_step == STEPS
    return trainer


def needs_deepspeed(strategy: str) -> None:
    if "zero" in strategy and find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install 'selfspec[deepspeed]'")


def assert_close(head: DraftHead, folder: Path) -> None:
    saved = load_head(folder, tiny.selfspec_target("llama"))
    for name, value in head.owned_state().items():
        assert torch.allclose(value, saved.owned_state()[name], rtol=WEIGHT_TOLERANCE, atol=1e-5), name


def compare(strategy: str, tmp_path: Path, *more: str, configuration: str = "") -> None:
    needs_deepspeed(strategy)
    found = launch_this(tmp_path / "two", strategy, *more, configuration=configuration)
    one = one_process(tmp_path / "one")
    assert found["losses"] == pytest.approx(losses(one), rel=LOSS_TOLERANCE) and len(found["losses"]) == STEPS
    assert found["eval_loss"] == pytest.approx(one.measure()["eval_loss"], rel=LOSS_TOLERANCE)
    assert_close(one.head, tmp_path / "two" / "run" / f"checkpoint-{STEPS}")
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
    compare("zero2", tmp_path, configuration="accelerate/zero2.yaml")


@pytest.mark.nightly
def test_one_process_goes_on_where_two_stopped(tmp_path: Path) -> None:
    """Without `micro_tokens`, so that one process alone would read larger batches."""
    found = launch_this(tmp_path, "ddp", "begin")
    checkpoint = tmp_path / "run" / f"checkpoint-{SAVED}"
    again = trainer_in(tmp_path / "one", connect("cpu"), tiny.selfspec_target("llama"), checkpoint, micro_tokens=0)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert losses(again) == pytest.approx(found["losses"], rel=LOSS_TOLERANCE) and len(found["losses"]) == STEPS
    assert_close(again.head, tmp_path / "run" / f"checkpoint-{STEPS}")


@pytest.mark.nightly
def test_two_processes_go_on_where_one_stopped(tmp_path: Path) -> None:
    one = trainer_in(tmp_path / "run", connect("cpu"), tiny.selfspec_target("llama"), micro_tokens=0)
    one.train()
    shutil.rmtree(tmp_path / "run" / f"checkpoint-{STEPS}")
    found = launch_this(tmp_path, "ddp", "begin")
    assert found["losses"] == pytest.approx(losses(one), rel=LOSS_TOLERANCE) and len(found["losses"]) == STEPS
    assert_close(one.head, tmp_path / "run" / f"checkpoint-{STEPS}")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("configuration", "strategy"), [("", "ddp"), ("accelerate/ddp.yaml", "ddp"), ("accelerate/zero2.yaml", "zero2")]
)
def test_a_recipe_trains_under_a_launcher(configuration: str, strategy: str, tmp_path: Path) -> None:
    needs_deepspeed(strategy)
    tiny.model("llama").save_pretrained(tmp_path / "target")
    tokenizer().save_pretrained(tmp_path / "target")
    recipe = scaled_down(
        load_recipe("eagle3", ["target=" + str(tmp_path / "target")]), prompts(tmp_path), tmp_path / "out"
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_dict()))
    done = launch(["-m", "selfspec.train", str(tmp_path / "recipe.yaml"), "optimisation.max_steps=3"], configuration)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.split().count(str(tmp_path / "out")) == 2, "each process says where the heads are"
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert (record["processes"], record["strategy"], record["steps"]) == (2, strategy, 3)
    target = tiny.selfspec_target("llama")
    head = load_head(tmp_path / "out", target)
    fresh = type(head).from_target(copy.copy(head.config), target, torch.Generator().manual_seed(0))
    shapes = {name: value.shape for name, value in fresh.owned_state().items()}
    assert {name: value.shape for name, value in head.owned_state().items()} == shapes, "one whole head"
    assert sum(p.numel() for p in head.parameters()) == record["trained_parameters"]
    patched = patch(target.model, head, guard=False)
    ids = tiny.text(1, 9)
    written = patched.generate(ids, max_new_tokens=12, do_sample=False)
    unpatch(target.model)
    assert torch.equal(written, target.model.generate(ids, max_new_tokens=12, do_sample=False))


# What runs in each process


def main(folder: Path, strategy: str, shard_it: bool, begin: bool) -> None:
    if begin:
        run_only(folder, connect("cpu", strategy))
        return
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


def run_only(folder: Path, joined: Processes) -> None:
    """From the newest checkpoint, if there is one."""
    found = newest_checkpoint(folder / "run")
    trainer = trainer_in(folder / "run", joined, tiny.selfspec_target("llama"), found, micro_tokens=0)
    trainer.train(resume_from_checkpoint=None if found is None else str(found))
    if joined.state.is_main_process:
        what = {"world": torch.distributed.get_world_size(), "strategy": trainer.strategy, "losses": losses(trainer)}
        (folder / "found.json").write_text(json.dumps(what))
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
    main(Path(sys.argv[1]), sys.argv[2], "sharded-target" in sys.argv, "begin" in sys.argv)
