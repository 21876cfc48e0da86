"""DSpark: guesses that know the guess before, depths chosen before any token; and JetSpec's causal blocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from selfspec.draft import Budget, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.heads.anchors import choose_anchors
from selfspec.heads.dspark import DSpark, DSparkConfig
from selfspec.heads.jetspec import JetSpec, JetSpecConfig
from selfspec.heads.losses import Teacher, ce_tv
from selfspec.target import Target

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.selfspec_target("llama")


def make(target: Target, **options: Any) -> DSpark:
    config = DSparkConfig(**{"block_size": 4, "markov_rank": 8, "stop_below": 0.0, **options})
    head = DSpark.from_target(config, target, torch.Generator().manual_seed(0))
    assert isinstance(head, DSpark)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return head


def read(target: Target, head: DSpark | JetSpec, ids: Tensor) -> Verified:
    output = target.features(ids[:, :-1], None, head.needs)
    counts = torch.full((ids.shape[0],), ids.shape[1] - 1)
    return Verified(ids[:, :-1], ids[:, 1:], counts, output.hidden, output.layers)


def after(head: DSpark, base: Tensor, token: int) -> Tensor:
    """The logits of one slot given the token before, from the weights."""
    ids = head.output.vocab.ids.tolist()
    row = token if head.markov.before.num_embeddings == tiny.VOCAB else (ids.index(token) if token in ids else len(ids))
    return base + head.markov.after.weight @ head.markov.before.weight[row]


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"draft_vocab_size": 20}, {"draft_vocab_size": 20, "markov_all_tokens": True}])
def test_every_node_is_scored_given_its_parent(target: Target, options: dict[str, Any]) -> None:
    head = make(target, tree_nodes=9, tree_top_k=3, **options)
    if options:
        head.output.set_vocab(torch.arange(40, 60))
    whole = read(target, head, tiny.text(2, 12))
    state = head.begin(whole)
    base = head.output(head._draft(state, 3))
    tree = head.propose(state, Budget(), Sampling(), None)
    ids = head.output.vocab.ids.tolist()
    for row in range(2):
        scores = {0: 0.0}
        beyond = []
        for node in range(tree.nodes):
            depth, token = int(tree.shape.depth[row, node]), int(tree.tokens[row, node])
            if depth == 3:
                continue
            gains = after(head, base[row, depth], token).log_softmax(-1)
            children = [n for n in range(1, 9) if int(tree.parents[row, n]) == node]
            for child in children:
                scores[child] = scores[node] + float(gains[ids.index(int(tree.tokens[row, child]))])
            taken = {ids.index(int(tree.tokens[row, child])) for child in children}
            best = [float(gains[c]) for c in gains.topk(3).indices.tolist() if c not in taken]
            beyond += [scores[node] + gain for gain in best]
        assert len(scores) == 9
        assert min(scores.values()) >= max(beyond) - 1e-5 or tree.shape.max_depth == 3


@torch.no_grad()
def test_drawn_tokens_come_from_the_marginal_given_the_token_before(target: Target) -> None:
    head = make(target, draw=True)
    state = head.begin(read(target, head, tiny.text(1, 12).expand(3, -1)))
    base = head.output(head._draft(state, 3))
    tree = head.propose(state, Budget(), Sampling(True, 0.8), torch.Generator().manual_seed(0))
    assert tree.drawn is not None and tree.shape.is_chain
    for row in range(3):
        for depth in range(3):
            wanted = (after(head, base[row, depth], int(tree.tokens[row, depth])) / 0.8).softmax(-1)
            torch.testing.assert_close(tree.drawn.probs[row, depth], wanted, atol=1e-5, rtol=1e-4)


def trusting(head: DSpark, confidence: Tensor) -> DSpark:
    """The head with these chances per row and depth, whatever it reads."""
    head._confidence = lambda said: confidence.logit()[:, : said.shape[1]]  # type: ignore[method-assign]
    return head


@pytest.mark.parametrize("draw", [False, True], ids=["tree", "drawn"])
def test_guesses_stop_where_trust_ends_row_by_row(target: Target, draw: bool) -> None:
    chances = torch.tensor([[0.9, 0.9, 0.9], [0.9, 0.5, 0.9], [0.4, 0.99, 0.99]])
    head = trusting(make(target, stop_below=0.5, draw=draw, tree_top_k=2), chances)
    state = head.begin(read(target, head, tiny.text(3, 12)))
    tree = head.propose(state, Budget(), Sampling(do_sample=draw), torch.Generator().manual_seed(0))
    tree.check(state.root, tiny.VOCAB)
    assert tree.depths() == [3, 1, 0]
    assert (tree.drawn is not None) == draw


def test_no_trust_is_plain_decoding(target: Target) -> None:
    head = trusting(make(target, stop_below=0.5), torch.full((1, 3), 0.1))
    state = head.begin(read(target, head, tiny.text(1, 12)))
    assert head.propose(state, Budget(), Sampling(), None).nodes == 1


def test_the_depth_does_not_depend_on_what_is_drawn(target: Target) -> None:
    """Else the tokens that survive would be chosen ones, and sampling would not be lossless."""
    head = make(target, stop_below=0.3, draw=True)
    state = head.begin(read(target, head, tiny.text(6, 12)))
    depths = set()
    for seed in range(20):
        tree = head.propose(state, Budget(), Sampling(do_sample=True), torch.Generator().manual_seed(seed))
        depths.add(tuple(tree.depths()))
    assert len(depths) == 1 and len(set(depths.pop())) > 1


@torch.no_grad()
def test_the_confidence_head_learns_the_acceptance(target: Target) -> None:
    """Its loss is smallest where it says sum min(p, q), and has no slope there."""
    head = make(target, confidence_weight=1.0)
    whole = read(target, head, tiny.text(2, 16))
    mask = torch.ones(2, 15, dtype=torch.bool)
    plain = make(target, confidence_weight=0.0).loss(whole, mask).loss
    with torch.no_grad():
        head.confidence.weight.zero_()
        head.confidence.bias.zero_()
    taught = mask.clone()
    taught[:, 0] = False
    anchors = choose_anchors(whole, taught, 3, 99, torch.zeros(1))
    said = head._train_blocks(whole, anchors)
    p = target.model(whole.tokens).logits.softmax(-1)
    best, extra = [], 0.0
    for depth in range(1, 4):
        found = []
        for row in range(2):
            for a, anchor in enumerate(anchors.places[row].tolist()):
                place = anchor + depth - 1
                if place > 14:
                    continue
                q = after(head, head.output(said[row, a, depth]), int(whole.next_tokens[row, place - 1])).softmax(-1)
                found.append(torch.minimum(p[row, place], q).sum())
        mean = torch.stack(found).mean()
        best.append(mean.logit())
        entropy = -(mean * mean.log() + (1 - mean) * (1 - mean).log())
        extra = extra + head._weight(depth) * entropy * len(found)
    head.calibration.copy_(torch.stack([torch.ones(3), torch.stack(best)], 1))
    result = head.loss(whole, mask)
    torch.testing.assert_close((result.loss - plain) * result.seen[0], extra, atol=1e-3, rtol=1e-4)
    with torch.enable_grad():
        head.loss(whole, mask).loss.backward()
    assert head.calibration.grad is not None
    assert float(head.calibration.grad[:, 1].abs().max()) < 1e-5


def test_dsparks_loss_is_a_tenth_cross_entropy() -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.25, 0.25, 0.5]])
    found = ce_tv(q.log(), Teacher(p.log().clamp_min(-1e9), torch.tensor([0])))
    assert float(found) == pytest.approx(0.1 * math.log(4) + 0.9 * 0.5)
    assert DSparkConfig().loss == "ce_tv"


def test_a_fresh_head_is_a_dflash_head(target: Target) -> None:
    head = DSpark.from_target(DSparkConfig(), target, torch.Generator().manual_seed(0))
    assert isinstance(head, DSpark)
    assert not head.markov.after.weight.any()
    assert float(head._confidence(torch.randn(1, 7, tiny.HIDDEN)).detach().abs().max()) == pytest.approx(
        float(head.confidence.bias.detach().abs())
    )


@pytest.mark.parametrize(("options", "named"), [({"markov_rank": 0}, "0"), ({"stop_below": 1.0}, "1.0")], ids=str)
def test_impossible_configurations_are_refused(target: Target, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make(target, **options)
    with pytest.raises(ConfigError, match="causal"):
        JetSpecConfig(causal=False)


@torch.no_grad()
def test_causal_blocks_say_the_same_however_long_they_are(target: Target) -> None:
    head = JetSpec.from_target(JetSpecConfig(block_size=6), target, torch.Generator().manual_seed(0))
    assert isinstance(head, JetSpec)
    state = head.begin(read(target, head, tiny.text(2, 12)))
    torch.testing.assert_close(head._draft(state, 2), head._draft(state, 5)[:, :2], atol=1e-6, rtol=1e-5)
