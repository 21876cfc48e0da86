"""The cost table: what is read off it, what is kept of it, and that a measurement plays what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from guard_tools import BF16, asked

from selfspec.errors import ConfigError
from selfspec.inference.choices import OFF, Choice, Round
from selfspec.inference.guard.costs import (
    CostTable,
    Group,
    circumstances,
    draft_key,
    on_line,
    read_table,
    smoothed,
    table_path,
    write_table,
)
from selfspec.inference.guard.measure import _group, _Script, measure
from selfspec.resolve import resolve_draft


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))


def test_times_between_sizes_lie_on_straight_lines() -> None:
    points = {1: 10.0, 4: 16.0, 8: 20.0}
    assert [on_line(points, at) for at in (1, 2.5, 4, 6, 8, 12)] == [10, 13, 16, 18, 20, 24]
    assert on_line(points, 12, beyond=False) == 20 and on_line({3: 5.0}, 9) == 5
    assert on_line({1: 10.0, 2: 8.0}, 4) == 8  # a falling end is not drawn on towards nothing


def test_batch_sizes_and_contexts_are_interpolated_too() -> None:
    groups = [Group(rows, context, {1: float(rows * context)}) for rows in (1, 4) for context in (100, 300)]
    table = CostTable({}, groups)
    assert table.plain(1, 200) == 200 and table.plain(4, 100) == 400 and table.plain(2, 200) == pytest.approx(400)
    assert table.plain(9, 900) == 1200


def test_noise_is_levelled_and_a_real_fall_is_kept() -> None:
    noise = dict.fromkeys((1, 2, 4, 8), 1.0)
    assert smoothed({1: 10.0, 2: 12.0, 4: 11.0, 8: 14.0}, noise) == {1: 10.0, 2: 11.5, 4: 11.5, 8: 14.0}
    assert smoothed({1: 107.0, 2: 216.0, 4: 193.0, 8: 179.0}, noise) == {1: 107.0, 2: 216.0, 4: 193.0, 8: 179.0}


def test_a_size_that_was_not_measured_costs_what_the_next_larger_one_does() -> None:
    group = Group(1, 100, dict(BF16), {"d": asked(2.0)})
    assert group.added("d", Choice(0, 8, 2)) == 4 and group.added("d", Choice(0, 3)) == 4
    assert group.added("d", Choice(0, 99)) == 10 and group.added("d", Choice(0)) == 6


def test_a_table_is_kept_whole_and_belongs_to_its_circumstances(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.selfspec_target("llama")
    about = circumstances(target)
    table = CostTable(about, [Group(1, 100, dict(BF16), {"d": asked(2.0)})])
    write_table(table)
    assert read_table(about) == table
    assert [path.name for path in table_path(about).parent.iterdir()] == [table_path(about).name]
    assert not read_table({**about, "threads": 99}).groups
    table_path(about).write_text("{")
    assert not read_table(about).groups
    monkeypatch.setenv("SELFSPEC_CACHE", "/proc/nowhere")
    write_table(table)
    assert not read_table(about).groups
    target.release()


@pytest.mark.parametrize(
    "group",
    [Group(1, 9, {}), Group(1, 9, {1: 0.0}), Group(1, 9, {1: float("nan")}), Group(1, 9, {1: 1.0}, {"d": []})],
    ids=["no times", "no time", "not a number", "nothing asked"],
)
def test_a_table_that_no_machine_could_have_given_is_measured_anew(group: Group) -> None:
    write_table(CostTable({}, [group]))
    assert table_path({}).is_file() and not read_table({}).groups


def test_the_cache_follows_the_desktop_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SELFSPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert table_path({}).parent == Path("/some/cache/selfspec/costs")


def test_new_times_of_one_draft_leave_those_of_others() -> None:
    table = CostTable({}, [Group(1, 100, dict(BF16), {"old": asked(1.0)})])
    table.add(Group(1, 100, {1: 1.0}, {"new": asked(2.0)}))
    assert table.covers(1, ["old", "new"]) and not table.covers(2, ["old"]) and table.plain(1, 100) == 1.0


def test_drafts_of_one_kind_and_other_settings_have_keys_of_their_own() -> None:
    target = tiny.selfspec_target("llama")
    keys = {draft_key(resolve_draft(draft, target)) for draft in ("layer-skip", "early-exit", "lookup")}
    keys.add(draft_key(resolve_draft({"kind": "layer-skip", "depth": 2}, target)))
    assert len(keys) == 4
    target.release()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_measurement_times_every_size_and_notes_what_drafts_give(rows: int) -> None:
    target = tiny.selfspec_target("llama")
    draft = resolve_draft({"kind": "layer-skip", "nodes": 6, "threshold": 0.0, "adaptive": False}, target)
    before = torch.get_rng_state()
    group = measure(target, [draft], tiny.text(1, 9)[0].tolist(), rows, 0.0, (1, 2, 4), ((None, None), (3, None)))
    assert (group.rows, group.context, sorted(group.target)) == (rows, 9, [1, 2, 4])
    (found,) = group.drafts.values()
    assert [(a.nodes, a.gave) for a in found] == [(None, 6), (3, 3)] and min(group.target.values()) > 0
    assert torch.equal(torch.get_rng_state(), before)
    target.release()


def test_every_choice_counts_as_often_as_time_allows_and_takes_turns_with_those_of_its_part_only() -> None:
    parts = [[OFF, Choice(0, 4)], [Choice(1, 2), Choice(1, 4)]]
    for limit, turns in ((1000.0, 5), (0.0, 1)):
        script, played = _Script(parts, 1, [limit, limit]), []
        while not script.done:
            played.append(script.choose(1, 1, 9))
            script.learn(played[-1], Round(1, 1, 1, 0, [1], float(len(played))))
        warm = [choice for _ in range(2) for part in parts for choice in part]
        assert played == warm + [choice for part in parts for choice in part[:1] + turns * part]
        assert [len(rounds) for rounds in script.rounds.values()] == [turns] * 4
        assert script.rounds[OFF][0].seconds == len(warm) + 2, "what was played first counts nowhere"


def test_noise_of_the_targets_pass_is_not_taken_for_the_cost_of_a_draft() -> None:
    """A draft of 2 ms on passes of 50 ms, one in two of which waits another 30 ms for the machine."""
    target = tiny.selfspec_target("llama")
    draft = resolve_draft("lookup", target)
    noisy = [0.080, 0.050, 0.080, 0.050, 0.080]
    rounds = {
        OFF: [Round(1, 9, 1, 0, [1], seconds, 0.0) for seconds in noisy[::-1]],
        Choice(1, 4): [Round(1, 9, 1, 0, [1], seconds + 0.002, 0.002) for seconds in noisy],
        Choice(1, 8): [Round(1, 9, 1, 1, [1], 0.030 + 0.002, 0.002) for _ in noisy],
    }
    (found,) = _group(rounds, [draft], 9).drafts.values()
    assert [asked.seconds for asked in found] == [0.002, 0.002]
    target.release()


def test_a_draft_that_spares_the_target_work_is_charged_for_whole_rounds_only() -> None:
    """As early exit does: its stages take 30 ms, and the pass that follows 20 of its 50 ms less."""
    target = tiny.selfspec_target("llama")
    draft = resolve_draft("early-exit", target)
    rounds = {
        OFF: [Round(1, 9, 1, 0, [1], 0.050, 0.0) for _ in range(3)],
        Choice(1, 4): [Round(1, 9, 1, 1, [1], 0.060, 0.030) for _ in range(3)],
    }
    (found,) = _group(rounds, [draft], 9).drafts.values()
    assert [asked.seconds for asked in found] == [pytest.approx(0.010)]
    target.release()


def test_a_model_for_too_short_texts_is_not_measured() -> None:
    target = tiny.selfspec_target("llama")
    with pytest.raises(ConfigError, match="no room to measure"):
        measure(target, [], tiny.text(1, 510)[0].tolist())
    target.release()
