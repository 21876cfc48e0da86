"""Accept rules: which path of the draft tree the target agrees with, and the token after it.

p is the target's distribution after all logits processors, q the draft's. Letters: B rows, N nodes, V vocabulary, K
rows still walking, Q draft vocabulary.

Nodes chosen without chance: a token is taken from p (its argmax when greedy) and the walk goes on if a child carries
it; the first token without a child ends the round. That is plain decoding with the forward passes already done, so
nothing about it can be lossy.

Nodes drawn from q: multi-round speculative sampling (Leviathan et al. 2023, Chen et al. 2023; siblings: SpecInfer, Miao
et al. 2024, Algorithm 2). Children are tried in order, each accepted with min(1, p(x)/q(x)); after a refusal
p <- norm(max(0, p - q)), and if siblings are drawn without replacement q <- norm(q without x). If no child is accepted
the token is drawn from what is left of p. A chosen child among drawn ones is a draw from a point mass at x. Siblings
drawn by different drafts are each judged by their own q. A token that two drafts drew cannot be accepted the second
time (its residual is 0 by then), but that second draw still takes its q off the residual: leaving it out is lossy.

A chain of drawn nodes is judged as a whole: block verification (Sun et al. 2024, "Block Verification Accelerates
Speculative Decoding", Algorithm 2) is as exact and never accepts fewer tokens in expectation.

Rules that change the text are in `selfspec.lossy` and only used on request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from selfspec.drawing import NO_TOKEN
from selfspec.errors import ConfigError, DraftTreeError, UnsupportedGeneration
from selfspec.lossy import GREEDY_RULES, TYPICAL, walk_loosely, walk_typical
from selfspec.tree import DraftTree, Drawn
from selfspec.walk import Chance, Children, NodeScores, NodeTokens

_SUM_TOLERANCE = 1e-3

NO_DISTRIBUTION = (
    "the target's scores hold NaN or infinity, or forbid every token, so there is nothing to sample from; look at the "
    "model's dtype and at the logits processors"
)
LOSSLESS = "lossless"
TOKEN_WISE = "token-wise"


@dataclass(frozen=True)
class AcceptRule:
    """How trees are judged. Greedy decoding is exact but for the three rules that are made for it.

    Args:
        name: `lossless` (whole blocks where the tree is a chain of drawn nodes, node by node otherwise), `token-wise`
            (node by node always), or one that changes the text: `lossy-typical` when sampling; when greedy
            `lossy-top-k`, `lossy-distance` and `lossy-min-block` (Stern et al. 2018, sections 5.1 to 5.3).
        epsilon: typical acceptance takes a node when p(x) > min(epsilon, delta * exp(-entropy of p)).
        delta: see `epsilon`. The defaults of both are those of Medusa's own code.
        top_k: a guess passes that is among this many of the target's likeliest tokens.
        distance: a guess passes that is this near to the target's likeliest token.
        metric: the distance of two token ids; None takes the difference of the ids, which means something only where
            tokens stand for intensities.
        min_block: tokens that a round adds at least, the target's own included, as far as the tree reaches.

    Raises:
        ConfigError: no such rule, or bounds out of range.
    """

    name: str = LOSSLESS
    epsilon: float = 0.09
    delta: float = 0.3
    top_k: int = 2
    distance: float = 2.0
    metric: Callable[[int, int], float] | None = None
    min_block: int = 2

    def __post_init__(self) -> None:
        known = (LOSSLESS, TOKEN_WISE, TYPICAL, *GREEDY_RULES)
        if self.name not in known:
            raise ConfigError(f"no accept rule is called {self.name!r}; use one of {', '.join(known)}")
        if not (0 < self.epsilon <= 1 and 0 < self.delta <= 1):
            raise ConfigError(f"epsilon={self.epsilon} and delta={self.delta} must lie in (0, 1]")
        if self.top_k < 1 or self.min_block < 1 or not self.distance >= 0:
            raise ConfigError(
                f"top_k={self.top_k} and min_block={self.min_block} must be at least 1, distance={self.distance} "
                "not below 0"
            )

    @property
    def lossy(self) -> bool:
        """Whether text may differ from the target's, greedy or in distribution."""
        return self.name.startswith("lossy-")


