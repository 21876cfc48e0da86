"""The figures of `bench`, with a clock that the test turns, and the verdict on greedy texts."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import tiny
import torch
from rich.console import Console
from transformers import LogitsProcessor, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from selfspec.errors import ConfigError
from selfspec.inference.bench import BenchSettings, bench, resolve_drafts
from selfspec.inference.bench import measure as module
from selfspec.inference.bench.figures import TRANSFORMERS, TRANSFORMERS_NGRAM, bootstrap, engine_share, recommended
from selfspec.inference.bench.measure import rotated
from selfspec.inference.bench.plots import plot_speed
from selfspec.inference.bench.tables import acceptance_table, results_table
from selfspec.inference.engine import decode
from selfspec.inference.plain import decode_plain
from selfspec.inference.request import Request
from selfspec.inference.runs import prepare
from selfspec.inference.verdict import NEAR_TIE, Difference, compare, first_difference, overall, resolution
from selfspec.target import Target

FIELDS = {"target", "dtype", "device", "threads", "prompts", "max_new_tokens", "temperature", "seed", "runs"}
RUN_FIELDS = {
    "name",
    "tokens",
    "seconds",
    "tokens_per_s",
    "speedup",
    "tokens_per_round",
    "accepted_by_depth",
    "identical",
    "stage_seconds",
}
PREFILL, PASS, PROMPT = 10.0, 1.0, 30


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    door = tiny.selfspec_target("llama")
    yield door
    door.release()


def prompts(count: int) -> list[list[int]]:
    return [tiny.text(1, PROMPT, seed)[0].tolist() for seed in range(count)]


def by_name(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {run["name"]: run for run in results["runs"]}


@pytest.fixture
def clock(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A prefill takes ten seconds, any other pass of the target one second, all else nothing."""
    now = [0.0]

    def tick(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        now[0] += PREFILL if kwargs["input_ids"].shape[1] >= PROMPT else PASS

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    handle = target.model.base_model.register_forward_pre_hook(tick, with_kwargs=True)
    yield
    handle.remove()


@pytest.mark.usefixtures("clock")
def test_rates_leave_out_prefill_and_warm_up(target: Target) -> None:
    settings = BenchSettings(max_new_tokens=21, warmup_tokens=5)
    runs = by_name(bench(target, resolve_drafts(["lookup"], target), prompts(3), settings))
    for name in ("plain", TRANSFORMERS):
        run = runs[name]
        assert (run["tokens"], run["rounds"], run["decoded_tokens"]) == (3 * 21, 3 * 20, 3 * 20)
        assert (run["prefill_seconds"], run["seconds"], run["total_seconds"]) == (30, 60, 90)
        assert run["tokens_per_s"] == run["speedup"] == run["tokens_per_round"] == 1.0
    for name in (TRANSFORMERS_NGRAM, "lookup"):
        run = runs[name]
        assert run["tokens"] == 3 * 21
        assert run["seconds"] == run["rounds"]
        assert run["tokens_per_s"] == pytest.approx(run["tokens_per_round"])
        assert run["accepted_per_round"] == pytest.approx(run["tokens_per_round"] - 1)


@pytest.mark.usefixtures("clock")
def test_speed_up_is_the_median_of_paired_ratios(target: Target) -> None:
    settings = BenchSettings(max_new_tokens=21)
    run = by_name(bench(target, resolve_drafts(["lookup"], target), prompts(3), settings))["lookup"]
    ratios = sorted(row["tokens_per_s"] / 1.0 for row in run["per_prompt"])
    assert run["speedup"] == ratios[1]
    assert run["speedup_best_baseline"] == ratios[1]
    low, high = run["speedup_interval"]
    assert ratios[0] <= low <= ratios[1] <= high <= ratios[2]


@pytest.mark.usefixtures("clock")
def test_acceptance_of_a_scripted_draft(target: Target) -> None:
    """Accepts 3, 0, 5 and 1 of its guesses; the last round has room for one guess only."""
    (prompt,) = prompts(1)
    with torch.no_grad():
        whole = target.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=40)[0].tolist()
    script = [3, 0, 5, 1]
    draft = oracle.Oracle([whole], oracle.chain(5, lambda row, turn: script[turn % 4]))
    results = bench(target, {"script": draft}, [prompt], BenchSettings(14, warmup_tokens=2, baselines=False))
    run = by_name(results)["script"]
    assert (run["tokens"], run["committed"], run["accepted"], run["rounds"]) == (14, 13, 9, 4)
    assert run["proposed"] == 5 + 5 + 5 + 1
    assert (run["tokens_per_round"], run["accepted_per_round"]) == (3.25, 2.25)
    assert run["accepted_by_depth"] == [0.75, 0.5, 0.5, 0.25, 0.25]
    assert run["conditional_by_depth"] == [0.75, 1.0, 1.0, 0.5, 1.0]  # 2 of 2 rounds that got that deep, and so on
    assert run["identical"] is True
    assert run["speedup"] == 13 / 4


