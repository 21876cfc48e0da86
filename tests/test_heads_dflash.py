"""DFlash: what its blocks see in decoding and in training, and the peer's own numbers."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import golden
import pytest
import tiny
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny import chunk
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteriaList

from selfspec.draft import Budget, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.heads.anchors import choose_anchors
from selfspec.heads.context_layers import ContextLayer
from selfspec.heads.dflash import DFlash
from selfspec.heads.dflash_config import DFlashConfig, default_taps
from selfspec.inference.engine import decode
from selfspec.inference.request import Request
from selfspec.target import Target

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.selfspec_target("gemma3")


def make(target: Target, **options: Any) -> DFlash:
    head = DFlash.from_target(DFlashConfig(**options), target, torch.Generator().manual_seed(0))
    assert isinstance(head, DFlash)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return head


def read(target: Target, head: DFlash, ids: Tensor) -> Verified:
    output = target.features(ids[:, :-1], None, head.needs)
    counts = torch.full((ids.shape[0],), ids.shape[1] - 1)
    return Verified(ids[:, :-1], ids[:, 1:], counts, output.hidden, output.layers)


# Anchors


def test_anchors_have_something_to_learn_in_their_block() -> None:
    ids = tiny.text(2, 12)
    verified = Verified(ids[:, :-1], ids[:, 1:], torch.tensor([11, 11]))
    taught = torch.zeros(2, 11, dtype=torch.bool)
    taught[0, 6] = taught[1, 1] = True
    anchors = choose_anchors(verified, taught, 3, 99, torch.zeros(1))
    assert anchors.places.tolist() == [[4, 5, 6], [1, 1, 1]]
    assert anchors.weight.tolist() == [[1, 1, 1], [1, 0, 0]]


def test_few_anchors_are_random_stand_for_all_and_depend_on_their_row_alone() -> None:
    ids = tiny.text(2, 60)
    whole = Verified(ids[:, :-1], ids[:, 1:], torch.tensor([59, 40]))
    taught = torch.arange(59) < whole.counts.unsqueeze(1)
    taught[:, 0] = False
    seen = set()
    for step in range(200):
        anchors = choose_anchors(whole, taught, 4, 5, torch.tensor(float(step)))
        torch.testing.assert_close(anchors.weight, torch.tensor([[58 / 5] * 5, [39 / 5] * 5]))
        assert all(len(set(row)) == 5 for row in anchors.places.tolist())
        seen |= set(anchors.places[1].tolist())
    assert seen == set(range(1, 40))
    short = Verified(ids[1:, :40], ids[1:, 1:41], torch.tensor([40]))
    alone = choose_anchors(short, taught[1:, :40], 4, 5, torch.tensor(199.0))
    assert torch.equal(alone.places[0], anchors.places[1])


def test_blocks_see_the_text_before_their_anchor_and_themselves() -> None:
    ids = tiny.text(1, 5)
    verified = Verified(ids[:, :-1], ids[:, 1:], torch.tensor([4]))
    taught = torch.tensor([[False, False, True, True]])
    anchors = choose_anchors(verified, taught, 1, 9, torch.zeros(1))
    assert anchors.places.tolist() == [[2, 3]]
    assert anchors.positions(2).tolist() == [[2, 3, 3, 4]]
    drawn = ["1100 1100", "1100 1100", "1110 0011", "1110 0011"]
    wanted = torch.tensor([[c == "1" for c in row.replace(" ", "")] for row in drawn])
    assert torch.equal(anchors.mask(4, 2, causal=False)[0, 0], wanted)
    wanted[0, 5] = wanted[2, 7] = False
    assert torch.equal(anchors.mask(4, 2, causal=True)[0, 0], wanted)


# One path for training and decoding


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", tiny.NAMES)
def test_training_sees_what_decoding_sees(name: str, causal: bool) -> None:
    target = tiny.selfspec_target(name)
    head = make(target, block_size=4, causal=causal)
    whole = read(target, head, tiny.text(2, 20))
    taught = torch.ones(2, 19, dtype=torch.bool)
    taught[:, 0] = False
    anchors = choose_anchors(whole, taught, 3, 99, torch.zeros(1))
    said = head._train_blocks(whole, anchors)
    state = head.begin(chunk(whole, 0, 7))
    for start, stop in [(7, 8), (8, 12), (12, 15)]:
        head.propose(state, Budget(), Sampling(), None)
        torch.testing.assert_close(
            head._draft(state, head.config.block_size - 1), said[:, start - 1, 1:], atol=1e-5, rtol=1e-5
        )
        state = head.observe(state, chunk(whole, start, stop))


def test_a_slot_learns_what_the_target_says_at_its_place(target: Target) -> None:
    head = make(target, block_size=4, position_decay=0)
    whole = read(target, head, tiny.text(1, 16))
    assert whole.hidden is not None
    mask = torch.zeros(1, 15, dtype=torch.bool)
    mask[0, 9] = True
    said = head._train_blocks(whole, choose_anchors(whole, mask, 3, 99, torch.zeros(1)))
    p = target.model(whole.tokens).logits[0, 9].softmax(-1)
    wanted = 0.0
    for depth, anchor in ((1, 2), (2, 1), (3, 0)):  # anchors 7, 8 and 9
        logits = head.output(said[0, anchor, depth])
        wanted = wanted - (p * logits.log_softmax(-1)).sum()
    result = head.loss(whole, mask)
    torch.testing.assert_close(result.loss, wanted, atol=1e-4, rtol=1e-5)
    assert result.seen.tolist() == [1, 1, 1]


def test_later_slots_count_less(target: Target) -> None:
    whole = None
    losses = []
    for decay in (0.0, 1000.0, -1.0, 0.5):
        head = make(target, block_size=4, position_decay=decay)
        whole = whole or read(target, head, tiny.text(1, 12))
        losses.append(head.loss(whole, torch.ones(1, 11, dtype=torch.bool)).loss)
    assert losses[1] < losses[3] < losses[0]
    assert losses[2] == losses[3]


def test_the_context_is_read_once_and_blocks_leave_no_trace(target: Target) -> None:
    head = make(target)
    state = head.begin(read(target, head, tiny.text(2, 12)))
    before = [layer.stored_keys[:, :, :11].clone() for layer in state.cache.layers]
    head.propose(state, Budget(), Sampling(), None)
    assert state.cache.lengths == [11, 11]
    for layer, keys in zip(state.cache.layers, before, strict=True):
        assert torch.equal(layer.stored_keys[:, :, :11], keys)


def test_nothing_limits_the_length(target: Target) -> None:
    head = make(target)
    piece = read(target, head, tiny.text(1, 101))
    state = head.begin(piece)
    for _ in range(7):
        state = head.observe(state, piece)
    assert state.cache.lengths == [800]
    head.propose(state, Budget(), Sampling(), None).check(state.root, tiny.VOCAB)


# Trees


@torch.no_grad()
def test_the_tree_ranks_the_blocks_marginals(target: Target) -> None:
    head = make(target, block_size=4, tree_nodes=10, tree_top_k=5)
    state = head.begin(read(target, head, tiny.text(2, 12)))
    marginals = head.output(head._draft(state, head.config.block_size - 1)).log_softmax(-1)
    tree = head.propose(state, Budget(), Sampling(), None)
    for row in range(2):
        scores = [0.0]
        for node in range(1, 10):
            depth, parent = int(tree.shape.depth[row, node]), int(tree.parents[row, node])
            scores.append(scores[parent] + float(marginals[row, depth - 1, tree.tokens[row, node]]))
        assert scores == sorted(scores, reverse=True)


@torch.no_grad()
def test_drawn_chains_carry_the_distribution_they_came_from(target: Target) -> None:
    head = make(target, block_size=4, draw=True, draft_vocab_size=20)
    head.output.set_vocab(torch.arange(40, 60))
    state = head.begin(read(target, head, tiny.text(1, 12).expand(500, -1)))
    wanted = (head.output(head._draft(state, 3)[:1]) / 0.7).softmax(-1)[0]
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(3, 20)
    for _ in range(6):
        tree = head.propose(state, Budget(), Sampling(True, 0.7), generator)
        counts += torch.nn.functional.one_hot(tree.tokens[:, 1:] - 40, 20).sum(0)
    assert tree.drawn is not None and tree.shape.is_chain
    torch.testing.assert_close(tree.drawn.probs[0, :3], wanted)
    noise = (wanted * (1 - wanted) / 3000).sqrt()
    assert bool(((counts / 3000 - wanted).abs() <= 5 * noise + 1e-9).all())
    assert head.propose(state, Budget(), Sampling(), generator).drawn is None


# Configuration


@pytest.mark.parametrize("layers", range(1, 80))
def test_default_taps_exist_in_targets_of_any_depth(layers: int) -> None:
    taps = default_taps(layers)
    assert taps == sorted(set(taps)) and 0 <= taps[0] <= taps[-1] < layers
    assert layers != 36 or taps == [2, 10, 18, 26, 34]


def test_what_the_target_decides_is_written_down(target: Target) -> None:
    config = make(target).config
    assert config.taps == [1, 2]
    assert config.mask_token_id == tiny.VOCAB - 1
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 16)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"head_dim": 7}, "head_dim 7"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "3 attention heads"),
        ({"num_layers": 0}, "layer"),
        ({"block_size": 1}, "block"),
        ({"anchors": 0}, "anchor"),
        ({"taps": [4]}, r"\[4\]"),
        ({"taps": [2, 1]}, r"\[2, 1\]"),
        ({"mask_token_id": 97}, "97"),
        ({"tree_top_k": 0}, "0 ranks"),
    ],
    ids=str,
)
def test_impossible_configurations_are_refused(target: Target, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make(target, **options)


# The peer's numbers


@functools.cache
def peers_target() -> Target:
    return golden.target("dflash")


def peer(**options: Any) -> DFlash:
    """The published layout, loaded as it is; `taps` are the peer's layer outputs plus one."""
    folder = golden.folder("dflash") / "draft"
    values = json.loads((folder / "config.json").read_text())
    config = DFlashConfig(
        **{
            "num_layers": values["num_hidden_layers"],
            "taps": [k + 1 for k in values["dflash_config"]["target_layer_ids"]],
            "mask_token_id": values["dflash_config"]["mask_token_id"],
            "block_size": values["block_size"],
            "tree_top_k": 1,
            "tree_nodes": 64,
            **{k: values[k] for k in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")},
            **{k: values[k] for k in ("rms_norm_eps", "rope_theta")},
            **options,
        }
    )
    head = DFlash(config, peers_target())
    weights = load_file(folder / "model.safetensors")
    weights["output.vocab.ids"] = head.output.vocab.ids
    head.load_state_dict(weights, strict=True)
    return head.eval()


def taps_of(features: Tensor) -> tuple[Tensor, ...]:
    return features.chunk(2, -1)


def block(head: DFlash) -> tuple[Tensor, Tensor]:
    """What the head says, and its logits, for the recorded prompt and block."""
    vectors = golden.tensors("dflash")
    ids, counts = vectors["forward.prompt_ids"], torch.tensor([29])
    following = torch.cat([ids[:, 1:], vectors["forward.block_ids"][:, :1]], 1)
    state = head.begin(Verified(ids, following, counts, None, taps_of(vectors["forward.target_hidden"])))
    said = head._draft(state, head.config.block_size - 1)
    return said, head.output(said)


def off_by(head: DFlash) -> float:
    vectors = golden.tensors("dflash")
    said, logits = block(head)
    return max(
        float((said - vectors["forward.draft_hidden"][:, 1:]).abs().max()),
        float((logits - vectors["forward.draft_logits"][:, 1:]).abs().max()),
    )


@torch.no_grad()
def test_peer_block() -> None:
    assert off_by(peer()) < 2e-5


@torch.no_grad()
def test_peer_rounds() -> None:
    vectors, head = golden.tensors("dflash"), peer()
    run = golden.notes("dflash")["runs"][1]
    ids, state, read = run["output_ids"], None, 0
    for turn in range(3):
        features = vectors[f"round{turn}.target_hidden"]
        stop = read + features.shape[1]
        text = torch.tensor([ids[read : stop + 1]])
        verified = Verified(text[:, :-1], text[:, 1:], torch.tensor([stop - read]), None, taps_of(features))
        state = head.begin(verified) if state is None else head.observe(state, verified)
        said = head._draft(state, head.config.block_size - 1)
        torch.testing.assert_close(said, vectors[f"round{turn}.draft_hidden"][:, 1:], atol=2e-5, rtol=1e-5)
        assert torch.equal(vectors[f"round{turn}.position_ids"][0], torch.arange(read, stop + 8))
        read = stop


def generate(head: DFlash, run: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The text, as long as the peer's greedy baseline, and the tokens committed by each round but the last."""
    committed = []
    observe = head.observe

    def counted(state: Any, verified: Verified) -> Any:
        committed.append(int(verified.counts))
        return observe(state, verified)

    head.observe = counted  # type: ignore[method-assign]
    limit = StoppingCriteriaList([MaxLengthCriteria(max_length=len(run["greedy_baseline_ids"]))])
    result = decode(head.target, head, Request(torch.tensor([run["prompt"]]), stopping=limit))
    return result.sequences[0].tolist(), committed[1:]  # the first is the prompt


@pytest.mark.parametrize("index", range(6))
def test_peer_greedy_runs(index: int) -> None:
    run = golden.notes("dflash")["runs"][index]
    text, committed = generate(peer(block_size=run["block_size"]), run)
    assert text == run["greedy_baseline_ids"]
    peers = run["acceptance_lengths_plus_bonus"][:-1]
    assert committed[: len(peers)] == peers and len(peers) > 5


def through_the_input_norm(head: DFlash) -> None:
    for layer in head.layers:
        assert isinstance(layer, ContextLayer)
        keys, norm = layer.read, layer.input_layernorm
        layer.read = lambda context, *rest, keys=keys, norm=norm: keys(norm(context), *rest)  # type: ignore[method-assign]


def causal_block(head: DFlash) -> None:
    head.config.causal = True


def without_key_norm(head: DFlash) -> None:
    for layer in head.layers:
        layer.self_attn.k_norm = torch.nn.Identity()


def anchor_left_out(head: DFlash) -> None:
    begin = head.begin
    head.begin = lambda v: begin(v).__class__(begin(v).cache, torch.full_like(v.root, 3))  # type: ignore[method-assign]


@torch.no_grad()
@pytest.mark.parametrize("fault", [through_the_input_norm, causal_block, without_key_norm, anchor_left_out])
def test_planted_faults_are_seen_in_the_block(fault: Callable[[DFlash], None]) -> None:
    head = peer()
    fault(head)
    assert off_by(head) > 1e-2


def test_layer_outputs_taken_for_inputs_lose_acceptance() -> None:
    run = golden.notes("dflash")["runs"][0]
    (text, right), (same, wrong) = generate(peer(), run), generate(peer(taps=[1, 4]), run)
    assert text == same
    assert len(wrong) > 1.1 * len(right)


def test_softmax_of_the_marginals_is_float32(target: Target) -> None:
    head = make(target, draw=True).to(torch.bfloat16)
    whole = read(target, head, tiny.text(1, 12))
    tree = head.propose(head.begin(whole), Budget(), Sampling(True, 1.0), torch.Generator().manual_seed(0))
    assert tree.drawn is not None and tree.drawn.probs.dtype == torch.float32
    assert float(F.relu(tree.drawn.probs[0, :-1].sum(-1) - 1).abs().max()) < 1e-5
    assert math.isclose(float(tree.drawn.probs[0, 0].sum()), 1, abs_tol=1e-5)
