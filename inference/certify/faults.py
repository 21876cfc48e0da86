"""The self-test of `certify`: faults that other libraries had, planted one by one; every one must be caught.

Each fault replaces one function for as long as it is tried, or is a draft that does not tell the truth. It counts as
caught when a part of `certify` fails or the library refuses to go on. The same drafts without a fault must pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper

from selfspec import accept as rules
from selfspec import target as door
from selfspec.cache import SlotCache, SlotLayer
from selfspec.errors import SelfspecError
from selfspec.inference.certify.certificate import (
    DRAWS,
    GREEDY,
    RULE,
    SAMPLED,
    SCREENED,
    CertifySettings,
    draws_part,
    rule_part,
    sampled_part,
    verdicts,
)
from selfspec.inference.certify.greedy import greedy_check
from selfspec.inference.certify.models import VOCAB, Peek, tiny_model, tiny_prompts
from selfspec.inference.certify.planting import Fault, MakeDraft, Outcome, instead
from selfspec.inference.certify.screened_faults import SCREENED_FAULTS, screened_self_test
from selfspec.inference.stopping import Stopper
from selfspec.scoring import Processors, TreeScores
from selfspec.target import Target
from selfspec.tree import Drawn
from selfspec.walk import Children

_SETTINGS = CertifySettings(
    max_new_tokens=24, sampled_prompts=1, samples=400, engine_samples=48, trees=150, temperature=0.5, top_k=12
)
_SOME_TOKENS = torch.arange(1, VOCAB, 2)

DRAFTS: dict[str, MakeDraft] = {
    "chosen tree": lambda m: Peek(m, (3, 2, 2, 1), draw=False),
    "drawn chain": lambda m: Peek(m, (1, 1, 1)),
    "siblings without replacement": lambda m: Peek(m, (3, 2), with_replacement=False),
    "siblings with replacement, reduced vocabulary": lambda m: Peek(m, (3, 1), token_ids=_SOME_TOKENS),
}


# Faults of the pass and the cache


def _all_visible(original: Any) -> Any:
    return lambda *given: torch.ones_like(original(*given))


def _without_parent(original: Any) -> Any:
    def visible(shape: Any, slots: Any, window: Any) -> Tensor:
        seen: Tensor = original(shape, slots, window).clone()
        first = seen.shape[-1] - shape.nodes
        for node in range(1, shape.nodes):
            seen[:, node, first + int(shape.parents[0, node])] = False
        return seen

    return visible


def _one_too_far(original: Any) -> Any:
    return lambda shape, slots: original(shape, slots) + 1


def _slots_as_positions(original: Any) -> Any:
    return lambda shape, slots: slots.lengths_tensor().unsqueeze(1) + torch.arange(shape.nodes)


def _one_rejected_kept(original: Any) -> Any:
    def keep(self: SlotCache, paths: Sequence[Sequence[int]]) -> None:
        original(self, paths)
        self.slots.advance([1] * len(paths))

    return keep


def _first_rows(original: Any) -> Any:
    return lambda self, rows: original(self, list(range(len(rows))))


# Faults of processors and stops


def _end_only_at_the_end(original: Any) -> Any:
    def cut(self: Stopper, history: Any, row: int, tokens: Sequence[int]) -> tuple[int, bool]:
        count, ended = original(self, history, row, tokens)
        inside = ended and tokens[count - 1] in self.end_tokens and count < len(tokens)
        return (len(tokens), False) if inside else (count, ended)

    return cut


def _stale_history(original: Any) -> Any:
    return lambda self, history, rows, extras, raw: original(self, history, rows, [[] for _ in rows], raw)


def _first_nodes_as_path(original: Any) -> Any:
    """Penalties look at the first nodes of the tree instead of those on the path."""

    def call(self: TreeScores, rows: list[int], paths: list[list[int]]) -> Tensor:
        raw = self.logits[rows, [path[-1] for path in paths]]
        extras = [self.tokens[row][1 : len(path)] for row, path in zip(rows, paths, strict=True)]
        return self.processors(self.history, rows, extras, raw)

    return call


def _scores_of_the_parent(original: Any) -> Any:
    """The last token of a run is taken after the node before the last."""

    def call(self: TreeScores, rows: list[int], paths: list[list[int]]) -> Tensor:
        raw = self.logits[rows, [path[-2] if len(path) > 2 else path[-1] for path in paths]]
        extras = [[self.tokens[row][n] for n in path[1:]] for row, path in zip(rows, paths, strict=True)]
        return self.processors(self.history, rows, extras, raw)

    return call


def _no_temperature(original: Any) -> Any:
    def init(self: Processors, processors: Any) -> None:
        kept = [p for p in processors if not isinstance(p, TemperatureLogitsWarper)]
        original(self, type(processors)(kept))

    return init


# Faults of the accept rule


def _first_guess_unread(original: Any) -> Any:
    def find(self: Any, row: int, node: int, token: int) -> int | None:
        below = self.of(row, node)
        return below[0] if node == 0 and below else original(self, row, node, token)

    return find


def _no_residual(original: Any) -> Any:
    return lambda weights, otherwise: otherwise


def _keeps_the_token(original: Any) -> Any:
    return lambda probs, token: probs


def _single_share(original: Any) -> Any:
    return lambda left, weight: weight


def _divided(original: Any) -> Any:
    """Each of c children is accepted with p / (c q); after that the token comes from the target."""

    def children(nodes: Any, tokens: Any, origin: Any, with_replacement: bool, p: Tensor, by: Any, chance: Any) -> Any:
        for node in (n for n in nodes if n in origin):
            if chance.coin(min(1.0, float(p[tokens[node]] / (len(nodes) * by[origin[node]][tokens[node]])))):
                return node, p
        return None, p

    return children


def _residual_forgotten(original: Any) -> Any:
    """Every sibling is judged by the whole p."""

    def children(nodes: Any, tokens: Any, origin: Any, with_replacement: bool, p: Tensor, by: Any, chance: Any) -> Any:
        q = by[origin[nodes[0]]] if nodes and nodes[0] in origin else torch.zeros_like(p)
        for node in (n for n in nodes if n in origin):
            if chance.coin(min(1.0, float(p[tokens[node]] / q[tokens[node]]))):
                return node, p
        left = (p - q).clamp(min=0)
        return None, left / left.sum() if float(left.sum()) > 0 else p

    return children


# Drafts that do not tell the truth


def _flatter(logits: Tensor, q: Tensor) -> Tensor:
    return q.sqrt() / q.sqrt().sum()


class _PassedOffAsDrawn(Peek):
    """Chooses the likeliest tokens and says that they were drawn."""

    def propose(self, state: Any, budget: Any, sampling: Any, generator: Any) -> Any:
        found = super().propose(state, budget, sampling, generator)
        if not sampling.do_sample:
            return found
        shape, columns = found.shape, found.tokens
        probs = torch.full((*columns.shape, VOCAB), 0.02)
        for node in range(1, shape.nodes):
            probs[:, int(shape.parents[0, node]), :].scatter_(1, columns[:, node : node + 1], 0.5)
        return type(found)(columns, shape, Drawn(probs / probs.sum(-1, keepdim=True), None, False))


CHOSEN, CHAIN, SIBLINGS, REDUCED = DRAFTS
FAULTS = (
    Fault("the mask lets every node see all others", GREEDY, CHOSEN, instead(door, "visible", _all_visible)),
    Fault("the mask hides a node's parent", GREEDY, CHOSEN, instead(door, "visible", _without_parent)),
    Fault("positions are off by one", GREEDY, CHOSEN, instead(door, "tree_positions", _one_too_far)),
    Fault("positions are slots, not depths", GREEDY, CHOSEN, instead(door, "tree_positions", _slots_as_positions)),
    Fault("accepted entries stay where they were", GREEDY, CHOSEN, instead(SlotLayer, "move", lambda o: _nothing)),
    Fault("a rejected entry stays in the cache", GREEDY, CHOSEN, instead(SlotCache, "keep", _one_rejected_kept)),
    Fault("the wrong rows go on in a batch", GREEDY, CHOSEN, instead(SlotCache, "select", _first_rows)),
    Fault("an end token inside a run is ignored", GREEDY, CHOSEN, instead(Stopper, "cut", _end_only_at_the_end)),
    Fault("penalties do not see the run", GREEDY, CHOSEN, instead(Processors, "__call__", _stale_history)),
    Fault("penalties see another path", GREEDY, CHOSEN, instead(TreeScores, "__call__", _first_nodes_as_path)),
    Fault(
        "the last token comes from the wrong node",
        GREEDY,
        CHOSEN,
        instead(TreeScores, "__call__", _scores_of_the_parent),
    ),
    Fault("the first guess is never verified", GREEDY, CHOSEN, instead(Children, "find", _first_guess_unread)),
    Fault("the target's temperature is left out", SAMPLED, CHOSEN, instead(Processors, "__init__", _no_temperature)),
    Fault("no residual after a refusal", RULE, CHAIN, instead(rules, "_normalised", _no_residual)),
    Fault("children accepted with p / (c q)", RULE, SIBLINGS, instead(rules, "_try_children", _divided)),
    Fault("plain q for siblings without replacement", RULE, SIBLINGS, instead(rules, "_without", _keeps_the_token)),
    Fault("siblings judged by the whole p", RULE, SIBLINGS, instead(rules, "_try_children", _residual_forgotten)),
    Fault("a block judged by its last weight alone", RULE, CHAIN, instead(rules, "_share", _single_share)),
    Fault("q is not what was drawn", DRAWS, lambda m: Peek(m, (1, 1, 1), handed_over=_flatter)),
    Fault(
        "temperature is left out of q",
        DRAWS,
        lambda m: Peek(m, (2, 1), handed_over=lambda logits, q: (logits.masked_fill(q <= 0, -1e9)).softmax(-1)),
    ),
    Fault(
        "siblings without replacement said to be independent",
        DRAWS,
        lambda m: Peek(m, (3, 2), with_replacement=False, said_with_replacement=True),
    ),
    Fault(
        "the draft's vocabulary is mixed up",
        DRAWS,
        lambda m: Peek(m, (2, 1), token_ids=_SOME_TOKENS, said_ids=_SOME_TOKENS.roll(1)),
    ),
    Fault("chosen nodes passed off as drawn", DRAWS, lambda m: _PassedOffAsDrawn(m, (2, 1))),
    *SCREENED_FAULTS,
)


def _nothing(*given: Any) -> None:
    """Takes the place of a function that should have done something."""


def self_test(faults: Sequence[Fault] = FAULTS, drafts: dict[str, MakeDraft] | None = None) -> Iterator[Outcome]:
    """Faultless drafts (those of DRAFTS), which must pass every part, then the faults, which must not."""
    model = tiny_model()
    target = Target(model)
    prompts = tiny_prompts(6)
    try:
        for name, make in (DRAFTS if drafts is None else drafts).items():
            yield _without_fault(name, target, make(model), prompts)
        for fault in (fault for fault in faults if fault.part != SCREENED):
            make = DRAFTS[fault.draft] if isinstance(fault.draft, str) else fault.draft
            yield _with_fault(fault, target, make(model), prompts)
    finally:
        target.release()
    yield from screened_self_test([fault for fault in faults if fault.part == SCREENED], faultless=drafts is None)


def _part(name: str, target: Target, draft: Peek, prompts: Sequence[list[int]]) -> Any:
    if name == GREEDY:
        return [greedy_check(target, draft, prompts, _SETTINGS.max_new_tokens)]
    part: Callable[..., Any] = {RULE: rule_part, DRAWS: draws_part, SAMPLED: sampled_part}[name]
    return part(target, draft, prompts[1:2], _SETTINGS)


def _without_fault(name: str, target: Target, draft: Peek, prompts: Sequence[list[int]]) -> Outcome:
    failed = []
    for part in (GREEDY, RULE, DRAWS, SAMPLED):
        failed += [line for line, passed in verdicts({part: _part(part, target, draft, prompts)}) if not passed]
    return Outcome(f"no fault, {name}", not failed, "; ".join(failed) or "passes every part")


def _with_fault(fault: Fault, target: Target, draft: Peek, prompts: Sequence[list[int]]) -> Outcome:
    order = sorted((GREEDY, RULE, DRAWS, SAMPLED), key=lambda part: part != fault.part)
    for part in order:
        try:
            with fault.plant():
                found = verdicts({part: _part(part, target, draft, prompts)})
        except SelfspecError as error:
            return Outcome(fault.name, True, f"refused: {str(error).splitlines()[0]}")
        failed = [line for line, passed in found if not passed]
        if failed:
            return Outcome(fault.name, True, f"caught by {failed[0]}")
    return Outcome(fault.name, False, "NOT caught")