def test_results_have_the_fields_users_are_promised(target: Target, tmp_path: Path) -> None:
    results = bench(target, resolve_drafts(["lookup"], target), prompts(2), BenchSettings(12))
    assert set(results) >= FIELDS
    assert [run["name"] for run in results["runs"]] == ["plain", TRANSFORMERS, TRANSFORMERS_NGRAM, "lookup"]
    assert all(set(run) >= RUN_FIELDS for run in results["runs"])
    assert all(run["identical"] is True for run in results["runs"])
    assert 0 <= by_name(results)["lookup"]["engine_share"] <= 1
    assert json.loads(json.dumps(results)) == results
    console = Console(width=80, record=True, file=(tmp_path / "table.txt").open("w"))
    results_table(results, console)
    acceptance_table(results, console)
    shown = console.export_text()
    assert all(run["name"] in shown for run in results["runs"])
    assert "1.00x" in shown


def test_sampled_text_is_not_compared_and_repeats_with_its_seed(target: Target) -> None:
    settings = BenchSettings(12, temperature=0.8, seed=3)
    first, second = (bench(target, resolve_drafts(["lookup"], target), prompts(2), settings) for _ in range(2))
    for one, other in zip(first["runs"], second["runs"], strict=True):
        assert one["identical"] is None
        assert [row["tokens"] for row in one["per_prompt"]] == [row["tokens"] for row in other["per_prompt"]]
        assert one["rounds"] == other["rounds"]


