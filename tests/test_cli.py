"""The command line: exit statuses, one line for every bad input, nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import tiny_folder
import torch
import typer
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from selfspec import cli, registry
from selfspec.checkpoint import CONFIG, WEIGHTS, save_head
from selfspec.errors import ConfigError
from selfspec.models import load_target
from selfspec.prompting import read_prompts
from selfspec.target import Target

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ["demo", "distill", "train", "eval", "bench", "generate", "import", "export", "info", "certify", "serve"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def verbosity() -> Iterator[None]:
    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    yield
    logging.set_verbosity(level)
    if shown:
        logging.enable_progress_bar()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process: exit status, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["selfspec", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def heads(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained heads of the model."""
    target = Target(load_target(model, torch.float32)[0])
    method = registry.method("medusa")
    head = method.from_target(method.config_class(), target, torch.Generator().manual_seed(0))
    folder = save_head(head, tmp_path_factory.mktemp("heads") / "some-heads")
    target.release()
    return folder


@pytest.fixture
def copy(heads: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(heads, tmp_path / "heads"))


def write_lines(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def refused(result: tuple[int, str, str], *words: str) -> None:
    """Exit status 1, one line on stderr that holds these words, nothing on stdout."""
    status, out, err = result
    assert status == 1
    assert out == ""
    assert err.startswith("selfspec: error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err


def test_help_lists_the_commands_and_loads_nothing_heavy() -> None:
    program = (
        "import sys\nfrom selfspec import cli\nsys.argv = ['selfspec', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([n for n in ('torch', 'transformers', 'matplotlib', 'datasets', 'numpy') if n in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert result.stdout.strip().endswith("[]"), result.stdout + result.stderr
    assert all(f" {name} " in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, run: Run) -> None:
    status, out, _ = run(command, "--help")
    assert status == 0
    assert "Usage: selfspec" in out


@pytest.mark.parametrize("arguments", [["nothing"], ["bench", "--nothing"], ["bench"], ["bench", "--limit", "0"]])
def test_wrong_usage_has_status_2(arguments: list[str], run: Run) -> None:
    assert run(*arguments)[0] == 2


TAKES_TARGET = ["demo", "distill", "eval", "bench", "tune", "certify", "generate", "chat", "serve", "import", "export"]
OR_AS_A_WORD = ["eval", "bench", "certify", "chat", "serve"]


@pytest.mark.parametrize("command", TAKES_TARGET)
def test_every_command_names_the_model_alike(command: str) -> None:
    found = next(c for c in typer.main.get_command(cli.app).commands.values() if c.name == command)  # type: ignore[attr-defined]
    assert any("--target" in parameter.opts for parameter in found.params)
    words = [p.metavar for p in found.params if p.param_type_name == "argument"]
    assert ("TARGET" in words) == (command in OR_AS_A_WORD)


@pytest.mark.parametrize("command", OR_AS_A_WORD)
def test_the_model_may_be_a_word_and_is_given_once(
    command: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def load(target: str, *machine: Any) -> Any:
        asked.append(target)
        raise ConfigError("loaded")

    monkeypatch.setattr(cli.options, "load", load)
    rest: list[Any] = ["--draft", "lookup", *(["--port", 0] if command == "serve" else [])]
    rest += ["--json", tmp_path / "x.json"] if command in ("bench", "eval", "certify") else []
    refused(run(command, "a-model", *rest), "loaded")
    refused(run(command, "--target", "a-model", *rest), "loaded")
    assert asked == ["a-model"] * 2
    status, _, err = run(command, "a-model", "--target", "b-model", *rest)
    assert status == 2 and "a-model" in err and "b-model" in err
    status, _, err = run(command, *rest)
    assert status == 2 and "--target" in err and len(asked) == 2


def test_certify_takes_words_for_what_no_option_gives(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(cli.certify, "_check", lambda path, target, draft, *machine: seen.append((target, draft)))
    for given in (
        ["a", "b"],
        ["--target", "a", "b"],
        ["a", "--draft", "b"],
        ["--draft", "b", "--target", "a"],
    ):
        assert run("certify", *given, "--check", "c.json")[0] == 0
    assert seen == [("a", "b")] * 4
    assert run("certify", "a", "--check", "c.json")[0] == 2


def test_bench_writes_its_results(run: Run, model: Path, heads: Path, tmp_path: Path) -> None:
    prompts = write_lines(
        tmp_path / "p.jsonl", {"prompt": "def f("}, {"turns": ["import os", "x"]}, {"text": "class A"}
    )
    options = ("--prompts", prompts, "--limit", 2, "--max-new-tokens", 8, "--draft", "lookup", "--draft", heads)
    status, _, err = run("bench", "--target", model, *options, "--dtype", "float32", "--json", tmp_path / "b.json")
    assert status == 0
    results = json.loads((tmp_path / "b.json").read_text())
    assert [r["name"] for r in results["runs"]][-2:] == ["lookup", "some-heads"]
    assert (results["prompts"], results["max_new_tokens"], results["dtype"]) == (2, 8, "float32")
    assert all(r["identical"] is True for r in results["runs"])
    assert str(tmp_path / "b.json") in err


def test_bench_of_a_random_shape_and_of_batches(run: Run, tmp_path: Path) -> None:
    options = ("--dtype", "float32", "--device", "cpu", "--limit", 2, "--max-new-tokens", 8, "--no-baselines")
    where = ("--json", tmp_path / "b.json", "--page", tmp_path / "page.html")
    status, out, _ = run("bench", "--gpu-shape", "tiny", "--batch", 2, "--batch", 1, "--no-bound", *options, *where)
    assert status == 0 and "1 batches of 2 rows" in out
    results = json.loads((tmp_path / "b.json").read_text())
    assert [r["name"] for r in results["runs"]] == ["plain", "scripted"]
    assert results["runs"][1]["identical"] is True and results["script"]["depth"] == 7
    assert [c["batch"] for c in results["conditions"]] == [2, 1]
    refused(run("bench", "--gpu-shape", "9B", *options), "9B", "use one of tiny, 1B, 8B, 70B")
    refused(run("bench", "--gpu-shape", "tiny", "--script", 9, *options), "tokens per round")


def test_bench_of_built_in_tasks(run: Run, model: Path, tmp_path: Path) -> None:
    options = ("--task", "lists", "--task", "code", "--limit", 2, "--max-new-tokens", 4, "--dtype", "float32")
    status, _, _ = run("bench", "--target", model, *options, "--no-baselines", "--json", tmp_path / "b.json")
    assert status == 0
    assert set(json.loads((tmp_path / "b.json").read_text())["tasks"]) == {"code", "lists"}
    refused(run("bench", "--target", model, "--task", "poems"), "poems", "translation")


def test_eval_shows_acceptance_by_depth(run: Run, model: Path, tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "p.jsonl", {"prompt": "abcabcabcabcabc"})
    options = ("--prompts", prompts, "--max-new-tokens", 8, "--draft", "lookup", "--dtype", "float32")
    status, out, _ = run("eval", "--target", model, *options)
    assert status == 0
    assert "accepted at depth" in out
    refused(run("eval", "--target", model), "--draft")


def test_generate_prints_the_text_once_and_reports(run: Run, model: Path, tmp_path: Path) -> None:
    options = ("--target", model, "--max-new-tokens", 8, "--dtype", "float32")
    _, plain, _ = run("generate", "abc", *options)
    status, drafted, err = run(
        "generate", "abc", *options, "--draft", "lookup", "--report", "--json", tmp_path / "g.json"
    )
    assert (status, drafted) == (0, plain)
    assert "tokens per round" in err
    saved = json.loads((tmp_path / "g.json").read_text())
    assert saved["text"].strip() == plain.strip()
    assert saved["report"]["new_tokens"] == 8


def test_generate_passes_further_arguments_on(run: Run, model: Path) -> None:
    status, out, _ = run("generate", "abc", "num_beams=2", "--target", model, "--max-new-tokens", 4)
    assert status == 0
    assert out.strip()


def test_generate_takes_stop_strings(run: Run, model: Path) -> None:
    options = ("--target", model, "--max-new-tokens", 8, "--dtype", "float32")
    _, whole, _ = run("generate", "abc", *options)
    stop = next(letter for letter in whole[1:] if letter.isascii() and letter.isalnum())
    for more in ((), ("--draft", "lookup")):
        status, out, err = run("generate", "abc", f"stop_strings=['{stop}']", *options, *more)
        assert status == 0, err
        assert out.rstrip("\n") == whole[: whole.index(stop) + 1]


def test_generate_loads_the_base_model_that_heads_name(run: Run, heads: Path, copy: Path) -> None:
    status, out, _ = run("generate", "abc", "--draft", heads, "--max-new-tokens", 4, "--dtype", "float32")
    assert status == 0
    assert out.strip()
    values = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**values, "base_model": ""}))
    refused(run("generate", "abc", "--draft", copy), "names no base model", "--target")


def test_prompts_may_hold_line_separators_of_unicode(tmp_path: Path) -> None:
    text = "one\u2028two\x85three"
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(tmp_path / "p.jsonl")] == [text]


def test_info_shows_kind_base_vocabulary_and_parameters(run: Run, heads: Path, tmp_path: Path) -> None:
    status, out, _ = run("info", heads, "--json", tmp_path / "i.json")
    assert status == 0
    shown = json.loads((tmp_path / "i.json").read_text())
    tensors = load_file(heads / WEIGHTS)
    assert shown["parameters"] == sum(t.numel() for t in tensors.values() if t.is_floating_point())
    assert (shown["kind"], shown["draft_vocab_size"]) == ("medusa", 258)
    assert "base_model" in out


# Bad input


def test_beam_search_with_a_draft_is_refused_by_name(run: Run, model: Path) -> None:
    result = run("generate", "abc", "num_beams=4", "--target", model, "--draft", "lookup")
    refused(result, "num_beams=4", "unpatch")


def test_heads_of_another_base_model(run: Run, heads: Path, tmp_path: Path) -> None:
    other = tiny_folder.save(tmp_path / "other", seed=1)
    refused(run("generate", "abc", "--target", other, "--draft", heads), "trained on", "fingerprint")


def test_missing_weight(run: Run, model: Path, copy: Path) -> None:
    tensors = load_file(copy / WEIGHTS)
    name = sorted(tensors)[0]
    save_file({k: v for k, v in tensors.items() if k != name}, copy / WEIGHTS)
    refused(run("generate", "abc", "--target", model, "--draft", copy), "missing", name)


def test_extra_weight(run: Run, model: Path, copy: Path) -> None:
    save_file({**load_file(copy / WEIGHTS), "stray": torch.zeros(1)}, copy / WEIGHTS)
    refused(run("generate", "abc", "--target", model, "--draft", copy), "unexpected", "stray")


@pytest.mark.parametrize("command", ["generate", "info"])
def test_truncated_weights(run: Run, model: Path, copy: Path, command: str) -> None:
    whole = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    arguments = [copy] if command == "info" else ["abc", "--target", model, "--draft", copy]
    refused(run(command, *arguments), "damaged")


def test_config_of_heads_that_is_not_json(run: Run, copy: Path) -> None:
    (copy / CONFIG).write_text("{")
    refused(run("info", copy), CONFIG)


def test_empty_prompt(run: Run, model: Path, tmp_path: Path) -> None:
    refused(run("generate", "", "--target", model), "empty")
    prompts = write_lines(tmp_path / "p.jsonl", {"prompt": ""})
    refused(run("bench", "--target", model, "--prompts", prompts), "p.jsonl:1", "empty")


def test_prompts_longer_than_a_table_of_positions_are_refused(run: Run, model: Path, tmp_path: Path) -> None:
    table = shutil.copytree(model, tmp_path / "table")
    families.build("gpt2", vocab_size=258, n_positions=64).save_pretrained(table)
    refused(run("generate", "a" * 100, "--target", table, "--draft", "lookup"), "64", "shorten")
    refused(run("generate", "a" * 100, "--target", table), "64", "shorten")
    prompts = write_lines(tmp_path / "p.jsonl", {"prompt": "a" * 100})
    refused(run("bench", "--target", table, "--prompts", prompts), "64", "shorten")


def test_a_prompt_longer_than_the_model_is_made_for_is_written_on(run: Run, tmp_path: Path) -> None:
    made = tiny_folder.save(tmp_path / "short", max_positions=32)
    with pytest.warns(UserWarning, match="made for 32"):
        status, out, _ = run("generate", "a" * 40, "--target", made, "--draft", "lookup", "--max-new-tokens", 4)
    assert status == 0
    assert out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["p.jsonl:1", "JSON"]),
        ("[1]", ["p.jsonl:1", "object"]),
        ('{"question": "a"}', ["p.jsonl:1", "prompt", "question"]),
    ],
)
def test_bad_prompts(run: Run, model: Path, tmp_path: Path, line: str, words: list[str]) -> None:
    (tmp_path / "p.jsonl").write_text(line + "\n")
    refused(run("bench", "--target", model, "--prompts", tmp_path / "p.jsonl"), *words)


