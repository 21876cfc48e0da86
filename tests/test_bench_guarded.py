"""Guarded drafts as runs of `bench`: beside the raw ones, with costs that were measured before anything was timed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import guard_tools as tools
import pytest
import tiny
import tiny_folder
from typer.testing import CliRunner

from selfspec.cli import app
from selfspec.errors import ConfigError
from selfspec.inference.bench import BenchSettings, bench, resolve_drafts
from selfspec.inference.bench import measure as bench_measure
from selfspec.inference.bench.suite import Conditions, run_suite
from selfspec.inference.guard import setup
from selfspec.target import Target


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of these tests stay among themselves."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    target = tiny.selfspec_target("llama")
    yield target
    target.release()


PROMPTS = [tiny.text(1, 12 + n, seed=n)[0].tolist() * 2 for n in range(3)]


def test_a_guarded_draft_has_a_run_of_its_own_and_costs_are_known_before_the_first_call(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    measured = tools.measured_as(tools.BF16, 1000.0)

    def note(*args: Any, **kwargs: Any) -> Any:
        order.append("costs")
        return measured(*args, **kwargs)

    monkeypatch.setattr(setup, "measure", note)
    for how, names in (("raw", ["lookup"]), ("guard", ["lookup+guard"]), ("both", ["lookup", "lookup+guard"])):
        settings = BenchSettings(max_new_tokens=8, baselines=False, guard=how)  # type: ignore[arg-type]
        found = bench(target, resolve_drafts(["lookup"], target), PROMPTS, settings, order.append)
        assert [run["name"] for run in found["runs"]] == ["plain", *names]
        assert all(run["identical"] is True for run in found["runs"])
        assert [run["guard"] is not None for run in found["runs"]] == [n.endswith("+guard") for n in ["plain", *names]]
    guarded = found["runs"][-1]
    assert guarded["guard"]["off"] == guarded["guard"]["rounds"] == sum(r["rounds"] for r in guarded["per_prompt"])
    raw = order[: order.index("costs")]
    assert order.count("costs") == 1 and order[len(raw) + 1] == "plain", "measured before the warm-up of its bench"
    assert len(raw) == 2 * (1 + len(PROMPTS))


def test_batches_have_guarded_runs_too(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "measure", tools.measured_as(tools.BF16, 1.0))
    settings = BenchSettings(max_new_tokens=8, guard="both")
    drafts = resolve_drafts(["lookup"], target)
    found = run_suite(target, drafts, PROMPTS, settings, Conditions(batches=(3,)))["conditions"][0]
    runs = {run["name"]: run for run in found["runs"]}
    assert list(runs)[-2:] == ["lookup", "lookup+guard"] and runs["lookup+guard"]["identical_rows"] == "3/3"


def test_without_costs_there_is_no_guarded_run(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError("too short")

    monkeypatch.setattr(setup, "measure", refuse)
    with pytest.raises(ConfigError, match="leave --guard and --both out"):
        bench(target, resolve_drafts(["lookup"], target), PROMPTS, BenchSettings(max_new_tokens=8, guard="both"))


def test_the_command_has_both_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "measure", tools.measured_as(tools.BF16, 1.0))
    seen: list[Any] = []
    original = bench_measure.guardings

    def note(target: Any, drafts: Any, nodes: Any, known: Any) -> Any:
        seen.append(known)
        return original(target, drafts, nodes, known)

    monkeypatch.setattr(bench_measure, "guardings", note)
    tiny_folder.save(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "one two one two one two"}) + "\n")
    command = ["bench", "--target", str(tmp_path / "model"), "--draft", "lookup", "--prompts", str(prompts), "--both"]
    command += ["--max-new-tokens", "8", "--no-baselines", "--no-bound", "--json", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [run["name"] for run in runs] == ["plain", "lookup", "lookup+guard"]
    assert seen and all(known == {"lookup": []} for known in seen)
