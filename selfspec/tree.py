"""The draft tree: what a draft proposes and the target verifies in one pass.

Letters: B rows, N tree nodes, Q size of the draft's vocabulary, R is 1 (all rows share a shape) or B.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from selfspec.errors import ConfigError, DraftTreeError
from selfspec.host import HostShape, fetch

Path = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TreeShape:
    """Who is whose child, without tokens.

    Args:
        parents: `[R, N]` int64, the index of each node's parent; node 0 is the root and has parent -1. Parents come
            before children.
        real: `[R, N]` bool, which nodes take part; None means all of them. The root is always real.
    """

    parents: Tensor
    real: Tensor | None = None

    @property
    def nodes(self) -> int:
        """N, the number of nodes, the root included."""
        return self.parents.shape[1]

    @cached_property
    def ancestors(self) -> Tensor:
        """`[R, N, N]` bool: entry (i, j) says that j is i itself or an ancestor of i."""
        nodes = self.nodes
        links = self.parents.unsqueeze(-1) == torch.arange(nodes, device=self.parents.device)
        reach = links | torch.eye(nodes, dtype=torch.bool, device=self.parents.device)
        hops = 1
        while hops < nodes - 1:
            reach = (reach.float() @ reach.float()) > 0
            hops *= 2
        return reach

    @cached_property
    def depth(self) -> Tensor:
        """`[R, N]` int64: the number of steps from the root (the root has 0)."""
        return self.ancestors.sum(-1) - 1

    @cached_property
    def host(self) -> HostShape:
        """The links on the host, fetched once."""
        parents, *real = fetch([self.parents] if self.real is None else [self.parents, self.real])
        return HostShape(parents, real[0] if real else None)

    @property
    def max_depth(self) -> int:
        """The depth of the deepest real node."""
        return self.host.max_depth

    @property
    def is_chain(self) -> bool:
        """True when every node is the only child of the one before it."""
        return self.host.is_chain

    def paths(self, row: int = 0) -> list[list[int]]:
        """Root-to-leaf paths of one row as node indices, the root included, in order of their leaves."""
        parents, real = self.host.links(row), self.host.flags(row) or [1] * self.nodes
        inner = {p for p, r in zip(parents, real, strict=True) if r}
        paths = []
        for leaf in (i for i in range(self.nodes) if real[i] and i not in inner):
            path = [leaf]
            while path[-1] != 0:
                path.append(parents[path[-1]])
            paths.append(path[::-1])
        return paths

    def keep(self, index: Tensor) -> TreeShape:
        """The shape cut down to the nodes in `index` (`[M]`, ascending, closed under parents, 0 first)."""
        place = torch.full((self.nodes + 1,), -1, dtype=torch.long, device=index.device)
        place[index] = torch.arange(index.numel(), device=index.device)
        parents = place[self.parents[:, index]]
        return TreeShape(parents, None if self.real is None else self.real[:, index])

    @staticmethod
    def chain(length: int, device: torch.device | str = "cpu") -> TreeShape:
        """A root followed by `length` nodes in a line; the same object every time, with what was derived from it."""
        return _chain(length, str(device))


@lru_cache(maxsize=128)
def _chain(length: int, device: str) -> TreeShape:
    with torch.inference_mode(False):
        return TreeShape(torch.arange(-1, length, device=device).unsqueeze(0))


@dataclass(frozen=True, eq=False)
class Drawn:
    """The distributions that drawn nodes really came from, without which sampling is not lossless.

    Whether a node is in the tree may depend on the draws of nodes before it, never on its own or on later ones: a tree
    from which unlikely draws were removed is not drawn from q any more. Nodes that are not real hang where they would
    have stood; those that fill up a row hang on the node before them, so that a chain stays one.

    Args:
        probs: `[B, R, Q]` float32; without `sources` R is N and row i is the distribution from which the children of
            node i were drawn.
        drawn: `[B, N]` bool, which nodes were drawn; the others were chosen without chance. None means all.
        with_replacement: whether siblings were drawn independently. If not, each sibling was drawn from the
            distribution with its elder siblings from the same row of `probs` removed and the rest renormalised.
        token_ids: `[Q]` int64, the target's token id of each column; None when Q is the target's vocabulary.
        sources: `[B, N]` int64, the row of `probs` that each node was drawn from, so that siblings may come from
            different drafts; None means the row of its parent. Entries of nodes that were not drawn are not read.
    """

    probs: Tensor
    drawn: Tensor | None = None
    with_replacement: bool = True
    token_ids: Tensor | None = None
    sources: Tensor | None = None

    def keep(self, index: Tensor) -> Drawn:
        """The record of the nodes in `index` (`[M]`, see `TreeShape.keep`)."""
        flags = None if self.drawn is None else self.drawn[:, index]
        if self.sources is None:
            return replace(self, probs=self.probs[:, index], drawn=flags)
        return replace(self, drawn=flags, sources=self.sources[:, index])

    def along(self, rows: Tensor, nodes: Tensor) -> Drawn:
        """The record of one line of nodes per row: `[B, 1]` row numbers and `[B, A]` nodes."""
        flags = None if self.drawn is None else self.drawn[rows, nodes]
        if self.sources is None:
            return replace(self, probs=self.probs[rows, nodes], drawn=flags)
        return replace(self, drawn=flags, sources=self.sources[rows, nodes])


@dataclass(frozen=True, eq=False)
class Computed:
    """Work of the target that a draft has done already and verification need not repeat.

    The first M nodes of the tree went through the target's blocks below `layer` during `propose`, node i of row b in
    slot `lengths[b] + i` of the target's cache, where the keys and values of these blocks now stand.

    Args:
        layer: E, the first block not run.
        hidden: `[B, M, D]`, the input of block E.
    """

    layer: int
    hidden: Tensor


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A batch of token trees.

    Args:
        tokens: `[B, N]` int64. Node 0 is the last committed token, which is not in the target's cache yet.
        shape: the links between nodes, shared by all rows or one per row.
        drawn: None when all nodes were chosen without chance (for instance top-k).
        computed: None when the target's blocks have not seen the nodes.
    """

    tokens: Tensor
    shape: TreeShape
    drawn: Drawn | None = None
    computed: Computed | None = None

    @property
    def nodes(self) -> int:
        """N, the root included."""
        return self.tokens.shape[1]

    @property
    def parents(self) -> Tensor:
        """`[R, N]` int64."""
        return self.shape.parents

    @cached_property
    def token_lists(self) -> list[list[int]]:
        """The tokens on the host, fetched once."""
        return fetch([self.tokens])[0]

    def fetch(self, more: Sequence[Tensor] = ()) -> list[list[list[int]]]:
        """Bring tokens and links to the host, and more with them (`[B, M]`, integers), in one transfer.

        Returns:
            Rows of each of `more`.
        """
        shape, known = self.shape, "host" in vars(self.shape)
        links = [] if known else [shape.parents] if shape.real is None else [shape.parents, shape.real]
        tokens, *found = fetch([self.tokens, *links, *more])
        vars(self)["token_lists"] = tokens
        if not known:
            vars(shape)["host"] = HostShape(found[0], None if shape.real is None else found[1])
        return found[len(links) :]

    def real(self) -> Tensor:
        """`[B, N]` bool."""
        if self.shape.real is None:
            return torch.ones_like(self.tokens, dtype=torch.bool)
        return self.shape.real.expand_as(self.tokens)

    def depths(self) -> list[int]:
        """Per row the depth of its deepest real node."""
        return [self.shape.host.deepest(row) for row in range(self.tokens.shape[0])]

    @staticmethod
    def root_only(root: Tensor) -> DraftTree:
        """No guesses at all: plain decoding of one token. `root` is `[B]`."""
        return DraftTree(root.unsqueeze(1), TreeShape.chain(0, root.device))

    def within(self, vocab_size: int) -> DraftTree:
        """The tree with tokens that can be embedded, for a pass that starts before they have been checked."""
        return replace(self, tokens=self.tokens.clamp(0, vocab_size - 1))

    def trunk(self) -> DraftTree:
        """The first child of each node from the root down, as one chain; for targets that cannot follow a tree.

        Which child comes first does not depend on what the target will say, so nothing is favoured: a first drawn
        child is a draw from its distribution, with or without elder siblings.
        """
        if self.shape.is_chain:
            return self
        lines = [self._first_line(row) for row in range(self.tokens.shape[0])]
        longest = max(map(len, lines))
        device = self.tokens.device
        nodes = torch.tensor([line + [0] * (longest - len(line)) for line in lines], device=device)
        real = torch.tensor([[place < len(line) for place in range(longest)] for line in lines], device=device)
        rows = torch.arange(len(lines), device=device).unsqueeze(1)
        drawn = None if self.drawn is None else self.drawn.along(rows, nodes)
        parents = TreeShape.chain(longest - 1, device).parents
        return DraftTree(self.tokens[rows, nodes], TreeShape(parents, None if bool(real.all()) else real), drawn)

    def _first_line(self, row: int) -> list[int]:
        parents, real = self.shape.host.links(row), self.shape.host.flags(row)
        line = [0]
        for node in range(1, self.nodes):
            if parents[node] == line[-1]:
                if real is not None and not real[node]:  # a younger sibling would not be a draw from q alone
                    break
                line.append(node)
        return line

    def limit_depth(self, depth: int) -> DraftTree:
        """The tree without the nodes deeper than `depth` in every row."""
        if self.nodes - 1 <= depth or self.shape.max_depth <= depth:
            return self
        index = (self.shape.depth <= depth).any(0).nonzero().squeeze(1)
        cut = self._only(index)
        if cut.shape.parents.shape[0] == 1:
            return cut
        shallow = (self.shape.depth <= depth)[:, index]
        real = shallow if cut.shape.real is None else cut.shape.real & shallow
        return DraftTree(cut.tokens, TreeShape(cut.shape.parents, real), cut.drawn)

    def limit_nodes(self, nodes: int) -> DraftTree:
        """The tree cut to at most `nodes` nodes, the root included.

        Chosen nodes go in their order, last first. Where nodes were drawn, whether one goes must not hang on its token
        (a draft may number nodes by how likely they came out), so whole levels go, deepest first; a first level that
        is still too wide keeps its eldest children, which were drawn first.
        """
        if self.nodes <= nodes:
            return self
        if self.drawn is None:
            return self._only(torch.arange(nodes, device=self.tokens.device))
        depth = self.shape.depth.amin(0)
        widths = torch.bincount(depth).cumsum(0).tolist()
        level = max((d for d, width in enumerate(widths) if width <= nodes), default=0)
        if level > 0:
            return self.limit_depth(level)
        flat = self.limit_depth(1)
        return flat._only(torch.arange(min(nodes, flat.nodes), device=self.tokens.device))

    def _only(self, index: Tensor) -> DraftTree:
        drawn = None if self.drawn is None else self.drawn.keep(index)
        return DraftTree(self.tokens[:, index], self.shape.keep(index), drawn)

    def check(self, root: Tensor, vocab_size: int) -> None:
        """Raise DraftTreeError unless the tree is well formed and starts at `root` (`[B]`)."""
        self.check_sizes(vocab_size)
        self.fetch()
        self.check_values(root.tolist(), vocab_size)

    def check_values(self, root: list[int], vocab_size: int) -> None:
        """The part of `check` that reads tokens and links on the host; cheap once they have been fetched."""
        tokens, shape = self.token_lists, self.shape.host
        first = [row[0] for row in tokens]
        if first != root:
            raise DraftTreeError(f"node 0 is {first}, wanted the last token {root}")
        if not shape.ordered:
            raise DraftTreeError(f"parents must come before children and the root's be -1, got {shape.parents}")
        if any(min(row) < 0 or max(row) >= vocab_size for row in tokens):
            # Those of nodes that are not real too: they are embedded like the others.
            outside = [token for row in tokens for token in row if not 0 <= token < vocab_size]
            raise DraftTreeError(f"tokens must lie in 0..{vocab_size - 1}, got {outside}")
        if shape.real is not None and not all(row[0] for row in shape.real):
            raise DraftTreeError("the root must be real in every row")
        if self.drawn is not None and self.drawn.sources is not None:
            _check_sources(self.drawn, self.drawn.sources)

    def check_sizes(self, vocab_size: int) -> None:
        """The part of `check` that reads no values."""
        batch, nodes = self.tokens.shape
        for name, links in (("parents", self.parents), ("real", self.shape.real)):
            if links is not None and (links.ndim != 2 or links.shape[0] not in (1, batch) or links.shape[1] != nodes):
                raise DraftTreeError(f"{name} have shape {tuple(links.shape)}, wanted (1 or {batch}, {nodes})")
        if self.drawn is not None:
            _check_drawn(self.drawn, batch, nodes, vocab_size)