Pick = Callable[[list[int], Tensor], list[int]]
"""Rows of the batch and their processed scores `[K, V]` float32 to one token each."""


@dataclass(frozen=True)
class Accepted:
    """What a round commits, on the host.

    Args:
        paths: per row the accepted nodes, the root (0) first.
        tokens: per row the new tokens: those of the accepted nodes after the root, then one more from the target.
    """

    paths: list[list[int]]
    tokens: list[list[int]]


def accept(
    tree: DraftTree,
    scores: NodeScores,
    do_sample: bool,
    chance: Chance,
    rule: AcceptRule | None = None,
    picks: list[list[int]] | None = None,
    tokens: NodeTokens | None = None,
) -> Accepted:
    """Walk the tree from the root, as far as the target agrees.

    Args:
        tree: the proposed tree.
        scores: the target's processed scores; asked only for nodes that the walk reaches (a block is read whole).
        do_sample: sample from the scores; otherwise take their argmax.
        chance: where randomness comes from.
        rule: how sampled trees are judged; the lossless rule if left out.
        picks: per row the target's own token at every node, where all were picked at once (see `picked_at_once`).
        tokens: takes the target's own token where the walk goes, without scores, where that is all that is asked.

    Raises:
        DraftTreeError: a draft distribution that is none.
        UnsupportedGeneration: scores of the target that make no distribution.
    """
    rule = rule or AcceptRule()
    if picks is not None:
        return _checked(_walk_picked(Children(tree), picks))
    if tokens is not None:
        return _checked(_walk_chosen(tree.tokens.shape[0], Children(tree), tokens))
    return _checked(_walk(tree, scores, do_sample, chance, rule))


def picked_at_once(tree: DraftTree, do_sample: bool, rule: AcceptRule) -> bool:
    """Whether the walk asks nothing but the target's own token at each node: its argmax, or a draw from p.

    Draws at nodes that the walk does not reach are independent of the others and change nothing.
    """
    return not rule.lossy and (tree.drawn is None or not do_sample)


def _walk_picked(children: Children, picks: list[list[int]]) -> Accepted:
    walks = []
    for row, picked in enumerate(picks):
        path, tokens, child = [0], [picked[0]], children.find(row, 0, picked[0])
        while child is not None:
            path.append(child)
            tokens.append(picked[child])
            child = children.find(row, child, picked[child])
        walks.append((path, tokens))
    return _together(walks)


def _checked(accepted: Accepted) -> Accepted:
    if any(tokens[-1] == NO_TOKEN for tokens in accepted.tokens):
        raise UnsupportedGeneration(NO_DISTRIBUTION)
    return accepted


def _walk(tree: DraftTree, scores: NodeScores, do_sample: bool, chance: Chance, rule: AcceptRule) -> Accepted:
    children, batch = Children(tree), tree.tokens.shape[0]
    if not do_sample and rule.name in GREEDY_RULES:
        return _together([walk_loosely(row, children, scores, rule) for row in range(batch)])
    if do_sample and rule.name == TYPICAL:
        return _together([walk_typical(row, children, scores, rule, chance) for row in range(batch)])
    if do_sample and tree.drawn is not None:
        return _together([_walk_drawn(row, children, tree.drawn, scores, chance, rule) for row in range(batch)])

    def pick(rows: list[int], found: Tensor) -> list[int]:
        picked: list[int] = (chance.token(found.softmax(-1)) if do_sample else found.argmax(-1)).tolist()
        return picked

    return _walk_chosen(batch, children, _picking(scores, pick))


def _picking(scores: NodeScores, pick: Pick) -> NodeTokens:
    return lambda rows, paths: pick(rows, scores(rows, paths))


