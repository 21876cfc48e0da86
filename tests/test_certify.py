"""`certify` passes what is right, fails what is wrong, and writes down what it looked at."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import oracle
import pytest
import tiny
import tiny_folder
import torch
from scipy.stats import chisquare
from test_draft_contract import ROWS, Row, make, read, repeating
from transformers import PreTrainedModel
from typer.testing import CliRunner

from selfspec.accept import AcceptRule
from selfspec.checkpoint import save_head
from selfspec.cli import app
from selfspec.draft import Sampling
from selfspec.errors import ConfigError
from selfspec.heads.lookup import Lookup
from selfspec.heads.medusa import Medusa, MedusaConfig
from selfspec.inference.certify import CertifySettings, certify, faults, verdicts
from selfspec.inference.certify.certificate import SCREENED, screened_part
from selfspec.inference.certify.draws import draws_check
from selfspec.inference.certify.greedy import greedy_check, noise_floor
from selfspec.inference.certify.models import tiny_prompts, wide_model
from selfspec.inference.certify.record import mismatches, read_certificate
from selfspec.inference.certify.rule import TOLERANCE, Shape, distance, shape_of
from selfspec.inference.certify.screened import _cells
from selfspec.inference.certify.statistics import detectable, fit, same_source, together
from selfspec.models import load_target
from selfspec.screen import Screen, Screened
from selfspec.target import Target, Unscored
from selfspec.tree import DraftTree, Drawn, TreeShape

SMALL = CertifySettings(max_new_tokens=10, sampled_prompts=1, samples=60, engine_samples=8, trees=10, top_k=5)
PROMPTS = [tiny.text(1, n, seed=n)[0].tolist() for n in (5, 12, 9)]


@pytest.fixture(autouse=True, scope="module")
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What drafts keep between runs goes here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SELFSPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny.model("gemma3")


@pytest.fixture(scope="module")
def record(model: PreTrainedModel) -> dict[str, Any]:
    return certify(model, "lookup", PROMPTS, SMALL, ["selfspec", "certify"])


# Certificates


def test_a_right_draft_is_certified_in_every_part(record: dict[str, Any]) -> None:
    assert record["passed"], verdicts(record["parts"])
    assert set(record["parts"]) == {"greedy", "screened", "rule", "draws", "sampled"}
    greedy = record["parts"]["greedy"][0]
    assert {text["variant"] for text in greedy["texts"]} == {
        "as it is",
        "repetition penalty 1.3",
        "end token inside the text",
        "row of a batch",
    }
    assert record["parts"]["rule"]["largest_distance"] < TOLERANCE


def test_the_record_holds_what_is_needed_to_run_it_again(record: dict[str, Any]) -> None:
    again = json.loads(json.dumps(record))
    assert again["versions"]["torch"] == torch.__version__
    assert {"command", "settings", "machine", "seconds", "format"} <= again.keys()
    assert again["target"]["fingerprint"].startswith("weights:")
    assert again["settings"]["seed"] == 0


@pytest.mark.nightly
def test_a_target_in_half_precision_is_checked_in_float32_too() -> None:
    model = tiny.model("llama").to(torch.bfloat16)
    record = certify(model, "lookup", PROMPTS, SMALL)
    assert [part["dtype"] for part in record["parts"]["greedy"]] == ["bfloat16", "float32"]
    assert model.dtype == torch.bfloat16
    assert record["passed"], verdicts(record["parts"])


def test_what_cannot_be_certified_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="nothing to certify"):
        CertifySettings(rule=AcceptRule("lossy-typical"))
    with pytest.raises(ConfigError, match="at least two tokens"):
        certify(model, "lookup", [], SMALL)
    with oracle.patched(model, "lookup"), pytest.raises(ConfigError, match="patched"):
        certify(model, "lookup", PROMPTS, SMALL)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A tiny target in a folder, and Medusa heads for it."""
    root = tmp_path_factory.mktemp("certify")
    target_folder = tiny_folder.save(root / "target")
    loaded, _ = load_target(target_folder, "float32")
    heads = root / "heads"
    made = Medusa.from_target(MedusaConfig(draft_vocab_size=20, num_heads=2), Target(loaded))
    save_head(made, heads)
    yield target_folder, heads


def test_the_command_writes_a_certificate_that_is_checked_against_target_and_heads(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    target, heads = folders
    file = tmp_path / "certificate.json"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("one two three", "four five six")))
    given = [str(target), str(heads), "--dtype", "float32"]
    options = ["--quick", "--prompts", str(prompts), "--max-new-tokens", "8", "--samples", "50", "--json", str(file)]
    found = CliRunner().invoke(app, ["certify", *given, *options])
    assert found.exit_code == 0, found.output
    assert "certified in" in found.output
    assert CliRunner().invoke(app, ["certify", *given, "--check", str(file)]).exit_code == 0
    changed = json.loads(file.read_text())
    changed["draft"]["files"]["config.json"] = "0" * 64
    changed["target"]["fingerprint"] = "weights:0:0"
    file.write_text(json.dumps(changed))
    found = CliRunner().invoke(app, ["certify", *given, "--check", str(file)])
    assert found.exit_code == 1
    assert "other files: config.json" in found.output
    assert "fingerprint" in found.output


