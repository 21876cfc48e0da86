"""Sampled text of the real model against the exact probabilities.

In a fixed context the first round is run again and again with new draws: propose, verify, accept. The exact joint
distribution of the next two tokens comes from the model's own `forward`, without cache and without a draft, and the
logits processors of transformers. Where a round gives one token only, the second is drawn from the exact distribution
after it, which is what later rounds must do too; a sample of whole calls of the engine tests that they do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from selfspec.accept import AcceptRule, accept
from selfspec.draft import Budget, Draft, Sampling, Verified
from selfspec.inference.certify.statistics import LEAST, Fit, detectable, fit, same_source
from selfspec.inference.engine import decode
from selfspec.inference.request import Request
from selfspec.inference.runs import prepare
from selfspec.scoring import History, Processors, TreeScores, sampling_of
from selfspec.target import Target
from selfspec.target_output import TargetOutput
from selfspec.tree import DraftTree
from selfspec.walk import TorchChance

Pair = tuple[int, int]
_KEPT_PASSES = 16
_SAME_TREE = 16
_ROWS = 8
_ENGINE_TOKENS = 5
_OTHERS, _IMPOSSIBLE = (-1, -1), (-2, -2)


class Exact:
    """The target's own distribution after a context and after each next token, from fresh passes of `forward`."""

    def __init__(self, target: Target, context: list[int], processors: LogitsProcessorList) -> None:
        self.target = target
        self.context = context
        self.processors = processors
        self._after: dict[tuple[int, ...], Tensor] = {}

    def after(self, tokens: tuple[int, ...] = ()) -> Tensor:
        """`[V]` float64, after the context and these tokens."""
        if tokens not in self._after:
            ids = torch.tensor([[*self.context, *tokens]], device=self.target.device)
            model: Any = self.target.model
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[:, -1].float()
            scores: Any = self.processors(ids, logits)  # type: ignore[arg-type]
            self._after[tokens] = scores[0].double().softmax(-1).cpu()
        return self._after[tokens]

    def draw(self, tokens: tuple[int, ...], generator: torch.Generator) -> int:
        """A token after the context and these."""
        return int(torch.multinomial(self.after(tokens), 1, generator=generator))


class _Kept:
    """Scores of one tree that are asked for again and again."""

    def __init__(self, scores: TreeScores) -> None:
        self.scores = scores
        self._kept: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, rows: list[int], paths: list[list[int]]) -> Tensor:
        """See `selfspec.accept.NodeScores`; for one row."""
        for path in paths:
            if tuple(path) not in self._kept:
                self._kept[tuple(path)] = self.scores([0], [path])
        return torch.cat([self._kept[tuple(path)] for path in paths])


class Rounds:
    """The first round after a context, as often as wanted."""

    def __init__(self, target: Target, draft: Draft, request: Request, rule: AcceptRule) -> None:
        self.target, self.draft, self.rule = target, draft, rule
        ids = request.input_ids
        self.sampling: Sampling = sampling_of(request.processors, True, request.temperature)
        self.processors = Processors(request.processors)
        self.history = History(ids, 64)
        self.cache = target.new_cache(1, ids.shape[1] + 64)
        out = target.prefill(ids[:, :-1], [ids.shape[1] - 1], self.cache, draft.needs)
        counts = torch.tensor([ids.shape[1] - 1], device=ids.device)
        shown = self.cache if draft.needs.cache else None
        self.verified = Verified(ids[:, :-1], ids[:, 1:], counts, out.hidden, out.layers, cache=shown)
        self._passes: dict[Any, _Kept] = {}
        self._chosen: DraftTree | None = None
        self._runs = 0

    def propose(self, generator: torch.Generator) -> DraftTree:
        """A tree of the draft's own choice."""
        tree = self.draft.propose(self.draft.begin(self.verified), Budget(), self.sampling, generator)
        tree.check(self.verified.root, self.target.vocab_size)
        return tree

    def run(self, generator: torch.Generator) -> list[int]:
        """The tokens that one round commits."""
        tree = self._next(generator)
        return accept(tree, self._scores(tree), True, TorchChance(generator, self.target.device), self.rule).tokens[0]

    def _next(self, generator: torch.Generator) -> DraftTree:
        """A new tree; one that was chosen without chance would come again and is made anew only now and then."""
        if self._chosen is None or self._runs % _SAME_TREE == 0:
            tree = self.propose(generator)
            self._chosen = tree if tree.drawn is None else None
        else:
            tree = self._chosen
        self._runs += 1
        return tree

    def _scores(self, tree: DraftTree) -> _Kept:
        """Trees come again; a pass over the same tree is not run twice."""
        key = (tuple(tree.token_lists[0]), tuple(tree.parents[0].tolist()))
        if key not in self._passes:
            if len(self._passes) >= _KEPT_PASSES:
                self._passes.clear()
            logits = self.target.verify(tree, self.cache, self.draft.needs).logits
            self._passes[key] = _Kept(TreeScores(TargetOutput(logits), tree.token_lists, self.history, self.processors))
        return self._passes[key]


