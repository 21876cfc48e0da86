"""The README's Python examples run as printed, on a tiny model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiny_folder
import torch

import selfspec
from selfspec.models import load_target

README = Path(__file__).resolve().parents[1] / "README.md"
pytestmark = pytest.mark.skipif(not README.exists(), reason="not a checkout: no README.md beside tests/")


def blocks() -> dict[str, str]:
    """Blocks marked `<!-- test: NAME -->`."""
    return dict(re.findall(r"<!-- test: (.*?) -->\n```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder.save(tmp_path_factory.mktemp("model"))


def test_every_python_block_is_tested() -> None:
    assert README.read_text(encoding="utf-8").count("```python") == len(blocks()) == 2


def test_first_example(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = blocks()["use"].replace("path-or-hub-id-of-the-model", str(folder))
    source = source.replace("path-or-hub-id-of-heads-for-it", "lookup")
    exec(compile(source, "README.md", "exec"), {})
    assert "tokens per round" in capsys.readouterr().out


def test_own_draft_writes_the_same_text(folder: Path) -> None:
    model, _ = load_target(folder, torch.float32)
    ids = torch.randint(2, 250, (2, 12), generator=torch.Generator().manual_seed(0))
    call: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 40}
    plain = model.generate(ids, **call)
    exec(compile(blocks()["own draft"], "README.md", "exec"), {"model": model})
    assert torch.equal(model.generate(ids, **call), plain)
    assert model.speculation.report()["draft"] == "bigram"
    selfspec.unpatch(model)