@pytest.mark.parametrize("name", ["plain", "lookup"])
def test_the_first_token_belongs_to_the_prefill(target: Target, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An accelerator works behind the caller's back until a token is read: a prefill without it would seem free."""
    now = [0.0]

    class Slow(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            now[0] += 1
            return scores

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    stop = StoppingCriteriaList([MaxLengthCriteria(PROMPT + 1)])
    request = Request(torch.tensor(prompts(1)), processors=LogitsProcessorList([Slow()]), stopping=stop)
    draft = resolve_drafts(["lookup"], target)["lookup"]
    result = decode_plain(target, request) if name == "plain" else decode(target, draft, request)
    assert {stage: seconds for stage, seconds in result.stats.seconds.items() if seconds} == {"prefill": 1.0}


def test_runs_rotate_from_prompt_to_prompt() -> None:
    runs: Any = ["a", "b", "c"]
    assert [rotated(runs, i) for i in range(4)] == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"], ["a", "b", "c"]]


def test_every_run_gets_the_same_stop_rules(target: Target) -> None:
    request = prepare(target, prompts(1)[0], BenchSettings(7).generate_arguments(7))
    assert [type(c).__name__ for c in request.stopping] == ["MaxLengthCriteria"]
    assert not request.do_sample
    sampled = prepare(target, prompts(1)[0], BenchSettings(7, temperature=0.5).generate_arguments(7))
    assert [type(p).__name__ for p in sampled.processors] == ["TemperatureLogitsWarper"]


def test_prompts_that_cannot_be_measured_are_refused_before_any_pass(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "prepare", None)
    with pytest.raises(ConfigError, match="no prompts"):
        bench(target, {}, [], BenchSettings(20))
    with pytest.raises(ConfigError, match="baseline's name"):
        bench(target, {"plain": oracle.Scripted()}, prompts(1), BenchSettings(20))


def test_engine_share_counts_what_no_stage_names() -> None:
    stages = {"prefill": 9.0, "propose": 1.0, "verify": 6.0, "accept": 0.5, "emit": 0.5, "keep": 0.5, "observe": 1.0}
    assert engine_share(stages, 10.0) == pytest.approx(0.2)


def test_interval_of_equal_values_is_a_point_and_one_value_has_none() -> None:
    assert bootstrap([2.0, 2.0, 2.0]) == [2.0, 2.0]
    assert bootstrap([2.0]) is None


@pytest.mark.parametrize(("speedups", "best"), [((1.2, 1.5), "b"), ((0.8, 0.9), "plain"), ((1.1, None), "a")])
def test_recommended_is_the_fastest_draft_that_pays(speedups: tuple[float | None, ...], best: str) -> None:
    runs = [{"name": "plain", "speedup": 1.0}, {"name": TRANSFORMERS_NGRAM, "speedup": 9.0}]
    runs += [{"name": name, "speedup": value} for name, value in zip("ab", speedups, strict=True)]
    assert recommended({"runs": runs}) == best


def test_chart_is_a_png(target: Target, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = bench(target, {}, prompts(1), BenchSettings(4))
    path = plot_speed(results, tmp_path / "new" / "speed.png")
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert [file.name for file in path.parent.iterdir()] == ["speed.png"]


def test_without_matplotlib_a_notice_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with caplog.at_level(logging.WARNING):
        assert plot_speed({"runs": []}, tmp_path / "speed.png") is None
    assert "pip install matplotlib" in caplog.text
    assert not list(tmp_path.iterdir())


# The verdict


def test_equal_texts_have_no_difference(target: Target) -> None:
    assert compare(target, [2, 3], [4, 5], [4, 5]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert overall([None, None]) is True


def test_a_text_that_ends_early_is_no_near_tie(target: Target) -> None:
    difference = compare(target, [2, 3], [4, 5], [4])
    assert difference is not None
    assert (difference.place, difference.verdict, difference.plain_token, difference.other_token) == (1, False, 5, None)


def steered(dtype: torch.dtype, gap: float) -> tuple[Target, list[int]]:
    """A target that holds tokens 10 and 11 for likeliest, this far apart, whatever it has read."""
    model = tiny.model("llama")
    with torch.no_grad():
        head = model.get_output_embeddings()
        biased = torch.nn.Linear(head.in_features, head.out_features)
        biased.weight.zero_()
        biased.bias.zero_()
        biased.bias[10], biased.bias[11] = 20.0, 20.0 - gap
    model.set_output_embeddings(biased)
    return Target(model.to(dtype)), prompts(1)[0]


@pytest.mark.parametrize(
    ("dtype", "gap", "verdict"),
    [
        (torch.bfloat16, 0.125, NEAR_TIE),
        (torch.bfloat16, 0.5, NEAR_TIE),
        (torch.bfloat16, 2.0, False),
        (torch.float32, 0.0, False),
    ],
)
def test_difference_is_judged_by_the_gap_in_units_of_the_dtype(
    dtype: torch.dtype, gap: float, verdict: str | bool
) -> None:
    target, prompt = steered(dtype, gap)
    difference = compare(target, prompt, [10, 10, 10], [10, 11, 10])
    assert difference is not None
    assert (difference.place, difference.verdict, difference.margin) == (1, verdict, gap)
    assert difference.top2_margin == gap
    assert difference.ulps == pytest.approx(gap / resolution(20.0, dtype))
    assert overall([None, difference]) == verdict
    assert str(difference).endswith("NOT a near-tie") == (verdict is False)


def test_one_wrong_text_outweighs_near_ties() -> None:
    near, wrong = Difference(1, NEAR_TIE), Difference(2, False)
    assert overall([near, None]) == NEAR_TIE
    assert overall([near, wrong]) is False


def test_resolution_is_the_step_to_the_next_number() -> None:
    assert resolution(20.0, torch.bfloat16) == 0.125
    assert resolution(1.0, torch.float16) == 2.0**-10
