"""Runs that are killed, interrupted or run out of disk go on to the same weights, with no row lost or doubled.

Run as a program, this file is the run that gets killed: text, features and training from one recipe.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from train_tools import tokenizer

from selfspec.errors import TrainingError
from selfspec.train.recipe import Recipe, make_recipe
from selfspec.train.resume import newest_checkpoint
from selfspec.train.run import Interrupted, train
from selfspec.train.shards import load_shards

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[1]
ROWS = 120


def write_text(folder: Path) -> Path:
    """Distinct lines, so that a row that is lost or doubled shows."""
    draw = random.Random(3)
    lines = [" ".join(f"t{draw.randrange(2, 93)}" for _ in range(20)) for _ in range(ROWS)]
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def recipe_in(folder: Path, text: Path) -> Recipe:
    return make_recipe(
        {
            "draft": {"kind": "eagle"},
            "device": "cpu",
            "data": [
                {"source": str(text), "mode": "write", "prompt_tokens": 8, "max_new_tokens": 16, "length": 24,
                 "temperature": 1.0, "max_tokens": 2400, "shard_tokens": 240},
            ],
            "store_features": True,
            "vocabulary": {"size": 40},
            "optimisation": {"batch_tokens": 256, "epochs": 3, "precision": "float32"},
            "evaluation": {"every": 0, "tokens": 240, "prompts": 2, "prompt_tokens": 8, "max_new_tokens": 8},
            "save_every": 3,
            "output": str(folder / "out"),
        }
    )  # fmt: skip


def rows_of(folder: Path) -> list[list[int]]:
    (data,) = (folder / "out" / "data").glob("write-train-*")
    stored = load_shards(data)
    return [stored[index]["input_ids"].tolist() for index in range(len(stored))]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "out" / "model.safetensors")


def run_here(folder: Path, text: Path) -> None:
    train(recipe_in(folder, text), tiny.model("llama"), tokenizer(), progress=False)


def start(folder: Path, text: Path) -> subprocess.Popen[bytes]:
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, str(folder), str(text)]
    return subprocess.Popen(command, env=os.environ | paths, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def killed_at(folder: Path, text: Path, what: str, delay: float) -> bool:
    """Start a run, wait until `what` (a glob below the output) is there, then some more, and kill; false: it ended."""
    process = start(folder, text)
    while process.poll() is None and not any((folder / "out").glob(what)):
        time.sleep(0.005)
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        process.kill()
    return process.wait() != 0


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    run_here(folder, text)
    return folder


def assert_same(folder: Path, whole: Path) -> None:
    rows = rows_of(folder)
    assert rows == rows_of(whole) and len({tuple(row) for row in rows}) == len(rows)
    for name, value in weights_of(whole).items():
        assert torch.equal(value, weights_of(folder)[name]), name
    assert not list(folder.rglob(".unfinished-*")) and not list(folder.rglob(".shard-*"))


def test_kills_while_text_features_and_weights_are_made(text: Path, whole: Path, tmp_path: Path) -> None:
    """Two SIGKILLs: after a shard of text, and during a later checkpoint."""
    for what in ("data/write-train-*/shard-00001*", "checkpoints/checkpoint-6/*"):
        assert killed_at(tmp_path, text, what, 0.0)
    run_here(tmp_path, text)
    assert_same(tmp_path, whole)


@pytest.mark.nightly
def test_thirty_kills_at_random_moments(text: Path, whole: Path, tmp_path: Path) -> None:
    """Each run is killed at a random moment of one of its stages; when one comes to its end, another begins."""
    draw, kills, runs = random.Random(0), 0, 0
    while kills < 30:
        folder = tmp_path / str(runs)
        stage = draw.choice(["", "data", "data/write-train-*/shard-*", "checkpoints", "checkpoints/checkpoint-*"])
        if killed_at(folder, text, stage or ".", draw.random() * (4.0 if not stage else 0.6)):
            kills += 1
        else:
            assert_same(folder, whole)
            runs += 1
    run_here(tmp_path / str(runs), text)
    assert_same(tmp_path / str(runs), whole)


@pytest.mark.nightly
def test_sigterm_saves_and_ends_cleanly(text: Path, whole: Path, tmp_path: Path) -> None:
    process = start(tmp_path, text)
    while process.poll() is None and not any((tmp_path / "out").glob("checkpoints/checkpoint-3*")):
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    found = newest_checkpoint(tmp_path / "out" / "checkpoints")
    assert found is not None
    run_here(tmp_path, text)
    assert_same(tmp_path, whole)


@pytest.mark.nightly
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_a_full_disk_leaves_the_last_checkpoint_whole(file: str, text: Path, whole: Path, tmp_path: Path) -> None:
    """Once the first checkpoint is there, no file may grow as large as this one of it."""
    process = start_with_limit(tmp_path, text, file)
    assert process.returncode == 3, process.stderr
    assert "could not be written" in process.stderr and "Traceback" not in process.stderr
    found = newest_checkpoint(tmp_path / "out" / "checkpoints")
    assert found is not None and found.name == "checkpoint-3"
    run_here(tmp_path, text)
    assert_same(tmp_path, whole)


def start_with_limit(folder: Path, text: Path, file: str) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, str(folder), str(text), file]
    return subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, check=False, timeout=120)


# The run that gets killed


def limit_files(file: str) -> None:
    """From the step after the first checkpoint on; past the limit a write fails as on a full disk (EFBIG)."""
    from selfspec.train.callbacks import Stopping

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    honest = Stopping.on_step_end

    def limited(self: Stopping, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        honest(self, args, state, control, **kwargs)
        if state.global_step == 4:
            size = (Path(args.output_dir) / "checkpoint-3" / file).stat().st_size - 1
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    Stopping.on_step_end = limited  # type: ignore[method-assign]


def main(arguments: list[str]) -> int:
    folder, text = Path(arguments[0]), Path(arguments[1])
    if arguments[2:]:
        limit_files(arguments[2])
    try:
        run_here(folder, text)
    except Interrupted:
        return 130
    except TrainingError as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
