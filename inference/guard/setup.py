"""The guard of a patched model: its cost table, and what calls learn from one another."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from selfspec.draft import Draft
from selfspec.errors import ConfigError
from selfspec.inference.drafting import Pick, parts_of
from selfspec.inference.guard.acceptance import Experience
from selfspec.inference.guard.costs import CostTable, circumstances, draft_key, read_table, write_table
from selfspec.inference.guard.measure import measure
from selfspec.inference.guard.policy import KEPT_RATIOS, Guard, drift, steps
from selfspec.inference.request import Request
from selfspec.target import Target

STATISTICS = "statistics.json"
_LOG = logging.getLogger(__name__)
_QUICK = 4.0
_MOST_TEXT = 256
_ENOUGH = 10


class Guarding:
    """Makes a guard for each call and keeps what it learned.

    Greedy text does not depend on what the guard chooses, so greedy calls go on from what earlier ones learned and
    correct the table by their own times. A sampled text is the same function of its seed only if all choices are, so
    sampled calls start anew from the table and the saved statistics; of other calls' times they take notice in steps of
    25%.

    Args:
        target: the model.
        draft: what guesses.
        nodes: the most nodes of a tree; None lets the guard choose.
        known: per draft, chances of acceptance by depth known beforehand; empty if none are.
        seconds: what measuring one batch size may take.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | Pick,
        nodes: int | None = None,
        known: Sequence[Sequence[float]] = (),
        seconds: float = _QUICK,
    ) -> None:
        self.target = target
        self.parts = parts_of(draft)
        self.nodes = nodes
        self.known = list(known) or [()] * len(self.parts)
        self.seconds = seconds
        self._fresh()

    def _fresh(self) -> None:
        self._lock = threading.Lock()
        self._table: CostTable | None = None
        self._memory: list[Experience] | None = None
        self._ratios: dict[int | None, list[float]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy (of the model, usually) learns for itself."""
        return {name: getattr(self, name) for name in ("target", "parts", "nodes", "known", "seconds")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fresh()

    def start(self, request: Request) -> Guard | None:
        """The guard of one call; None where costs cannot be measured, so that drafts are always asked.

        What is not known of the machine yet is measured first.
        """
        keys = [draft_key(draft) for draft in self.parts]
        with self._lock:
            table = self._measured(request, keys)
            if table is None:
                return None
            known = None if request.do_sample else self._memory
            if known is None:
                asked = [table.asked(key) for key in keys]
                known = [Experience.of(i, a, self.known[i], self.nodes) for i, a in enumerate(asked)]
            scale = [self._drift(i) for i in range(len(keys))]
        names = [(draft.kind, key) for draft, key in zip(self.parts, keys, strict=True)]
        if request.do_sample:
            scale = [steps(factor) for factor in scale]
        greedy = not request.do_sample
        trusted = greedy and any(one.first or one.rounds > _ENOUGH for one in known)
        return Guard(table, names, [one.carried() for one in known], scale, live=greedy, trusted=trusted)

    def finish(self, guard: Guard, request: Request) -> None:
        """Keep what a call learned."""
        with self._lock:
            if not request.do_sample:
                self._memory = [one.carried(guard.stats.rounds) for one in guard.experience]
            for who, ratios in guard.ratios.items():
                self._ratios[who] = (self._ratios.get(who, []) + ratios)[-KEPT_RATIOS:]

    def _drift(self, draft: int) -> float:
        return drift(self._ratios.get(draft, []), self._ratios.get(None, []))

    def _measured(self, request: Request, keys: Sequence[str]) -> CostTable | None:
        """The table, with times for one row and for about as many rows as this call has."""
        about = circumstances(self.target)
        if self._table is None or self._table.circumstances != about:
            self._table, self._memory, self._ratios = read_table(about), None, {}
        rows = request.input_ids.shape[0]
        for size in sorted({1, 1 << (rows - 1).bit_length()}):
            if self._table.covers(size, keys):
                continue
            _LOG.info("measuring what a round costs here (batch size %d); kept for later", size)
            try:
                self._table.add(measure(self.target, self.parts, _text(request, self.target), size, self.seconds))
            except (ConfigError, torch.OutOfMemoryError) as error:
                _LOG.warning("the guard is off, because costs cannot be measured: %s", error)
                return None
            write_table(self._table)
        return self._table


def _text(request: Request, target: Target) -> list[int]:
    """The beginning of the first prompt, to measure on; arbitrary tokens where it came as embeddings."""
    most = _MOST_TEXT if target.max_positions is None else min(_MOST_TEXT, max(target.max_positions // 4, 1))
    row = request.input_ids[0]
    if request.attention_mask is not None and row.numel():
        row = row[request.attention_mask[0, -row.numel() :].bool()]
    return [int(token) for token in row[:most].tolist()] or list(range(min(8, target.vocab_size)))


def saved_chances(folder: str | Path) -> list[float]:
    """Acceptance by depth from the statistics saved beside heads (see `selfspec tune`); empty if there are none.

    Raises:
        ConfigError: the file is damaged.
    """
    path = Path(folder) / STATISTICS
    if not path.is_file():
        return []
    try:
        chances = json.loads(path.read_text(encoding="utf-8"))["conditional_by_depth"]
        found = [float(chance) for chance in chances]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}); run `selfspec tune` again or remove it") from error
    if not all(0 <= chance <= 1 for chance in found):
        raise ConfigError(f"{path} holds chances outside 0..1; run `selfspec tune` again or remove it")
    return found