def _check_drawn(drawn: Drawn, batch: int, nodes: int, vocab_size: int) -> None:
    columns = vocab_size if drawn.token_ids is None else drawn.token_ids.numel()
    found, sources = tuple(drawn.probs.shape), drawn.sources
    wanted = (batch, nodes if sources is None or len(found) < 2 else found[1], columns)
    if found != wanted:
        raise DraftTreeError(f"draft distributions have shape {found}, wanted {wanted}")
    if sources is not None and tuple(sources.shape) != (batch, nodes):
        raise DraftTreeError(f"sources of drawn nodes have shape {tuple(sources.shape)}, wanted {(batch, nodes)}")


def _check_sources(drawn: Drawn, sources: Tensor) -> None:
    rows = drawn.probs.shape[1]
    read = sources[:, 1:] if drawn.drawn is None else sources[drawn.drawn]
    if bool(((read < 0) | (read >= rows)).any()):
        raise DraftTreeError(f"sources of drawn nodes must be rows 0..{rows - 1} of probs, got {read.tolist()}")


def shape_from_choices(choices: Iterable[Sequence[int]]) -> tuple[TreeShape, list[Path]]:
    """A static tree from nested choices, as Medusa writes them (Cai et al. 2024, section 2.3.1).

    A path `(c1, .., cm)` is a node at depth m whose token has rank `cm` among the guesses for its place. Nodes are
    ordered by depth, then by path; the root comes first.

    Args:
        choices: one path of ranks per node; every prefix of a path must be there too.

    Returns:
        The shape (`[1, N]`) and the paths in node order, the root's empty path first.

    Raises:
        ConfigError: a negative rank, a path twice, or a path without its parent, by name.
    """
    paths: list[Path] = [tuple(int(c) for c in choice) for choice in choices]
    if () in paths:
        raise ConfigError("a tree's choices hold an empty path (); the root is implied, leave it out")
    for path in paths:
        if any(c < 0 for c in path):
            raise ConfigError(f"path {path} in the tree's choices has a negative rank; ranks start at 0")
    twice = {p for p in paths if paths.count(p) > 1}
    if twice:
        raise ConfigError(f"path {min(twice)} stands more than once in the tree's choices; list each path once")
    ordered: list[Path] = [(), *sorted(paths, key=lambda p: (len(p), p))]
    place = {path: i for i, path in enumerate(ordered)}
    parents = [-1]
    for path in ordered[1:]:
        if path[:-1] not in place:
            raise ConfigError(f"path {path} in the tree's choices has no parent; add {path[:-1]}")
        parents.append(place[path[:-1]])
    return TreeShape(torch.tensor([parents])), ordered
