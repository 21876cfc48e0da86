"""Drafts under the guard as runs of `bench`, beside the same drafts asked in every round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from selfspec.draft import Draft
from selfspec.errors import ConfigError
from selfspec.inference.guard.policy import GuardStats
from selfspec.inference.guard.setup import Guarding
from selfspec.inference.runs import Sample
from selfspec.target import Target

GUARDED = "+guard"
"""Follows a draft's name in that of its guarded run."""


def guardings(
    target: Target,
    drafts: Mapping[str, Draft],
    nodes: Callable[[str], int | None],
    known: Mapping[str, Sequence[float]],
) -> dict[str, Guarding]:
    """What steers each draft: as `patch` makes it, but for costs measured anew, which would fall into a timed call.

    Args:
        target: the model.
        drafts: by name.
        nodes: the most nodes of a tree, by name.
        known: chances of acceptance by depth known beforehand, by name; none for names that are missing.
    """
    return {
        name: Guarding(target, draft, nodes(name), [known.get(name, ())], renews=False)
        for name, draft in drafts.items()
    }


def measured_now(guarding: Guarding, text: Sequence[int], rows: set[int], sampled: bool) -> None:
    """Measure costs of greedy or of sampled text that are not known yet, so that no timed call does.

    Raises:
        ConfigError: they cannot be measured; the guard's log says why.
    """
    if not guarding.prepare(text, rows, sampled or None):
        raise ConfigError("costs cannot be measured here, so there is no guarded run; leave --guard and --both out")


def guard_figures(samples: Sequence[Sample]) -> dict[str, Any] | None:
    """What the guard did in all of them, see `GuardStats.to_dict`; None where there was none."""
    done = [sample.guard for sample in samples if sample.guard is not None]
    total = GuardStats()
    for one in done:
        total.add(one)
    return total.to_dict() if done else None