def sampled_check(
    target: Target,
    draft: Draft,
    prompt: list[int],
    arguments: dict[str, Any],
    rule: AcceptRule,
    samples: int,
    engine_samples: int,
    seed: int,
    alpha: float,
) -> dict[str, Any]:
    """Test one context: first token, first two tokens, and whole calls, with plain sampling beside them.

    Args:
        target: the model.
        draft: the draft.
        prompt: tokens; one token sampled from the target is put behind them, since rounds start after one.
        arguments: of `generate`, for the logits processors.
        rule: the accept rule in use.
        samples: rounds to run.
        engine_samples: whole calls to run.
        seed: of all draws.
        alpha: chance of a false alarm that is allowed for each test.
    """
    request = replace(prepare(target, prompt, {**arguments, "do_sample": True, "max_new_tokens": 4}), accept=rule)
    own = torch.Generator().manual_seed(seed)
    generator = torch.Generator(target.device).manual_seed(seed + 1)
    opening = Exact(target, prompt, request.processors).draw((), own)
    exact = Exact(target, [*prompt, opening], request.processors)
    ids = torch.tensor([[*prompt, opening]], device=target.device)
    rounds = Rounds(target, draft, replace(request, input_ids=ids), rule)
    with torch.no_grad():
        runs = [rounds.run(generator) for _ in range(samples)]
        whole = _whole_calls(target, draft, prompt, opening, request, engine_samples, generator)
    drafted = [_pair(run, exact, own) for run in runs]
    plain = [_pair([exact.draw((), own)], exact, own) for _ in range(samples)]
    found: dict[str, Any] = {
        "drafted": _tests(drafted, exact, alpha),
        "plain": _tests(plain, exact, alpha),
        "engine": _tests(whole, exact, alpha),
        "drafted_against_plain_p_value": _against(drafted, plain),
        "tokens_per_round": sum(map(len, runs)) / len(runs),
    }
    looked_at = (found["drafted"], found["engine"])
    passed = all(part["passed"] for part in looked_at) and found["drafted_against_plain_p_value"] > alpha
    return {"context_tokens": len(prompt) + 1, "alpha_per_test": alpha, **found, "passed": passed}


def _pair(tokens: Sequence[int], exact: Exact, generator: torch.Generator) -> Pair:
    return tokens[0], tokens[1] if len(tokens) > 1 else exact.draw((tokens[0],), generator)


class _Open:
    """A processor that fixes the first new token, so that every call starts in the same context."""

    def __init__(self, place: int, token: int) -> None:
        self.place, self.token = place, token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] != self.place:
            return scores
        fixed = torch.full_like(scores, float("-inf"))
        fixed[:, self.token] = 0.0
        return fixed


def _whole_calls(
    target: Target,
    draft: Draft,
    prompt: list[int],
    opening: int,
    request: Request,
    samples: int,
    generator: torch.Generator,
) -> list[Pair]:
    """The second and third token of whole calls, several rows at a time; no token ends a text here."""
    processors = LogitsProcessorList([*request.processors, _Open(len(prompt), opening)])
    stopping = StoppingCriteriaList([MaxLengthCriteria(len(prompt) + _ENGINE_TOKENS)])
    found: list[Pair] = []
    while len(found) < samples:
        ids = torch.tensor([prompt] * min(_ROWS, samples - len(found)), device=target.device)
        call = replace(request, input_ids=ids, processors=processors, stopping=stopping, generator=generator)
        rows = decode(target, draft, call).sequences[:, len(prompt) + 1 :].tolist()
        found += [(row[0], row[1]) for row in rows]
    return found


def _tests(pairs: Sequence[Pair], exact: Exact, alpha: float) -> dict[str, Any]:
    first = exact.after().tolist()
    counts = [0] * len(first)
    for token, _ in pairs:
        counts[token] += 1
    tests = {"first_token": fit(counts, first), "two_tokens": _fit_pairs(pairs, exact)}
    passed = all(one.p_value > alpha and not one.outside for one in tests.values())
    described = {name: _described(one, len(pairs), alpha) for name, one in tests.items()}
    return {"samples": len(pairs), **described, "passed": passed}


def _fit_pairs(pairs: Sequence[Pair], exact: Exact) -> Fit:
    """Pairs that are expected five times or more have a cell each; one cell holds the others, one the impossible."""
    least, first = LEAST / len(pairs), exact.after()
    likely = set((first >= least).nonzero().flatten().tolist())
    share: dict[Pair, float] = {}
    for token in sorted(likely):
        joint = first[token] * exact.after((token,))
        share |= {(token, other): float(joint[other]) for other in (joint >= least).nonzero().flatten().tolist()}
    share |= {_OTHERS: max(0.0, 1.0 - sum(share.values())), _IMPOSSIBLE: 0.0}
    counts = dict.fromkeys(share, 0)
    for token, other in pairs:
        impossible = token in likely and float(exact.after((token,))[other]) <= 0
        cell = (token, other) if (token, other) in share else _OTHERS
        counts[_IMPOSSIBLE if impossible else cell] += 1
    return fit(list(counts.values()), list(share.values()))


def _described(one: Fit, samples: int, alpha: float) -> dict[str, Any]:
    return {
        "p_value": one.p_value,
        "statistic": one.statistic,
        "degrees_of_freedom": one.freedom,
        "total_variation": one.distance,
        "impossible_tokens": one.outside,
        "seen_with_90_percent_odds_from": detectable(samples, one.freedom, alpha),
    }


def _against(one: Sequence[Pair], other: Sequence[Pair]) -> float:
    cells = sorted({token for token, _ in [*one, *other]})
    counts = [Counter(token for token, _ in pairs) for pairs in (one, other)]
    return same_source(*([count[cell] for cell in cells] for count in counts))
