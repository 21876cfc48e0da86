"""The guard over rows that join and leave: the same text, drafts that wait do nothing, one choice per pass, figures."""

from __future__ import annotations

import random
import re
import urllib.request
from pathlib import Path
from typing import Any

import guard_tools as tools
import pytest
import syncs
import tiny
import torch
from test_batching import WISHES, Ears, alone, row, trained

from selfspec.draft import Verified
from selfspec.heads.lookup import Lookup
from selfspec.inference import rounds
from selfspec.inference.batching import Batch
from selfspec.inference.choices import OFF, Choice
from selfspec.inference.guard import setup
from selfspec.inference.guard.setup import Guarding
from selfspec.inference.guard.steering import Steering
from selfspec.resolve import resolve_draft
from selfspec.stats import Stats
from selfspec.target import Target


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of these tests stay among themselves."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def target() -> Any:
    target = tiny.selfspec_target("llama")
    yield target
    target.release()


class Watched:
    """Another draft; `shown` holds the rows of each call of begin, `asked` how often it guessed."""

    def __init__(self, draft: Any) -> None:
        self.draft, self.kind, self.needs = draft, draft.kind, draft.needs
        self.shown: list[int] = []
        self.observed, self.trees = 0, []  # type: ignore[var-annotated]

    def begin(self, verified: Verified) -> Any:
        self.shown.append(len(verified.tokens))
        return self.draft.begin(verified)

    def observe(self, state: Any, verified: Verified) -> Any:
        self.observed += 1
        return self.draft.observe(state, verified)

    def propose(self, state: Any, *rest: Any) -> Any:
        self.trees.append(self.draft.propose(state, *rest))
        return self.trees[-1]


