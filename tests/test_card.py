"""Cards: every figure comes from a file, and a card that says otherwise is found out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from selfspec import cli
from selfspec.card import check_card, write_card
from selfspec.card_sources import Facts
from selfspec.errors import CheckpointError, ConfigError
from selfspec.provenance import file_hash


def run(name: str, **values: Any) -> dict[str, Any]:
    common = {"tokens_per_s": 10.0, "baseline": "plain", "speedup": 1.0, "speedup_interval": [1.0, 1.0]}
    common |= {"tokens_per_round": 1.0, "accepted_per_round": 0.0, "accepted_by_depth": [], "identical": True}
    return {"name": name, **common, **values}


OWN = {
    "tokens_per_s": 23.456,
    "speedup": 2.3456,
    "speedup_interval": [2.111, 2.499],
    "speedup_best_baseline": 2.25,
    "speedup_best_baseline_interval": None,
    "tokens_per_round": 2.789,
    "accepted_per_round": 1.789,
    "accepted_by_depth": [0.876, 0.543],
    "identical": "near-tie",
    "nodes": 5,
}


def bench(**own: Any) -> dict[str, Any]:
    circumstances = {
        "target": "some/base",
        "dtype": "bfloat16",
        "device": "cpu",
        "machine": "A Processor",
        "threads": 2,
    }
    circumstances |= {"prompts": 7, "max_new_tokens": 64, "temperature": 0.0, "seed": 3}
    runs = [run("plain"), run("transformers", speedup=0.97), run("heads", **{**OWN, **own})]
    return {**circumstances, "versions": {"torch": "2.13"}, "runs": runs}


def certificate(files: dict[str, str]) -> dict[str, Any]:
    greedy = {"dtype": "float32", "compared_tokens": 96, "texts": [1, 2], "real_differences": 0, "ties": 1}
    first = {"first_token": {"total_variation": 0.0123}}
    sampled = {"drafted": {**first, "samples": 400}, "plain": {"first_token": {"total_variation": 0.0141}}}
    parts = {"greedy": [greedy], "rule": {"trees": [1] * 9, "largest_distance": 3e-16}, "sampled": [sampled]}
    parts["screened"] = {"used": True, "nodes": 4, "ways": [{"samples": 2000, "smallest_p_value": 0.125}]}
    who = {"fingerprint": "weights:a:b", "dtype": "bfloat16"}
    return {"passed": True, "target": who, "draft": {"files": files}, "parts": parts}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"kind": "medusa", "base_model": "some/base", "base_fingerprint": "weights:a:b", "base_revision": "abc"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    files = {name: file_hash(tmp_path / name) for name in ("config.json", "model.safetensors")}
    sizes = {"rows": 11, "tokens": 1234, "learned": 1200}
    training = {"steps": 42, "device": "cpu", "data": {"label-train": sizes}, "trained_parameters": 98765}
    training["recipe"] = {"data": [{"source": "stdlib"}]}
    records = {"bench.json": bench(), "bench-chat.json": bench(tokens_per_round=1.5), "training.json": training}
    for name, value in {**records, "certificate.json": certificate(files)}.items():
        (tmp_path / name).write_text(json.dumps(value))
    write_card(tmp_path, FACTS)
    return tmp_path


FACTS = Facts(
    repo="user/heads", license="mit", datasets=["some/data"], data_license="CC-BY-4.0", language=["en"], run="heads"
)


def test_a_card_says_what_its_files_say(folder: Path) -> None:
    text = (folder / "README.md").read_text()
    assert check_card(folder) == []
    for figure in (
        "| default | 2.79 | 1.79 | 0.88 0.54 |",
        "| chat | 1.50 | 1.79 | 0.88 0.54 |",
        "| default | heads | 23.5 | 2.35x (2.11-2.50) | 2.25x | near-tie |",
        "| default | transformers | 10.0 | 0.97x (1.00-1.00) | - | yes |",
        "7 prompts, 64 new tokens each, greedy, seed 3; bfloat16 on A Processor, 2 threads; torch 2.13.",
        "greedy, float32: 96 tokens of 2 texts, 0 real differences, 1 near-ties",
        "total variation 0.012 (plain sampling 0.014)",
        "98,765 trained parameters",
        "42 steps on cpu. Licence of the heads: mit. Licence of the training text: CC-BY-4.0.",
        "| label-train | 11 | 1234 | 1200 |",
        'selfspec.load("user/heads")',
        "selfspec bench --target some/base --draft user/heads --limit 7 --max-new-tokens 64 --temperature 0 "
        "--dtype bfloat16 --threads 2 --nodes 5 --seed 3",
    ):
        assert figure in text, figure


def test_metadata_is_that_of_the_hub(folder: Path) -> None:
    data = ModelCard((folder / "README.md").read_text()).data
    assert (data.base_model, data.library_name, data.pipeline_tag) == ("some/base", "selfspec", "text-generation")
    assert data.license == "mit" and data.datasets == ["some/data"] and data.language == ["en"]
    assert {"speculative-decoding", "medusa", "custom_generate"} <= set(data.tags)
    found = {(r.dataset_type, r.metric_type): r.metric_value for r in data.eval_results}
    assert found[("selfspec-default", "tokens_per_round")] == 2.789
    assert found[("selfspec-chat", "tokens_per_round")] == 1.5
    assert found[("selfspec-default", "speedup")] == 2.3456 and len(found) == 6


def in_json(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        change(values)
        (folder / name).write_text(json.dumps(values))

    return apply


def in_card(old: str, new: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        text = (folder / "README.md").read_text()
        assert old in text
        (folder / "README.md").write_text(text.replace(old, new))

    return apply


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (in_card("2.35x", "3.35x"), "3.35x"),
        (in_card("| default | 2.79 |", "| default | 2.99 |"), "acceptance"),
        (in_card("0.88 0.54", "0.98 0.54"), "acceptance"),
        (in_card("value: 2.3456", "value: 9.3456"), "metadata model-index"),
        (in_card("license: mit", "license: apache-2.0"), "metadata license"),
        (in_card("base_model: some/base", "base_model: other/base"), "metadata base_model"),
        (in_card("0 real differences", "no real differences"), "certificate"),
        (in_card("<!-- selfspec:speed -->", ""), "'speed' is missing"),
        (in_card("# user/heads", "# user/heads\n\nUp to 4.2x faster"), "4.2"),
        (in_card("# user/heads", "# user/heads\n\nAccepts 91% of guesses"), "91"),
        (in_card("# user/heads", "# user/heads\n\nIt makes 5.5 tokens per round"), "5.5"),
        (in_json("bench.json", lambda v: v["runs"][2].update(speedup=1.1)), "1.10x"),
        (in_json("bench-chat.json", lambda v: v["runs"][2].update(tokens_per_round=1.1)), "metadata model-index"),
        (in_json("certificate.json", lambda v: v.update(passed=False)), "FAILED"),
        (in_json("certificate.json", lambda v: v["target"].update(fingerprint="weights:a:c")), "fingerprint"),
        (in_json("config.json", lambda v: v.update(base_revision="abd")), "another config.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"other"), "another model.safetensors"),
        (lambda folder: (folder / "bench.json").unlink(), "acceptance"),
        (lambda folder: (folder / "certificate.json").unlink(), "certificate"),
    ],
)
def test_a_card_that_says_otherwise_is_found_out(folder: Path, change: Callable[[Path], None], words: str) -> None:
    change(folder)
    assert words in "\n".join(check_card(folder))


def test_what_people_write_is_kept_and_figures_of_the_files_may_be_repeated(folder: Path) -> None:
    path = folder / "README.md"
    text = path.read_text().replace(
        "# user/heads", "# My heads\n\nOn prompts of code 2.35x faster, 2.79 tokens per round."
    )
    path.write_text(text.replace("library_name: selfspec", "library_name: selfspec\nthumbnail: https://x.org/y.png"))
    assert check_card(folder) == []
    in_json("training.json", lambda v: v.update(steps=43))(folder)
    write_card(folder)
    assert "# My heads\n\nOn prompts of code" in path.read_text() and "43 steps" in path.read_text()
    assert "thumbnail: https://x.org/y.png" in path.read_text() and check_card(folder) == []
    once = path.read_text()
    write_card(folder)
    assert path.read_text() == once


def test_without_measurements_there_are_no_figures(folder: Path) -> None:
    for name in ("bench.json", "bench-chat.json", "certificate.json", "training.json", "README.md"):
        (folder / name).unlink()
    text = write_card(folder).read_text()
    assert text.count("Not measured") == 4 and "model-index" not in text and check_card(folder) == []


def test_a_bench_of_several_drafts_wants_the_name_of_the_own_run(folder: Path) -> None:
    in_json("bench.json", lambda v: v["runs"].append(run("other", accepted_by_depth=[0.1])))(folder)
    assert write_card(folder) and check_card(folder) == []
    with pytest.raises(ConfigError, match="--run NAME"):
        write_card(folder, Facts(repo="user/renamed"))
    with pytest.raises(ConfigError, match="--run NAME"):
        write_card(folder, Facts(repo="user/renamed", run="no such"))


@pytest.mark.parametrize("base", ["demo", "/some/folder", "./x/y"])
def test_names_that_the_hub_does_not_know_are_no_base_model(base: str, folder: Path) -> None:
    in_json("config.json", lambda v: v.update(base_model=base))(folder)
    text = write_card(folder).read_text()
    assert ModelCard(text).data.base_model is None


def test_the_command_says_what_is_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["selfspec", "card", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        found = capsys.readouterr()
        return int(ended.value.code or 0), found.out + found.err

    assert command("--check", str(folder))[0] == 0
    in_json("bench.json", lambda v: v["runs"][2].update(speedup=1.1))(folder)
    status, said = command("--check", str(folder))
    assert status == 1 and "FAIL" in said and "1.10x" in said
    assert command(str(folder), "--license", "apache-2.0")[0] == 0
    assert command("--check", str(folder))[0] == 0
    assert "license: apache-2.0" in (folder / "README.md").read_text()
    assert command("--check", str(folder), "--license", "mit")[0] == 1
    (folder / "README.md").unlink()
    with pytest.raises(CheckpointError, match="selfspec card"):
        check_card(folder)
