"""The accept rule by enumeration: every draw of draft and target with its exact weight, on a small vocabulary.

Nothing is sampled, so nothing is left to chance: the distance between the committed tokens and the target's own
distribution is computed. Targets and drafts are tables of logits; trees have the shapes a draft proposes, cut to a size
that can be walked. Letters: N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from selfspec.accept import AcceptRule, accept
from selfspec.scoring import History, Processors, TreeScores
from selfspec.target_output import TargetOutput
from selfspec.tree import DraftTree, Drawn, TreeShape

TOLERANCE = 1e-6
_VOCAB, _NODES, _DRAWN, _DEPTH = 4, 6, 3, 3
_TEMPERATURE, _TOP_K = 0.7, 3
_SPREAD = 1.5


@dataclass(frozen=True)
class Shape:
    """A tree without tokens, the root first.

    Args:
        parents: of each node.
        drawn: which nodes are drawn.
        with_replacement: how siblings are drawn.
        sources: which of the draft's distributions at its parent each node comes from.
    """

    parents: tuple[int, ...]
    drawn: tuple[bool, ...]
    with_replacement: bool = True
    sources: tuple[int, ...] | None = None

    def source(self, node: int) -> int:
        """See `sources`."""
        return 0 if self.sources is None else self.sources[node]

    @property
    def depth(self) -> int:
        """Of the deepest node."""
        return max(map(len, self.paths())) - 1

    def paths(self) -> list[list[int]]:
        """Per node the nodes from the root to it."""
        found = [[0]]
        for node in range(1, len(self.parents)):
            found.append([*found[self.parents[node]], node])
        return found

    def children(self, node: int) -> list[int]:
        """Children of a node, in order."""
        return [child for child in range(1, len(self.parents)) if self.parents[child] == node]


STANDARD = {
    "chain of three drawn": Shape((-1, 0, 1, 2), (False, True, True, True)),
    "siblings without replacement": Shape((-1, 0, 0, 0), (False, True, True, True), False),
    "siblings with replacement": Shape((-1, 0, 0, 1), (False, True, True, True)),
    "chosen tree": Shape((-1, 0, 0, 1, 1, 2), (False,) * 6),
    "siblings of two drafts": Shape((-1, 0, 0, 0), (False, True, True, True), False, (0, 0, 1, 0)),
    "chosen and drawn": Shape((-1, 0, 0, 1, 2), (False, False, True, True, False), False),
}
"""Every kind of tree the rule must be right for, whatever one draft proposes."""


def shape_of(tree: DraftTree, row: int = 0) -> Shape:
    """The tree of one row, cut to what can be enumerated: first children first, parents before children."""
    parents, real = tree.parents.expand_as(tree.tokens)[row].tolist(), tree.real()[row].tolist()
    flags = [False] * tree.nodes
    if tree.drawn is not None:
        flags = [True] * tree.nodes if tree.drawn.drawn is None else tree.drawn.drawn[row].tolist()
    place, depth, kept = {0: 0}, {0: 0}, [(-1, False, 0)]
    width: dict[int, int] = {}
    origins: dict[int, list[int]] = {}
    for node in range(1, tree.nodes):
        parent = parents[node]
        if not real[node] or parent not in place or depth[parent] == _DEPTH or width.get(parent, 0) == _VOCAB - 1:
            continue
        if len(kept) > _NODES or (flags[node] and sum(drawn for _, drawn, _ in kept) == _DRAWN):
            break
        width[parent] = width.get(parent, 0) + 1
        place[node], depth[node] = len(kept), depth[parent] + 1
        kept.append((place[parent], flags[node], _numbered(tree, row, node, origins.setdefault(parent, []))))
    links, drawn, sources = (tuple(column) for column in zip(*kept, strict=True))
    replaced = tree.drawn is None or tree.drawn.with_replacement
    return Shape(links, drawn, replaced, sources if any(sources) else None)


def _numbered(tree: DraftTree, row: int, node: int, seen: list[int]) -> int:
    """Sources of the siblings so far, in order of appearance; the place of this node's."""
    if tree.drawn is None or tree.drawn.sources is None:
        return 0
    source = int(tree.drawn.sources[row, node])
    if source not in seen:
        seen.append(source)
    return seen.index(source)


class _Branching:
    """A source of randomness that follows a script of outcomes and notes what else could have come."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = list(script)
        self.weight = 1.0
        self.taken: list[int] = []
        self.others: list[list[int]] = []

    def pick(self, weights: Sequence[float]) -> int:
        """An index, by weight."""
        possible = [i for i, weight in enumerate(weights) if weight > 0]
        at = len(self.taken)
        chosen = self.script[at] if at < len(self.script) else possible[0]
        if at >= len(self.script):
            self.others += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(chosen)
        self.weight *= weights[chosen] / sum(weights)
        return chosen

    def token(self, probs: Tensor) -> Tensor:
        """See `selfspec.accept.Chance`."""
        return torch.tensor([self.pick(row) for row in probs.double().tolist()])

    def coin(self, probability: float) -> bool:
        """See `selfspec.accept.Chance`."""
        return self.pick([1.0 - probability, probability]) == 1


def _outcomes(run: Callable[[_Branching], tuple[int, ...]]) -> Iterator[tuple[float, tuple[int, ...]]]:
    waiting: list[list[int]] = [[]]
    while waiting:
        chance = _Branching(waiting.pop())
        found = run(chance)
        waiting += chance.others
        yield chance.weight, found


class _Tables:
    """Logits of a target and q of a draft after every sequence of tokens."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.processors = Processors(
            LogitsProcessorList([TemperatureLogitsWarper(_TEMPERATURE), TopKLogitsWarper(_TOP_K)])
        )
        self._made: dict[tuple[int, ...], Tensor] = {}

    def logits(self, path: tuple[int, ...], kind: int = 0) -> Tensor:
        key = (kind, *path)
        if key not in self._made:
            place = sum((token + 1) * 7**depth for depth, token in enumerate(key))
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + place)
            self._made[key] = _SPREAD * torch.randn(_VOCAB, generator=generator)
        return self._made[key]

    def q(self, path: tuple[int, ...], source: int = 0) -> Tensor:
        return self.logits(path, 1 + source).softmax(-1)

    def p(self, path: tuple[int, ...]) -> list[float]:
        """Temperature and top-k, written down apart from the processors, in float64."""
        scores = self.logits(path).double() / _TEMPERATURE
        kept = sorted(range(_VOCAB), key=lambda token: -float(scores[token]))[:_TOP_K]
        weights = [float(scores[token].exp()) if token in kept else 0.0 for token in range(_VOCAB)]
        return [weight / sum(weights) for weight in weights]


