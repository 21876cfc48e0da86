"""The accept rules by full enumeration: every outcome of every draw, with its exact weight, on small vocabularies.

The draft's own draws are enumerated too. The claim is always the same: the joint distribution of the first committed
tokens is the target's, where the tokens after a round's last one follow the target (later rounds obey the same claim).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import oracle
import pytest
import tiny
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import selfspec
from selfspec import accept as rules
from selfspec.accept import AcceptRule, accept
from selfspec.draft import Sampling
from selfspec.errors import ConfigError, DraftTreeError
from selfspec.scoring import History, Processors, TreeScores, sampling_of
from selfspec.target import TargetOutput
from selfspec.tree import DraftTree, Drawn, TreeShape

TOLERANCE = 1e-6
Joint = dict[tuple[int, ...], float]


class Branching:
    """A source of randomness that follows a script of outcomes, and notes what else could have come."""

    def __init__(self, script: Sequence[int]) -> None:
        self.script = list(script)
        self.weight = 1.0
        self.taken: list[int] = []
        self.others: list[list[int]] = []

    def pick(self, weights: Sequence[float]) -> int:
        """An index, by weight."""
        total = sum(weights)
        possible = [i for i, w in enumerate(weights) if w > 0]
        at = len(self.taken)
        chosen = self.script[at] if at < len(self.script) else possible[0]
        if at >= len(self.script):
            self.others += [[*self.taken, other] for other in possible[1:]]
        self.taken.append(chosen)
        self.weight *= weights[chosen] / total
        return chosen

    def token(self, probs: Tensor) -> Tensor:
        """One token per row."""
        return torch.tensor([self.pick(row) for row in probs.double().tolist()])

    def coin(self, probability: float) -> bool:
        """Heads with this probability."""
        return self.pick([1.0 - probability, probability]) == 1


def outcomes(run: Callable[[Branching], Any]) -> Iterator[tuple[float, Any]]:
    """Every outcome of `run` with its weight."""
    waiting: list[list[int]] = [[]]
    while waiting:
        chance = Branching(waiting.pop())
        found = run(chance)
        waiting += chance.others
        yield chance.weight, found


@dataclass
class Table:
    """A target and a draft given as tables: logits after every sequence of tokens."""

    vocab: int
    seed: int
    processors: LogitsProcessorList

    def logits(self, path: tuple[int, ...]) -> Tensor:
        return _noise(self.seed, path, self.vocab)

    def q(self, path: tuple[int, ...], columns: int) -> Tensor:
        return _noise(self.seed + 1, path, columns).softmax(-1)


@cache
def _noise(seed: int, path: tuple[int, ...], size: int) -> Tensor:
    place = sum((token + 1) * 11**depth for depth, token in enumerate(path))
    return 1.5 * torch.randn(size, generator=torch.Generator().manual_seed(100_000 * seed + place))


@dataclass
class Fixed:
    """The same, with p and q given and the same after every path."""

    p: Sequence[float]
    q_: Sequence[float]
    processors: LogitsProcessorList

    @property
    def vocab(self) -> int:
        return len(self.p)

    def logits(self, path: tuple[int, ...]) -> Tensor:
        return torch.tensor(self.p).log()

    def q(self, path: tuple[int, ...], columns: int) -> Tensor:
        return torch.tensor(self.q_)


PLAIN = LogitsProcessorList()
TOKEN_WISE = AcceptRule("token-wise")


def expected_p(
    logits: Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, cut: str = "", at: float = 0.0
) -> list[float]:
    """Temperature, then top-k, then top-p (or one of the rarer cut-offs), written down anew in float64."""
    if cut:
        return _cut((logits.double() / temperature).softmax(-1).tolist(), cut, at)
    scaled = (logits.double() / temperature).softmax(-1).tolist()
    order = sorted(range(len(scaled)), key=lambda t: -scaled[t])
    if top_k:
        order = order[:top_k]
    total = sum(scaled[t] for t in order)
    kept, mass = [], 0.0
    for token in order:
        if mass < top_p * total or not kept:
            kept.append(token)
            mass += scaled[token]
    return [scaled[t] / mass if t in kept else 0.0 for t in range(len(scaled))]


def _cut(p: list[float], cut: str, at: float) -> list[float]:
    """min-p (Nguyen et al. 2024), typical-p (Meister et al. 2022), epsilon and eta cut-offs (Hewitt et al. 2022)."""
    entropy = -sum(x * math.log(x) for x in p)
    if cut == "typical":
        kept: set[int] = set()
        for token in sorted(range(len(p)), key=lambda t: abs(-math.log(p[t]) - entropy)):
            if sum(p[t] for t in kept) < at:
                kept.add(token)
    else:
        least = {"min-p": at * max(p), "epsilon": at, "eta": min(at, math.sqrt(at) * math.exp(-entropy))}[cut]
        kept = {t for t, x in enumerate(p) if x >= least}
    total = sum(p[t] for t in kept)
    return [x / total if t in kept else 0.0 for t, x in enumerate(p)]


@dataclass
class Spec:
    """How children are made: per node (named by its path of child numbers) the kinds of its children, in order.

    `d` is drawn from q, a digit is the chosen token of that rank under q.
    """

    nodes: dict[tuple[int, ...], str]
    with_replacement: bool = True
    token_ids: tuple[int, ...] | None = None

    @property
    def depth(self) -> int:
        return 1 + max(map(len, self.nodes))


def draft(table: Any, spec: Spec, chance: Branching) -> tuple[DraftTree, list[tuple[int, ...]]]:
    """A tree as `spec` says, with the draft's draws taken from `chance`; and the tokens on the way to each node."""
    columns = len(spec.token_ids) if spec.token_ids else table.vocab
    ids = list(spec.token_ids) if spec.token_ids else list(range(columns))
    tokens, parents, drawn, paths, place = [0], [-1], [False], [()], {(): 0}
    probs: dict[int, Tensor] = {}
    for name in sorted(spec.nodes, key=lambda n: (len(n), n)):
        node = place[name]
        probs[node] = table.q(paths[node], columns)
        left = probs[node].double().tolist()
        order = sorted(range(columns), key=lambda c: -left[c])
        for number, kind in enumerate(spec.nodes[name]):
            if kind == "d":
                column = chance.pick(left)
                if not spec.with_replacement:
                    left[column] = 0.0
            else:
                column = order[int(kind)]
            place[(*name, number)] = len(tokens)
            tokens.append(ids[column])
            parents.append(node)
            drawn.append(kind == "d")
            paths.append((*paths[node], ids[column]))
    table_of_q = torch.stack([probs.get(i, torch.full((columns,), 1.0 / columns)) for i in range(len(tokens))])
    flags = torch.tensor([drawn])
    any_drawn = Drawn(
        table_of_q.unsqueeze(0),
        None if bool(flags[:, 1:].all()) else flags,
        spec.with_replacement,
        None if spec.token_ids is None else torch.tensor(spec.token_ids),
    )
    tree = DraftTree(torch.tensor([tokens]), TreeShape(torch.tensor([parents])), any_drawn if any(drawn) else None)
    return tree, paths


