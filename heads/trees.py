"""Which tree a draft proposes: static trees from nested choices, and trees grown by the draft's own confidence.

Letters: B rows, N tree nodes, k beams, C children considered, Q draft vocabulary.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from selfspec.draft import Budget
from selfspec.errors import ConfigError
from selfspec.host import waits
from selfspec.tree import Path, TreeShape, shape_from_choices

_FIRST = (0.55, 0.13, 0.06, 0.04, 0.03, 0.02, 0.02, 0.01)
_FADE = (1.0, 0.85, 0.75, 0.7)
DEFAULT_NODES = {1: 6, 2: 8, 3: 10}


def best_choices(acceptance: Sequence[Sequence[float]], nodes: int) -> list[Path]:
    """The tree of `nodes` guesses (the root not counted) with the highest expected accepted length.

    A path counts as accepted with the product of its ranks' chances (Cai et al. 2024, section 2.3.3), so taking the
    likeliest path next is optimal. Best first: every prefix of the list is the best tree of its size.

    Args:
        acceptance: per depth, the chance that the guess of each rank is right.
        nodes: how many guesses.
    """
    found: list[Path] = []
    frontier: list[tuple[float, Path]] = [(-1.0, ())]
    while frontier and len(found) <= nodes:
        chance, path = heapq.heappop(frontier)
        found.append(path)
        ranks = acceptance[len(path)] if len(path) < len(acceptance) else ()
        for rank, right in enumerate(ranks):
            heapq.heappush(frontier, (chance * right, (*path, rank)))
    return found[1:]


def expected_tokens(choices: Sequence[Path], acceptance: Sequence[Sequence[float]]) -> float:
    """Tokens per round to be expected of a static tree, the target's own included."""
    return 1.0 + sum(math.prod(acceptance[d][rank] for d, rank in enumerate(path)) for path in choices)


def fastest_choices(
    acceptance: Sequence[Sequence[float]], seconds: Callable[[int, int], float], most: int = 64
) -> list[Path]:
    """The static tree with the most tokens per second.

    Over all sizes and depths the best tree is taken. The best one of a size and depth is what the dynamic programme of
    Sequoia (Chen et al. 2024, section 3.1) finds; as a path is never likelier than its prefix, the likeliest paths are
    closed under prefixes, and taking them best first gives the same tree.

    Args:
        acceptance: per depth, the chance that the guess of each rank is right.
        seconds: of a round, by nodes (the root included) and depth of its tree.
        most: guesses at most.

    Returns:
        The choices, best first; none where a plain pass is fastest.
    """
    best: list[Path] = []
    rate = 1.0 / seconds(1, 0)
    for depth in range(1, len(acceptance) + 1):
        choices = best_choices(acceptance[:depth], most)
        for size in range(1, len(choices) + 1):
            tree = choices[:size]
            deep = max(map(len, tree))
            found = expected_tokens(tree, acceptance) / seconds(size + 1, deep)
            if found > rate:
                best, rate = tree, found
    return best


def default_choices(heads: int) -> list[Path]:
    """A small tree for this many heads, sized for machines where every node of a verify pass costs."""
    table = [[_FADE[min(depth, len(_FADE) - 1)] * chance for chance in _FIRST] for depth in range(heads)]
    return best_choices(table, DEFAULT_NODES.get(heads, 12) - 1)


def check_choices(choices: Sequence[Path], heads: int, ranks: int) -> None:
    """Raise ConfigError, naming the path, unless the choices form a tree that the heads can fill.

    Args:
        choices: one path of ranks per node.
        heads: the deepest path possible.
        ranks: how many guesses a head can rank.
    """
    shape_from_choices(choices)
    for path in choices:
        if len(path) > heads:
            raise ConfigError(f"path {path} in the tree's choices is {len(path)} deep, but there are {heads} heads")
        if max(path) >= ranks:
            raise ConfigError(f"path {path} in the tree's choices asks for rank {max(path)} of {ranks} draft tokens")


def cut_choices(choices: Sequence[Path], nodes: int, depth: int) -> list[Path]:
    """The first choices that fit `nodes` (the root not counted) and `depth`; a late parent holds its children back."""
    place = {path: index for index, path in enumerate(choices)}
    shallow = [path for path in choices if len(path) <= depth]
    return sorted(shallow, key=lambda path: (max(place[path[: n + 1]] for n in range(len(path))), len(path)))[:nodes]


