"""Tokens drawn without all logits (see `selfspec.draws`) against the softmax that they stand for.

`generate` draws them at nodes of trees, of long texts, on targets whose output head can be screened. Here one pass
reads real text as a chain of nodes, and at the nodes where the target is least certain tokens are drawn again and
again. What they are compared with is the softmax of logits that are multiplied out in float64 from the same hidden
states, rounded to the model's dtype, and given to the same processors: in low precision another pass, or another form
of the product, has other logits. The logits that the pass makes itself must be those too, and all of them must lie
within the bounds that the screen states.

Letters: B prompts, N tree nodes, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from selfspec.draft import Needs
from selfspec.draws import ScreenedDraws
from selfspec.inference.certify.statistics import Fit, detectable, fit, together
from selfspec.inference.request import Request
from selfspec.inference.runs import prepare
from selfspec.output_head import same_product
from selfspec.screen import Screened
from selfspec.target import Target, TargetOutput, Unscored
from selfspec.tree import DraftTree, TreeShape
from selfspec.walk import TorchChance

ODDS = 1e-7
"""Of a false alarm, over all tests of the part, by the chi-square approximation; it is off by less than tenfold."""
_CELL = 20.0
_MOST_NODES, _NODES_PER_PROMPT, _MOST_PROMPTS = 48, 2, 8
_ROWS = 8192
_LONG = 256


@dataclass(frozen=True, eq=False)
class _Pass:
    """One pass over `[B, N]` nodes: what it gave, its scores, and logits `[B, N, V]` from float64."""

    out: TargetOutput
    screened: Screened
    logits: Tensor
    same: bool
    bounded: bool


def screened_check(
    target: Target, prompts: Sequence[list[int]], arguments: dict[str, Any], draws: int, seed: int
) -> dict[str, Any]:
    """Draw many tokens in a few places and test them.

    Args:
        target: the model, in the dtype it is used in.
        prompts: token ids, two each at least; the first few are used.
        arguments: of `generate`, with `temperature`, `top_k` and `top_p`.
        draws: per place and way of sampling.
        seed: of all draws.

    Returns:
        What was tested, and whether it holds; `used` is False where the target's tokens are never drawn like this.
    """
    if not target.draws:
        return _unused("its output head is not screened")
    requests = {name: prepare(target, prompts[0], wish | {"max_new_tokens": _LONG}) for name, wish in _ways(arguments)}
    drawn = {name: request for name, request in requests.items() if request.wants_draws}
    if not drawn:
        return _unused("its generation configuration asks for processors that read all logits")
    prompts = prompts[:_MOST_PROMPTS]
    with torch.no_grad():
        read = _read(target, prompts)
        if read is None:
            return _unused("its hidden states are not finite, or its kernels for bytes were found to be wrong")
        places = _least_certain(read.logits, float(arguments["temperature"]))
        generator = torch.Generator(target.device).manual_seed(seed)
        alpha = ODDS / (len(drawn) * (len(places) + 1))
        ways = [_way(name, read, one, places, draws, generator, alpha) for name, one in drawn.items()]
    passed = read.same and read.bounded and all(way["passed"] for way in ways)
    about = {"same_logits": read.same, "within_bounds": read.bounded, "alpha": alpha, "odds": 10 * ODDS}
    return {"used": True, "nodes": len(places), **about, "ways": ways, "passed": passed}


def _unused(reason: str) -> dict[str, Any]:
    return {"used": False, "reason": reason, "passed": True}


def _ways(arguments: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The temperature alone, which is drawn by rejection, and a top k, which is looked for."""
    k = int(arguments["top_k"]) or 50
    alone = {**arguments, "top_k": 0, "top_p": 1.0}
    return [(f"temperature {arguments['temperature']:g}", alone), (f"top {k}", {**arguments, "top_k": k})]