Marker = Callable[[DraftTree], DraftTree]


def committed(table: Any, spec: Spec, mark: Marker = lambda tree: tree, rule: AcceptRule | None = None) -> Joint:
    """Weights of the committed runs of tokens, over all draws of draft and target."""

    def run(chance: Branching) -> tuple[int, ...]:
        tree, paths = draft(table, spec, chance)
        logits = torch.stack([table.logits(path) for path in paths]).unsqueeze(0)
        history = History(torch.zeros(1, 1, dtype=torch.long), 8)
        scores = TreeScores(TargetOutput(logits), tree.tokens.tolist(), history, Processors(table.processors))
        return tuple(accept(mark(tree), scores, True, chance, rule).tokens[0])

    found: Joint = {}
    for weight, tokens in outcomes(run):
        found[tokens] = found.get(tokens, 0.0) + weight
    return found


def distance(
    table: Any,
    spec: Spec,
    warp: dict[str, Any] | None = None,
    mark: Marker = lambda tree: tree,
    rule: AcceptRule | None = None,
) -> float:
    """Total variation between the first `depth + 1` tokens and the target's own."""
    warp = warp or {}
    length = spec.depth + 1
    cached: dict[tuple[int, ...], list[float]] = {}

    def p(path: tuple[int, ...]) -> list[float]:
        if path not in cached:
            cached[path] = expected_p(table.logits(path), **warp)
        return cached[path]

    def joint(path: tuple[int, ...], weight: float) -> Joint:
        if len(path) == length:
            return {path: weight}
        found: Joint = {}
        for token, chance in enumerate(p(path)):
            if weight * chance > 0:
                found |= joint((*path, token), weight * chance)
        return found

    got: Joint = {}
    for tokens, weight in committed(table, spec, mark, rule).items():
        for path, part in joint(tokens, weight).items():
            got[path] = got.get(path, 0.0) + part
    wanted = joint((), 1.0)
    return sum(abs(got.get(path, 0.0) - wanted.get(path, 0.0)) for path in got.keys() | wanted.keys()) / 2


