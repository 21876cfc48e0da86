"""`model.speculation`: the draft in use and what it has done so far."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from selfspec.accept import AcceptRule
from selfspec.draft import Draft
from selfspec.inference.drafting import Pick
from selfspec.inference.guard.policy import GuardStats
from selfspec.inference.guard.setup import Guarding
from selfspec.inference.record import Recorder
from selfspec.stats import STAGES, Stats
from selfspec.target import Target


class Speculation:
    """Statistics of a patched model. Safe to use from several threads.

    Attributes:
        target: the door to the model.
        vocab_size: of the model when it was patched.
        draft: the draft in use.
        nodes: the most nodes of a tree, None if the draft decides.
        accept: how sampled trees are judged.
        guarding: chooses the size of every round; None asks the draft in every round.
        last: statistics of the call that finished last, None before the first.
        recorder: writes down text for training, None as a rule.
        replaced: a `generate` that someone had put on the model itself before it was patched, None as a rule.
        undo: takes back what the draft changed of the target; None as a rule.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | Pick,
        nodes: int | None = None,
        accept: AcceptRule | None = None,
        guarding: Guarding | None = None,
    ) -> None:
        self.target = target
        self.vocab_size = target.vocab_size
        self.draft = draft
        self.nodes = nodes
        self.accept = accept or AcceptRule()
        self.guarding = guarding
        self.last: Stats | None = None
        self.replaced: Any = None
        self.recorder: Recorder | None = None
        self.undo: Callable[[], None] | None = None
        self._total, self._guarded = Stats(), GuardStats()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        """A copy (of the model, usually) keeps the draft and counts for itself."""
        kept = ("target", "vocab_size", "draft", "nodes", "accept", "guarding", "replaced", "recorder")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fresh = {"last": None, "undo": None, "_total": Stats(), "_guarded": GuardStats()}
        self.__dict__.update(state, **fresh, _lock=threading.Lock())

    def record(self, stats: Stats, guarded: GuardStats | None = None) -> None:
        """Take in a finished call, and what its guard did."""
        with self._lock:
            self.last = stats
            self._total.add(stats)
            if guarded is not None:
                self._guarded.add(guarded)

    def reset(self) -> None:
        """Forget all statistics."""
        with self._lock:
            self.last = None
            self._total, self._guarded = Stats(), GuardStats()

    def report(self) -> Report:
        """Rounds, tokens per round, acceptance by depth, time by stage, what the guard did; since `patch` or `reset`.

        `guard` is None when there is none; its figures are those of `GuardStats.to_dict`.
        """
        with self._lock:
            guard = None if self.guarding is None else self._guarded.to_dict()
            about = {"draft": self.draft.kind, "accept": self.accept.name, "lossy": self.accept.lossy, "guard": guard}
            return Report(**about, **self._total.to_dict())


class Report(dict[str, Any]):
    """A dict of figures that prints as a short table."""

    def __str__(self) -> str:
        if not self["rounds"]:
            return f"{self._title()}: no rounds yet"
        depths = " ".join(f"{share:.2f}" for share in self["accepted_by_depth"])
        total = sum(self["stage_seconds"].values()) or 1.0
        stages = " ".join(f"{stage} {self['stage_seconds'][stage] / total:.0%}" for stage in STAGES)
        return (
            f"{self._title()}: {self['new_tokens']} tokens in {self['rounds']} rounds\n"
            f"tokens per round {self['tokens_per_round']:.2f} (plain decoding 1.00), "
            f"of them drafted {self['accepted_per_round']:.2f}\n"
            f"share of rounds that accepted depth 1, 2, ...: {depths}\n"
            f"time: {stages}" + self._guard()
        )

    def _guard(self) -> str:
        guard = self["guard"]
        if guard is None or not guard["rounds"]:
            return ""
        sizes = ", ".join(f"{size}: {rounds}" for size, rounds in guard["sizes"].items())
        drafts = ", ".join(f"{draft}: {rounds}" for draft, rounds in guard["drafts"].items())
        return (
            f"\nguard: off in {guard['off']} of {guard['rounds']} passes, {guard['probes']} probes; time saved against "
            f"plain decoding: predicted {guard['predicted_saving']:.0%}, measured {guard['measured_saving']:.0%}"
            + (f"\npasses by nodes of the tree: {sizes}" if sizes else "")
            + (f"; by draft: {drafts}" if len(guard["drafts"]) > 1 else "")
        )

    def _title(self) -> str:
        return f"draft {self['draft']}" + (f", LOSSY accept rule {self['accept']}" if self["lossy"] else "")

    __repr__ = __str__