def _read(target: Target, prompts: Sequence[list[int]]) -> _Pass | None:
    """The last tokens of each prompt as nodes below what comes before them."""
    nodes = min(_MOST_NODES // len(prompts), min(map(len, prompts)) - 1)
    heads, counts = [prompt[:-nodes] for prompt in prompts], [len(prompt) - nodes for prompt in prompts]
    padded = [head + [0] * (max(counts) - len(head)) for head in heads]
    cache = target.new_cache(len(prompts), max(counts) + nodes)
    target.prefill(torch.tensor(padded, device=target.device), counts, cache, Needs())
    tokens = torch.tensor([prompt[-nodes:] for prompt in prompts], device=target.device)
    out = target.verify(DraftTree(tokens, TreeShape.chain(nodes - 1)), cache, Needs())
    screened = out.screened
    if screened is None or not isinstance(out.scored, Unscored):
        return None
    raw = _product(out.scored)
    logits = out.finished(raw.to(out.logits.dtype))
    return _Pass(out, screened, logits, same_product(out.logits, logits), screened.holds(raw.float().flatten(0, 1)))


def _product(scored: Unscored) -> Tensor:
    """`[B, N, V]` float64, what the output head gives."""
    weight, bias = scored.head.weight.detach(), scored.head.bias
    hidden = scored.hidden.double()
    raw = torch.cat([hidden @ part.double().t() for part in weight.split(_ROWS)], -1)
    return raw if bias is None else raw + bias.detach().double()


def _least_certain(logits: Tensor, temperature: float) -> list[tuple[int, int]]:
    """Rows and nodes: of each prompt those where the distribution has the largest entropy."""
    places = []
    for row, scores in enumerate(logits):
        log_p = (scores.float() / temperature).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        best = entropy.topk(min(_NODES_PER_PROMPT, len(entropy))).indices
        places += [(row, node) for node in sorted(best.tolist())]
    return places


def _way(
    name: str,
    read: _Pass,
    request: Request,
    places: Sequence[tuple[int, int]],
    draws: int,
    generator: torch.Generator,
    alpha: float,
) -> dict[str, Any]:
    """Test one way of sampling, at each place and over all of them."""
    chance = TorchChance(generator, generator.device)
    nodes = read.logits.shape[1]
    drawing = ScreenedDraws(read.out, read.screened, nodes, request.processors, chance)
    fits = []
    for row, node in places:
        path = list(range(node + 1))
        tokens = [drawing([row], [path])[0] for _ in range(draws)]
        scores: Any = request.processors(request.input_ids, read.logits[row, node].float().unsqueeze(0))  # type: ignore[arg-type]
        fits.append(_fit(tokens, scores[0].double().softmax(-1)))
    values = [*(one.p_value for one in fits), together(fits)]
    outside = sum(one.outside for one in fits)
    return {
        "way": name,
        "samples": draws * len(places),
        "p_value": values[-1],
        "smallest_p_value": min(values),
        "degrees_of_freedom": sum(one.freedom for one in fits),
        "largest_total_variation": max(one.distance for one in fits),
        "impossible_tokens": outside,
        "seen_with_90_percent_odds_from": detectable(draws * len(places), sum(one.freedom for one in fits), alpha),
        "passed": not outside and min(values) > alpha,
    }


def _fit(tokens: Sequence[int], p: Tensor) -> Fit:
    """A test with a cell for each token that is expected often, and for groups of the others, likelier ones first.

    Args:
        tokens: drawn ones.
        p: `[V]` float64.
    """
    cells, count = _cells(p, _CELL / len(tokens))
    share = torch.zeros(count + 1, dtype=torch.float64).index_add_(0, cells, p.cpu())
    drawn = [int(cells[token]) if token >= 0 else count for token in tokens]
    share[count] = 0.0
    return fit([drawn.count(cell) for cell in range(count + 1)], share.tolist())


def _cells(p: Tensor, least: float) -> tuple[Tensor, int]:
    """The cell of each token, `[V]` int64, and how many cells there are; that of what cannot be comes after them."""
    falling, order = p.cpu().sort(descending=True)
    alone = int((falling >= least).sum())
    before = falling.cumsum(0) - falling
    groups = ((before - falling[:alone].sum()) / least).floor().long().clamp_min(0)
    cell = torch.where(falling >= least, torch.arange(len(p)), alone + groups)
    count = int(cell[falling > 0].max()) + 1
    cell[falling <= 0] = count
    return torch.empty_like(cell).index_put_((order,), cell), count