CHAIN_1, CHAIN_3 = {(): "d"}, {(): "d", (0,): "d", (0, 0): "d"}
SPECS = {
    "one drawn child": (5, Spec(CHAIN_1)),
    "chain of three drawn": (3, Spec(CHAIN_3)),
    "chain of three chosen": (5, Spec({(): "0", (0,): "0", (0, 0): "1"})),
    "three siblings without replacement": (5, Spec({(): "ddd"}, with_replacement=False)),
    "all siblings without replacement": (4, Spec({(): "dddd"}, with_replacement=False)),
    "three siblings with replacement": (4, Spec({(): "ddd"})),
    "tree of depth 2 without replacement": (3, Spec({(): "dd", (0,): "dd", (1,): "dd"}, with_replacement=False)),
    "tree of depth 2 with replacement": (3, Spec({(): "dd", (0,): "dd", (1,): "d"})),
    "uneven tree without replacement": (4, Spec({(): "ddd", (1,): "dd"}, with_replacement=False)),
    "chosen tree of depth 2": (5, Spec({(): "012", (0,): "01", (2,): "3"})),
    "drawn before chosen": (4, Spec({(): "d0", (1,): "dd"}, with_replacement=False)),
    "chosen before drawn": (4, Spec({(): "0d", (0,): "d", (1,): "01"}, with_replacement=False)),
    "chosen among drawn with replacement": (4, Spec({(): "d1d"})),
    "the same token chosen twice": (4, Spec({(): "00d"})),
    "drawn above chosen": (4, Spec({(): "dd", (0,): "01", (1,): "0"}, with_replacement=False)),
    "chosen above drawn": (4, Spec({(): "01", (0,): "dd", (1,): "d"}, with_replacement=False)),
    "reduced draft vocabulary": (6, Spec({(): "dd", (0,): "dd"}, with_replacement=False, token_ids=(1, 3, 4))),
    "reduced, unsorted, with replacement": (6, Spec({(): "dd", (1,): "d"}, token_ids=(5, 0, 2))),
}
WARPS: dict[str, tuple[dict[str, Any], Callable[[], LogitsProcessorList]]] = {
    "as is": ({}, LogitsProcessorList),
    "temperature 0.6": ({"temperature": 0.6}, lambda: LogitsProcessorList([TemperatureLogitsWarper(0.6)])),
    "temperature 1.7 and top-p 0.8": (
        {"temperature": 1.7, "top_p": 0.8},
        lambda: LogitsProcessorList([TemperatureLogitsWarper(1.7), TopPLogitsWarper(0.8)]),
    ),
    "temperature 0.8, top-k 3, top-p 0.9": (
        {"temperature": 0.8, "top_k": 3, "top_p": 0.9},
        lambda: LogitsProcessorList([TemperatureLogitsWarper(0.8), TopKLogitsWarper(3), TopPLogitsWarper(0.9)]),
    ),
}

WARPS |= {
    f"{cut} at {at}": (
        {"temperature": 0.8, "cut": cut, "at": at},
        lambda warper=warper, at=at: LogitsProcessorList([TemperatureLogitsWarper(0.8), warper(at)]),
    )
    for cut, at, warper in (
        ("min-p", 0.3, MinPLogitsWarper),
        ("typical", 0.7, TypicalLogitsWarper),
        ("epsilon", 0.15, EpsilonLogitsWarper),
        ("eta", 0.2, EtaLogitsWarper),
    )
}


def _cases() -> list[tuple[str, str]]:
    """Every kind of tree with one set of warpers, all sets in turn; the cheap ones with all of them."""
    cheap = [
        "one drawn child",
        "chain of three chosen",
        "reduced draft vocabulary",
        "chosen among drawn with replacement",
    ]
    every = [(name, list(WARPS)[number % len(WARPS)]) for number, name in enumerate(SPECS)]
    return sorted({*every, *itertools.product(cheap, WARPS)})


@pytest.mark.parametrize(("name", "warp"), _cases())
def test_committed_tokens_follow_the_target_exactly(name: str, warp: str) -> None:
    vocab, spec = SPECS[name]
    settings, processors = WARPS[warp]
    found = distance(Table(vocab, 3, processors()), spec, settings)
    assert found < TOLERANCE, f"{name}, {warp}: total variation {found:.2e}"


@pytest.mark.parametrize("seed", range(2))
def test_other_tables_give_the_same_answer(seed: int) -> None:
    warp, processors = WARPS["temperature 1.7 and top-p 0.8"]
    for name in ("three siblings without replacement", "chosen before drawn", "reduced draft vocabulary"):
        vocab, spec = SPECS[name]
        assert distance(Table(vocab, 1000 * (seed + 1), processors()), spec, warp) < TOLERANCE, name