def accept_chosen(tree: DraftTree, tokens: NodeTokens, picks: list[list[int]] | None = None) -> Accepted:
    """Walk the tree as if no node had been drawn, each row picking in a way of its own; lossless like plain decoding.

    A row picks one token per committed token, in order, so what it draws depends neither on the tree nor on other rows.

    Args:
        tree: the proposed tree.
        tokens: takes the target's own token where the walk goes.
        picks: that token at every node, `[B][N]`, where it is known already; then nothing is asked.

    Raises:
        UnsupportedGeneration: scores of the target that make no distribution.
    """
    if picks is not None:
        return _walk_picked(Children(tree), picks)
    return _checked(_walk_chosen(tree.tokens.shape[0], Children(tree), tokens))


def _together(walks: Sequence[tuple[list[int], list[int]]]) -> Accepted:
    return Accepted([path for path, _ in walks], [tokens for _, tokens in walks])


def _walk_chosen(batch: int, children: Children, taken: NodeTokens) -> Accepted:
    paths: list[list[int]] = [[0] for _ in range(batch)]
    tokens: list[list[int]] = [[] for _ in range(batch)]
    walking = list(range(batch))
    while walking:
        found = taken(walking, [paths[row] for row in walking])
        still = []
        for row, token in zip(walking, found, strict=True):
            tokens[row].append(token)
            child = children.find(row, paths[row][-1], token)
            if child is not None:
                paths[row].append(child)
                still.append(row)
        walking = still
    return Accepted(paths, tokens)


def _walk_drawn(
    row: int, children: Children, drawn: Drawn, scores: NodeScores, chance: Chance, rule: AcceptRule
) -> tuple[list[int], list[int]]:
    block = _drawn_chain(row, children, drawn)
    if len(block) > 1 and rule.name == LOSSLESS:
        return _judge_block(row, block, children.tokens[row], drawn, scores, chance)
    path, tokens = [0], []
    while True:
        p = scores([row], [path])[0].softmax(-1)
        nodes = children.of(row, path[-1])
        origin = {node: _source(drawn, row, node, path[-1]) for node in nodes if _is_drawn(drawn, row, node)}
        by_source = {source: _over_vocabulary(drawn, row, source, p.numel()) for source in set(origin.values())}
        for q in by_source.values():
            _check_distribution(q, path[-1])
        child, p = _try_children(nodes, children.tokens[row], origin, drawn.with_replacement, p, by_source, chance)
        if child is None:
            tokens.append(int(chance.token(p.unsqueeze(0))))
            return path, tokens
        path.append(child)
        tokens.append(children.tokens[row][child])


def _drawn_chain(row: int, children: Children, drawn: Drawn) -> list[int]:
    """The nodes below the root when they form a chain and all were drawn; else nothing.

    Nodes that are not real count: a branch may be missing because of what was drawn before it, and a rule chosen by
    what was drawn is not exact. A chain that ends early is one all the same.
    """
    if not children.in_line[row]:
        return []
    chain, below = [], children.of(row, 0)
    while below:
        if len(below) > 1 or not _is_drawn(drawn, row, below[0]):
            return []
        chain.append(below[0])
        below = children.of(row, below[0])
    return chain


