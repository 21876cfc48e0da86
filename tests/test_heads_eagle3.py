"""EAGLE-3: the forms it takes, and the numbers of SafeAILab, SpecForge and speculators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import golden
import pytest
import tiny
import torch
from golden import assert_near, assert_rounds_equal
from safetensors.torch import load_file
from torch import Tensor

from selfspec.draft import Budget, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.heads import autoregressive, eagle3
from selfspec.heads.eagle3 import Eagle3, Eagle3Config
from selfspec.target import Target

torch.set_num_threads(1)


def read(target: Target, head: Eagle3, ids: Tensor) -> Verified:
    output = target.features(ids[:, :-1], None, head.needs)
    counts = torch.full((ids.shape[0],), ids.shape[1] - 1)
    return Verified(ids[:, :-1], ids[:, 1:], counts, output.hidden, output.layers)


# Forms

SWITCHES = [
    {},
    {"fc_norm": False},
    {"fc_norm": False, "norm_before_fc": True},
    {"norm_before_residual": True, "norm_output": True, "num_layers": 2},
    {"own_embedding": True, "own_output": True, "draft_hidden_size": 48, "fc_bias": True},
    {"attention_bias": True, "qk_norm": True, "head_dim": 6, "target_layers": [0, 2]},
]


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
def test_every_form_rolls_on_trains_and_drafts(switches: dict[str, Any]) -> None:
    target = tiny.selfspec_target("llama")
    head = Eagle3.from_target(Eagle3Config(draft_vocab_size=50, **switches), target, torch.Generator().manual_seed(0))
    assert isinstance(head, Eagle3)
    verified = read(target, head, tiny.text(2, 20))
    state = head.begin(tiny.chunk(verified, 0, 12))
    head.propose(state, Budget(), Sampling(), None)
    state = head.observe(state, tiny.chunk(verified, 12, 19))
    torch.testing.assert_close(state.guess, head.begin(verified).guess, atol=1e-5, rtol=1e-5)
    head.propose(state, Budget(), Sampling(), None).check(verified.root, target.vocab_size)
    head.loss(verified, torch.ones(2, 19, dtype=torch.bool)).loss.backward()
    missing = [name for name, parameter in head.named_parameters() if parameter.grad is None]
    assert not missing


@pytest.mark.parametrize(
    ("layers", "wanted"), [(2, [1]), (3, [1, 2]), (4, [1, 2, 3]), (8, [2, 4, 5]), (32, [2, 16, 29])]
)
def test_layers_read_by_default(layers: int, wanted: list[int]) -> None:
    assert eagle3._layers(None, layers) == wanted


@pytest.mark.parametrize(
    ("switches", "named"),
    [
        ({"target_layers": [1, 1]}, "target_layers"),
        ({"target_layers": [3]}, r"from 0 to 2"),
        ({"target_layers": []}, "target_layers"),
        ({"norm_before_fc": True}, "exclude each other"),
        ({"draft_hidden_size": 48}, "own_embedding"),
    ],
    ids=str,
)
def test_impossible_forms_are_refused(switches: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Eagle3.from_target(Eagle3Config(**switches), tiny.selfspec_target("llama"))


@torch.no_grad()
@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_fresh_head_says_what_the_highest_layer_says(name: str) -> None:
    """Its output has the last hidden state's size channel by channel, so learning starts from sensible logits."""
    target = tiny.selfspec_target(name)
    head = Eagle3.from_target(Eagle3Config(), target, torch.Generator().manual_seed(0))
    assert isinstance(head, Eagle3)
    verified = read(target, head, tiny.text(4, 40))
    assert verified.hidden is not None
    positions = torch.arange(39).unsqueeze(0)
    guess = head._readout(head._run(head._features(verified), verified.next_tokens, positions, None, [None]))
    ratio = guess.pow(2).mean((0, 1)).sqrt() / verified.hidden.pow(2).mean((0, 1)).sqrt()
    assert 0.5 < float(ratio.median()) < 2