# Chains of drawn nodes are judged as a block

CHAIN_2 = {(): "d", (0,): "d"}
CHAIN_4 = {(): "d", (0,): "d", (0, 0): "d", (0, 0, 0): "d"}
BLOCKS = {
    "two": (4, Spec(CHAIN_2)),
    "three": (3, Spec(CHAIN_3)),
    "four": (2, Spec(CHAIN_4)),
    "reduced draft vocabulary": (5, Spec(CHAIN_2, token_ids=(4, 1, 2))),
}


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_exact_under_every_warper(name: str, warp: str) -> None:
    vocab, spec = BLOCKS[name]
    settings, processors = WARPS[warp]
    for rule in (AcceptRule(), TOKEN_WISE):
        assert distance(Table(vocab, 21, processors()), spec, settings, rule=rule) < TOLERANCE, rule.name


def _expected_length(table: Any, spec: Spec, rule: AcceptRule) -> float:
    return sum(weight * len(tokens) for tokens, weight in committed(table, spec, rule=rule).items())


def test_blocks_never_accept_fewer_tokens_than_the_token_wise_rule_and_often_more() -> None:
    gains = []
    for seed in range(12):
        for vocab, spec in ((3, Spec(CHAIN_2)), (2, Spec(CHAIN_3)), (5, Spec(CHAIN_2, token_ids=(4, 1, 2)))):
            table = Table(vocab, 50 + 2 * seed, PLAIN)
            block, single = (_expected_length(table, spec, rule) for rule in (AcceptRule(), TOKEN_WISE))
            gains.append(block - single)
    assert min(gains) > -1e-6
    assert sum(gain > 1e-3 for gain in gains) > len(gains) / 2


def test_expected_lengths_of_a_block_are_those_of_the_paper() -> None:
    # Sun et al. 2024, section 2: p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 10/9 token by token, 11/9 by block.
    table = Fixed([1 / 3, 2 / 3], [2 / 3, 1 / 3], PLAIN)
    assert _expected_length(table, Spec(CHAIN_2), TOKEN_WISE) - 1 == pytest.approx(10 / 9, abs=1e-5)
    assert _expected_length(table, Spec(CHAIN_2), AcceptRule()) - 1 == pytest.approx(11 / 9, abs=1e-5)


def test_the_residual_of_a_single_token_is_wrong_for_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    table, spec = Table(3, 9, PLAIN), Spec(CHAIN_3)
    assert distance(table, spec) < TOLERANCE
    monkeypatch.setattr(rules, "_share", lambda left, weight: weight)
    found = distance(table, spec)
    assert found > 1e-3, f"total variation {found:.2e}"


# A lossy rule, on request


def test_typical_acceptance_takes_the_deepest_typical_path_and_then_a_token_of_the_target() -> None:
    p = [0.5, 0.3, 0.15, 0.05]  # entropy 1.142, so the bound is min(0.25, 0.8 exp(-1.142)) = 0.25
    rule = AcceptRule("lossy-typical", epsilon=0.25, delta=0.8)
    joint = committed(Fixed(p, [0.4, 0.3, 0.2, 0.1], PLAIN), Spec({(): "01", (1,): "1"}), rule=rule)
    assert joint == pytest.approx({(1, 1, token): weight for token, weight in enumerate(p)}, abs=1e-6)
    none_is_typical = AcceptRule("lossy-typical", epsilon=1.0, delta=1.0)
    joint = committed(Fixed([0.25] * 4, [0.4, 0.3, 0.2, 0.1], PLAIN), Spec({(): "01"}), rule=none_is_typical)
    assert {len(tokens) for tokens in joint} == {1}


def test_typical_acceptance_is_seen_to_be_lossy_by_the_enumeration() -> None:
    rule = AcceptRule("lossy-typical")
    assert rule.lossy
    assert not AcceptRule().lossy
    assert distance(Table(5, 3, PLAIN), Spec({(): "01"}), rule=rule) > 0.1


@pytest.mark.parametrize("wrong", [{"name": "typical"}, {"epsilon": 0.0}, {"delta": 1.5}], ids=str)
def test_rules_that_do_not_exist_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AcceptRule(**wrong)