def _judge_block(
    row: int, block: list[int], tokens: list[int], drawn: Drawn, scores: NodeScores, chance: Chance
) -> tuple[list[int], list[int]]:
    """Block verification (Sun et al. 2024, Algorithm 2).

    With X_1..X_n the block, w_0 = 1 and w_i = min(1, w_(i-1) p(X_i) / q(X_i)), place i is accepted with
    h_i = s_i / (s_i + 1 - w_i) where s_i = sum of max(0, w_i p - q) after X_i, and h_n = w_n; the longest accepted
    prefix counts. The coins are independent, so they are thrown from the far end. After n tokens the next is drawn
    from p, after i < n from norm(max(0, w_i p - q)).
    """
    paths = [[0, *block[:i]] for i in range(len(block) + 1)]
    p = scores([row] * len(paths), paths).softmax(-1)
    w = [1.0]
    for place, node in enumerate(block):
        q = _over_vocabulary(drawn, row, _source(drawn, row, node, paths[place][-1]), p.shape[1])
        _check_distribution(q, paths[place][-1])
        w.append(min(1.0, w[-1] * _ratio(p[place], q, tokens[node], node)))
    kept, left = len(block), p[-1]
    while kept and not chance.coin(w[-1] if kept == len(block) else _share(left, w[kept])):
        kept -= 1
        q = _over_vocabulary(drawn, row, _source(drawn, row, block[kept], paths[kept][-1]), p.shape[1])
        left = (w[kept] * p[kept] - q).clamp_(min=0)
    last = chance.token(_normalised(left, p[kept]).unsqueeze(0))
    return paths[kept], [*(tokens[node] for node in block[:kept]), int(last)]


def _share(left: Tensor, weight: float) -> float:
    """h_i from the residual after place i; 1 where p equals q to the last bit."""
    total = float(left.sum())
    return total / (total + 1.0 - weight) if total + 1.0 - weight > 0 else 1.0


def _ratio(p: Tensor, q: Tensor, token: int, node: int) -> float:
    """p(x) / q(x) of a drawn node."""
    if float(q[token]) <= 0:
        raise DraftTreeError(f"node {node} carries token {token}, which its own draft distribution excludes")
    return float(p[token] / q[token])


def _try_children(
    nodes: list[int],
    tokens: list[int],
    origin: dict[int, int],
    with_replacement: bool,
    p: Tensor,
    by_source: dict[int, Tensor],
    chance: Chance,
) -> tuple[int | None, Tensor]:
    """The accepted child, or None and the residual of p.

    Args:
        nodes: siblings in order.
        tokens: of all nodes of the row.
        origin: the source of each drawn sibling.
        with_replacement: see `Drawn`.
        p: `[V]`.
        by_source: `[V]` each, q of each source; changed when drawn without replacement.
        chance: where randomness comes from.
    """
    for node in nodes:
        token = tokens[node]
        if node in origin:
            q = by_source[origin[node]]
            if chance.coin(min(1.0, _ratio(p, q, token, node))):
                return node, p
            p = _normalised((p - q).clamp_(min=0), p)
            if not with_replacement:
                by_source[origin[node]] = _without(q, token)
        else:
            if chance.coin(float(p[token])):
                return node, p
            p = _without(p, token)
    return None, p


def _source(drawn: Drawn, row: int, node: int, parent: int) -> int:
    """The row of `probs` that a drawn node came from."""
    return parent if drawn.sources is None else int(drawn.sources[row, node])


def _is_drawn(drawn: Drawn, row: int, node: int) -> bool:
    return drawn.drawn is None or bool(drawn.drawn[row, node])


def _check_distribution(q: Tensor, node: int) -> None:
    """Raise unless q sums to 1; anything else (NaN, logits, a cut-off softmax) would make sampling lossy unseen."""
    total = float(q.sum())
    if not abs(total - 1) < _SUM_TOLERANCE:
        raise DraftTreeError(f"the draft distribution at node {node} sums to {total:.4g}, wanted 1; give softmax(q)")


def _over_vocabulary(drawn: Drawn, row: int, source: int, vocab_size: int) -> Tensor:
    q = drawn.probs[row, source].float()
    if drawn.token_ids is None:
        return q
    return q.new_zeros(vocab_size).scatter_(0, drawn.token_ids, q)


def _without(probs: Tensor, token: int) -> Tensor:
    rest = probs.clone()
    rest[token] = 0
    return _normalised(rest, rest)


def _normalised(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Weights scaled to sum 1; `otherwise` where rounding left nothing (p equals q to the last bit)."""
    total = weights.sum()
    return weights / total if float(total) > 0 else otherwise