# SafeAILab: forward, trees, decoding

PEERS = {
    "eagle3": ("pytorch_model.bin", {"draft_vocab_size": 200, "rope_theta": 10000.0}),
    "eagle3-fullvocab": ("model.safetensors", {"rope_theta": 10000.0}),
    "eagle3-theta": ("pytorch_model.bin", {"draft_vocab_size": 200, "rope_theta": 10000.0}),
    "specforge-eagle3": ("model.safetensors", {"draft_vocab_size": 200, "steps": 7}),
    "speculators-eagle3": ("model.safetensors", {"draft_vocab_size": 200, "steps": 4}),
    "speculators-eagle3-nbr": (
        "model.safetensors",
        {"draft_vocab_size": 200, "steps": 4, "norm_before_residual": True, "norm_before_fc": True},
    ),
    "speculators-eagle3-normout": (
        "model.safetensors",
        {"draft_vocab_size": 200, "steps": 4, "fc_norm": True, "norm_output": True, "num_layers": 2},
    ),
    "speculators-eagle3-headdim": (
        "model.safetensors",
        {"draft_vocab_size": 200, "steps": 4, "head_dim": 32, "rope_theta": 50000.0},
    ),
}


def peer(name: str, **fields: Any) -> Eagle3:
    """A published head, its tensors under our names."""
    file, form = PEERS[name]
    path = golden.folder(name) / "draft" / file
    weights = load_file(path) if path.suffix == ".safetensors" else golden.weights(path)
    weights = {key.replace("midlayer.", "layers.0."): value for key, value in weights.items()}
    weights["output.rows"] = weights.pop("lm_head.weight")
    count = weights["output.rows"].shape[0]
    weights["output.vocab.ids"] = torch.arange(count) + weights.pop("d2t", torch.zeros(count, dtype=torch.long))
    weights.pop("t2d", None)
    form = {"fc_norm": False, "own_output": True, "own_embedding": "embed_tokens.weight" in weights, **form, **fields}
    head = Eagle3.from_target(Eagle3Config(**form), golden.target(name))
    assert isinstance(head, Eagle3)
    head.load_state_dict(weights, strict=True)
    head.after_load()
    return head.eval()


SAFEAI = ["eagle3", "eagle3-fullvocab", "eagle3-theta"]
BIG, SMALL, CHAIN = (
    {"tree_nodes": t, "tree_depth": d + 1, "tree_top_k": k} for t, d, k in ((60, 7, 10), (16, 3, 4), (6, 4, 1))
)


def compare_rounds(head: Eagle3, name: str, case: str) -> None:
    """Two recorded rounds fed to the head: states level by level, tree, mask, positions."""
    vectors = golden.tensors(name)
    state, seen = None, 0
    for turn in range(2):
        prefix = f"{case}.round{turn}."
        ids, features = vectors[prefix + "input_ids"], vectors[prefix + "features"]
        stop = seen + features.shape[1]
        verified = Verified(
            ids[:, seen:stop],
            ids[:, seen + 1 : stop + 1],
            torch.tensor([stop - seen]),
            layers=tuple(features.chunk(3, -1)),
        )
        state = head.begin(verified) if state is None else head.observe(state, verified)
        seen = stop
        outputs = spy(head)
        tree = head.propose(state, Budget(), Sampling(), None)
        assert_near(state.guess.unsqueeze(1), vectors[prefix + "level0.hidden_out"])
        for level, (guess, positions) in enumerate(outputs, 1):
            assert_near(guess, vectors[f"{prefix}level{level}.hidden_out"])
            assert torch.equal(positions[0], vectors[f"{prefix}level{level}.position_ids"])
        assert torch.equal(tree.tokens, vectors[prefix + "draft_tokens"])
        assert torch.equal(tree.shape.ancestors[0], vectors[prefix + "tree_mask"][0, 0].bool())
        assert torch.equal(tree.shape.depth[0], vectors[prefix + "tree_position_ids"])


