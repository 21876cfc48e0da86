"""Vectors made by other projects' own code; they lie beside the repository and are not part of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MaxLengthCriteria, StoppingCriteriaList

from selfspec.inference.engine import decode
from selfspec.inference.request import Request
from selfspec.target import Target

ROOT = Path(__file__).resolve().parents[2] / "shared" / "golden"


def folder(name: str) -> Path:
    """The vectors of one peer, or skip the test."""
    path = ROOT / name
    if not path.is_dir():
        pytest.skip(f"no golden vectors at {path}")
    return path


def target(name: str) -> Target:
    """The target the vectors were made with, float32."""
    return Target(AutoModelForCausalLM.from_pretrained(folder(name) / "target", dtype=torch.float32).eval())


def weights(path: Path) -> dict[str, Tensor]:
    """A peer's pickled state dict, tensors only."""
    return torch.load(path, weights_only=True)


def tensors(name: str) -> dict[str, Tensor]:
    """The recorded inputs and outputs."""
    return load_file(folder(name) / "golden.safetensors")


def notes(name: str) -> dict[str, Any]:
    """What was run, with ids and lists."""
    return json.loads((folder(name) / "golden.json").read_text())


@dataclass
class Round:
    """One round of real decoding: the tree, what was accepted of it, and nothing about time."""

    tokens: list[int]
    depths: list[int]
    accepted: int


def decode_rounds(target: Target, head: Any, run: dict[str, Any]) -> tuple[list[Round], list[int]]:
    """Decode a recorded prompt with our engine; the rounds, and the text as far as the peer wrote it."""
    rounds: list[Round] = []
    trees: list[Any] = []
    propose, observe = head.propose, head.observe

    def proposed(*args: Any) -> Any:
        trees.append(propose(*args))
        return trees[-1]

    def observed(state: Any, verified: Any) -> Any:
        if not trees:  # `begin` of some heads reads the prompt through it
            return observe(state, verified)
        tree = trees[-1]
        rounds.append(Round(tree.tokens[0].tolist(), tree.shape.depth[0].tolist(), int(verified.counts[0]) - 1))
        return observe(state, verified)

    head.propose, head.observe = proposed, observed
    prompt = torch.tensor([run["prompt"]])
    room = MaxLengthCriteria(max_length=len(run["output_ids"]) + 100)  # the last rounds are not cut short
    result = decode(target, head, Request(prompt, stopping=StoppingCriteriaList([room])))
    head.propose, head.observe = propose, observe
    return rounds[: run["rounds"]], result.sequences[0, : len(run["output_ids"])].tolist()


def assert_rounds_equal(rounds: list[Round], run: dict[str, Any]) -> None:
    """Trees, positions and accepted lengths of every round; trees with a near-tie compare as sets, as the notes say."""
    assert [r.accepted for r in rounds] == run["accept_length_per_round"]
    gaps = run.get("min_topk_gap_per_round", [1.0] * len(rounds))
    for ours, tokens, gap in zip(rounds, run["tree_tokens_per_round"], gaps, strict=True):
        assert ours.tokens == tokens or (gap < 2e-5 and sorted(ours.tokens) == sorted(tokens))
    for ours, positions in zip(rounds, run.get("tree_position_ids_per_round", []), strict=False):
        assert ours.depths == positions


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    """Within 2e-5, or 1e-5 of the largest value."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=max(2e-5, 1e-5 * float(theirs.abs().max())))
