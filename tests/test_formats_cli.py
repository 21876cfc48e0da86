"""`selfspec import`, `selfspec export` and `selfspec info` on other projects' folders."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_folder
import torch
from safetensors.torch import load_file
from transformers.utils import logging

from selfspec import cli
from selfspec.checkpoint import CONFIG, WEIGHTS, save_head
from selfspec.heads.eagle import Eagle, EagleConfig
from selfspec.models import load_target
from selfspec.target import Target

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run the command line in this process: exit status, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["selfspec", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    yield call
    logging.set_verbosity(level)
    if shown:
        logging.enable_progress_bar()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def heads(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = Target(load_target(model, torch.float32)[0])
    config = EagleConfig(input_norms=False, layer_norm=False, output_norm=False, fc_bias=True)
    head = Eagle.from_target(config, target, torch.Generator().manual_seed(0))
    torch.nn.init.ones_(head.fc.bias)
    return save_head(head, tmp_path_factory.mktemp("heads") / "some-heads", torch.float16)


def test_export_then_import_gives_the_same_files(run: Run, model: Path, heads: Path, tmp_path: Path) -> None:
    status, out, _ = run("export", heads, tmp_path / "there", "--format", "safeai-eagle")
    assert status == 0 and "eagle heads, format safeai-eagle" in out and "loaded by: SafeAILab/EAGLE" in out
    status, out, _ = run("import", tmp_path / "there", tmp_path / "back", "--target", model, "--dtype", "float32")
    assert status == 0 and "embed_tokens.weight: a copy of the embedding" in out
    assert json.loads((tmp_path / "back" / CONFIG).read_text()) == json.loads((heads / CONFIG).read_text())
    back, here = load_file(tmp_path / "back" / WEIGHTS), load_file(heads / WEIGHTS)
    assert back.keys() == here.keys()
    assert all(torch.equal(back[name], here[name]) and back[name].dtype == here[name].dtype for name in here)


def test_import_without_a_target_says_what_is_not_checked(run: Run, heads: Path, tmp_path: Path) -> None:
    run("export", heads, tmp_path / "there", "--format", "safeai-eagle")
    status, out, _ = run("import", tmp_path / "there", tmp_path / "back")
    assert status == 0 and "checked when the heads are loaded" in out


def test_a_lossy_export_must_be_asked_for(run: Run, heads: Path, tmp_path: Path) -> None:
    status, _, err = run("export", heads, tmp_path / "there", "--format", "vllm-eagle")
    assert status == 1 and "fc.bias" in err and "--lossy" in err
    status, out, _ = run("export", heads, tmp_path / "there", "--format", "vllm-eagle", "--lossy")
    assert status == 0 and "fc.bias" in out


def test_info_lists_where_heads_can_go(run: Run, heads: Path, tmp_path: Path) -> None:
    status, _, _ = run("info", heads, "--json", tmp_path / "info.json")
    shown = json.loads((tmp_path / "info.json").read_text())
    assert status == 0 and shown["format"] == "selfspec"
    assert "safeai-eagle" in shown["exports"] and "vllm-eagle (--lossy: fc.bias" in shown["exports"]


def test_info_describes_a_foreign_folder(run: Run, heads: Path, tmp_path: Path) -> None:
    run("export", heads, tmp_path / "there", "--format", "safeai-eagle", "--save-dtype", "bfloat16")
    status, out, _ = run("info", tmp_path / "there")
    assert status == 0
    assert "safeai-eagle" in out and "bfloat16" in out and "draft_vocab_size" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("import", "{heads}", "{out}"), "selfspec head already"),
        (("import", "{model}", "{out}"), "no known format"),
        (("import", "{out}/nothing", "{out}"), "not a folder"),
        (("export", "{heads}", "{out}", "--format", "gguf"), "known formats"),
        (("export", "{heads}", "{out}", "--format", "vllm-medusa"), "formats for it: safeai-eagle"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], named: str, run: Run, model: Path, heads: Path, tmp_path: Path
) -> None:
    status, out, err = run(*(text.format(heads=heads, model=model, out=tmp_path / "out") for text in arguments))
    assert (status, out) == (1, "") and named in err and len(err.splitlines()) == 1