def test_a_patched_model_says_that_its_rule_is_lossy() -> None:
    model = tiny.model("llama")
    with oracle.patched(model, oracle.Oracle([[0]], oracle.chain(2)), accept="lossy-typical"):
        model.generate(tiny.text(1, 4), max_new_tokens=4, do_sample=True)
        assert model.speculation.report()["lossy"]
        assert "LOSSY accept rule lossy-typical" in str(model.speculation.report())
    with pytest.raises(ConfigError, match="use one of lossless"):
        selfspec.patch(model, "lookup", accept="typical")


# What drafts are told, and what they may draw from

SHAPES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "temperature": ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
    "top-k": ({"temperature": 1.5, "top_k": 7}, [TemperatureLogitsWarper(1.5), TopKLogitsWarper(7)]),
    "top-p": ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
    "min-p": ({"min_p": 0.2}, [MinPLogitsWarper(0.2)]),
    "all": (
        {"temperature": 0.8, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
        [TemperatureLogitsWarper(0.8), TopKLogitsWarper(9), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)],
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_drafts_are_told_how_p_is_shaped_and_can_shape_q_alike(name: str) -> None:
    settings, warpers = SHAPES[name]
    sampling = sampling_of(LogitsProcessorList(warpers), True)
    assert sampling == Sampling(True, **settings)
    logits = 2 * torch.randn(2, 6, 40, generator=torch.Generator().manual_seed(1))
    wanted = LogitsProcessorList(warpers)(torch.zeros(12, 1).long(), logits.flatten(0, 1)).softmax(-1)
    assert torch.allclose(sampling.probs(logits).flatten(0, 1), wanted, atol=1e-6)


# Errors planted on purpose: the check above must see them


def _target_unchanged(weights: Tensor, otherwise: Tensor) -> Tensor:
    return otherwise


def _same(probs: Tensor, token: int) -> Tensor:
    return probs


def _divided_by_count(
    nodes: list[int], tokens: list[int], origin: Any, repeat: bool, p: Tensor, by_source: dict[int, Tensor], chance: Any
) -> tuple[int | None, Tensor]:
    """Accept each of c children with p / (c q); after that sample from the target."""
    q = next(iter(by_source.values()), p)
    for node in nodes:
        ratio = float(p[tokens[node]] / (len(nodes) * q[tokens[node]]))
        if chance.coin(min(1.0, ratio)):
            return node, p
    return None, p


def _judged_by_soft_q(tree: DraftTree) -> DraftTree:
    """The same tree, with chosen children passed off as drawn."""
    q = torch.tensor([[0.6, 0.3, 0.1]]).expand(1, tree.nodes, 3)
    return DraftTree(tree.tokens, tree.shape, Drawn(q))


PQ = ([0.5, 0.3, 0.2], [0.1, 0.6, 0.3])
SIBLINGS = Spec({(): "dd"}, with_replacement=False)


def test_plain_q_for_siblings_without_replacement_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [Fixed(*PQ, PLAIN), Table(5, 3, PLAIN)]
    specs = [SIBLINGS, Spec({(): "ddd"}, with_replacement=False)]
    assert max(map(distance, tables, specs)) < TOLERANCE
    monkeypatch.setattr(rules, "_without", _same)
    # By hand for the first, with R = (1, 0, 0) the residual after a refusal of token 1 or 2: the second sibling x is
    # then accepted with R(x) / q(x), so only x = 0; the same as with the right q. Without chance to differ: 0.
    assert distance(tables[0], specs[0]) == pytest.approx(0.0, abs=1e-6)
    found = distance(tables[1], specs[1])
    assert found > 0.1, f"total variation {found:.2e}"


def test_plain_q_where_it_can_be_worked_out_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # p = (.4, .4, .2), q = (.2, .2, .6): token 2 is refused with 2/3 and leaves R = (.5, .5, 0) by symmetry; the
    # second sibling is 0 or 1 with 1/2 each under the right q, accepted with min(1, .5 / .5) = 1. Other refusals
    # do not happen. With the plain q of .2 the chance is min(1, .5 / .2) = 1 as well, so nothing shows. With
    # p = (.34, .46, .2) R is (.35, .65, 0): right q gives .35/.5 = .7, plain q gives 1, and then both tokens are
    # equally likely in that branch of weight .6 * 2/3 = .4: the distance is .4 * .15 = .06.
    table = Fixed([0.34, 0.46, 0.2], [0.2, 0.2, 0.6], PLAIN)
    assert distance(table, SIBLINGS) < TOLERANCE
    monkeypatch.setattr(rules, "_without", _same)
    assert distance(table, SIBLINGS) == pytest.approx(0.06, abs=1e-6)


def test_dividing_by_the_number_of_children_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    table, spec = Fixed(*PQ, PLAIN), Spec({(): "dd"})
    assert distance(table, spec) < TOLERANCE
    monkeypatch.setattr(rules, "_try_children", _divided_by_count)
    # Per child: accepted weight min(q, p / 2) = (.1, .15, .1); refused .65, twice, then p.
    once = [0.1, 0.15, 0.1]
    wrong = [a * 1.65 + 0.65**2 * p for a, p in zip(once, PQ[0], strict=True)]
    by_hand = sum(abs(w - p) for w, p in zip(wrong, PQ[0], strict=True)) / 2
    assert by_hand > 0.05
    assert distance(table, spec) == pytest.approx(by_hand, abs=1e-6)


def test_sampling_from_the_target_after_a_refusal_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    table, spec = Fixed(*PQ, PLAIN), Spec(CHAIN_1)
    assert distance(table, spec) < TOLERANCE
    monkeypatch.setattr(rules, "_normalised", _target_unchanged)
    # min(p, q) + .4 p = (.30, .42, .28)
    assert distance(table, spec) == pytest.approx(0.2, abs=1e-6)


def test_judging_chosen_children_with_soft_q_is_seen() -> None:
    table, spec = Fixed([0.5, 0.3, 0.2], [0.6, 0.3, 0.1], PLAIN), Spec({(): "01"})
    assert distance(table, spec) < TOLERANCE
    found = _first_token(committed(table, spec, _judged_by_soft_q), 3)
    assert found == pytest.approx([5 / 6, 0.0, 1 / 6], abs=1e-6)
    assert distance(table, spec, mark=_judged_by_soft_q) == pytest.approx(1 / 3, abs=1e-6)


def test_a_residual_not_carried_to_the_next_sibling_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(
        nodes: list[int],
        tokens: list[int],
        origin: Any,
        repeat: bool,
        p: Tensor,
        by_source: dict[int, Tensor],
        chance: Any,
    ) -> tuple[int | None, Tensor]:
        if not nodes:
            return None, p
        q = next(iter(by_source.values()))
        for node in nodes:
            if chance.coin(min(1.0, float(p[tokens[node]] / q[tokens[node]]))):
                return node, p
        left = (p - q).clamp(min=0)
        return None, left / left.sum()

    table = Fixed(*PQ, PLAIN)
    assert distance(table, SIBLINGS) < TOLERANCE
    monkeypatch.setattr(rules, "_try_children", forgetful)
    found = distance(table, SIBLINGS)
    assert found > 0.05, f"total variation {found:.2e}"


# Values from theory


def _first_token(joint: Joint, vocab: int) -> list[float]:
    found = [0.0] * vocab
    for tokens, weight in joint.items():
        found[tokens[0]] += weight
    return found


def test_a_chain_accepts_with_the_overlap_of_p_and_q_and_replaces_by_the_residual() -> None:
    joint = committed(Fixed(*PQ, PLAIN), Spec(CHAIN_1))
    accepted = {t: sum(w for tokens, w in joint.items() if len(tokens) == 2 and tokens[0] == t) for t in range(3)}
    refused = {tokens[0]: weight for tokens, weight in joint.items() if len(tokens) == 1}
    assert accepted == pytest.approx({0: 0.1, 1: 0.3, 2: 0.2}, abs=1e-6)
    assert refused == pytest.approx({0: 0.4}, abs=1e-6), "the replacement is always token 0"


def test_a_fully_accepted_chain_ends_with_a_token_of_the_target() -> None:
    joint = committed(Fixed(*PQ, PLAIN), Spec(CHAIN_3), rule=TOKEN_WISE)
    whole = sum(weight for tokens, weight in joint.items() if len(tokens) == 4)
    assert whole == pytest.approx(0.6**3, abs=1e-6)
    last = [sum(w for t, w in joint.items() if len(t) == 4 and t[3] == v) / whole for v in range(3)]
    assert last == pytest.approx(PQ[0], abs=1e-6)


def test_temperature_is_part_of_what_drafts_are_judged_by() -> None:
    class Given(Fixed):
        def logits(self, path: tuple[int, ...]) -> Tensor:
            return torch.tensor([2.0, 1.0, 0.0, -1.0])

        def q(self, path: tuple[int, ...], columns: int) -> Tensor:
            return torch.tensor([1.0, 2.0, 0.0, 0.0]).softmax(-1)

    table = Given([1, 1, 1, 1], [], LogitsProcessorList([TemperatureLogitsWarper(0.5)]))
    for spec in (Spec(CHAIN_1), SIBLINGS, Spec({(): "01"}), Spec({(): "d0"})):
        wanted = torch.tensor([4.0, 2.0, 0.0, -2.0], dtype=torch.float64).softmax(-1).tolist()
        assert wanted == pytest.approx([0.865, 0.117, 0.016, 0.002], abs=1e-3)
        assert _first_token(committed(table, spec), 4) == pytest.approx(wanted, abs=1e-6)


def test_chosen_children_are_accepted_with_the_probability_of_their_token() -> None:
    joint = committed(Fixed([0.5, 0.3, 0.2], [0.6, 0.3, 0.1], PLAIN), Spec({(): "01"}))
    assert sum(weight for tokens, weight in joint.items() if len(tokens) == 2) == pytest.approx(0.8, abs=1e-6)


def test_a_draft_equal_to_the_target_is_always_accepted() -> None:
    p = [0.5, 0.3, 0.2]
    joint = committed(Fixed(p, p, PLAIN), Spec(CHAIN_3))
    assert sum(weight for tokens, weight in joint.items() if len(tokens) < 4) < 1e-6


def test_greedy_ignores_how_the_nodes_came_about() -> None:
    table = Table(5, 3, PLAIN)
    for _, (paths, tree, tokens) in outcomes(lambda chance: _greedy(table, chance)):
        best, walked = 0, []
        for node in paths[1:]:
            assert tree.parents[0, node] == best
            best = node
            walked.append(int(tree.tokens[0, node]))
        assert walked == tokens[:-1]
        for place in range(len(tokens)):
            assert tokens[place] == int(table.logits(tuple(tokens[:place])).argmax())


def _greedy(table: Table, chance: Branching) -> tuple[list[int], DraftTree, list[int]]:
    tree, paths = draft(table, Spec({(): "dd", (0,): "d"}), chance)
    logits = torch.stack([table.logits(path) for path in paths]).unsqueeze(0)
    history = History(torch.zeros(1, 1, dtype=torch.long), 8)
    scores = TreeScores(TargetOutput(logits), tree.tokens.tolist(), history, Processors(PLAIN))
    found = accept(tree, scores, False, Branching([]))
    return found.paths[0], tree, found.tokens[0]


def test_a_token_that_its_own_q_excludes_is_refused_as_malformed() -> None:
    drawn = Drawn(torch.tensor([[[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]]))
    tree = DraftTree(torch.tensor([[0, 2]]), TreeShape.chain(1), drawn)
    scores = TreeScores(
        TargetOutput(torch.zeros(1, 2, 3)), [[0, 2]], History(torch.zeros(1, 1).long(), 4), Processors(PLAIN)
    )
    with pytest.raises(DraftTreeError, match="node 1"):
        accept(tree, scores, True, Branching([]))


@pytest.mark.parametrize("q", [[float("nan")] * 3, [2.0, 1.0, 1.0], [0.1, 0.1, 0.1]], ids=["nan", "above 1", "below 1"])
def test_a_q_that_is_no_distribution_is_refused(q: list[float]) -> None:
    tree = DraftTree(torch.tensor([[0, 2]]), TreeShape.chain(1), Drawn(torch.tensor([[q, q]])))
    scores = TreeScores(
        TargetOutput(torch.zeros(1, 2, 3)), [[0, 2]], History(torch.zeros(1, 1).long(), 4), Processors(PLAIN)
    )
    with pytest.raises(DraftTreeError, match="sum"):
        accept(tree, scores, True, Branching([]))


def test_rows_that_are_not_real_never_take_part() -> None:
    real = torch.tensor([[True, False], [True, True]])
    tree = DraftTree(torch.tensor([[0, 1], [0, 1]]), TreeShape(torch.tensor([[-1, 0]]), real))
    logits = torch.tensor([0.0, 5.0, 0.0]).expand(2, 2, 3)
    scores = TreeScores(
        TargetOutput(logits), tree.tokens.tolist(), History(torch.zeros(2, 1).long(), 4), Processors(PLAIN)
    )
    found = accept(tree, scores, False, Branching([]))
    assert found.paths == [[0], [0, 1]]
    assert found.tokens == [[1], [1, 1]]


# End to end on a tiny model: drawn samples, so the verdict has odds

SAMPLES, TOKENS, FALSE_ALARM = 600, 2, 1e-6
SAMPLING: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "top_k": 6, "top_p": 0.9}


def _first_tokens_of(model: Any, prompt: Tensor) -> Joint:
    """The exact joint of the first tokens, from plain forward passes and the warpers written down above."""
    warp = {"temperature": 1.3, "top_k": 6, "top_p": 0.9}
    first = expected_p(model(prompt).logits[0, -1], **warp)
    found: Joint = {}
    for token in (t for t, p in enumerate(first) if p > 0):
        second = expected_p(model(torch.cat([prompt, torch.tensor([[token]])], 1)).logits[0, -1], **warp)
        found |= {(token, t): first[token] * p for t, p in enumerate(second) if p > 0}
    return found


def _drafts(vocab: int) -> dict[str, Any]:
    flat = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(3)).softmax(-1)
    ids = torch.arange(0, vocab, 2)
    reduced = flat[:, ids] / flat[:, ids].sum(-1, keepdim=True)
    return {
        "drawn without replacement": oracle.DrawnTree(flat, (4, 2), False),
        "drawn with replacement": oracle.DrawnTree(flat, (3, 2), True),
        "drawn from a reduced vocabulary": oracle.DrawnTree(reduced, (4, 3), False, ids),
        "chosen": oracle.Oracle([[0]], oracle.random_trees(5, 40, 0.0, vocab=vocab)),
    }


