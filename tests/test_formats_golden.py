"""Imported checkpoints of other projects reproduce what the projects' own code computed: see tests/golden.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
from test_heads_hydra import ARCHS, compare_decoding, compare_forward
from torch import Tensor

from selfspec.checkpoint import load_head
from selfspec.draft import Verified
from selfspec.heads.formats import formats, import_folder
from selfspec.heads.formats.source import Source
from selfspec.target import Target
from selfspec.tree import shape_from_choices

torch.set_num_threads(1)
NEAR = {"atol": 2e-5, "rtol": 1e-5}


def imported(name: str, tmp_path: Path, draft: str = "draft", **settings: Any) -> tuple[Target, Any]:
    """The head of one golden folder, through the files that `selfspec import` writes."""
    target = golden.target(name)
    import_folder(golden.folder(name) / draft, tmp_path, target)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    return target, load_head(tmp_path, target)


def replay(target: Target, head: Any, run: dict[str, Any]) -> None:
    """Generate as the peer did; trees, positions, accepted lengths and text must be the peer's."""
    rounds, ids = golden.decode_rounds(target, head, run)
    assert ids == run["output_ids"]
    golden.assert_rounds_equal(rounds, run)


FAULTS = {
    "layers counted as outputs": ("eagle3-theta", {"target_layers": [1, 3, 4]}),
    "the target's rotary base": ("eagle3-theta", {"rope_theta": 500000.0}),
    "a residual from the normed state": ("eagle3", {"norm_before_residual": True}),
    "the normed state fed back": ("eagle3", {"norm_output": True}),
    "target_layer_ids without one more": ("dflash", {"taps": [1, 4]}),
    "a causal block": ("dflash", {"causal": True}),
    "the state below the last one": ("hydra-mlp", {"hidden_state_offset": 1}),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "fault"), FAULTS.values(), ids=FAULTS)
def test_the_vectors_catch_a_wrong_import(name: str, fault: dict[str, Any], tmp_path: Path) -> None:
    run = golden.notes(name)["runs"][0]
    lengths = [length - 1 for length in run.get("acceptance_lengths_plus_bonus", [])]
    size = run.get("args", {"total_token": run.get("block_size", 2), "depth": 7, "top_k": 1})
    settings: dict[str, Any] = {"tree_nodes": size["total_token"], "tree_top_k": size["top_k"]}
    settings |= {} if name == "dflash" else {"tree_depth": size["depth"] + 1}
    settings |= {"choices": golden.notes(name)["tree_choices"]} if name.startswith("hydra") else {}

    def accepted(head: Any) -> list[int]:
        return [one.accepted for one in golden.decode_rounds(head.target, head, run)[0]]

    wanted = lengths or run["accept_length_per_round"]
    assert accepted(imported(name, tmp_path / "right", **settings)[1]) == wanted
    assert accepted(imported(name, tmp_path / "wrong", **settings, **fault)[1]) != wanted


def greedy_runs(name: str) -> list[Any]:
    """The peer's greedy runs; one that stands for the folder where it is missing, so that the skip is seen.

    One by default; the others take long.
    """
    path = golden.ROOT / name / "golden.json"
    if not path.is_file():
        return [{"tag": "missing"}]
    runs = [run for run in json.loads(path.read_text())["runs"] if run["tag"].startswith("greedy")]
    return [runs[-1], *(pytest.param(run, marks=pytest.mark.nightly) for run in runs[:-1])]


def tag(run: dict[str, Any]) -> str:
    return str(run["tag"])


@torch.no_grad()
def test_medusa_logits(tmp_path: Path) -> None:
    _, head = imported("medusa", tmp_path)
    vectors = golden.tensors("medusa")
    logits = head.output(head.blocks(vectors["prefill.hidden_states"][0]))
    torch.testing.assert_close(logits, vectors["prefill.medusa_logits"][:, 0], **NEAR)


@pytest.mark.parametrize("run", greedy_runs("medusa"), ids=tag)
def test_medusa_runs(run: dict[str, Any], tmp_path: Path) -> None:
    choices = golden.notes("medusa")["tree_choices"][run["choices"]]
    replay(*imported("medusa", tmp_path, choices=choices), run)


@torch.no_grad()
def test_eagle_states_and_logits(tmp_path: Path) -> None:
    _, head = imported("eagle1", tmp_path)
    vectors = golden.tensors("eagle1")
    positions = torch.arange(29).unsqueeze(0)
    guess = head._run(vectors["forward.features"], vectors["forward.draft_input_ids"], positions, None, [None])
    torch.testing.assert_close(guess, vectors["forward.draft_hidden"], **NEAR)
    torch.testing.assert_close(head.output(guess), vectors["forward.draft_logits"], **NEAR)


@pytest.mark.parametrize("run", greedy_runs("eagle1"), ids=tag)
def test_eagle_runs(run: dict[str, Any], tmp_path: Path) -> None:
    size = run["args"]
    settings = {"tree_nodes": size["total_token"], "tree_depth": size["depth"] + 1, "tree_top_k": size["top_k"]}
    replay(*imported("eagle1", tmp_path, **settings), run)