class CandidatePool:
    """A tree grown level by level towards what the draft itself holds likely (Li et al. 2024, EAGLE-2, section 4).

    Each level offers the best `top_k` children of each beam node; the best `top_k` of those are the next beam. In the
    end the best nodes of all levels form the tree. Scores are sums of log q, which never grow along a path, so the
    parents of chosen nodes are chosen too; equal scores go to the earlier entry of the pool.

    Args:
        batch: B.
        top_k: k, both children per node and width of the beam.
        device: of the logits.
    """

    def __init__(self, batch: int, top_k: int, device: torch.device) -> None:
        self.top_k = top_k
        self._scores: list[Tensor] = []
        self._columns: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._size = 0
        self._beam_scores = torch.zeros(batch, 1, device=device)
        self._beam = torch.full((batch, 1), -1, device=device)

    def grow(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Add the children of the beam.

        Args:
            logits: `[B, beam, Q]` of the draft at the nodes of the beam (at the root on the first call).

        Returns:
            The new beam, best first: its draft columns and the slots of its parents in the old beam, `[B, k]` each.
        """
        logits = logits.float()
        children = min(self.top_k, logits.shape[-1])
        values, columns = logits.topk(children)
        gains = (values - logits.logsumexp(-1, keepdim=True)).clamp_max(0)
        scores = (self._beam_scores.unsqueeze(-1) + gains).flatten(1)
        columns = columns.flatten(1)
        self._scores.append(scores)
        self._columns.append(columns)
        self._parents.append(self._beam.repeat_interleave(children, 1))
        order = scores.sort(descending=True, stable=True).indices[:, : self.top_k]
        self._beam_scores = scores.gather(1, order)
        self._beam = order + self._size
        self._size += scores.shape[1]
        return columns.gather(1, order), order // children

    def settled(self, guesses: int) -> bool:
        """Whether no deeper node can be among the best `guesses` any more, in any row.

        Deeper levels would not change the tree then. An accelerator is not asked: it would have to finish first.
        """
        if self._size < guesses or waits(self._beam.device):
            return False
        worst = torch.cat(self._scores, 1).topk(guesses).values[:, -1]
        return bool((worst >= self._beam_scores[:, 0]).all())

    def best(self, guesses: int) -> tuple[Tensor, TreeShape]:
        """The best `guesses` entries of the pool (all, if it holds fewer), in the pool's order.

        Returns:
            Their draft columns `[B, N - 1]` and the links of the tree of N nodes with the root in front.
        """
        scores, columns, parents = (torch.cat(part, 1) for part in (self._scores, self._columns, self._parents))
        chosen = scores.sort(descending=True, stable=True).indices[:, :guesses].sort(1).values
        batch, count = chosen.shape
        place = torch.zeros(batch, self._size + 1, dtype=torch.long, device=chosen.device)
        place.scatter_(1, chosen + 1, torch.arange(1, count + 1, device=chosen.device).expand(batch, -1))
        links = place.gather(1, parents.gather(1, chosen) + 1)
        root = torch.full((batch, 1), -1, dtype=torch.long, device=chosen.device)
        return columns.gather(1, chosen), TreeShape(torch.cat([root, links], 1))


class GrownTree(CandidatePool):
    """A pool with the size of its tree.

    Args:
        batch: B.
        top_k: k, both children per node and width of the beam.
        guesses: nodes of the tree, the root not counted.
        levels: the most levels to grow.
        device: of the logits.
    """

    def __init__(self, batch: int, top_k: int, guesses: int, levels: int, device: torch.device) -> None:
        super().__init__(batch, top_k, device)
        self.guesses = guesses
        self.levels = levels

    @property
    def done(self) -> bool:
        """Whether all levels are grown, or no deeper node can be in the tree any more, in any row."""
        return len(self._scores) == self.levels or self.settled(self.guesses)

    def finish(self) -> tuple[Tensor, TreeShape]:
        """See `best`."""
        return self.best(self.guesses)


@dataclass(frozen=True, eq=False)
class _Level:
    """One level of a static tree: whose children its nodes are, and which of them have children themselves.

    Args:
        parents: `[n]`, slots in the beam before.
        ranks: `[n]`, each node's rank in its parent's logits.
        widest: one more than the highest rank.
        beam: `[k]`, the nodes with children.
        origin: `[k]`, the parents of those.
    """

    parents: Tensor
    ranks: Tensor
    widest: int
    beam: Tensor
    origin: Tensor


class StaticPlan:
    """A static tree, level by level, for drafts that are asked anew at every node (Li et al. 2024; Ankner et al. 2024).

    Args:
        choices: paths of ranks; see `shape_from_choices`.
        device: where the indices are used.
    """

    def __init__(self, choices: Sequence[Path], device: torch.device) -> None:
        shape, paths = shape_from_choices(choices)
        self.shape = TreeShape(shape.parents.to(device))
        inner = {path[:-1] for path in paths[1:]}
        self.levels: list[_Level] = []
        beam: list[Path] = [()]
        while beam:
            place = {path: slot for slot, path in enumerate(beam)}
            level = [path for path in paths if path and path[:-1] in place]
            beam = [path for path in level if path in inner]
            rows = (
                [place[path[:-1]] for path in level],
                [path[-1] for path in level],
                [level.index(path) for path in beam],
                [place[path[:-1]] for path in beam],
            )
            parents, ranks, kept, origin = (torch.tensor(row, dtype=torch.long, device=device) for row in rows)
            self.levels.append(_Level(parents, ranks, 1 + max(rows[1]), kept, origin))


class StaticTree:
    """A static tree being filled; grows as a `GrownTree` does."""

    def __init__(self, plan: StaticPlan) -> None:
        self.plan = plan
        self._columns: list[Tensor] = []

    def grow(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Fill the next level from `[B, beam, Q]`; returns draft columns and parents' slots of the new beam."""
        level = self.plan.levels[len(self._columns)]
        columns = logits.topk(level.widest).indices[:, level.parents, level.ranks]
        self._columns.append(columns)
        return columns[:, level.beam], level.origin.expand(columns.shape[0], -1)

    @property
    def done(self) -> bool:
        """Whether every node has its token."""
        return len(self._columns) == len(self.plan.levels)

    def finish(self) -> tuple[Tensor, TreeShape]:
        """Draft columns `[B, N - 1]` and the links of the tree of N nodes with the root in front."""
        return torch.cat(self._columns, 1), self.plan.shape


class TreePlanner:
    """Which tree a head grows that is asked anew at every node: a static one of its own, or what it holds likely.

    Args:
        choices: a static tree as paths of ranks, best first; None grows trees instead.
        nodes: of a grown tree, the root included, unless the budget says otherwise.
        depth: the most levels of a grown tree.
        top_k: beams of a grown tree, and children considered per beam.
        heads: the deepest path possible.
        columns: Q.

    Raises:
        ConfigError: choices that form no tree, or sizes that make no sense.
    """

    def __init__(
        self, choices: Sequence[Sequence[int]] | None, nodes: int, depth: int, top_k: int, heads: int, columns: int
    ) -> None:
        if top_k < 1 or nodes < 1 or depth < 0:
            raise ConfigError(f"a tree of {nodes} nodes, depth {depth} and {top_k} beams is no tree")
        self.choices: list[Path] | None = None
        if choices is not None:
            self.choices = [tuple(int(rank) for rank in path) for path in choices]
            check_choices(self.choices, heads, columns)
        self.nodes, self.depth, self.top_k = nodes, min(depth, heads), top_k
        self._plans: dict[tuple[int, int, torch.device], StaticPlan] = {}

    def start(self, root: Tensor, budget: Budget) -> GrownTree | StaticTree | None:
        """An empty tree for `[B]` roots; None where the budget leaves no room for a guess."""
        if self.choices is None:
            guesses = budget.guesses(self.nodes)
            levels = min(self.depth, budget.depth, guesses)
            return GrownTree(root.shape[0], self.top_k, guesses, levels, root.device) if levels > 0 else None
        guesses = len(self.choices) if budget.nodes is None else min(budget.nodes - 1, len(self.choices))
        if min(guesses, budget.depth) < 1:
            return None
        key = (guesses, min(budget.depth, guesses), root.device)
        if key not in self._plans:
            self._plans[key] = StaticPlan(cut_choices(self.choices, *key[:2]), root.device)
        return StaticTree(self._plans[key])