@pytest.mark.parametrize("name", ["drawn with replacement", "drawn from a reduced vocabulary", "chosen"])
def test_sampled_text_of_a_patched_model_passes_a_chi_square_test(name: str) -> None:
    model = tiny.model("llama", seed=4)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.35)
    prompt = tiny.text(1, 5, seed=9)
    # The token of the prefill is not drafted, so the joint that is tested starts one token later.
    start = oracle.plain(model, prompt, max_new_tokens=1)
    wanted = _first_tokens_of(model, start)
    force = _Force(prompt.shape[1], int(start[0, -1]))
    with oracle.patched(model, _drafts(tiny.VOCAB)[name]):
        torch.manual_seed(11)
        rows = model.generate(
            prompt,
            max_new_tokens=1 + TOKENS + 1,
            num_return_sequences=SAMPLES,
            logits_processor=LogitsProcessorList([force]),
            **SAMPLING,
        )
        assert model.speculation.last.accepted > 20, "the draft must be right now and then, or nothing is tested"
    counts: dict[tuple[int, ...], int] = dict.fromkeys(wanted, 0)
    for row in rows[:, prompt.shape[1] + 1 :][:, :TOKENS].tolist():
        assert tuple(row) in counts, f"{row} has probability 0"
        counts[tuple(row)] += 1
    seen, hoped = _merged([counts[k] for k in wanted], [SAMPLES * wanted[k] for k in wanted])
    p_value = chisquare(seen, hoped).pvalue
    assert p_value > FALSE_ALARM, (
        f"{name}: chi-square over {len(seen)} cells and {SAMPLES} samples gives p = {p_value:.1e}; "
        f"an exact sampler falls below {FALSE_ALARM} once in {1 / FALSE_ALARM:,.0f} seeds"
    )


