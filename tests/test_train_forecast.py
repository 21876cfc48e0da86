"""Forecasts: what is arithmetic is exact, what is measured leaves the run as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny
import torch
from test_train_run import Rows, new_head, trainer_of
from train_tools import tokenizer

from selfspec.errors import ConfigError
from selfspec.train.distill import DistillConfig, distill
from selfspec.train.forecast import Forecasting, forecast, hours, words

torch.set_num_threads(1)


def trainer(tmp_path: Path, **options: Any) -> Any:
    ids = tiny.text(12, 24)
    head = new_head("medusa", tiny.selfspec_target("llama"))
    rows = Rows(ids, torch.ones_like(ids, dtype=torch.bool))
    return trainer_of(head, rows, tmp_path / "run", **{"batch_tokens": 64, "epochs": 2.0, **options})


def test_a_forecast_changes_nothing_of_the_run(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    before = {name: value.clone() for name, value in made.head.state_dict().items()}
    state = torch.get_rng_state()
    order = list(made.batches)
    found = forecast(made)
    assert torch.equal(torch.get_rng_state(), state) and list(made.batches) == order
    assert all(torch.equal(value, before[name]) for name, value in made.head.state_dict().items())
    assert all(p.grad is None for p in made.head.parameters())
    weights = 4 * sum(p.numel() for p in made.head.parameters())
    assert found["disk_bytes"] == 7 * weights and found["steps"] == made.progress.steps
    assert found["hours"] == pytest.approx(found["steps"] * found["seconds_per_step"] / 3600)
    assert f"{found['steps']} steps" in words(found)


def test_hours_end_at_the_first_limit(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_steps=10)
    assert hours(made, 36.0) == pytest.approx(0.1)
    assert hours(made, 36.0, done=5, before=720.0) == pytest.approx(0.25)
    made.settings.max_minutes = 3.0
    assert hours(made, 36.0) == pytest.approx(0.05)


def test_the_first_minute_gives_a_better_forecast_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scripted clock: three seconds a step, where two were foretold."""
    made = trainer(tmp_path, max_steps=1000, epochs=None)
    clock = [0.0]
    monkeypatch.setattr("selfspec.train.forecast.time.monotonic", lambda: clock[0])
    said: list[str] = []
    result: dict[str, Any] = {"seconds_per_step": 2.0, "steps": 1000, "hours": 0.5, "memory_bytes": 0, "disk_bytes": 0}
    watch = Forecasting(made, result, said.append)
    made.progress.start = 0.0
    for step in range(1, 60):
        clock[0] = 1.0 + 3.0 * step
        made.state.global_step = step
        made.state.is_world_process_zero = True
        watch.on_step_end(made.args, made.state, made.control)
    better = result["after_the_first_minute"]
    assert better["seconds_per_step"] == pytest.approx(3.0)
    assert better["hours"] == pytest.approx((64 + 979 * 3.0) / 3600) and len(said) == 1 and "50.0 minutes" in said[0]


@pytest.mark.parametrize("kept", [{}, {"hidden": True, "layers": [1]}, {"hidden": True, "feature_dtype": "float8"}])
def test_the_disk_that_is_foretold_is_the_disk_that_is_used(tmp_path: Path, kept: dict[str, Any]) -> None:
    source = tmp_path / "t.jsonl"
    source.write_text("".join(json.dumps({"text": "t5 t6 t7 t8 " * 60}) + "\n" for _ in range(40)))
    config = DistillConfig(source=str(source), split="all", length=128, predictions=True, top_logits=2, **kept)
    made = distill(tiny.selfspec_target("llama"), tokenizer(), config, tmp_path / "out", progress=False)
    assert made["bytes"] == pytest.approx(made["forecast_bytes"], rel=0.05)


def test_too_little_disk_is_refused_before_the_first_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(1000))
    source = tmp_path / "t.jsonl"
    source.write_text(json.dumps({"text": "t5 t6 t7 t8 " * 60}) + "\n")
    target = tiny.selfspec_target("llama")
    monkeypatch.setattr(target, "features", lambda *args: pytest.fail("a pass of the target"))
    config = DistillConfig(source=str(source), split="all", length=128, hidden=True)
    with pytest.raises(ConfigError, match="GB free; lower max_tokens"):
        distill(target, tokenizer(), config, tmp_path / "out", progress=False)
