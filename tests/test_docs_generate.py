"""The examples of some pages of docs/ run, and the table of docs/generate.md names every argument it should."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import guard_tools as tools
import pytest
import tiny
import torch
from oracle import plain
from transformers import GenerationConfig

import selfspec
from selfspec import registry
from selfspec.inference.guard import setup
from selfspec.target import Target

DOCS = Path(__file__).resolve().parents[1] / "docs"
# Arguments of a generation configuration that choose no way of decoding.
NO_WAY_OF_DECODING = {
    "assistant_confidence_threshold",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "bos_token_id",
    "cache_config",
    "compile_config",
    "continuous_batching_config",
    "decoder_start_token_id",
    "diversity_penalty",
    "disable_compile",
    "early_stopping",
    "is_assistant",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "pad_token_id",
    "remove_invalid_values",
    "speculation_type",
    "target_lookbehind",
    "token_healing",
    "transformers_version",
}
ALIASES = {
    "encoder_no_repeat_ngram_size": "encoder_*",
    "encoder_repetition_penalty": "encoder_*",
    "forced_bos_token_id": "forced tokens",
    "forced_eos_token_id": "forced tokens",
    "begin_suppress_tokens": "suppress_tokens",
}


@pytest.mark.parametrize("name", ["generate.md", "own-drafts.md"])
def test_the_examples_run_as_written(name: str, tmp_path: Path) -> None:
    tiny.model("llama").save_pretrained(tmp_path)
    for block in blocks(name):
        exec(compile(block, name, "exec"), {"folder": str(tmp_path)})


def blocks(name: str) -> list[str]:
    """The Python of a page."""
    found = re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), flags=re.DOTALL)
    assert found
    return found


def test_the_examples_of_the_guard_run_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama")
    target, method = Target(model), registry.method("medusa")
    method.from_target(method.config_class(), target).save_pretrained(tmp_path / "path-or-hub-id-of-heads")
    target.release()
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []
    patch = selfspec.patch
    monkeypatch.setenv("SELFSPEC_GUARD", "1")
    monkeypatch.setattr(selfspec, "patch", lambda *a, **k: seen.append(patch(*a, **k).speculation))
    for block in blocks("guard.md"):
        exec(compile(block, "guard.md", "exec"), {"model": model})
    assert [s.draft.kind for s in seen[-2:]] == ["compose(medusa,lookup)", "pick(medusa,lookup)"]
    assert [s.nodes for s in seen] == [None, None, 8, None, None]
    assert [s.guarding is not None for s in seen] == [True, False, True, True, True]
    prompt = tiny.text(1, 9)
    monkeypatch.setattr(setup, "measure", tools.measured_as(tools.BF16, 1.0))
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    assert torch.equal(model.generate(prompt, max_new_tokens=4), plain(model, prompt, max_new_tokens=4))
    selfspec.unpatch(model)


def test_the_example_of_a_client_runs_as_written(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fastapi", reason="needs the serve extra")
    pytest.importorskip("openai", reason="needs openai's own client, of the dev extra")
    from serving import offline, serving, tiny_model

    model, tokenizer = tiny_model(str(tmp_path_factory.mktemp("model")))
    with serving(model, tokenizer) as up:
        for block in blocks("serve.md"):
            assert "http://127.0.0.1:8000" in block
            exec(compile(block.replace("http://127.0.0.1:8000", up.url), "serve.md", "exec"), {"MODEL": "tiny"})
    assert capsys.readouterr().out == offline(model, tokenizer, "one two one two", max_new_tokens=20, do_sample=False)


def test_every_argument_of_a_generation_configuration_has_its_row() -> None:
    text = (DOCS / "generate.md").read_text()
    names = {name for name in GenerationConfig().to_dict() if not name.startswith("_")} - NO_WAY_OF_DECODING
    missing = [name for name in sorted(names) if ALIASES.get(name, f"`{name}") not in text]
    assert not missing, missing