def distance(shape: Shape, rule: AcceptRule, seed: int) -> float:
    """Total variation between the first `depth + 1` committed tokens and the target's, over all outcomes."""
    tables = _Tables(seed)
    found: dict[tuple[int, ...], float] = {}
    for weight, tokens in _outcomes(lambda chance: _round(shape, rule, tables, chance)):
        found[tokens] = found.get(tokens, 0.0) + weight
    got: dict[tuple[int, ...], float] = {}
    for tokens, weight in found.items():
        for path, part in _continued(tables, tokens, weight, shape.depth + 1):
            got[path] = got.get(path, 0.0) + part
    wanted = dict(_continued(tables, (), 1.0, shape.depth + 1))
    return sum(abs(got.get(path, 0.0) - wanted.get(path, 0.0)) for path in got.keys() | wanted.keys()) / 2


def _continued(
    tables: _Tables, path: tuple[int, ...], weight: float, length: int
) -> Iterator[tuple[tuple[int, ...], float]]:
    """All texts of this length that begin with `path`, as the target would go on."""
    if len(path) == length:
        yield path, weight
        return
    for token, share in enumerate(tables.p(path)):
        if share > 0:
            yield from _continued(tables, (*path, token), weight * share, length)


def _round(shape: Shape, rule: AcceptRule, tables: _Tables, chance: _Branching) -> tuple[int, ...]:
    tokens = _filled(shape, tables, chance)
    texts = [tuple(tokens[node] for node in path[1:]) for path in shape.paths()]
    drawn = _drawn(shape, tables, texts) if any(shape.drawn) else None
    tree = DraftTree(torch.tensor([tokens]), TreeShape(torch.tensor([shape.parents])), drawn)
    logits = torch.stack([tables.logits(text) for text in texts]).unsqueeze(0)
    history = History(torch.zeros(1, 1, dtype=torch.long), 8)
    scores = TreeScores(TargetOutput(logits), tree.token_lists, history, tables.processors)
    return tuple(accept(tree, scores, True, chance, rule).tokens[0])


def _drawn(shape: Shape, tables: _Tables, texts: Sequence[tuple[int, ...]]) -> Drawn:
    flags = torch.tensor([shape.drawn])
    if shape.sources is None:
        return Drawn(torch.stack([tables.q(text) for text in texts]).unsqueeze(0), flags, shape.with_replacement)
    several = 1 + max(shape.sources)
    probs = torch.stack([tables.q(text, source) for text in texts for source in range(several)]).unsqueeze(0)
    rows = [max(parent, 0) * several + source for parent, source in zip(shape.parents, shape.sources, strict=True)]
    return Drawn(probs, flags, shape.with_replacement, sources=torch.tensor([rows]))


def _filled(shape: Shape, tables: _Tables, chance: _Branching) -> list[int]:
    """Tokens of the nodes: the drawn ones from q, the chosen ones by their rank among the chosen siblings."""
    tokens, paths = [0] * len(shape.parents), shape.paths()
    for node in range(len(tokens)):
        text = tuple(tokens[n] for n in paths[node][1:])
        left = [tables.q(text, source).double().tolist() for source in range(len(tokens))]
        ranked = iter(torch.tensor(left[0]).argsort(descending=True).tolist())
        for child in shape.children(node):
            q = left[shape.source(child)]
            tokens[child] = chance.pick(q) if shape.drawn[child] else next(ranked)
            if shape.drawn[child] and not shape.with_replacement:
                q[tokens[child]] = 0.0
    return tokens


def rule_check(shapes: Sequence[Shape], rule: AcceptRule, seed: int) -> dict[str, Any]:
    """Enumerate the standard trees and those of the draft at hand (`shapes`).

    Returns:
        Per tree its distance, the largest of them, and whether all are below the tolerance.
    """
    own = {f"this draft, tree {i + 1}": shape for i, shape in enumerate(dict.fromkeys(shapes))}
    trees = [
        {"name": name, **asdict(shape), "distance": distance(shape, rule, seed)}
        for name, shape in {**STANDARD, **own}.items()
    ]
    worst = max(tree["distance"] for tree in trees)
    return {
        "rule": rule.name,
        "vocabulary": _VOCAB,
        "temperature": _TEMPERATURE,
        "top_k": _TOP_K,
        "tolerance": TOLERANCE,
        "trees": trees,
        "largest_distance": worst,
        "passed": worst < TOLERANCE,
    }
