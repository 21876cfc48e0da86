"""Tuned drafts: the search goes on where it stopped, its result loads like a folder of heads."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_folder
import torch
from oracle import patched, plain

import selfspec
from selfspec import cli
from selfspec.checkpoint import CONFIG, load_draft, load_head, save_draft
from selfspec.errors import CheckpointError, ConfigError
from selfspec.heads.early_exit import EarlyExit, EarlyExitConfig
from selfspec.heads.layer_skip import LayerSkip, LayerSkipConfig
from selfspec.heads.low_rank import LowRank, LowRankConfig
from selfspec.inference.tune import TuneSettings, tune
from selfspec.target import Target

pytest.importorskip("optuna", reason="the `tune` extra is not installed")

PROMPTS = [tiny.text(1, 8, seed=seed)[0].tolist() for seed in range(3)]
SHORT = {"max_new_tokens": 6, "max_seconds": 600.0}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.selfspec_target("gemma3")


def test_the_search_goes_on_where_it_stopped(target: Target, tmp_path: Path) -> None:
    journal, seen = tmp_path / "journal", []

    def call(trials: int, prompts: Any = PROMPTS) -> Any:
        settings = TuneSettings(**SHORT, max_trials=trials, random_sets=2)
        return tune(LayerSkip, LayerSkipConfig(), target, prompts, journal, settings, lambda n, best: seen.append(n))

    first = call(3)
    assert seen == [1, 2, 3] and first.trials == 3 and first.rate > 0
    assert len(first.random_rates) == 2 and first.again is not None
    assert set(first.values) == {"depth", "attention.1", "attention.2", "mlp.1", "mlp.2"}
    assert call(5).trials == 5 and seen == [1, 2, 3, 4, 5]
    call(1, PROMPTS[:2])
    assert seen == [1, 2, 3, 4, 5, 1], "other prompts are another search"


def test_the_defaults_are_tried_first(target: Target, tmp_path: Path) -> None:
    settings = TuneSettings(**SHORT, max_trials=1, random_sets=0)
    found = tune(LayerSkip, LayerSkipConfig(), target, PROMPTS[:1], tmp_path / "journal", settings)
    default = LayerSkip(LayerSkipConfig(), target)
    assert found.draft.plan().attention == default.plan().attention and found.draft.plan().mlp == default.plan().mlp


def test_the_draft_vocabulary_comes_from_the_calibration_text(target: Target, tmp_path: Path) -> None:
    settings = TuneSettings(**SHORT, max_trials=1, random_sets=0)
    base = EarlyExitConfig(draft_vocab_size=20)
    found = tune(EarlyExit, base, target, PROMPTS, tmp_path / "journal", settings)
    written = plain(target.model, torch.tensor(PROMPTS), max_new_tokens=6, do_sample=False)
    counts = torch.bincount(written.flatten(), minlength=target.vocab_size)
    kept = counts[torch.tensor(found.draft.config.vocab_ids)]
    assert len(kept) == 20 and kept.min() >= counts.sort().values[-20]


def test_tuned_settings_load_like_heads_and_only_on_their_model(target: Target, tmp_path: Path) -> None:
    draft = LayerSkip(LayerSkipConfig(skip_attention=[2], skip_mlp=[1], depth=3), target)
    folder = save_draft(draft, tmp_path / "found")
    assert [path.name for path in folder.iterdir()] == [CONFIG]
    loaded = load_draft(folder, target)
    assert isinstance(loaded, LayerSkip) and loaded.config == draft.config
    with pytest.raises(CheckpointError, match="fingerprint"):
        load_draft(folder, tiny.selfspec_target("gemma3", seed=1))
    with pytest.raises(CheckpointError, match="no weights"):
        load_head(folder, target)
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**values, "skip_mlp": [9]}))
    with pytest.raises(ConfigError, match=r"\[9\]"):
        load_draft(folder, target)


def test_patch_takes_a_folder_of_tuned_settings(tmp_path: Path) -> None:
    model = tiny.model("llama")
    target = Target(model)
    folder = save_draft(EarlyExit(EarlyExitConfig(exit_layer=2), target), tmp_path / "found")
    target.release()
    ids = tiny.text(2, 9)
    with patched(model, folder):
        found = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(found, plain(model, ids, max_new_tokens=12, do_sample=False))
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


@pytest.mark.parametrize(
    ("method", "config"), [(LayerSkip, LayerSkipConfig), (EarlyExit, EarlyExitConfig), (LowRank, LowRankConfig)]
)
def test_every_value_of_every_knob_makes_a_draft(
    method: Any, config: Any, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    knobs, start = method.knobs(target), method.start(target)
    assert set(start) == set(knobs) and all(start[name] in choices for name, choices in knobs.items())
    for name, choices in knobs.items():
        for choice in choices:
            draft = method.from_target(method.tuned(config(), {**start, name: choice}), target)
            assert draft.config.kind == method.kind


def test_random_sets_cost_the_same() -> None:
    values = {"depth": 4, **{f"attention.{k}": k < 4 for k in range(1, 9)}, **{f"mlp.{k}": k < 3 for k in range(1, 9)}}
    other = LayerSkip.shuffled(values, random.Random(0))
    assert other is not None and other != values and other["depth"] == 4
    for part in ("attention", "mlp"):
        counts = [sum(v for name, v in found.items() if name.startswith(part)) for found in (values, other)]
        assert counts[0] == counts[1]
    assert EarlyExit.shuffled({"depth": 4}, random.Random(0)) is None


def test_the_command_writes_a_folder_that_generate_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_folder.save(tmp_path / "model")
    results = tmp_path / "results.json"

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["selfspec", *map(str, arguments)])
        try:
            cli.main()
        except SystemExit as ended:
            assert not ended.code, capsys.readouterr().err
        return capsys.readouterr().out

    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def add(a, b):"}\n{"prompt": "for i in range"}\n')
    common = ["--target", model, "--dtype", "float32", "--draft", "early-exit", "--max-new-tokens", 6]
    shown = run(
        "tune", *common, "--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "found", "--max-trials", 2,
        "--json", results, "draft_vocab_size=64",
    )  # fmt: skip
    assert "2 trials" in shown
    assert json.loads(results.read_text())["trials"] == 2
    values = json.loads((tmp_path / "found" / CONFIG).read_text())
    assert values["kind"] == "early-exit" and values["exit_layer"] == 1 and len(values["vocab_ids"]) == 64
    loaded, tokenizer = selfspec.load(tmp_path / "found", dtype="float32")
    ids = tokenizer("def add(", return_tensors="pt").input_ids
    found = loaded.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(found, plain(loaded, ids, max_new_tokens=8, do_sample=False))
