"""Tasks, bounds, intervals, batches and random shapes of `bench`, against theory and transformers' own generate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from scipy.stats import binom

from selfspec import recipes
from selfspec.errors import ConfigError
from selfspec.inference.bench import BenchSettings, bench, resolve_drafts
from selfspec.inference.bench.bound import bound, cost_curve
from selfspec.inference.bench.figures import ASSISTED, EARLY_EXIT, bootstrap, by_task
from selfspec.inference.bench.page import plot_page
from selfspec.inference.bench.shapes import ScriptedDraft, random_model, rate_for, scripted_texts
from selfspec.inference.bench.suite import Conditions, in_turn, lengthened, run_suite
from selfspec.inference.bench.throughput import throughput
from selfspec.inference.engine import decode
from selfspec.inference.runs import prepare, prepare_batch
from selfspec.prompting import Prompt, read_prompts
from selfspec.stats import Stats
from selfspec.target import Target

TASKS = {"code", "chat", "summary", "rag", "maths", "translation", "lists"}
GREEDY = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    door = tiny.selfspec_target("llama")
    yield door
    door.release()


def prompts(count: int, ragged: bool = False) -> list[list[int]]:
    return [tiny.text(1, 20 + 3 * i * ragged, i)[0].tolist() for i in range(count)]


# Prompts


def test_the_package_has_ten_prompts_of_every_task_and_no_prompt_twice() -> None:
    found = read_prompts(recipes.prompts())
    assert {prompt.category for prompt in found} == TASKS
    assert all(sum(p.category == task for p in found) == 10 for task in TASKS)
    assert len({json.dumps([p.text, p.messages]) for p in found}) == len(found)


# Intervals


@pytest.mark.parametrize("count", [5, 9])
def test_the_interval_is_that_of_the_exact_bootstrap_distribution_of_the_median(count: int) -> None:
    """The median of a resample is at most the k-th smallest value when more than half of the draws are among those."""
    values = [float(v * v) for v in range(1, count + 1)]
    upto = [binom.sf(count // 2, count, k / count) for k in range(1, count + 1)]
    low, high = (next(v for v, p in zip(values, upto, strict=True) if p >= q) for q in (0.025, 0.975))
    assert all(abs(p - q) > 0.004 for p in upto for q in (0.025, 0.975)), "too near the edge for 2,000 resamples"
    assert bootstrap(values) == [low, high]


def test_figures_of_a_task_come_from_its_prompts_alone() -> None:
    def row(task: str, speedup: float, rounds: int, committed: int) -> dict[str, Any]:
        return {"task": task, "speedup": speedup, "rounds": rounds, "committed": committed}

    runs = [{"name": "a", "per_prompt": [row("x", 1.0, 10, 20), row("y", 3.0, 5, 5), row("x", 2.0, 10, 40)]}]
    found = by_task(runs, 0)
    assert found["x"]["a"]["speedup"] == 1.5 and found["x"]["a"]["tokens_per_round"] == 3.0
    assert found["y"]["a"] == {"prompts": 1, "speedup": 3.0, "speedup_interval": None, "tokens_per_round": 1.0}
    assert by_task([{"name": "a", "per_prompt": [row(None, 1.0, 1, 1)]}], 0) == {}  # type: ignore[arg-type]


# Bounds


def test_bounds_by_hand() -> None:
    """10 rounds of 5 nodes that commit 3 tokens each; a pass takes 1 s at 4 nodes and 2 s at 8, so 1.25 s at 5."""
    stats = Stats(rounds=10, committed=30, accepted=20, proposed=40)
    stats.seconds.update(verify=15.0, propose=2.0, observe=3.0, accept=4.0)
    found = bound(stats, 25.0, {1: 0.5, 4: 1.0, 8: 2.0})
    assert found is not None
    assert found["engine_free_tokens_per_s"] == 30 / 20 and found["reached"] == pytest.approx(20 / 25)
    assert found["pass_seconds"] == 1.25 and found["draft_seconds"] == 0.5
    assert found["curve_tokens_per_s"] == pytest.approx(3 / 1.75)
    assert found["curve_reached"] == pytest.approx((30 / 25) / (3 / 1.75))
    assert found["free_draft_tokens_per_s"] == pytest.approx(3 / 1.25)
    assert bound(Stats(), 1.0, None) is None


def test_the_cost_curve_runs_passes_of_the_sizes_it_names(target: Target) -> None:
    seen: list[int] = []
    handle = target.model.base_model.register_forward_pre_hook(
        lambda m, a, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    curve = cost_curve(target, [5, 7, 9], 30, (1, 3, 6), repeats=2)
    handle.remove()
    assert list(curve) == [1, 3, 6] and all(seconds > 0 for seconds in curve.values())
    passes = [size for size in seen if size != 30]  # the prefill; the head is compared with the model's once
    assert [passes.count(size) for size in (3, 6)] == [3, 3]


def test_a_suite_has_tasks_bounds_and_a_page(target: Target, tmp_path: Path) -> None:
    settings = BenchSettings(10, bound=True)
    results = bench(target, resolve_drafts(["lookup"], target), prompts(3), settings, tasks=["code", "chat", "code"])
    assert list(results["tasks"]) == ["code", "chat"]
    assert results["tasks"]["code"]["lookup"]["prompts"] == 2
    run = next(run for run in results["runs"] if run["name"] == "lookup")
    assert 0 < run["bound"]["reached"] <= 1
    assert [row["task"] for row in run["per_prompt"]] == ["code", "chat", "code"]
    assert json.loads(json.dumps(results)) == results
    pytest.importorskip("matplotlib")
    png, page = plot_page(results, tmp_path / "page.png"), plot_page(results, tmp_path / "page.html")
    assert png is not None and png.read_bytes().startswith(b"\x89PNG")
    assert page is not None and "data:image/png;base64," in page.read_text()


def test_assisted_generation_and_early_exit_are_baselines_on_request(target: Target) -> None:
    settings = BenchSettings(8, baselines=False, assistant=tiny.model("llama", seed=3), early_exit=1)
    runs = {run["name"]: run for run in bench(target, {}, prompts(2), settings)["runs"]}
    assert set(runs) == {"plain", ASSISTED, EARLY_EXIT}
    assert all(run["identical"] is True for run in runs.values())
    assert target.model.config.num_hidden_layers == 3


# Conditions


def test_prompts_are_taken_from_every_task_in_turn() -> None:
    every = [Prompt(text=f"{task}{i}", category=task) for task in "abc" for i in range(3)]
    assert [p.text for p in in_turn(every, [], 5)] == ["a0", "b0", "c0", "a1", "b1"]
    assert [p.text for p in in_turn(every, ["c", "a"], 9)] == ["a0", "c0", "a1", "c1", "a2", "c2"]
    assert [p.text for p in in_turn([Prompt("x"), Prompt("y")], [], 9)] == ["x", "y"]
    with pytest.raises(ConfigError, match="no prompt belongs to task 'd'; tasks at hand: a, b, c"):
        in_turn(every, ["d"], 9)


def test_prompts_are_lengthened_with_the_end_of_other_text_and_never_cut() -> None:
    given = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    assert lengthened(given, 4) == [[5, 1, 2, 3], [8, 9, 4, 5], [6, 7, 8, 9]]
    assert lengthened(given, 9) == [
        [6, 7, 8, 9, 4, 5, 1, 2, 3],
        [1, 2, 3, 6, 7, 8, 9, 4, 5],
        [4, 5, 1, 2, 3, *given[2]],
    ]
    assert lengthened(given, None) == given == lengthened(given, 1)


def test_every_condition_is_measured_and_the_first_keeps_its_place(target: Target) -> None:
    settings, conditions = BenchSettings(6, baselines=False), Conditions((0.0, 0.7), (None, 40), (2, 1))
    results = run_suite(target, resolve_drafts(["lookup"], target), prompts(2), settings, conditions)
    keys = [(c["context"], c["temperature"], c["batch"]) for c in results["conditions"]]
    assert keys == [(c, t, b) for c in (None, 40) for t in (0.0, 0.7) for b in (2, 1)]
    assert (results["temperature"], results["context"], results["batch"]) == (0.0, None, 1)
    assert [run["name"] for run in results["runs"]] == ["plain", "lookup"]
    assert results["conditions"][5]["prompt_tokens"] == 80
    json.dumps(results)


# Batches


def test_batches_give_the_rows_of_generate_and_count_their_tokens(target: Target) -> None:
    found = throughput(target, resolve_drafts(["lookup"], target), prompts(5, ragged=True), 2, GREEDY)
    assert (found["batch"], found["batches"]) == (2, 2)
    assert [run["name"] for run in found["runs"]] == ["transformers", "plain", "lookup"]
    assert all(run["tokens"] == 4 * 12 and run["identical_rows"] == "4/4" for run in found["runs"])
    assert found["runs"][0]["speedup"] == 1.0
    assert found["runs"][2]["tokens_per_round"] >= 1
    with pytest.raises(ConfigError, match="do not fill a batch of 9"):
        throughput(target, {}, prompts(2), 9, GREEDY)


# Random models and scripts


@pytest.mark.parametrize(("wanted", "depth"), [(1.0, 4), (3.0, 7), (2.2, 3), (5.0, 4)])
def test_the_rate_gives_the_tokens_per_round_that_were_asked_for(wanted: float, depth: int) -> None:
    rate = rate_for(wanted, depth)
    assert sum(rate**d for d in range(depth + 1)) == pytest.approx(wanted)
    with pytest.raises(ConfigError, match="tokens per round"):
        rate_for(depth + 1.1, depth)


def test_a_script_is_accepted_as_often_as_its_errors_allow_and_the_text_stays() -> None:
    model = random_model("tiny", torch.float32, "cpu")
    target = Target(model)
    prompt = torch.randint(2, 512, (1, 10), generator=torch.Generator().manual_seed(0))[0].tolist()
    (text,) = scripted_texts(target, [prompt], 200)
    assert text == model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=200)[0].tolist()
    draft = ScriptedDraft([text], 7, rate_for(3.0, 7), 512)
    result = decode(target, draft, prepare(target, prompt, {"do_sample": False, "max_new_tokens": 200}))
    assert result.sequences[0].tolist() == text
    assert result.stats.tokens_per_round == pytest.approx(3.0, abs=0.75)  # 4 standard errors of 65 rounds
    target.release()


def test_shapes_that_do_not_exist_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="use one of tiny, 1B, 8B, 70B"):
        random_model("9B", torch.float32, "cpu")


@pytest.mark.parametrize(("shape", "weights"), [("1B", 1.24e9), ("8B", 8.03e9), ("70B", 70.6e9)])
def test_shapes_have_the_weights_that_they_are_named_after(shape: str, weights: float) -> None:
    model = random_model(shape, torch.bfloat16, "meta")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(weights, rel=0.01)


def test_scripts_of_several_rows_keep_apart() -> None:
    target = Target(random_model("tiny", torch.float32, "cpu"))
    asked = [torch.randint(2, 512, (1, n), generator=torch.Generator().manual_seed(n))[0].tolist() for n in (9, 14)]
    texts = scripted_texts(target, asked, 30)
    request = prepare_batch(target, asked, {"do_sample": False, "max_new_tokens": 30})
    result = decode(target, ScriptedDraft(texts, 4, 1.0, 512), request)
    assert [row[-30:] for row in result.sequences.tolist()] == [text[-30:] for text in texts]
    assert result.stats.accepted_by_depth[0] == 1.0
    target.release()
