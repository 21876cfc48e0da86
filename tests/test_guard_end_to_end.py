"""The guard from end to end: sampled text by chi-square, targets that keep a state, targets that are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import families
import guard_tools as tools
import oracle
import pytest
import test_accept as exact
import tiny
import torch
from scipy.stats import chisquare
from test_batching import Ears, alone, row
from transformers import LogitsProcessorList

import selfspec
from selfspec.heads.lookup import Lookup
from selfspec.inference.batching import Batch
from selfspec.inference.choices import OFF, Choice, Round
from selfspec.inference.guard import measure, setup
from selfspec.inference.guard.policy import GuardStats
from selfspec.inference.guard.steering import Steering
from selfspec.stats import Stats
from selfspec.target import Target
from selfspec.tree import DraftTree, TreeShape


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of these tests stay among themselves."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))


# Sampled text

BATCHES, ROWS = 30, 18


class ByTheLastRound:
    """Chooses by what the last round brought, as hard as a pilot may: luck decides on the size of the next tree."""

    def __init__(self) -> None:
        self.stats = GuardStats()
        self.brought = self.turn = 0
        self.played: set[Choice] = set()

    def choose(self, rows: int, context: int, deepest: int) -> Choice:
        """One of four."""
        choices = [OFF, Choice(0, 3), Choice(0, None, 1), Choice(0)]
        self.turn += 1
        choice = choices[(self.brought + self.turn) % 4]
        self.played.add(choice)
        return choice

    def learn(self, choice: Choice, result: Round) -> None:
        """What it brought."""
        self.brought = sum(result.gains)


class Steered:
    """Stands in for `Guarding` with one pilot for all calls, so that each choice hangs on earlier texts as well."""

    def __init__(self, pilot: Any) -> None:
        self.pilot = pilot

    def start(self, request: Any) -> Any:
        return self.pilot

    def finish(self, pilot: Any, sampled: bool) -> None:
        pass


def p_value(draft: Any, pilot: Any) -> float:
    """Of a chi-square test of the two tokens after a forced one, over many small batches."""
    model = tiny.model("llama", seed=4)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.35)
    prompt = tiny.text(1, 5, seed=9)
    start = oracle.plain(model, prompt, max_new_tokens=1)
    wanted = exact._first_tokens_of(model, start)
    force = LogitsProcessorList([exact._Force(prompt.shape[1], int(start[0, -1]))])
    counts = dict.fromkeys(wanted, 0)
    with oracle.patched(model, draft):
        model.speculation.guarding = Steered(pilot)
        torch.manual_seed(12)
        accepted = 0
        for _ in range(BATCHES):
            rows = model.generate(
                prompt, max_new_tokens=4, num_return_sequences=ROWS, logits_processor=force, **exact.SAMPLING
            )
            accepted += model.speculation.last.accepted
            for found in rows[:, prompt.shape[1] + 1 :][:, :2].tolist():
                assert tuple(found) in counts, f"{found} has probability 0"
                counts[tuple(found)] += 1
    assert accepted > 10, "the draft must be right now and then, or nothing is tested"
    total = BATCHES * ROWS
    seen, hoped = exact._merged([counts[k] for k in wanted], [total * wanted[k] for k in wanted])
    return float(chisquare(seen, hoped).pvalue)


@pytest.mark.parametrize("name", ["drawn without replacement", "chosen"])
def test_sampled_text_whose_trees_hang_on_luck_passes_a_chi_square_test(name: str) -> None:
    pilot = ByTheLastRound()
    assert p_value(exact._drafts(tiny.VOCAB)[name], pilot) > exact.FALSE_ALARM
    assert len(pilot.played) == 4


def test_sampled_text_under_the_guard_passes_a_chi_square_test() -> None:
    guard = tools.guard(tools.table(tools.BF16, 0.1), first=(0.7, 0.7))
    assert p_value(exact._drafts(tiny.VOCAB)["drawn with replacement"], guard) > exact.FALSE_ALARM
    assert guard.stats.off > 20 and len(guard.stats.sizes) > 1


class Cheat(oracle.DrawnTree):
    """Draws, looks, and takes back what the text would rather not have."""

    def tree(self, state: Any, budget: Any, generator: Any) -> DraftTree:
        made = super().tree(state, budget, generator)
        real = torch.ones_like(made.tokens, dtype=torch.bool)
        real[:, 1:] = made.tokens[:, 1:] % 2 == 0
        return DraftTree(made.tokens, TreeShape(made.shape.parents.expand_as(made.tokens), real), made.drawn)


@pytest.mark.nightly
def test_a_choice_that_has_seen_the_draws_is_caught() -> None:
    draft = Cheat(torch.full((tiny.VOCAB, tiny.VOCAB), 1 / tiny.VOCAB), (40,), True)
    assert p_value(draft, ByTheLastRound()) < exact.FALSE_ALARM


# Targets with state


@pytest.mark.parametrize("kind", ["mamba2", "qwen3_next"])
def test_a_target_with_state_is_measured_and_guarded_and_writes_its_own_text(kind: str) -> None:
    model = families.build(kind)
    prompt = torch.arange(3, 12).repeat(2).unsqueeze(0)
    wanted = oracle.plain(model, prompt, max_new_tokens=40, do_sample=False)
    with oracle.patched(model, "lookup", guard=True):
        model.speculation.guarding.seconds = 0.0
        for _ in range(2):
            assert torch.equal(model.generate(prompt, max_new_tokens=40, do_sample=False), wanted)
        table = model.speculation.guarding._tables[True]
        assert sorted(table.groups[0].target) == list(measure.SIZES) and len(table.groups) == 1
        assert model.speculation.report()["guard"]["rounds"] > 0


@pytest.mark.parametrize("kind", ["mamba2", "qwen3_next"])
def test_a_target_with_state_follows_any_choices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build(kind)
    prompt = torch.arange(3, 12).unsqueeze(0)
    wanted = oracle.plain(model, prompt, max_new_tokens=50, do_sample=False)
    draft = oracle.Oracle(wanted.tolist(), oracle.chain(6, lambda row, turn: turn % 4))
    played = [OFF, Choice(0), Choice(0, 3), Choice(0, None, 2), OFF, OFF, Choice(0, 7)]
    pilot = tools.Scripted(lambda turn: played[turn % len(played)])
    pilot.stats = GuardStats()  # type: ignore[attr-defined]
    with oracle.patched(model, draft):
        model.speculation.guarding = Steered(pilot)
        assert torch.equal(model.generate(prompt, max_new_tokens=50, do_sample=False), wanted)
        assert model.speculation.last.accepted > 3
    target, ears = Target(model), [Ears(), Ears()]
    monkeypatch.setattr(setup, "measure", tools.measured_as(tools.BF16, 1.0))
    held = setup.Guarding(target, Lookup())
    assert held.prepare([3, 4, 5], {1})
    steering = Steering(held)
    batches = [
        Batch(target, Lookup(), [row(target, n, {"max_new_tokens": 20}, ears[n])], Stats(), pilot=steering)
        for n in (0, 1)
    ]
    while any(batch.rows for batch in batches):
        for batch in batches:
            if batch.rows:
                batch.round()
    assert [one.tokens for one in ears] == [alone(target, n, {"max_new_tokens": 20}) for n in (0, 1)]
    target.release()


# torch.compile


@contextmanager
def compiling() -> Iterator[Callable[[], int]]:
    """How many graphs have been compiled."""
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    dynamo.reset()


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["model", "forward"])
def test_a_compiled_target_is_measured_at_two_sizes_once_they_are_compiled(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with compiling() as graphs:
        model, prompt = tiny.model("llama"), tiny.text(1, 12).repeat(1, 2)
        wanted = oracle.plain(model, prompt, max_new_tokens=24, do_sample=False)
        if where == "model":
            model.compile(backend="eager")
        else:
            model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
        seen: list[tuple[int, int]] = []
        learn = measure._Script.learn

        def note(script: Any, choice: Choice, result: Round) -> None:
            seen.append((script.turns, graphs()))
            learn(script, choice, result)

        monkeypatch.setattr(measure._Script, "learn", note)
        selfspec.patch(model, "lookup", guard=True)
        model.speculation.guarding.seconds = 0.0
        assert torch.equal(model.generate(prompt, max_new_tokens=24, do_sample=False), wanted)
        table = model.speculation.guarding._tables[True]
        assert table.circumstances["compiled"] and sorted(table.groups[0].target) == [1, 8]
        settled = next(made for turn, made in seen if turn == 3)
        assert 0 < seen[-1][1] <= settled <= 8, "nothing is compiled in a turn that counts"
        made = graphs()
        assert made <= settled + 1
        assert torch.equal(model.generate(prompt, max_new_tokens=24, do_sample=False), wanted)
        assert graphs() == made, "a second text of the same length compiles nothing"
        selfspec.unpatch(model)


def test_a_model_that_is_compiled_later_has_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = tools.measured_as(tools.BF16, 1.0)
    monkeypatch.setattr(setup, "measure", measured)
    target = tiny.selfspec_target("llama")
    held = setup.Guarding(target, Lookup())
    assert held.prepare([3, 4], {1}) and held.prepare([3, 4], {1})
    target.model.model.layers[0].compile(backend="eager")
    assert held.prepare([3, 4], {1}) and len(measured.calls) == 2
    target.release()
