"""Two processes on CPU train like one: `pytest -m nightly`. Run by torchrun, this file is one of the processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from test_train_run import METHODS, Rows, new_head, trainer_of

from selfspec.checkpoint import save_head
from selfspec.train.run import processes

torch.set_num_threads(1)


def train_one(folder: Path) -> Any:
    """Twelve rows in six batches; the rows of some batches hold nothing to learn."""
    ids = tiny.text(12, 24)
    learn = torch.ones_like(ids, dtype=torch.bool)
    learn[3:9] = False
    head = new_head(METHODS[0], tiny.selfspec_target("llama"))
    trainer = trainer_of(head, Rows(ids, learn), folder / "run", batch_tokens=128, micro_tokens=64, epochs=2.0)
    trainer.train()
    return trainer


@pytest.mark.nightly
def test_two_processes_equal_one(tmp_path: Path) -> None:
    one = train_one(tmp_path)
    root = Path(__file__).resolve().parents[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29617"]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}", "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, __file__, str(tmp_path / "two")], check=True, timeout=300, env=environment)
    assert one.state.global_step == 6
    two = load_file(tmp_path / "two" / "head" / "model.safetensors")
    for name, value in one.head.owned_state().items():
        assert torch.allclose(value, two[name], rtol=1e-4, atol=1e-6), name


if __name__ == "__main__":
    assert processes("cpu").num_processes == 2
    out = Path(sys.argv[1])
    trained = train_one(out)
    assert trained.state.global_step == 6
    if trained.args.process_index == 0:
        save_head(trained.head, out / "head")