def test_a_failed_certificate_does_not_pass_the_check(record: dict[str, Any], model: PreTrainedModel) -> None:
    target = Target(model)
    draft = Lookup()
    try:
        assert mismatches(record, target, "lookup", draft) == []
        assert "failed" in mismatches({**record, "passed": False}, target, "lookup", draft)[0]
    finally:
        target.release()


def test_files_that_are_no_certificates_are_refused(tmp_path: Path) -> None:
    for text in ("{", "{}", '{"target": 1, "draft": 1, "parts": 1, "passed": true, "format": 99}'):
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(ConfigError):
            read_certificate(tmp_path / "c.json")


# The self-test

QUICK_FAULTS = [f for f in faults.FAULTS if f.part in (faults.RULE, faults.DRAWS)]


@pytest.mark.parametrize("fault", QUICK_FAULTS[::5], ids=lambda fault: fault.name)
def test_planted_faults_are_caught_by_the_part_that_should(fault: faults.Fault) -> None:
    [found] = [o for o in faults.self_test([fault], drafts={})]
    assert found.passed, found.outcome
    assert ("accept rule" if fault.part == faults.RULE else "draws") in found.outcome or "refused" in found.outcome


def test_there_are_at_least_twelve_faults_and_none_stays_planted() -> None:
    assert len({fault.name for fault in faults.FAULTS}) == len(faults.FAULTS) >= 12
    before = [vars(owner)[name] for owner, name in ((faults.door, "visible"), (faults.SlotLayer, "move"))]
    for fault in faults.FAULTS:
        with fault.plant():
            pass
    assert before == [vars(owner)[name] for owner, name in ((faults.door, "visible"), (faults.SlotLayer, "move"))]


@pytest.mark.nightly
def test_every_planted_fault_is_caught_and_faultless_drafts_pass() -> None:
    missed = [found for found in faults.self_test() if not found.passed]
    assert not missed


# Draws without all logits

needs_kernels = pytest.mark.skipif(
    not Screen.applies(torch.empty(1, 1).expand(40_000, 1)), reason="no kernels for bytes on this processor"
)


@pytest.fixture(scope="module")
def wide() -> Iterator[Target]:
    target = Target(wide_model())
    yield target
    target.release()


def wide_prompts() -> list[list[int]]:
    return [prompt * 2 for prompt in tiny_prompts(3)[1:]]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)])
def test_draws_without_all_logits_are_judged_in_the_targets_own_dtype(dtype: torch.dtype) -> None:
    target = Target(wide_model().to(dtype))
    try:
        settings = CertifySettings(screened_draws=100, top_k=30, sampled_prompts=2)
        found = screened_part(target, wide_prompts(), settings)
    finally:
        target.release()
    [(line, passed)] = verdicts({SCREENED: found})
    assert found["used"] and passed, line
    assert [way["way"] for way in found["ways"]] == ["temperature 0.9", "top 30"]
    assert all(way["samples"] == 400 and way["degrees_of_freedom"] > 8 for way in found["ways"])
    assert found["same_logits"] and found["within_bounds"] and "800 at 4 nodes" in line


@needs_kernels
@pytest.mark.parametrize(
    "name",
    ["a proposed token is never refused", pytest.param("half of the top k is missed", marks=pytest.mark.nightly)],
)
def test_planted_faults_of_draws_without_all_logits_are_caught(name: str) -> None:
    [found] = faults.self_test([fault for fault in faults.FAULTS if fault.name == name], drafts={})
    assert found.passed and "draws without all logits" in found.outcome, found.outcome