class ApartState:
    """A state that cannot take in others, around one that could."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def select(self, rows: Any) -> Any:
        return ApartState(self.inner.select(rows))


class Apart(Watched):
    """A draft whose states cannot be joined."""

    def begin(self, verified: Verified) -> Any:
        return ApartState(super().begin(verified))

    def observe(self, state: Any, verified: Verified) -> Any:
        return ApartState(super().observe(state.inner, verified))

    def propose(self, state: Any, *rest: Any) -> Any:
        return super().propose(state.inner, *rest)


def of_kind(kind: str, target: Target) -> Any:
    if kind == "lookup":
        return Lookup()
    if kind == "apart":
        return Apart(Lookup())
    if kind == "early-exit":
        return resolve_draft(kind, target)
    draft = trained(kind, target)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return draft


def crowd(target: Target, draft: Any, pilot: Any) -> list[Ears]:
    """Rows of all wishes in one batch, some from the start, some later, some dropped."""
    ears = [Ears() for _ in WISHES]
    rows = [row(target, number, wish, ears[number]) for number, wish in enumerate(WISHES)]
    batches = [Batch(target, draft, rows[:2], Stats(), pilot=pilot)]
    waiting = [rows[2:3], rows[3:]]
    while any(batch.rows for batch in batches) or waiting:
        for batch in batches:
            for _ in range(2):
                if batch.rows:
                    batch.round()
        if waiting:
            fresh = Batch(target, draft, waiting.pop(0), Stats(), pilot=pilot)
            home = next((b for b in batches if b.rows and b.joins(fresh)), None)
            if home is None:
                batches.append(fresh)
            else:
                home.join(fresh)
    return ears


@pytest.mark.parametrize("kind", ["lookup", "medusa", "eagle", "dflash", "early-exit", "apart"])
def test_whatever_is_chosen_each_row_writes_what_it_writes_alone(target: Target, kind: str) -> None:
    for seed in range(2):
        draw = random.Random(seed)
        pilot = tools.Scripted(
            lambda _, draw=draw: (
                OFF if draw.random() < 0.5 else Choice(0, draw.choice([None, 2, 5, 9]), draw.choice([None, 2]))
            )
        )
        ears = crowd(target, of_kind(kind, target), pilot)
        asked = [choice for choice, _ in pilot.rounds]
        assert OFF in asked and len(set(asked)) > 3
        assert {result.rows for _, result in pilot.rounds} >= ({1} if kind == "early-exit" else {2, 3})
        for number, wish in enumerate(WISHES):
            assert ears[number].tokens == alone(target, number, wish), (seed, number)


def test_a_draft_that_waits_is_shown_all_new_rows_at_once_when_it_is_wanted(target: Target) -> None:
    long = {"max_new_tokens": 40}
    for ask_first in (False, True):
        draft = Watched(trained("medusa", target))
        turns = {0, 9} if ask_first else {9}
        pilot = tools.Scripted(lambda turn, turns=turns: Choice(0, 4) if turn in turns else OFF)
        batch = Batch(target, draft, [row(target, 0, long, Ears())], Stats(), pilot=pilot)
        for number in range(1, 5):
            batch.round()
            batch.round()
            batch.join(Batch(target, draft, [row(target, number, long, Ears())], Stats(), pilot=pilot))
        assert draft.shown == ([1] if ask_first else []) and draft.observed == ask_first
        batch.round()
        batch.round()
        assert draft.shown == ([1, 4] if ask_first else [5])
        assert draft.trees[-1].tokens.shape[0] == 5


@pytest.mark.parametrize("kind", ["lookup", "medusa", "eagle", "dflash"])
def test_rows_that_joined_while_a_draft_waited_get_the_guesses_of_one_that_saw_all(target: Target, kind: str) -> None:
    found = []
    for eager in (True, False):
        draft = Watched(of_kind(kind, target))
        pilot = tools.Scripted(lambda turn: Choice(0, 6) if turn in (1, 7, 8) else OFF)
        batches = [
            Batch(target, draft, [row(target, number, {"max_new_tokens": 40}, Ears())], Stats(), pilot=pilot)
            for number in (0, 1, 2)
        ]
        for batch in batches:
            batch.drafters.eager = eager
        for turn in range(9):
            batches[0].round()
            if turn in (2, 4):
                batches[0].join(batches[turn // 2])
        found.append(draft.trees)
    assert len(found[0]) == len(found[1]) == 3
    for first, second in zip(*found, strict=True):
        assert torch.equal(first.tokens, second.tokens)


def test_rows_that_left_leave_nothing_behind_for_a_draft_that_waits(target: Target) -> None:
    pilot = tools.Scripted(lambda turn: OFF)
    rows = [row(target, number, {"max_new_tokens": 200}, Ears()) for number in range(3)]
    batch = Batch(target, Lookup(), rows[:1], Stats(), pilot=pilot)
    batch.join(Batch(target, Lookup(), rows[1:], Stats(), pilot=pilot))
    for _ in range(150):
        batch.round()
    (follower,) = batch.drafters._followers
    assert [len(share.unseen) for share in follower.shares] == [151 // 64 + 151 % 64] * 2
    batch.drop([rows[0], rows[2]])
    assert [(share.rows, {len(part.tokens) for part in share.unseen}) for share in follower.shares] == [(1, {1})]


class TwoCosts:
    """Costs by which the draft pays for one row and never for several."""

    def __call__(self, target: Any, drafts: Any, text: Any, rows: int = 1, seconds: float = 0.0, **_: Any) -> Any:
        return tools.group(drafts, rows, tools.BF16, 1.0 if rows == 1 else 500.0)


def test_the_choice_follows_the_number_of_rows(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "measure", TwoCosts())
    wish = {"max_new_tokens": 120, "repetition_penalty": 0.5}  # repeats itself, so that lookup is right
    held = Guarding(target, Lookup())
    assert held.prepare([3, 4, 5], {1, 4})
    steering = Steering(held)
    rounds: dict[int, list[bool]] = {}

    class Seen:
        def choose(self, rows: int, context: int, deepest: int) -> Choice:
            choice = steering.choose(rows, context, deepest)
            rounds.setdefault(rows, []).append(choice == OFF)
            return choice

        def learn(self, choice: Choice, result: Any) -> None:
            learned.append(choice == OFF)
            steering.learn(choice, result)

    learned: list[bool] = []
    short = {**wish, "max_new_tokens": 60}
    rows = [row(target, n, wish if n == 2 else short, Ears()) for n in (2, 2, 2, 2)]
    batch = Batch(target, Lookup(), rows, Stats(), pilot=Seen())
    while batch.rows:
        batch.round()
    assert all(rounds[4])
    alone_again = Batch(target, Lookup(), [row(target, 2, wish, Ears())], Stats(), pilot=Seen())
    while alone_again.rows:
        alone_again.round()
    assert sum(rounds[1]) < len(rounds[1]) / 2
    passes, off, _ = steering.counts()
    assert passes == len(learned) and off == sum(learned)
    steering.renew()
    assert steering.counts()[:2] == (passes, off)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_round_of_greedy_rows_waits_for_an_accelerator_once(
    target: Target, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "waits", lambda device: True)
    ears = [Ears() for _ in range(rows)]
    wishes = [{"max_new_tokens": 30}, {"max_new_tokens": 30, "suppress_tokens": [5, 6]}, {"max_new_tokens": 30}]
    batch = Batch(target, Lookup(), [row(target, n, wishes[n], ears[n]) for n in range(rows)], Stats())
    batch.round()
    for _ in range(3):
        found = syncs.count(batch.round)
        assert len(found) == 1, found
    while batch.rows:
        batch.round()
    for number in range(rows):
        assert ears[number].tokens == alone(target, number, wishes[number])


def test_as_on_an_accelerator_all_kinds_of_rows_write_their_own_text(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "waits", lambda device: True)
    for ears, (number, wish) in zip(crowd(target, of_kind("medusa", target), None), enumerate(WISHES), strict=True):
        assert ears.tokens == alone(target, number, wish)


# A server


def _figures(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url + "/metrics", timeout=30) as response:
        text = response.read().decode()
    return {name: float(value) for name, value in re.findall(r"^(selfspec_guard_\w+) ([\d.e+]+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("step", [1.0, 1000.0])
def test_a_guarded_server_answers_as_offline_and_shows_what_the_guard_did(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    pytest.importorskip("fastapi", reason="needs the serve extra")
    openai = pytest.importorskip("openai", reason="needs openai's own client, of the dev extra")
    from serving import offline, serving, tiny_model

    measured = tools.measured_as(tools.BF16, step)
    monkeypatch.setattr(setup, "measure", measured)
    model, tokenizer = tiny_model(str(tmp_path_factory.getbasetemp() / "tiny"))
    with serving(model, tokenizer, guard=True) as up:
        client = openai.OpenAI(base_url=up.url + "/v1", api_key="none", max_retries=0)
        prompts = [f"{chr(97 + n)} and {n} and {n} and " for n in range(4)]
        for wanted in (prompts[:1], prompts):
            answer = client.completions.create(model="tiny", prompt=wanted, max_tokens=40, temperature=0)
            for prompt, choice in zip(wanted, answer.choices, strict=True):
                assert choice.text == offline(model, tokenizer, prompt, max_new_tokens=40, do_sample=False)
        seen = _figures(up.url)
    assert [rows for rows, _ in measured.calls] == [1, 8, 32]
    assert seen["selfspec_guard_passes_total"] > 40
    if step == 1000.0:
        assert seen["selfspec_guard_passes_off_total"] == seen["selfspec_guard_passes_total"]
    else:
        assert seen["selfspec_guard_passes_off_total"] < seen["selfspec_guard_passes_total"]