@pytest.mark.parametrize("run", greedy_runs("eagle1-static"), ids=tag)
def test_eagle_runs_on_the_static_tree(run: dict[str, Any], tmp_path: Path) -> None:
    """The original EAGLE-1, 25 nodes: mask, depths, the tokens of every round, accepted lengths, text."""
    name = "eagle1-static"
    target, head = imported(name, tmp_path, choices=golden.notes(name)["tree_choices"])
    replay(target, head, run)
    vectors, (shape, _) = golden.tensors(name), shape_from_choices(head.config.choices)
    assert torch.equal(shape.ancestors[0].float(), vectors["verify_buffers.tree_attn_mask"][0, 0])
    assert torch.equal(shape.depth[0], vectors["verify_buffers.tree_position_ids"])


EAGLE3 = ["eagle3", "eagle3-fullvocab", "eagle3-theta"]


@pytest.mark.parametrize(
    ("name", "run"),
    [(name, run) for name in EAGLE3 for run in greedy_runs(name)[:1]],
    ids=lambda value: str(value)[:40],
)
def test_eagle3_runs(name: str, run: dict[str, Any], tmp_path: Path) -> None:
    size = run["args"]
    settings = {"tree_nodes": size["total_token"], "tree_depth": size["depth"] + 1, "tree_top_k": size["top_k"]}
    target, head = imported(name, tmp_path, **settings)
    assert list(head.config.target_layers) == [2, 4, 5]
    replay(target, head, run)


def pass_once(head: Any, features: Tensor, ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The head's output before its last norm, and its logits, from fused features `[1, T, K * D]`."""
    counts = torch.tensor([ids.shape[1]])
    verified = Verified(ids, ids, counts, None, features.chunk(len(head.config.target_layers), -1))
    guess = head._run(head._features(verified), ids, positions, None, [None] * head.config.num_layers)
    return guess, head.output(head._readout(guess))


@torch.no_grad()
def test_specforge_states_and_logits(tmp_path: Path) -> None:
    _, head = imported("specforge-eagle3", tmp_path)
    vectors = golden.tensors("specforge-eagle3")
    positions = torch.arange(30).unsqueeze(0)
    guess, logits = pass_once(head, vectors["forward.features"], vectors["forward.shifted_input_ids"], positions)
    torch.testing.assert_close(head.norm(guess), vectors["forward.normed_hidden"], **NEAR)
    torch.testing.assert_close(logits, vectors["forward.logits"], **NEAR)


SPECULATORS = ["", "-nbr", "-normout", "-headdim"]


@torch.no_grad()
@pytest.mark.parametrize("variant", SPECULATORS)
def test_speculators_states_and_logits(variant: str, tmp_path: Path) -> None:
    name = f"speculators-eagle3{variant}"
    _, head = imported(name, tmp_path)
    vectors = golden.tensors(name)
    second = [vectors[f"train.{part}"][:, 63:] for part in ("hidden_states", "input_ids", "position_ids")]
    guess, logits = pass_once(head, *second)
    torch.testing.assert_close(guess, vectors["train.step0.hidden_prenorm"], **NEAR)
    torch.testing.assert_close(logits, vectors["train.step0.logits"], **NEAR)


def test_a_converted_checkpoint_is_the_same_head_in_both_formats(tmp_path: Path) -> None:
    name = "convert-eagle3-to-speculators"
    heads = [imported(name, tmp_path / draft, draft)[1] for draft in ("draft", "draft-safeai")]
    one, other = (head.state_dict() for head in heads)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    configs = [{**head.config.to_dict(), "base_model": ""} for head in heads]
    assert configs[0] == configs[1]


def drafts() -> list[Path]:
    """All golden folders of heads."""
    return sorted(golden.ROOT.glob("*/draft*")) if golden.ROOT.is_dir() else []


@pytest.mark.parametrize("folder", drafts(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_folder_is_of_two_formats(folder: Path) -> None:
    source = Source.open(folder)
    found = [name for name, one in formats().items() if one.reads and one.detects(source)]
    assert len(found) == 1, found


@pytest.mark.parametrize("run", greedy_runs("dflash"), ids=tag)
def test_dflash_runs(run: dict[str, Any], tmp_path: Path) -> None:
    settings = {"block_size": run["block_size"], "tree_top_k": 1, "tree_nodes": run["block_size"]}
    target, head = imported("dflash", tmp_path, **settings)
    assert head.config.taps == [2, 5]
    lengths = [length - 1 for length in run["acceptance_lengths_plus_bonus"]]
    rounds, ids = golden.decode_rounds(target, head, run)
    assert ids == run["output_ids"] and [one.accepted for one in rounds] == lengths


HYDRA = [pytest.param(name, marks=[pytest.mark.nightly] if name != ARCHS[1] else []) for name in ARCHS]


@pytest.mark.parametrize("name", HYDRA)
def test_hydra_states_logits_and_runs(name: str, tmp_path: Path) -> None:
    _, head = imported(name, tmp_path, choices=golden.notes(name)["tree_choices"])
    compare_forward(head, name)
    compare_decoding(head, name, slice(1))
