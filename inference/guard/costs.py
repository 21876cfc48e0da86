"""What a round costs on this machine: a table of measured times, kept on disk, and times read off between its points.

A table belongs to a machine (processor or accelerator, cores), a model (fingerprint, dtype, attention), the number of
threads and the versions of the libraries. It holds one group of times per batch size and context length: seconds of
the engine's round by number of nodes with a draft that costs nothing, and what each draft adds by what it was asked
for.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from selfspec._version import __version__
from selfspec.checkpoint import write_json
from selfspec.draft import Draft
from selfspec.fingerprint import fingerprint
from selfspec.inference.choices import Choice
from selfspec.models import cache_folder
from selfspec.provenance import device_name
from selfspec.target import Target
from selfspec.wrapped import is_compiled

_FORMAT = 1


@dataclass(frozen=True)
class Asked:
    """What a draft gave when it was asked for so many nodes and such a depth, and what it took.

    Args:
        nodes: asked for, None leaves it to the draft.
        depth: asked for, None sets no limit.
        seconds: of a round, less those of the same round with a draft that costs nothing.
        gave: nodes of its trees, the root included, on average.
        reached: depth of the deepest.
    """

    nodes: int | None
    depth: int | None
    seconds: float
    gave: float
    reached: int


@dataclass(frozen=True)
class Group:
    """Times at one batch size and context length.

    Args:
        rows: texts in the batch.
        context: tokens before the round.
        target: seconds of a round by nodes of its tree; 1 is a plain pass.
        drafts: by `draft_key`, what was asked.
    """

    rows: int
    context: int
    target: dict[int, float]
    drafts: dict[str, list[Asked]] = field(default_factory=dict)

    def round(self, nodes: float) -> float:
        """Seconds of a round with a free draft; straight lines between measured sizes and beyond the last."""
        return on_line(self.target, nodes)

    def added(self, draft: str, choice: Choice) -> float:
        """Seconds that a draft adds to the round; asked for what was not measured, those of the next larger size."""
        known = self.drafts[draft]
        for asked in known:
            if (asked.nodes, asked.depth) == (choice.nodes, choice.depth):
                return asked.seconds
        larger = [a for a in known if a.nodes is not None and choice.nodes is not None and a.nodes >= choice.nodes]
        return min(larger, key=lambda a: a.nodes or 0).seconds if larger else max(a.seconds for a in known)


@dataclass
class CostTable:
    """All groups of one machine, model, dtype, number of threads and set of versions.

    Args:
        circumstances: what the times belong to.
        groups: at least one before anything is read off.
    """

    circumstances: dict[str, Any]
    groups: list[Group] = field(default_factory=list)

    def plain(self, rows: int, context: int) -> float:
        """Seconds of a plain pass."""
        return self.between(rows, context, lambda group: group.round(1))

    def plain_round(self, nodes: float, rows: int, context: int) -> float:
        """Seconds of a round over so many nodes with a draft that costs nothing."""
        return self.between(rows, context, lambda group: group.round(nodes))

    def round(self, draft: str, choice: Choice, nodes: float, rows: int, context: int) -> float:
        """Seconds of a round of a draft whose tree has so many nodes."""
        return self.between(
            rows,
            context,
            lambda group: group.round(nodes) + group.added(draft, choice),
            [group for group in self.groups if draft in group.drafts],
        )

    def asked(self, draft: str) -> list[Asked]:
        """What is known of a draft; of several batch sizes, at the smallest."""
        known = [group for group in self.groups if draft in group.drafts]
        return min(known, key=lambda group: (group.rows, group.context)).drafts[draft]

    def between(
        self, rows: int, context: int, value: Callable[[Group], float], groups: Sequence[Group] | None = None
    ) -> float:
        """A value read off at a batch size and context length: straight lines between groups, the nearest outside."""
        by_rows: dict[int, dict[int, float]] = {}
        for group in self.groups if groups is None else groups:
            by_rows.setdefault(group.rows, {})[group.context] = value(group)
        at_context = {r: on_line(points, context, beyond=False) for r, points in by_rows.items()}
        return on_line(at_context, rows, beyond=False)

    def covers(self, rows: int, drafts: Sequence[str]) -> bool:
        """Whether times at this batch size are known for all these drafts."""
        return any(group.rows == rows and set(drafts) <= set(group.drafts) for group in self.groups)

    def add(self, group: Group) -> None:
        """Take in new times; drafts that were measured before and not now keep theirs."""
        for old in self.groups:
            if (old.rows, old.context) == (group.rows, group.context):
                group.drafts.update({key: asked for key, asked in old.drafts.items() if key not in group.drafts})
        self.groups = [g for g in self.groups if (g.rows, g.context) != (group.rows, group.context)] + [group]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"format": _FORMAT, "circumstances": self.circumstances, "groups": [asdict(g) for g in self.groups]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostTable:
        """From JSON values."""
        groups = [
            Group(
                g["rows"],
                g["context"],
                {int(nodes): float(seconds) for nodes, seconds in g["target"].items()},
                {key: [Asked(**asked) for asked in known] for key, known in g["drafts"].items()},
            )
            for g in values["groups"]
        ]
        return cls(dict(values["circumstances"]), groups)


def on_line(points: Mapping[int, float], at: float, beyond: bool = True) -> float:
    """Straight lines between points; beyond the last one its line goes on, or its value stays."""
    places = sorted(points)
    if len(places) == 1 or at <= places[0]:
        return points[places[0]]
    right = next((i for i, place in enumerate(places) if place >= at), len(places) - 1)
    if at > places[-1] and not beyond:
        return points[places[-1]]
    left, right = places[right - 1], places[right]
    slope = (points[right] - points[left]) / (right - left)
    return points[right] + (at - right) * (max(slope, 0.0) if at > right else slope)


def smoothed(medians: Mapping[int, float], noise: Mapping[int, float]) -> dict[int, float]:
    """Times by size, in which a larger size is cheaper than a smaller one only where that is more than noise.

    Neighbours that fall by less than their noise are pooled (Ayer et al. 1955, isotonic regression, stopped there): on
    some machines a pass over two tokens really does cost more than one over eight.

    Args:
        medians: seconds by size.
        noise: how far each median may be off.
    """
    blocks: list[tuple[list[int], float, float]] = []
    for size in sorted(medians):
        blocks.append(([size], medians[size], noise[size]))
        while len(blocks) > 1 and 0 < blocks[-2][1] - blocks[-1][1] <= blocks[-2][2] + blocks[-1][2]:
            (left, first, a), (right, second, b) = blocks[-2:]
            mean = (first * len(left) + second * len(right)) / (len(left) + len(right))
            blocks[-2:] = [(left + right, mean, max(a, b))]
    return {size: seconds for sizes, seconds, _ in blocks for size in sizes}


# What a table belongs to


def circumstances(target: Target, whole: bool = True) -> dict[str, Any]:
    """The machine, the model and the software whose times these are.

    Args:
        target: the model.
        whole: whether rounds make all logits; see `Request.wants_likeliest`.
    """
    return {
        "logits": "all" if whole else "likeliest",
        "machine": device_name(target.device),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": target.device.type,
        "model": fingerprint(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": target.attention,
        "compiled": is_compiled(target.model),
        "versions": {"selfspec": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


def draft_key(draft: Draft) -> str:
    """A name for a draft with its configuration and its dtype: what its cost hangs on."""
    config: Any = getattr(draft, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    weights = [f"{p.dtype}{tuple(p.shape)}" for p in draft.parameters()] if isinstance(draft, torch.nn.Module) else []
    weights += ["light"] if getattr(draft, "light", False) else []
    text = json.dumps([type(draft).__qualname__, values, weights], sort_keys=True, default=str)
    return f"{draft.kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def table_path(about: Mapping[str, Any]) -> Path:
    """Where the table is kept: `$SELFSPEC_CACHE/costs`, else `~/.cache/selfspec/costs`."""
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / "costs" / f"{name}.json"


def read_table(about: dict[str, Any]) -> CostTable:
    """The table kept for these circumstances; an empty one where there is none, or one that cannot be read."""
    try:
        values = json.loads(table_path(about).read_text(encoding="utf-8"))
        if values["format"] == _FORMAT and values["circumstances"] == about:
            table = CostTable.from_dict(values)
            if all(map(_makes_sense, table.groups)):
                return table
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return CostTable(about)


def _makes_sense(group: Group) -> bool:
    """Whether a group that was read from disk could have been measured."""
    asked = [one for known in group.drafts.values() for one in known]
    times = [*group.target.values(), *(1.0 + one.seconds for one in asked)]
    return bool(group.target) and all(group.drafts.values()) and all(0 < t < math.inf for t in times)


def write_table(table: CostTable) -> None:
    """Keep a table. Nothing is kept where nothing can be written: it is measured again next time."""
    try:
        write_json(table_path(table.circumstances), table.to_dict())
    except OSError:
        return