def spy(head: Eagle3) -> list[tuple[Tensor, Tensor]]:
    """Outputs and positions of every pass from now on."""
    seen: list[tuple[Tensor, Tensor]] = []
    run = type(head)._run

    def recorded(features: Tensor, tokens: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        guess = run(head, features, tokens, positions, *rest)
        seen.append((guess, positions))
        return guess

    head._run = recorded  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize(("case", "tree"), [("c0", BIG), ("c1", SMALL)])
@pytest.mark.parametrize("name", SAFEAI)
def test_safeai_states_and_trees(name: str, case: str, tree: dict[str, int]) -> None:
    compare_rounds(peer(name, **tree), name, case)


def compare_decoding(name: str, tag: str, tree: dict[str, int]) -> None:
    head = peer(name, **tree)
    for run in golden.notes(name)["runs"]:
        if tag in run["tag"]:
            rounds, ids = golden.decode_rounds(head.target, head, run)
            assert ids == run["output_ids"]
            assert_rounds_equal(rounds, run)


def test_safeai_decoding() -> None:
    compare_decoding("eagle3", "tt16_d3_k4.p1", SMALL)


@pytest.mark.nightly
@pytest.mark.parametrize(("tag", "tree"), [("tt16_d3_k4", SMALL), ("tt6_d4_k1", CHAIN), ("tt60_d7_k10", BIG)])
@pytest.mark.parametrize("name", SAFEAI)
def test_all_safeai_decoding(name: str, tag: str, tree: dict[str, int]) -> None:
    compare_decoding(name, tag, tree)


def _swap_norms(head: Eagle3) -> None:
    first = head.layers[0]
    first.input_layernorm, first.hidden_norm = first.hidden_norm, first.input_layernorm


def _absolute_ids(head: Eagle3) -> None:
    offsets = head.output.vocab.ids - torch.arange(200)
    head.output.vocab.to_target = lambda columns: offsets[columns]  # type: ignore[method-assign]


def _read_one_layer_lower(head: Eagle3) -> None:
    assert head.config.target_layers is not None
    head.config.target_layers = [layer - 1 for layer in head.config.target_layers]


FAULTS: dict[str, tuple[dict[str, Any], Callable[[Eagle3], None] | None]] = {
    "residual from the normed state": ({"norm_before_residual": True}, None),
    "post-norm feedback": ({"norm_output": True}, None),
    "a level short": ({"tree_depth": SMALL["tree_depth"] - 1}, None),
    "root not counted": ({"tree_nodes": SMALL["tree_nodes"] + 1}, None),
    "swapped norms": ({}, _swap_norms),
    "offsets taken as ids": ({}, _absolute_ids),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_safeai_vectors_catch(fault: str) -> None:
    fields, harm = FAULTS[fault]
    head = peer("eagle3", **{**SMALL, **fields})
    if harm is not None:
        harm(head)
    with pytest.raises((AssertionError, KeyError)):
        compare_rounds(head, "eagle3", "c1")


def test_safeai_vectors_catch_the_targets_rope_theta() -> None:
    with pytest.raises(AssertionError):
        compare_rounds(peer("eagle3-theta", rope_theta=500000.0, **SMALL), "eagle3-theta", "c1")


def test_safeai_vectors_catch_positions_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    step = autoregressive._Beam.step
    monkeypatch.setattr(autoregressive._Beam, "step", lambda self, origin: _moved(*step(self, origin)))
    with pytest.raises(AssertionError):
        compare_rounds(peer("eagle3", **SMALL), "eagle3", "c1")


def _moved(positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return positions + 1, mask


def test_safeai_decoding_catches_layers_read_one_lower() -> None:
    head = peer("eagle3", **SMALL)
    _read_one_layer_lower(head)
    run = next(run for run in golden.notes("eagle3")["runs"] if "tt16" in run["tag"])
    rounds, _ = golden.decode_rounds(head.target, head, run)
    with pytest.raises(AssertionError):
        assert_rounds_equal(rounds, run)