def test_missing_files(run: Run, model: Path, tmp_path: Path) -> None:
    refused(run("bench", "--target", model, "--prompts", tmp_path / "none.jsonl"), "none.jsonl")
    refused(run("bench", "--target", tmp_path / "nothing"), "nothing")
    refused(run("info", tmp_path / "nothing"), "nothing")


def test_draft_that_must_be_trained_and_draft_that_does_not_exist(run: Run, model: Path) -> None:
    refused(run("bench", "--target", model, "--draft", "medusa"), "trained first")
    refused(run("bench", "--target", model, "--draft", "./nowhere"), "nowhere")


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--out", "{file}/x"],
        ["bench", "--target", "t", "--json", "{file}/x.json"],
        ["bench", "--target", "t", "--plot", "{file}/x.png"],
        ["eval", "--target", "t", "--draft", "d", "--json", "{file}/x.json"],
        ["distill", "--target", "t", "--out", "{file}/x"],
        ["train", "r", "--json", "{file}/x.json"],
        ["generate", "abc", "--target", "t", "--json", "{file}/x.json"],
    ],
)
def test_unwritable_output_is_seen_before_anything_is_loaded(run: Run, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "file").touch()
    refused(run(*(a.format(file=tmp_path / "file") for a in arguments)), "nothing can be written")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_unknown_keys(run: Run, model: Path, tmp_path: Path) -> None:
    refused(run("distill", "--target", model, "--out", tmp_path / "d", "lenght=3"), "lenght", "length")
    refused(run("train", "no-such-recipe"), "no-such-recipe")
    refused(run("generate", "abc", "words with spaces", "--target", model), "words with spaces")
    recipe = tmp_path / "r.yaml"
    recipe.write_text("draft: {kind: medusa}\nlearning_rate: 1\n")
    refused(run("train", recipe, f"output={tmp_path / 'h'}"), "learning_rate")
    assert not (tmp_path / "h").exists()


def test_demo_of_an_unknown_method(run: Run, tmp_path: Path) -> None:
    refused(run("demo", "--draft", "nothing", "--out", tmp_path), "nothing")


def test_debug_shows_the_traceback(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["selfspec", "info", str(tmp_path / "nothing"), "--debug"])
    with pytest.raises(ValueError, match="nothing"):
        cli.main()


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_is_not_there_is_one_line_that_names_the_usable_ones(run: Run, model: Path, device: str) -> None:
    status, _, err = run("generate", "x", "--target", model, "--device", device)
    assert status == 1
    assert err.count("\n") == 1
    assert f"device {device!r} cannot be used here" in err
    assert "use cpu" in err


def test_a_slip_in_the_name_of_a_method_is_answered_with_the_right_name(run: Run, model: Path) -> None:
    status, _, err = run("generate", "x", "--target", model, "--draft", "lokup")
    assert status == 1
    assert "did you mean the method 'lookup'?" in err
