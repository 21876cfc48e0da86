"""Faults that users of other libraries met with draft heads and their files, where no other test here would show them.

The map is in tests/README.md.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from oracle import patched, plain
from safetensors import safe_open
from test_train_run import Rows, trainer_of
from torch import nn

import selfspec
from selfspec import registry, versions
from selfspec.checkpoint import WEIGHTS, load_head, save_head
from selfspec.draft import Verified
from selfspec.errors import CheckpointError, UnsupportedGeneration, UnsupportedModel
from selfspec.head import DraftHead
from selfspec.target import Target

ROOT = Path(__file__).resolve().parents[1]
HEADS = ("dflash", "eagle", "eagle3", "hydra", "medusa")
each = pytest.mark.parametrize("kind", HEADS)


def head_of(kind: str, target: Target, **options: Any) -> DraftHead:
    cls = registry.method(kind)
    head: DraftHead = cls.from_target(cls.config_class(**options), target, torch.Generator().manual_seed(0))
    return head.eval()


# Weights


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, as it may by chance."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@each
@pytest.mark.parametrize("layers", [1, 3])
def test_every_layer_of_a_new_head_is_set_whatever_memory_held(kind: str, layers: int) -> None:
    target = tiny.selfspec_target("gemma3")
    with poisoned_memory():
        assert bool(torch.empty(4).isnan().all())
        head = head_of(kind, target, num_layers=layers)
        bad = [name for name, value in head.named_parameters() if not bool(torch.isfinite(value).all())]
        bad += [name for name, value in head.named_buffers() if not bool(torch.isfinite(value).all())]
    assert not bad
    ids = tiny.text(2, 24)
    features = target.features(ids[:, :-1], None, head.needs)
    verified = Verified(ids[:, :-1], ids[:, 1:], torch.tensor([23, 23]), features.hidden, features.layers)
    assert bool(torch.isfinite(head.loss(verified, torch.ones(2, 23, dtype=torch.bool)).loss))


@each
def test_frozen_tied_and_transposed_weights_of_a_head_are_saved_and_restored(kind: str, tmp_path: Path) -> None:
    """A part that its owner froze, memory that two names share, and strides that are not in order."""
    target = tiny.selfspec_target("llama")
    head = head_of(kind, target)
    named = dict(head.named_parameters())
    by_shape: dict[Any, list[str]] = {}
    for name, value in named.items():
        by_shape.setdefault(tuple(value.shape), []).append(name)
    shared = next((names[:2] for names in by_shape.values() if len(names) > 1), [])
    with torch.no_grad():
        for value in named.values():
            value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel())))
        for name in shared[1:]:
            named[name].data = named[shared[0]].data
        wide = next(value for value in named.values() if value.ndim >= 2 and not any(value is named[n] for n in shared))
        wide.data = wide.data.transpose(-1, -2).contiguous().transpose(-1, -2)
        assert not wide.is_contiguous()
    next(iter(named.values())).requires_grad_(False)
    save_head(head, tmp_path)
    again = load_head(tmp_path, tiny.selfspec_target("llama"))
    assert set(again.owned_state()) == set(head.owned_state())
    assert all(torch.equal(value, head.owned_state()[name]) for name, value in again.owned_state().items())
    with safe_open(str(tmp_path / WEIGHTS), framework="pt") as file:
        stored = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert stored == sum(value.numel() for value in head.owned_state().values())


def test_a_frozen_part_of_a_head_survives_training_and_its_checkpoints(tmp_path: Path) -> None:
    target = tiny.selfspec_target("llama")
    head = head_of("medusa", target)
    name, part = next(iter(head.named_parameters()))
    part.requires_grad_(False)
    before = part.clone()
    trainer_of(head, Rows(tiny.text(8, 24)), tmp_path).train()
    assert torch.equal(dict(head.named_parameters())[name], before)
    saved = max(tmp_path.glob("checkpoint-*"))
    assert torch.equal(load_head(saved, target).owned_state()[name], before)


@each
@pytest.mark.parametrize("shape", [(0,), (0, tiny.HIDDEN)])
def test_a_head_is_never_made_of_weights_that_are_not_there(kind: str, shape: tuple[int, ...]) -> None:
    """What ZeRO-3 leaves of a weight outside its gathering: the true shape beside a tensor of nothing."""
    model = tiny.model("llama")
    empty: Any = nn.Parameter(torch.empty(shape), requires_grad=False)
    empty.ds_shape = model.lm_head.weight.shape
    model.lm_head.weight = empty
    with pytest.raises(UnsupportedModel, match="spread over ranks; keep it whole"):
        head_of(kind, Target(model))


# Base models that change


@each
def test_a_target_whose_vocabulary_grew_is_served_exactly(kind: str) -> None:
    """Padded rows are proposed by nobody and committed only where plain decoding would."""
    model = tiny.model("llama")
    ids = tiny.text(2, 10)
    with patched(model, head_of(kind, Target(model))):
        model.resize_token_embeddings(pad_to_multiple_of=64)
        assert torch.equal(model.generate(ids, max_new_tokens=20), plain(model, ids, max_new_tokens=20))


@each
def test_a_target_whose_vocabulary_shrank_is_refused_before_the_first_pass(kind: str) -> None:
    model = tiny.model("llama")
    with patched(model, head_of(kind, Target(model))):
        model.resize_token_embeddings(60)
        with pytest.raises(UnsupportedGeneration, match=r"60 tokens, it had 97"):
            model.generate(tiny.text(1, 10) % 60, max_new_tokens=20)


def test_heads_of_a_base_model_before_its_vocabulary_grew_are_refused(tmp_path: Path) -> None:
    model = tiny.model("llama")
    save_head(head_of("medusa", Target(model)), tmp_path)
    model.resize_token_embeddings(128)
    with pytest.raises(CheckpointError, match="was trained on"):
        selfspec.patch(model, str(tmp_path))


def test_an_adapter_saved_from_a_patched_model_holds_no_heads(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(tiny.model("llama"), config)
    wrapped.save_pretrained(tmp_path / "before")
    with patched(wrapped, head_of("eagle", Target(wrapped.get_base_model()))):
        wrapped.save_pretrained(tmp_path / "patched")
    names = []
    for folder in ("before", "patched"):
        with safe_open(str(tmp_path / folder / "adapter_model.safetensors"), framework="pt") as file:
            names.append(sorted(file.keys()))
    assert names[0] == names[1]
    assert all("lora_" in name for name in names[0])


# Versions


@pytest.mark.parametrize("version", ["4.57.1", "5.23.9", "5.40.0", "6.0.0.dev0"])
def test_another_transformers_is_refused_in_one_sentence(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model("llama")
    monkeypatch.setattr(versions.transformers, "__version__", version)
    with pytest.raises(UnsupportedModel, match=rf"transformers {version} is installed.*pip install"):
        selfspec.patch(model, "lookup")


def test_a_transformers_without_what_is_needed_is_named_at_import(tmp_path: Path) -> None:
    """An older release lacks classes that are imported; a user must not be left with the name of one of them."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text(
        "__version__ = '4.57.1'\n"
        "class PreTrainedModel: pass\n"
        "class GenerationConfig: pass\n"
        "class LogitsProcessorList: pass\n"
        "class StoppingCriteriaList: pass\n"
    )
    (tmp_path / "transformers" / "generation.py").write_text(
        "class GenerateDecoderOnlyOutput: pass\nclass StopStringCriteria: pass\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    found = subprocess.run(
        [sys.executable, "-c", "import selfspec; selfspec.patch"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 1
    assert "UnsupportedModel: transformers 4.57.1 is installed" in found.stderr.splitlines()[-1]


MOVED = {"key_cache", "value_cache", "to_legacy_cache", "from_legacy_cache", "_seen_tokens"}


def test_nothing_reads_what_newer_transformers_took_away() -> None:
    files = [path for folder in ("selfspec", "heads", "inference", "train") for path in (ROOT / folder).glob("**/*.py")]
    assert len(files) > 100
    found = {
        f"{path.name}:{node.lineno} {node.attr}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in MOVED
    }
    assert not found
