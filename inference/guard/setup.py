"""The guard of a patched model: its cost table, and what calls learn from one another."""

from __future__ import annotations

import json
import logging
import os
import statistics
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from selfspec import registry
from selfspec.checkpoint import heads_folder
from selfspec.draft import Draft
from selfspec.errors import ConfigError
from selfspec.inference.drafting import Pick, parts_of
from selfspec.inference.guard.acceptance import Experience
from selfspec.inference.guard.costs import CostTable, circumstances, draft_key, read_table, write_table
from selfspec.inference.guard.measure import ASKED, SIZES, LogitsNeeded, measure
from selfspec.inference.guard.policy import KEPT_RATIOS, Guard, drift, steps
from selfspec.inference.request import Request
from selfspec.target import Target
from selfspec.wrapped import is_compiled

STATISTICS = "statistics.json"
_LOG = logging.getLogger(__name__)
_QUICK = 4.0
_MOST_TEXT = 256
_ENOUGH = 10
_UNLIKE = 1.33
_FULL_ROWS = 8
_MOST_PLACES = 256
_COMPILED_NODES = 8


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
        renews: measure anew, once, where calls show that the table is of another state of the machine.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | Pick,
        nodes: int | None = None,
        known: Sequence[Sequence[float]] = (),
        seconds: float = _QUICK,
        renews: bool = True,
    ) -> None:
        self.target = target
        self.parts = parts_of(draft)
        self.nodes = nodes
        self.known = list(known) or [()] * len(self.parts)
        self.seconds = seconds
        self.renews = renews
        self._fresh()

    def _fresh(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[bool, CostTable] = {}
        self._memory: list[Experience] | None = None
        self._ratios: dict[tuple[bool, int | None], list[float]] = {}
        self._renewed: set[bool] = set()

    def __getstate__(self) -> dict[str, Any]:
        """A copy (of the model, usually) learns for itself."""
        return {name: getattr(self, name) for name in ("target", "parts", "nodes", "known", "seconds", "renews")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fresh()

    def start(self, request: Request) -> Guard | None:
        """The guard of one call; None where costs cannot be measured, so that drafts are always asked.

        What is not known of the machine yet is measured first.
        """
        rows = request.input_ids.shape[0]
        whole = None if request.wants_likeliest else not (request.wants_draws and self.target.draws)
        found = self._measured(_text(request, self.target), {1, 1 << (rows - 1).bit_length()}, whole)
        return None if found is None else self._guard(*found, request.do_sample)

    def prepare(self, text: Sequence[int], rows: Iterable[int], whole: bool | None = None) -> bool:
        """Measure what is not known yet of the costs at these batch sizes; False where they cannot be measured.

        Args:
            text: tokens to measure on; what is beyond a quarter of the model's positions is left out.
            rows: batch sizes.
            whole: of rounds that make all logits; None means those of greedy text without processors.
        """
        return self._measured(text, set(rows), whole) is not None

    def _measured(self, text: Sequence[int], rows: set[int], asked: bool | None) -> tuple[CostTable, bool] | None:
        """The same: the costs, and whether their rounds make all logits, which may come out on the way; or None."""
        whole = not self.target.screens if asked is None else asked
        most = _MOST_TEXT if self.target.max_positions is None else max(self.target.max_positions // 4, 1)
        try:
            with self._lock:
                return self._complete(whole, list(text[: min(most, _MOST_TEXT)]), rows), whole
        except LogitsNeeded:
            return self._measured(text, rows, None if asked is None else not self.target.draws)
        except (ConfigError, torch.OutOfMemoryError) as error:
            _LOG.warning("the guard is off, because costs cannot be measured: %s", error)
            return None

    def _complete(self, whole: bool, text: Sequence[int], rows: set[int]) -> CostTable:
        about, keys = circumstances(self.target, whole), self._keys()
        table = self._tables.get(whole)
        if table is not None and table.circumstances != about:
            table, self._tables, self._memory, self._ratios, self._renewed = None, {}, None, {}, set()
        anew = self._suspect(whole)
        if anew:
            _LOG.info("rounds take another time here than the costs that were kept say: measuring anew")
        table = CostTable(about) if anew else table or read_table(about)
        for size in sorted(rows):
            if not table.covers(size, keys):
                _LOG.info("measuring what a round costs here (batch size %d); kept for later", size)
                what = self._scope(size)
                table.add(measure(self.target, self.parts, text, size, self.seconds, whole=whole, **what))
                write_table(table)
            self._tables[whole] = table
        if anew:  # only now: an interrupted measurement is made again
            self._renewed.add(whole)
            self._memory, self._ratios = None, {}
        return table

    def _suspect(self, whole: bool) -> bool:
        """Whether plain passes take so unlike what the table says that it was made in another state of the machine.

        Measuring anew is done once: a machine that changes all the time has no table.
        """
        plain = self._ratios.get((whole, None), [])
        if not self.renews or whole in self._renewed or len(plain) < _ENOUGH:
            return False
        return not 1 / _UNLIKE < statistics.median(plain) < _UNLIKE

    def _scope(self, rows: int) -> dict[str, Any]:
        """What to measure. Every shape that a compiled model meets may be compiled first, so it meets two only.

        Of large batches only trees that a pass over a few hundred places holds; larger ones are read off the line.
        """
        if is_compiled(self.target.model):
            nodes = max(self.nodes or _COMPILED_NODES, 2)
            return {"sizes": (1, nodes), "asked": ((nodes, None),), "settle": 2}
        if rows <= _FULL_ROWS:
            return {}
        most = max(_MOST_PLACES // rows, 2)
        fitting = tuple((nodes, depth) for nodes, depth in ASKED if nodes is not None and nodes <= most)
        return {"sizes": tuple(size for size in SIZES if size <= most), "asked": fitting}

    def _keys(self) -> list[str]:
        return [draft_key(draft) for draft in self.parts]

    def guard(self, sampled: bool, whole: bool | None = None) -> Guard:
        """A guard for a text, or for several that do not depend on its choices; after `prepare` has said True.

        Args:
            sampled: the text depends on the choices, so these must not depend on the clock nor on earlier texts.
            whole: as `prepare` was told.
        """
        with self._lock:
            if whole is None:
                greedy = not self.target.screens
                whole = greedy if greedy in self._tables else next(iter(self._tables))
            table = self._tables[whole]
        return self._guard(table, whole, sampled)

    def _guard(self, table: CostTable, whole: bool, sampled: bool) -> Guard:
        keys = self._keys()
        with self._lock:
            known = None if sampled else self._memory
            if known is None:
                asked = [table.asked(key) for key in keys]
                known = [Experience.of(i, a, self.known[i], self.nodes) for i, a in enumerate(asked)]
            scale = [self._drift(whole, i) for i in range(len(keys))]
            names = [(draft.kind, key) for draft, key in zip(self.parts, keys, strict=True)]
            if sampled:
                scale = [steps(factor) for factor in scale]
            trusted = not sampled and any(one.first or one.rounds > _ENOUGH for one in known)
            carried = [one.carried() for one in known]
            return Guard(table, names, carried, scale, live=not sampled, trusted=trusted)

    def finish(self, guard: Guard, sampled: bool) -> None:
        """Keep what a call learned."""
        with self._lock:
            whole = next((kind for kind, table in self._tables.items() if table is guard.table), None)
            if whole is None:
                return  # measured anew meanwhile
            if not sampled:
                self._memory = [one.carried(guard.stats.rounds) for one in guard.experience]
            for who, ratios in guard.ratios.items():
                self._ratios[whole, who] = (self._ratios.get((whole, who), []) + ratios)[-KEPT_RATIOS:]

    def _drift(self, whole: bool, draft: int) -> float:
        return drift(self._ratios.get((whole, draft), []), self._ratios.get((whole, None), []))


def _text(request: Request, target: Target) -> list[int]:
    """The beginning of the first prompt, to measure on; arbitrary tokens where it came as embeddings."""
    row = request.input_ids[0]
    if request.attention_mask is not None and row.numel():
        row = row[request.attention_mask[0, -row.numel() :].bool()]
    return [int(token) for token in row[:_MOST_TEXT].tolist()] or list(range(min(8, target.vocab_size)))


def known_chances(draft: Any, revision: str | None = None, token: str | None = None) -> list[float]:
    """The same for whatever was given as a draft; empty for those that are no folder and no Hub id."""
    if not isinstance(draft, (str, Path)):
        return []
    if Path(draft).is_dir():
        return saved_chances(draft)
    method = str(draft).partition(":")[0]
    return [] if method in registry.kinds() else saved_chances(heads_folder(draft, revision, token, (STATISTICS,)))


def guard_by_default() -> bool:
    """Whether the guard is on where nothing is said: unless `SELFSPEC_GUARD=0` stands in the environment."""
    return os.environ.get("SELFSPEC_GUARD", "1") != "0"


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
