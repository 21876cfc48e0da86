"""Tuning trained heads, and the benchmark of the guard."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_folder
import torch
from oracle import Oracle, bushy, chain, patched, plain

from selfspec import cli, registry
from selfspec.checkpoint import CONFIG, save_head
from selfspec.heads.trees import best_choices, expected_tokens, fastest_choices
from selfspec.inference.bench import guard as bench
from selfspec.inference.guard.setup import STATISTICS, saved_chances
from selfspec.inference.tune_heads import acceptance
from selfspec.models import load_target
from selfspec.target import Target

TABLE = [[0.6, 0.2, 0.1], [0.5, 0.25, 0.05], [0.4, 0.3, 0.2]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))


def _all_trees(most: int) -> list[list[tuple[int, ...]]]:
    """Every set of at most `most` paths over three ranks and three depths that holds all prefixes."""
    paths = [p for depth in (1, 2, 3) for p in itertools.product(range(3), repeat=depth)]
    found: list[frozenset[tuple[int, ...]]] = [frozenset()]
    seen = set(found)
    for tree in found:
        if len(tree) == most:
            continue
        for path in paths:
            larger = tree | {path}
            if path not in tree and (len(path) == 1 or path[:-1] in tree) and larger not in seen:
                seen.add(larger)
                found.append(larger)
    return [sorted(tree, key=lambda p: (len(p), p)) for tree in found]


def test_static_trees_are_the_best_of_all_trees_of_their_size_and_the_fastest_of_all_sizes() -> None:
    trees = _all_trees(4)
    for size in (1, 2, 3, 4):
        found = expected_tokens(best_choices(TABLE, size), TABLE)
        assert found == pytest.approx(max(expected_tokens(t, TABLE) for t in trees if len(t) == size))
    for node, level in ((0.02, 0.0), (0.1, 0.05), (0.02, 0.3), (0.3, 0.2), (2.0, 0.0)):

        def seconds(nodes: int, depth: int, node: float = node, level: float = level) -> float:
            return 1 + node * (nodes - 1) + level * depth

        def rate(tree: Any) -> float:
            return expected_tokens(tree, TABLE) / seconds(len(tree) + 1, max(map(len, tree), default=0))

        assert rate(fastest_choices(TABLE, seconds, 4)) == pytest.approx(max(map(rate, trees))), (node, level)


def test_acceptance_is_counted_by_depth_and_by_rank() -> None:
    model = tiny.model("llama")
    prompt = tiny.text(1, 9)
    text = plain(model, prompt, max_new_tokens=41)[0].tolist()
    target = Target(model)
    deep = acceptance(target, Oracle([text], chain(3, right=2)), [prompt[0].tolist()], 41)
    assert deep["conditional_by_depth"][:3] == [1, 1, 0] and deep["chances_by_rank"] == [[1.0], [1.0]]
    wide = acceptance(target, Oracle([text], bushy(2, 3)), [prompt[0].tolist()], 40)
    assert wide["chances_by_rank"][0] == [0, 0, 1]  # the right one comes last of three siblings
    target.release()


@pytest.mark.parametrize(
    ("kind", "tree", "static"), [("medusa", {}, True), ("medusa", {"tree": "best-first"}, False), ("hydra", {}, False)]
)
def test_tuned_heads_carry_statistics_a_profile_and_a_static_tree_if_theirs_is_one_and_write_the_same_text(
    kind: str,
    tree: dict[str, str],
    static: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, heads, results = tiny_folder.save(tmp_path / "model"), tmp_path / "heads", tmp_path / "out.json"
    model, _ = load_target(str(folder), "float32")
    target = Target(model)
    method = registry.method(kind)
    save_head(method.from_target(method.config_class(num_heads=2, **tree), target), heads)
    target.release()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "def add(a, b):"}\n')
    arguments = ["tune", "--target", folder, "--dtype", "float32", "--draft", heads, "--max-new-tokens", 8]
    monkeypatch.setattr(
        sys, "argv", ["selfspec", *map(str, [*arguments, "--prompts", tmp_path / "prompts.jsonl", "--json", results])]
    )
    monkeypatch.setattr("selfspec.inference.tune_heads.measure", _quick)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert "wrote" in capsys.readouterr().out
    assert len(saved_chances(heads)) == len(json.loads((heads / STATISTICS).read_text())["conditional_by_depth"])
    assert list(heads.glob("profile-*.json")) and json.loads(results.read_text())["profile"]["groups"]
    assert json.loads((heads / CONFIG).read_text())["kind"] == kind
    assert ("choices" in json.loads(results.read_text())) is static
    ids = tiny.text(1, 7)
    with patched(model, heads, guard=True):
        assert torch.equal(model.generate(ids, max_new_tokens=20), plain(model, ids, max_new_tokens=20))


def _quick(target: Any, drafts: Any, text: Any, rows: int, seconds: float, whole: bool) -> Any:
    from selfspec.inference.guard.measure import measure

    return measure(target, drafts, text, rows, 0.0, (1, 2, 4), ((None, None), (2, None)))


def test_the_adversarial_benchmark_pairs_three_ways_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfspec.inference.guard.setup.measure", _quick)
    target = tiny.selfspec_target("llama")
    settings = bench.GuardBenchSettings(6, (1.5, 0.0), (1, 2), 3, 5)
    drafts = {"wrong": Oracle([[1]], chain(2))}
    cases = bench.bench_guard(target, drafts, tiny.text(3, 6).tolist(), settings)
    assert len(cases) == 8 and {(c["text"], c["batch"]) for c in cases} == set(
        itertools.product(("prompts", "random tokens"), (1, 2))
    )
    for case in cases:
        low, high = case["guarded_interval"]
        assert 0 < low <= case["guarded"] <= high and case["raw"] > 0
        assert case["guard"]["rounds"] == 3 * 5  # the first token comes from the prefill
    target.release()