class _Force:
    """A processor that fixes the token at one place."""

    row_independent = True

    def __init__(self, place: int, token: int) -> None:
        self.place = place
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == self.place:
            forced = torch.full_like(scores, float("-inf"))
            forced[:, self.token] = 0.0
            return forced
        return scores


def _merged(seen: list[int], hoped: list[float], least: float = 5.0) -> tuple[list[float], list[float]]:
    """Cells with small expectations put together, as the chi-square approximation wants."""
    order = sorted(range(len(hoped)), key=lambda i: hoped[i])
    cells: list[list[float]] = [[0.0, 0.0]]
    for i in order:
        if cells[-1][1] >= least:
            cells.append([0.0, 0.0])
        cells[-1][0] += seen[i]
        cells[-1][1] += hoped[i]
    total = sum(cell[1] for cell in cells)
    return [cell[0] for cell in cells], [cell[1] * sum(seen) / total for cell in cells]


def test_the_enumeration_itself_is_complete() -> None:
    total = sum(weight for weight, _ in outcomes(lambda c: (c.coin(0.3), c.pick([0.2, 0.5, 0.3]), c.coin(0.9))))
    assert total == pytest.approx(1.0, abs=1e-12)
    assert len(list(itertools.chain(outcomes(lambda c: (c.coin(0.3), c.pick([1.0, 0.0, 3.0])))))) == 4


def test_scores_come_to_where_the_tokens_are() -> None:
    """A model spread over devices has its logits on the last one, its tokens on the first (`meta` here)."""
    history = History(torch.zeros(1, 4, dtype=torch.long, device="meta"), 4)
    scores = Processors(LogitsProcessorList())(history, [0], [[]], torch.zeros(1, 7, dtype=torch.bfloat16))
    assert (scores.device.type, scores.dtype) == ("meta", torch.float32)
