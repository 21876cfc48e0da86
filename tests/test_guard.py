"""The guard: never slower than plain by its own account, near the best fixed choice, and no change of the text."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import guard_tools as tools
import pytest
import tiny
import torch
from generate_tools import NEW
from oracle import Oracle, chain, left_padded, patched, plain
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation import MaxLengthCriteria

import selfspec
from selfspec import registry
from selfspec.draft import Budget, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.inference import drafting
from selfspec.inference.choices import OFF, Choice, Round
from selfspec.inference.drafting import Pick
from selfspec.inference.engine import Generation, decode
from selfspec.inference.guard import setup
from selfspec.inference.guard.policy import GuardStats, steps
from selfspec.inference.output import Output
from selfspec.inference.request import Request
from selfspec.resolve import resolve_draft
from selfspec.target import Target
from selfspec.tree import DraftTree

CURVES = {"flat": tools.BF16, "doubles": tools.FP32}
TEXTS = {
    "never right": lambda draft, place: 0.0,
    "seldom right": lambda draft, place: 0.15,
    "often right": lambda draft, place: 0.7,
    "right in parts": lambda draft, place: 0.05 if place // 60 % 2 else 0.8,
}
each_curve = pytest.mark.parametrize("curve", CURVES)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of these tests stay among themselves."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))


# Speed, by scripted costs and acceptance


@each_curve
@pytest.mark.parametrize("text", TEXTS)
def test_at_every_place_of_every_text_at_most_a_pass_and_one_percent_are_lost(curve: str, text: str) -> None:
    for step in (0.0, 4.0, 21.0):
        for seed in range(2):
            written = tools.guarded(tools.guard(tools.table(CURVES[curve], step)), TEXTS[text], 130, seed)
            for account, place in zip(written.accounts, written.places, strict=True):
                assert account >= -(1 + 0.01 * place) - 1e-9, (step, seed, place)


@each_curve
def test_text_on_which_drafts_pay_is_written_nearly_as_fast_as_with_the_best_fixed_choice(curve: str) -> None:
    ratios = []
    for seed in range(5):
        costs = tools.table(CURVES[curve], 2.0)
        steering = tools.guard(costs, first=(0.7, 0.7, 0.7))
        found = tools.guarded(steering, TEXTS["often right"], 250, seed)
        ratios.append(tools.best_fixed(costs, TEXTS["often right"], 250, seed) / found.passes)
    assert statistics.median(ratios) > 0.93


def test_a_draft_that_becomes_right_is_found_again() -> None:
    steering = tools.guard(tools.table(tools.BF16, 4.0))
    written = tools.guarded(steering, lambda draft, place: 0.0 if place < 150 else 0.9, 600, 1)
    late = written.choices[-40:]
    assert sum(choice == OFF for choice in late) < 10 and written.passes < 450


def test_probes_become_rare_while_they_do_not_pay() -> None:
    steering = tools.guard(tools.table(tools.BF16, 4.0))
    choices = tools.guarded(steering, TEXTS["never right"], 600, 0).choices
    assert sum(c != OFF for c in choices[:100]) > sum(c != OFF for c in choices[-300:])
    assert steering.stats.off > 570


def test_of_several_drafts_the_one_that_pays_is_picked() -> None:
    for good in (0, 1):
        steering = tools.guard(tools.table(tools.BF16, 3.0, 3.0), drafts=2)
        right = lambda draft, place, good=good: 0.8 if draft == good else 0.05  # noqa: E731
        written = tools.guarded(steering, right, 300, 2)
        asked = [choice.draft for choice in written.choices if choice.draft is not None]
        assert asked.count(good) > 0.8 * len(asked) and written.passes < 200


def test_a_given_size_is_kept_but_may_be_off() -> None:
    costs = tools.table(tools.BF16, 4.0)
    steering = tools.guard(costs, nodes=8)
    chosen = {steering.choose(1, 100, 9) for _ in range(3)}
    assert chosen <= {OFF, Choice(0, 8)} and Choice(0, 8) in chosen
    assert tools.guard(costs, nodes=1).choose(1, 100, 9) == OFF


def test_choices_of_sampled_text_do_not_hang_on_the_clock() -> None:
    slow, fast = (tools.guard(tools.table(tools.BF16, 4.0)) for _ in range(2))
    first = tools.guarded(slow, TEXTS["right in parts"], 150, 3)

    def late(choice: Choice, result: Any) -> None:
        fast.learn(choice, replace(result, seconds=99.0))

    second = tools.write(fast.table, lambda deep: fast.choose(1, 100, deep), TEXTS["right in parts"], 150, 3, late)
    assert first.choices == second.choices


def test_greedy_text_follows_the_times_of_its_own_rounds() -> None:
    steering = tools.guard(tools.table(tools.BF16, 1.0))
    steering.live = True

    def dear(choice: Choice, result: Any) -> None:
        steering.learn(choice, replace(result, seconds=result.seconds * (1 if choice == OFF else 5)))

    tools.write(steering.table, lambda deep: steering.choose(1, 100, deep), TEXTS["often right"], 900, 3, dear)
    assert steering.scale[0] == pytest.approx(5, rel=0.01)
    assert steering.choose(1, 100, 9) == OFF


def test_other_calls_times_count_in_steps() -> None:
    assert [steps(f) for f in (0.95, 1.0, 1.1)] == [1.0, 1.0, 1.0] and steps(1.3) == 1.25


# The text


def _drafts(target: Target) -> list[Any]:
    """One of each way of reading the target: last hidden state, layers, cache, nothing; and a model of its own."""
    made = []
    for kind in ("medusa", "eagle", "dflash"):
        cls = registry.method(kind)
        draft = cls.from_target(cls.config_class(), target, torch.Generator().manual_seed(0))
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        made.append(draft)
    return [*made, resolve_draft("lookup", target), resolve_draft("layer-skip", target)]


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    target = tiny.selfspec_target("llama")
    yield target
    target.release()


def _request(target: Target, **options: Any) -> Request:
    ids, mask = left_padded([tiny.text(1, n)[0].tolist() for n in (5, 9, 14)])
    return Request(ids, mask, stopping=StoppingCriteriaList([MaxLengthCriteria(14 + NEW)]), **options)


def test_greedy_text_is_the_same_with_any_choices(target: Target) -> None:
    drafts, request = _drafts(target), _request(target)
    truth = plain(target.model, request.input_ids, attention_mask=request.attention_mask, max_new_tokens=NEW)
    for seed in range(2):
        draw = torch.Generator().manual_seed(seed)

        def any_of(_: int, draw: torch.Generator = draw) -> Choice:
            number, nodes, depth = (int(torch.randint(n, (1,), generator=draw)) for n in (len(drafts) + 2, 9, 5))
            return OFF if number >= len(drafts) else Choice(number, nodes or None, depth or None)

        result = decode(target, Pick(drafts), request, tools.Scripted(any_of))
        assert torch.equal(result.sequences, truth)


class _Recorded:
    """Another draft, its trees written down."""

    def __init__(self, draft: Any) -> None:
        self.draft, self.kind, self.needs = draft, draft.kind, draft.needs
        self.trees: list[DraftTree] = []
        self.calls = 0

    def begin(self, verified: Verified) -> Any:
        self.calls += 1
        return self.draft.begin(verified)

    def observe(self, state: Any, verified: Verified) -> Any:
        self.calls += 1
        return self.draft.observe(state, verified)

    def propose(self, state: Any, budget: Budget, sampling: Sampling, generator: torch.Generator | None) -> DraftTree:
        self.calls += 1
        self.trees.append(self.draft.propose(state, budget, sampling, generator))
        return self.trees[-1]


def test_a_draft_shown_late_what_it_missed_guesses_what_it_would_have_guessed(target: Target) -> None:
    for draft in _drafts(target):
        found = []
        for eager in (True, False):
            recorded, request = _Recorded(draft), _request(target)
            pilot = tools.Scripted(lambda turn: Choice(0, 6) if turn in (3, 4, 9) else OFF)
            with torch.no_grad():
                generation = Generation(target, recorded, request, Output(request), pilot)
                generation.drafters.eager = eager
                generation.prefill()
                while generation.rows:
                    generation.round()
            found.append(recorded)
        assert len(found[0].trees) == 3 and found[1].calls < found[0].calls
        for first, second in zip(found[0].trees, found[1].trees, strict=True):
            assert torch.equal(first.tokens, second.tokens), draft.kind


def test_what_is_kept_for_a_draft_is_bounded(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "MOST_KEPT", 4096)
    recorded = _Recorded(_drafts(target)[0])
    decode(target, recorded, _request(target), tools.Scripted(lambda turn: OFF))
    assert 1 < recorded.calls < NEW / 2 and not recorded.trees


def _scripted_costs(monkeypatch: pytest.MonkeyPatch, curve: dict[int, float], step: float) -> Any:
    measure = tools.measured_as(curve, step)
    monkeypatch.setattr(setup, "measure", measure)
    return measure


def test_a_draft_that_cannot_pay_is_never_asked_nor_shown_anything(
    model: PreTrainedModel, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    _scripted_costs(monkeypatch, tools.BF16, 1000.0)
    draft = _Recorded(Oracle([[1]], chain(5)))
    with patched(model, draft, guard=True):
        found = model.generate(prompt, max_new_tokens=NEW)
        report = model.speculation.report()
    assert draft.calls == 0 and torch.equal(found, plain(model, prompt, max_new_tokens=NEW))
    assert report["guard"]["off"] == report["rounds"] == NEW - 1
    assert report["guard"]["predicted_saving"] == pytest.approx(0) and "guard: off in" in str(report)


@pytest.mark.parametrize("combine", ["compose", "pick"])
def test_batches_and_several_drafts_write_the_text_of_plain_decoding(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, combine: str
) -> None:
    _scripted_costs(monkeypatch, tools.BF16, 1.0)
    ids, mask = left_padded([tiny.text(1, n)[0].tolist() for n in (5, 9, 14)])
    truth = plain(model, ids, attention_mask=mask, max_new_tokens=60)
    texts = [row[(m == 0).sum() :].tolist() for row, m in zip(truth, mask, strict=True)]
    with patched(model, [Oracle(texts, chain(4)), "lookup"], guard=True, combine=combine):
        for _ in range(2):
            assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=60), truth)
        report = model.speculation.report()
    asked = report["guard"]["drafts"]
    assert report["tokens_per_round"] > 2 and report["guard"]["sizes"]
    assert combine == "compose" or asked["oracle"] > sum(asked.values()) / 2


def test_a_seed_repeats_its_sampled_text_whatever_ran_before(
    model: PreTrainedModel, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    _scripted_costs(monkeypatch, tools.BF16, 1.0)
    head = registry.method("medusa").from_target(registry.method("medusa").config_class(), Target(model))

    def sampled() -> torch.Tensor:
        draw = torch.Generator().manual_seed(7)
        return model.generate(prompt, max_new_tokens=40, do_sample=True, generator=draw)

    with patched(model, head, guard=True):
        first = sampled()
        assert model.speculation.report()["guard"]["sizes"]
        model.generate(prompt, max_new_tokens=40)
        assert torch.equal(sampled(), first)
    with patched(model, head, guard=True):
        assert torch.equal(sampled(), first)


# The patch


def test_costs_are_measured_once_and_read_from_disk_later(
    model: PreTrainedModel, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = _scripted_costs(monkeypatch, tools.BF16, 1.0)
    for _ in range(2):
        with patched(model, "lookup", guard=True):
            for _ in range(2):
                model.generate(prompt, max_new_tokens=4)
    assert measure.calls == [(1, prompt.shape[1])]
    with patched(model, "lookup", guard=True):
        model.generate(prompt.expand(3, -1), max_new_tokens=4)
    assert [rows for rows, _ in measure.calls] == [1, 4]
    with patched(model, "lookup", guard=False):
        model.generate(prompt.expand(7, -1), max_new_tokens=4)
        assert model.speculation.report()["guard"] is None
    assert len(measure.calls) == 2


@pytest.mark.parametrize(("seconds", "times"), [(1.0, 1), (0.8, 1), (0.6, 2), (1.5, 2)])
def test_costs_of_another_state_of_the_machine_are_measured_anew_once(
    target: Target, monkeypatch: pytest.MonkeyPatch, seconds: float, times: int
) -> None:
    """Plain passes of a second by the table take this long in the text."""
    measure = _scripted_costs(monkeypatch, {1: 1.0, 2: 1.1, 8: 1.2}, 0.1)
    guarding = setup.Guarding(target, _drafts(target)[0])
    for _ in range(3):
        assert guarding.prepare([3, 4], {1}, whole=True)
        guard = guarding.guard(sampled=False, whole=True)
        for _ in range(12):
            guard.learn(OFF, Round(1, 20, 1, 0, [1], seconds))
        guarding.finish(guard, sampled=False)
    assert len(measure.calls) == times


def test_measuring_anew_that_was_interrupted_is_made_again(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = _scripted_costs(monkeypatch, {1: 1.0, 2: 1.1, 8: 1.2}, 0.1)
    guarding = setup.Guarding(target, _drafts(target)[0])
    assert guarding.prepare([3, 4], {1}, whole=True)
    guard = guarding.guard(sampled=False, whole=True)
    for _ in range(12):
        guard.learn(OFF, Round(1, 20, 1, 0, [1], 3.0))
    guarding.finish(guard, sampled=False)

    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        guarding.prepare([3, 4], {1}, whole=True)
    monkeypatch.setattr(setup, "measure", measure)
    for _ in range(2):
        assert guarding.prepare([3, 4], {1}, whole=True)
    assert len(measure.calls) == 2, "the first time, and anew"


def test_where_nothing_can_be_measured_drafts_are_asked_in_every_round(
    model: PreTrainedModel, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ConfigError("too short")

    monkeypatch.setattr(setup, "measure", refuse)
    with patched(model, "lookup", guard=True):
        model.generate(prompt, max_new_tokens=4)
    assert "cannot be measured: too short" in caplog.text


def test_the_environment_switches_the_default_and_no_more(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, wanted, given in (("0", False, None), ("0", True, True), ("1", True, None), ("1", False, False)):
        monkeypatch.setenv("SELFSPEC_GUARD", value)
        with patched(model, "lookup", guard=given):
            assert (model.speculation.guarding is not None) is wanted


def test_picking_wants_the_guard_and_drafts(model: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="guard=True or 'compose'"):
        selfspec.patch(model, ["lookup"], combine="pick", guard=False)
    with pytest.raises(ConfigError, match="combine='best'"):
        selfspec.patch(model, ["lookup"], combine="best", guard=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least one"):
        selfspec.patch(model, [], combine="pick", guard=True)


def test_a_copied_model_learns_for_itself(
    model: PreTrainedModel, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    _scripted_costs(monkeypatch, tools.BF16, 1.0)
    with patched(model, "lookup", guard=True):
        model.generate(prompt, max_new_tokens=8)
        other = copy.deepcopy(model)
        assert other.speculation.guarding.target.model is other
        before = model.speculation.report()
        assert torch.equal(other.generate(prompt, max_new_tokens=8), plain(other, prompt, max_new_tokens=8))
        assert model.speculation.report() == before and other.speculation.report()["guard"]["rounds"] == 7


def test_saved_statistics_are_read_from_the_folder_of_heads(tmp_path: Path) -> None:
    assert setup.saved_chances(tmp_path) == []
    file = tmp_path / setup.STATISTICS
    file.write_text('{"conditional_by_depth": [0.75, 0.5]}')
    assert setup.saved_chances(tmp_path) == [0.75, 0.5]
    for damaged in ("{", "{}", '{"conditional_by_depth": [2]}', "[]"):
        file.write_text(damaged)
        with pytest.raises(ConfigError, match=r"statistics\.json"):
            setup.saved_chances(tmp_path)


def test_savings_are_told_against_plain_rounds_of_the_same_calls() -> None:
    stats = GuardStats(rounds=10, off=4, plain_seconds=20.0, predicted_seconds=10.0, seconds=22.0)
    stats.add(GuardStats(sizes={8: 6}, drafts={"x": 6}, off_predicted=4.0, off_seconds=8.0))
    figures = stats.to_dict()
    assert (figures["predicted_saving"], figures["measured_saving"]) == (0.5, pytest.approx(0.45))
    assert GuardStats().to_dict()["measured_saving"] is None