@needs_kernels
def test_logits_outside_their_bounds_fail(wide: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = CertifySettings(screened_draws=50, sampled_prompts=1, top_k=5)
    assert screened_part(wide, wide_prompts(), settings)["within_bounds"]
    holds = Screened.holds
    monkeypatch.setattr(Screened, "holds", lambda self, logits: holds(replace(self, size=self.size / 10), logits))
    found = screened_part(wide, wide_prompts(), settings)
    assert not found["within_bounds"] and not found["passed"]
    assert "outside the bounds" in verdicts({SCREENED: found})[0][0]


@needs_kernels
def test_a_pass_with_other_logits_fails(wide: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = CertifySettings(screened_draws=50, sampled_prompts=1, top_k=5)
    made = Unscored.logits
    monkeypatch.setattr(Unscored, "logits", lambda self: made(self) * 1.01)
    found = screened_part(wide, wide_prompts(), settings)
    assert not found["same_logits"] and not found["passed"]


@needs_kernels
def test_targets_whose_tokens_are_never_drawn_so_say_why(wide: Target, model: PreTrainedModel) -> None:
    target, config = Target(model), wide.model.generation_config
    try:
        assert "not screened" in screened_part(target, PROMPTS, SMALL)["reason"]
        config.repetition_penalty = 1.2
        found = screened_part(wide, wide_prompts(), SMALL)
    finally:
        target.release()
        config.repetition_penalty = None
    assert not found["used"] and found["passed"] and "processors" in found["reason"]


def test_tokens_have_cells_of_their_own_or_share_one_with_those_as_likely() -> None:
    p = torch.tensor([0.0, 0.04, 0.3, 0.06, 0.05, 0.5, 0.05, 0.0], dtype=torch.float64)
    cells, count = _cells(p, 0.1)
    assert count == 4 and cells.tolist() == [4, 3, 1, 2, 2, 0, 3, 4]
    thin = torch.full((1000,), 1e-3, dtype=torch.float64)
    cells, count = _cells(thin, 0.05)
    assert torch.bincount(cells, thin).allclose(torch.full((count,), 1 / 20, dtype=torch.float64), atol=2e-3)


# Greedy: ties and real differences


def test_the_noise_floor_is_small_and_not_nothing(model: PreTrainedModel) -> None:
    target = Target(model)
    try:
        assert 0 < noise_floor(target, tiny.text(1, 30)[0].tolist()) < 1e-3
    finally:
        target.release()


def test_a_difference_far_above_the_noise_is_real(model: PreTrainedModel) -> None:
    target = Target(model)
    try:
        fault = next(f for f in faults.FAULTS if "never verified" in f.name)
        draft = oracle.Oracle([[0]], oracle.chain(2))
        with fault.plant():
            found = greedy_check(target, draft, PROMPTS[:1], 8)
    finally:
        target.release()
    [difference] = [d for d in found["texts"][0]["differences"].values() if d is not None][:1]
    assert difference["class"] == "real"
    assert difference["margin"] > found["tie_margin"] > 0
    assert not found["passed"]


# The rule


def test_the_enumeration_sees_a_lossy_rule() -> None:
    assert distance(Shape((-1, 0, 0), (False,) * 3), AcceptRule("lossy-typical"), 1) > 0.01
    assert distance(Shape((-1, 0, 0), (False,) * 3), AcceptRule(), 1) < TOLERANCE


def test_trees_are_cut_to_what_can_be_enumerated_and_keep_their_kind() -> None:
    drawn = torch.tensor([[False, True, True, False, True]])
    probs = torch.full((1, 5, 4), 0.25)
    tree = DraftTree(torch.zeros(1, 5).long(), TreeShape(torch.tensor([[-1, 0, 0, 1, 3]])), Drawn(probs, drawn, False))
    assert shape_of(tree) == Shape((-1, 0, 0, 1, 3), (False, True, True, False, True), False)
    assert shape_of(DraftTree(torch.zeros(1, 40).long(), TreeShape.chain(39))).depth == 3
    wide = DraftTree(torch.zeros(1, 9).long(), TreeShape(torch.tensor([[-1] + [0] * 8])))
    assert shape_of(wide).parents == (-1, 0, 0, 0)


# The q of every draft


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_nodes_of_every_method_are_drawn_from_the_q_it_hands_over(row: Row) -> None:
    target = tiny.selfspec_target("llama")
    try:
        draft = make(row, target)
        for sampling in (Sampling(True, 0.7), Sampling(True, 1.2, top_k=8, top_p=0.9)):
            verified = read(target, draft, repeating(2, 16))
            found = draws_check(draft, verified, sampling, 25, 3, 1e-6)
            assert found["passed"], found
    finally:
        target.release()


# Statistics


def test_the_g_test_agrees_with_chi_square_where_cells_are_full() -> None:
    p = [0.4, 0.3, 0.2, 0.1]
    found = fit([420, 280, 210, 90], p)
    wanted = chisquare([420, 280, 210, 90], [400, 300, 200, 100])
    assert found.freedom == 3
    assert found.p_value == pytest.approx(wanted.pvalue, abs=0.01)
    assert found.distance == pytest.approx(0.03)


def test_counts_where_nothing_can_be_are_told_apart() -> None:
    assert fit([50, 50, 1], [0.5, 0.5, 0.0]).outside == 1
    assert fit([100], [1.0]).p_value == 1.0
    assert together([]) == 1.0


def test_small_cells_are_pooled() -> None:
    found = fit([95, *[1] * 5, *[0] * 95], [0.95, *[0.0005] * 100])
    assert found.freedom == 1


def test_the_power_that_is_stated_is_the_power_there_is() -> None:
    # The deviation that is hardest to see for its total variation has w = 2 d; it must be seen in 90% of samples.
    samples, alpha, p = 500, 1e-3, [0.25] * 4
    d = detectable(samples, 3, alpha)
    assert d is not None
    q = [0.25 + d / 2, 0.25 + d / 2, 0.25 - d / 2, 0.25 - d / 2]
    chance = random.Random(0)
    seen = 0
    for _ in range(400):
        drawn = chance.choices(range(4), q, k=samples)
        seen += fit([drawn.count(cell) for cell in range(4)], p).p_value < alpha
    assert 0.85 < seen / 400 < 0.95


def test_two_samples_are_compared() -> None:
    assert same_source([50, 30, 20], [48, 33, 19]) > 0.5
    assert same_source([80, 10, 10], [10, 80, 10]) < 1e-6
