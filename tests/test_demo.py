"""The demo from end to end on a tiny random model, and what a second run reuses."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_folder
from rich.console import Console

from selfspec import cli, registry
from selfspec.errors import ConfigError
from selfspec.inference.bench.figures import PLAIN, TRANSFORMERS, TRANSFORMERS_NGRAM
from selfspec.train import demo as module
from selfspec.train.demo import demo_recipes, run_demo, untrained_kinds
from selfspec.train.demo_settings import FULL, SMALL, DemoSettings, Scale

SCALE = Scale(
    minutes=0.04,
    label_tokens=1_500,
    write_tokens=150,
    held_out_tokens=200,
    evaluation_prompts=1,
    check_prompts=1,
    bench_prompts=1,
    prompt_tokens=80,
    max_new_tokens=12,
)


def show(settings: DemoSettings) -> tuple[dict[str, Any], str]:
    """Run the demo; its results and what it printed."""
    console = Console(width=100, record=True, quiet=False, file=(settings.out.parent / "shown.txt").open("w"))
    results = run_demo(settings, console)
    return results, console.export_text()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoSettings, dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("demo")
    model = tiny_folder.save(folder / "model")
    settings = DemoSettings(str(model), folder / "out", scale=SCALE, dtype="float32")
    results, shown = show(settings)
    return settings, results, shown


def test_results_are_complete_and_on_disk(finished: tuple[DemoSettings, dict[str, Any], str]) -> None:
    settings, results, _ = finished
    assert json.loads((settings.out / "results.json").read_text()) == json.loads(json.dumps(results))
    names = [run["name"] for run in results["runs"]]
    assert names == [PLAIN, TRANSFORMERS, TRANSFORMERS_NGRAM, *untrained_kinds(), *demo_recipes()]
    assert results["recommended"] in names
    assert set(results["heads"]) == set(demo_recipes())
    assert all((Path(folder) / "model.safetensors").is_file() for folder in results["heads"].values())
    assert set(results["minutes"]) >= {"target", "training text", "training", "speed"}


def test_float32_text_is_shown_once_and_called_exact(finished: tuple[DemoSettings, dict[str, Any], str]) -> None:
    _, results, shown = finished
    assert all(run["identical"] is True for run in results["runs"])
    assert all(entry["verdict"] is True for entry in results["check"])
    assert "written alike by plain, transformers, patched with" in shown
    assert "exact: all" in shown
    assert all(f"{number}/6" in shown for number in range(1, 7))


def test_second_run_trains_and_measures_nothing(
    finished: tuple[DemoSettings, dict[str, Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, results, _ = finished
    monkeypatch.setattr(module, "bench_with_progress", None)
    written = {path: path.stat().st_mtime_ns for path in (settings.out / "heads").rglob("*.safetensors")}
    again, shown = show(settings)
    assert again["runs"] == results["runs"]
    assert shown.count("is there already") == len(demo_recipes())
    assert written == {path: path.stat().st_mtime_ns for path in (settings.out / "heads").rglob("*.safetensors")}


def test_other_settings_measure_again(
    finished: tuple[DemoSettings, dict[str, Any], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _, _ = finished

    def measured(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "bench_with_progress", measured)
    with pytest.raises(KeyboardInterrupt):
        show(replace(settings, scale=replace(SCALE, bench_prompts=2)))


def test_interrupt_says_how_to_go_on(
    finished: tuple[DemoSettings, dict[str, Any], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings, _, _ = finished

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_demo", interrupted)
    arguments = ["demo", "--target", settings.target, "--out", str(settings.out), "--small"]
    monkeypatch.setattr(sys, "argv", ["selfspec", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert f"To go on: selfspec {shlex.join(arguments)}" in capsys.readouterr().err


def test_methods_come_from_the_recipes_and_the_registry() -> None:
    assert demo_recipes()
    assert set(demo_recipes()) <= set(registry.kinds())
    assert not set(demo_recipes()) & set(untrained_kinds())


def test_unknown_method_and_unwritable_output_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing"):
        run_demo(DemoSettings(drafts=("nothing",), out=tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="nothing can be written"):
        run_demo(DemoSettings(out=tmp_path / "file" / "out"))


def test_small_asks_for_less_of_everything() -> None:
    assert all(getattr(SMALL, name) < getattr(FULL, name) for name in vars(FULL))
