"""`selfspec run`: every stage once, nothing twice, and only what a change reaches again."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_folder

from selfspec import cli
from selfspec.card import check_card
from selfspec.card_sources import read_sources
from selfspec.errors import ConfigError, TrainingError
from selfspec.provenance import file_hash
from selfspec.train import pipeline as module
from selfspec.train.pipeline import STATE, Pipeline, RunSettings
from selfspec.train.recipe import Recipe, load_recipe, make_recipe

ALL = ["distil", "train", "tune", "bench", "certify", "card"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, texts to train on, and prompts."""
    folder = tmp_path_factory.mktemp("sources")
    tiny_folder.save(folder / "model")
    lines = [json.dumps({"text": f"the number {n} is followed by {n + 1} and by {n + 2}"}) for n in range(120)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"the number {n}"}) for n in (7, 77, 700)))
    return folder


def recipe(sources: Path, **optimisation: Any) -> Recipe:
    return make_recipe(
        {
            "target": str(sources / "model"),
            "dtype": "float32",
            "device": "cpu",
            "draft": {"kind": "medusa", "num_heads": 2},
            "data": [{"source": str(sources / "texts.jsonl"), "length": 48, "max_tokens": 1500}],
            "vocabulary": {"size": 64},
            "optimisation": {"batch_tokens": 256, "max_steps": 3, **optimisation},
            "evaluation": {"tokens": 100, "prompts": 0},
        }
    )


def settings(out: Path, sources: Path, **given: Any) -> RunSettings:
    return RunSettings(
        out=out,
        **{
            "prompts": {"numbers": sources / "prompts.jsonl"},
            "limit": 2,
            "max_new_tokens": 8,
            "quick": True,
            "base_model": "user/base",
            **given,
        },
    )


def go(recipe: Recipe, plan: RunSettings) -> list[str]:
    """Run, and return the stages that did something."""
    said: list[str] = []
    Pipeline(recipe, plan, say=said.append).run()
    return [line.removesuffix(" ...") for line in said if line.endswith(" ...")]


def test_each_stage_is_done_once_and_again_where_a_change_reaches(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"max_new_tokens": 6, "sampled_prompts": 1, "samples": 50, "engine_samples": 2, "trees": 4}
    monkeypatch.setattr(module, "QUICK", few)
    out = tmp_path / "out"
    plain = recipe(sources)
    assert go(plain, settings(out, sources)) == ALL
    found = read_sources(out)
    assert found.certificate and found.certificate["passed"] and list(found.benches) == ["numbers"]
    assert found.config["base_model"] == "user/base" and check_card(out) == []
    assert found.provenance and found.provenance["seeds"]["training"] == 0 and found.provenance["data"]
    weights = file_hash(out / "model.safetensors")

    with monkeypatch.context() as patch:
        patch.setattr(module, "load_target", lambda *_: pytest.fail("nothing is left to do, so no model is needed"))
        assert go(plain, settings(out, sources)) == []
        licensed = settings(out, sources)
        licensed.facts.license = "mit"
        assert go(plain, licensed) == ["card"]
    (out / "certificate.json").unlink()
    assert go(plain, licensed)[0] == "certify"  # made within the same second, it is the same and so is the card
    (out / "bench-numbers.json").write_text("{}")
    assert go(plain, licensed)[0] == "bench"
    assert check_card(out) == []
    assert go(recipe(sources, max_steps=4), licensed)[0] == "train", "the text is the same, the training is not"
    assert file_hash(out / "model.safetensors") != weights


def test_heads_that_fail_their_certificate_go_no_further(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Pipeline(recipe(sources), settings(tmp_path / "out", sources))
    monkeypatch.setattr(module, "certify", lambda *_: {"passed": False})
    monkeypatch.setattr(Pipeline, "_prompts", lambda *_: [[1, 2, 3]])
    monkeypatch.setattr(Pipeline, "model", None)
    with pytest.raises(TrainingError, match="NOT certified"):
        made._certify()


@pytest.mark.parametrize(("state", "words"), [("{", "not valid JSON"), ("", "not valid JSON")])
def test_a_broken_state_file_is_named(state: str, words: str, sources: Path, tmp_path: Path) -> None:
    (tmp_path / STATE).write_text(state)
    with pytest.raises(ConfigError, match=words):
        go(recipe(sources), settings(tmp_path, sources))


@pytest.mark.parametrize("given", ["FILE", "=x", "code=", "a/b=x", "code=missing.jsonl"])
def test_prompts_of_the_command_line_need_a_domain_and_a_file(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["selfspec", "run", "demo-medusa", "--prompts", given])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1 and "prompts" in capsys.readouterr().err


@pytest.mark.nightly
def test_the_command_makes_everything_and_shows_what_it_would_publish(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    from omegaconf import OmegaConf

    OmegaConf.save(OmegaConf.create(recipe(sources).to_dict()), path)
    assert load_recipe(path).target == str(sources / "model")
    words = ["selfspec", "run", str(path), "--out", str(tmp_path / "out"), "--limit", "2", "--max-new-tokens", "8"]
    for extra, told in (["--base-model", "user/base"], "to publish: --push"), ([], "not ready to be published"):
        monkeypatch.setattr(sys, "argv", [*words, "--quick", *extra])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        assert told in capsys.readouterr().out
    assert json.loads((tmp_path / "out/bench.json").read_text())["prompts"] == 2
