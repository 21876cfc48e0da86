"""EAGLE: which pairs it reads and when, its unrolled training, and the peer's own numbers."""

from __future__ import annotations

from typing import Any

import golden
import pytest
import tiny
import torch
from tiny import chunk
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from selfspec.draft import Budget, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.heads.autoregressive import unrolled_mask
from selfspec.heads.eagle import Eagle, EagleConfig
from selfspec.target import Target

torch.set_num_threads(1)


def drawn(*rows: str) -> Tensor:
    return torch.tensor([[c == "1" for c in row.replace(" ", "")] for row in rows])


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.selfspec_target("gemma3")


def make(target: Target, **options: Any) -> Eagle:
    head = Eagle.from_target(EagleConfig(**options), target, torch.Generator().manual_seed(0))
    assert isinstance(head, Eagle)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return head


def read(target: Target, head: Eagle, ids: Tensor) -> Verified:
    output = target.features(ids[:, :-1], None, head.needs)
    counts = torch.full((ids.shape[0],), ids.shape[1] - 1)
    return Verified(ids[:, :-1], ids[:, 1:], counts, output.hidden)


def spy(head: Eagle) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Record features, tokens and positions of every pass of the head."""
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    run = head._run

    def recorded(features: Tensor, tokens: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        seen.append((features, tokens, positions))
        return run(features, tokens, positions, *rest)

    head._run = recorded  # type: ignore[method-assign]
    return seen


def test_each_committed_pair_enters_once_with_the_targets_feature(target: Target) -> None:
    head = make(target)
    whole = read(target, head, tiny.text(1, 16))
    assert whole.hidden is not None
    seen = spy(head)
    state = head.begin(chunk(whole, 0, 10))
    pairs = [seen[-1]]
    for start, stop in ((10, 11), (11, 14), (14, 15)):
        head.propose(state, Budget(), Sampling(), None)
        state = head.observe(state, chunk(whole, start, stop))
        pairs.append(seen[-1])
    features, tokens, positions = (torch.cat(part, 1) for part in zip(*pairs, strict=True))
    assert torch.equal(positions, torch.arange(15).unsqueeze(0))
    assert torch.equal(tokens, whole.next_tokens)
    assert torch.equal(features, whole.hidden)
    assert state.cache.lengths == [15]


def test_proposing_adds_nothing_to_the_heads_cache(target: Target) -> None:
    head = make(target)
    state = head.begin(read(target, head, tiny.text(2, 12)))
    before = [
        (layer.stored_keys[:, :, :11].clone(), layer.stored_values[:, :, :11].clone()) for layer in state.cache.layers
    ]
    head.propose(state, Budget(), Sampling(), None)
    assert state.cache.lengths == [11, 11]
    for layer, (keys, values) in zip(state.cache.layers, before, strict=True):
        assert torch.equal(layer.stored_keys[:, :, :11], keys) and torch.equal(layer.stored_values[:, :, :11], values)


def test_unrolled_masks() -> None:
    assert torch.equal(unrolled_mask(4, 0, torch.device("cpu"))[0, 0], drawn("1000", "1100", "1110", "1111"))
    assert torch.equal(
        unrolled_mask(4, 1, torch.device("cpu"))[0, 0],
        drawn(
            "0000 1000",
            "1000 0100",
            "1100 0010",
            "1110 0001",
        ),
    )
    assert torch.equal(
        unrolled_mask(4, 2, torch.device("cpu"))[0, 0],
        drawn(
            "0000 0000 1000",
            "0000 1000 0100",
            "1000 0100 0010",
            "1100 0010 0001",
        ),
    )


@torch.no_grad()
def test_unrolled_training_sees_what_decoding_sees(target: Target) -> None:
    """Pass s at place i is what the head computes s levels below the root when the text itself was guessed."""
    head = make(target, tree_top_k=1, tree_depth=4, tree_nodes=5, steps=4)
    ids = tiny.text(1, 14)
    verified = read(target, head, ids)
    seen = spy(head)
    head.loss(verified, torch.ones(1, 13, dtype=torch.bool))
    passes = [features for features, _, _ in seen]
    seen.clear()
    start = 8
    state = head.begin(chunk(verified, 0, start))
    follow = [int(t) for t in verified.next_tokens[0, start : start + 3]]
    head.output.vocab.to_target = lambda columns: torch.full_like(  # type: ignore[method-assign]
        columns, follow[min(len(seen) - 1, 2)]
    )
    head.propose(state, Budget(), Sampling(), None)
    for step in range(1, 4):
        features, tokens, positions = seen[step]
        assert (int(tokens), int(positions)) == (follow[step - 1], start + step - 1)
        torch.testing.assert_close(features[0, 0], passes[step][0, start + step - 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_place_learns_from_the_next_feature(target: Target, steps: int) -> None:
    head = make(target, steps=steps, token_weight=0.0, feature_weight=1.0)
    verified = read(target, head, torch.arange(10).unsqueeze(0))
    assert verified.hidden is not None
    truth = torch.cat([verified.hidden[:, 1:], verified.hidden[:, :1]], 1)
    head._run = lambda *args: truth  # type: ignore[method-assign]
    result = head.loss(verified, torch.ones(1, 9, dtype=torch.bool))
    assert result.loss.item() == 0
    assert torch.equal(result.correct, result.seen)
    assert result.seen.tolist() == [8.0, 7.0, 6.0][:steps]


def test_passes_are_weighted_by_their_step(target: Target) -> None:
    verified = None
    losses = []
    for steps, decay in ((1, 0.5), (2, 0.5), (2, 1.0)):
        head = make(target, steps=steps, step_decay=decay)
        verified = verified or read(target, head, tiny.text(1, 12))
        losses.append(head.loss(verified, torch.ones(1, 11, dtype=torch.bool)).loss)
    torch.testing.assert_close(losses[1] - losses[0], (losses[2] - losses[0]) / 2)


def test_dimensions_come_from_the_target_and_are_written_down(target: Target) -> None:
    head = make(target)
    config = head.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 16)
    assert head.layers[0].self_attn.q_proj.weight.shape == (64, 32)
    assert make(target, head_dim=6).layers[0].self_attn.o_proj.weight.shape == (32, 24)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"head_dim": 7}, "head_dim 7"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "3 attention heads"),
        ({"num_layers": 0}, "layer"),
        ({"steps": 0}, "step"),
        ({"tree_top_k": 0}, "0 beams"),
    ],
    ids=str,
)
def test_impossible_configurations_are_refused(target: Target, options: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make(target, **options)


def test_no_position_table_limits_the_length(target: Target) -> None:
    head = make(target)
    ids = tiny.text(1, 3)
    hidden = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(0))
    state = head.begin(Verified(ids[:, :-1], ids[:, 1:], torch.tensor([2]), hidden))
    for _ in range(300):
        state = head.observe(state, Verified(ids[:, :-1], ids[:, 1:], torch.tensor([2]), hidden))
    assert state.cache.lengths == [602]
    head.propose(state, Budget(), Sampling(), None).check(state.root, 97)


def peer(**tree: int) -> Eagle:
    """The published layout: no norms but the one before the MLP, a bias on `fc`."""
    config = EagleConfig(
        input_norms=False, layer_norm=False, output_norm=False, fc_bias=True, rms_norm_eps=1e-6, **tree
    )
    head = Eagle.from_target(config, golden.target("eagle1"))
    assert isinstance(head, Eagle)
    weights = golden.weights(golden.folder("eagle1") / "draft" / "pytorch_model.bin")
    weights["output.vocab.ids"] = head.output.vocab.ids
    del weights["embed_tokens.weight"]
    head.load_state_dict(weights, strict=True)
    return head


@torch.no_grad()
def test_peer_forward() -> None:
    head, vectors = peer(), golden.tensors("eagle1")
    positions = torch.arange(29).unsqueeze(0)
    guess = head._run(vectors["forward.features"], vectors["forward.draft_input_ids"], positions, None, [None])
    torch.testing.assert_close(guess, vectors["forward.draft_hidden"], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(head.output(guess), vectors["forward.draft_logits"], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("case", "tree"),
    [
        ("c0", {"tree_nodes": 60, "tree_depth": 8, "tree_top_k": 10}),
        ("c1", {"tree_nodes": 16, "tree_depth": 4, "tree_top_k": 4}),
    ],
)
def test_peer_dynamic_trees(case: str, tree: dict[str, int]) -> None:
    head, vectors = peer(**tree), golden.tensors("eagle1")
    state, read = None, 0
    for turn in range(2):
        prefix = f"{case}.round{turn}."
        hidden, ids = vectors[prefix + "features"], vectors[prefix + "input_ids"]
        stop = read + hidden.shape[1]
        counts = torch.tensor([stop - read])
        verified = Verified(ids[:, read:stop], ids[:, read + 1 : stop + 1], counts, hidden)
        state = head.begin(verified) if state is None else head.observe(state, verified)
        read = stop
        proposed = head.propose(state, Budget(), Sampling(), None)
        assert torch.equal(proposed.tokens, vectors[prefix + "draft_tokens"])
        assert torch.equal(proposed.shape.ancestors[0], vectors[prefix + "tree_mask"][0, 0].bool())
        assert torch.equal(proposed.shape.depth[0], vectors[prefix + "tree_position_ids"])


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_fresh_head_guesses_that_the_next_feature_is_like_this_one(name: str) -> None:
    target = tiny.selfspec_target(name)
    head = Eagle.from_target(EagleConfig(), target, torch.Generator().manual_seed(0))
    assert isinstance(head, Eagle)
    verified = read(target, head, tiny.text(4, 40))
    assert verified.hidden is not None
    positions = torch.arange(39).unsqueeze(0)
    guess = head._run(verified.hidden, verified.next_tokens, positions, None, [None])
    assert float(torch.cosine_similarity(guess, verified.hidden, -1).mean()) > 0.7
    ratio = guess.pow(2).mean((0, 1)).sqrt() / verified.hidden.pow(2).mean((0, 1)).sqrt()
    assert float(ratio.min()) > 0.5 and float(ratio.max()) < 2


def test_targets_whose_config_names_no_mlp_size() -> None:
    config = GPT2Config(vocab_size=tiny.VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    with torch.random.fork_rng():
        target = Target(GPT2LMHeadModel(config).eval())
    head = Eagle.from_target(EagleConfig(), target)
    assert head.config.intermediate_size == 128


def test_features_come_to_where_the_head_is(target: Target) -> None:
    head = make(target).to("meta")
    joined = head._join(torch.zeros(1, 2, tiny.HIDDEN, dtype=torch.float64), torch.tensor([[3, 4]]))
    assert (joined.device.type, joined.dtype) == ("meta", torch.float32)
