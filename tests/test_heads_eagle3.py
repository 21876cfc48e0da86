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
from selfspec.heads.losses import Teacher, forward_kl, lk_alpha, taught_places, teach, total_variation
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


# SpecForge and speculators: one training batch


def named_like(head: Eagle3, key: str) -> torch.nn.Parameter:
    ours = key.removeprefix("train.grad.").replace("midlayer.", "layers.0.").replace("lm_head.weight", "output.rows")
    return head.get_parameter(ours)


def compare_gradients(head: Eagle3, vectors: dict[str, Tensor], factor: float) -> None:
    """Every recorded gradient, ours times `factor`."""
    keys = [key for key in vectors if key.startswith("train.grad.")]
    assert len(keys) > 10
    for key in keys:
        grad = named_like(head, key).grad
        assert grad is not None
        assert_near(grad * factor, vectors[key])


def specforge_batch(head: Eagle3, vectors: dict[str, Tensor]) -> tuple[Verified, Tensor, Tensor]:
    """The batch as our heads read it, the places whose teacher counts, and those that count for accuracy.

    SpecForge's row i has the mask of its own place; ours names the place that teaches, one later. It leaves out places
    whose teacher's first choice lies outside the draft vocabulary.
    """
    ids, mask = vectors["train.row_ids"], vectors["train.loss_mask"].squeeze(-1).bool()
    out = head.target.features(ids, vectors["train.attention_mask"], head.needs)
    assert out.hidden is not None
    following = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)
    verified = Verified(ids, following, torch.full((3,), 64), out.hidden, out.layers)
    first = head.target.model.lm_head(out.hidden).argmax(-1)
    known = torch.isin(first, head.output.vocab.ids)
    later = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], 1)
    return verified, later & known, later


def compare_specforge(head: Eagle3) -> None:
    vectors = golden.tensors("specforge-eagle3")
    verified, mask, _ = specforge_batch(head, vectors)
    assert_near(torch.cat(verified.layers, -1)[:1], vectors["train.hidden_states"][:1])
    for step, guesses in enumerate(head._passes(verified)):
        if f"train.step{step}.hidden" in vectors:  # their row i of step k is our place i + k
            places = guesses[:1, step:-1]
            assert_near(places, vectors[f"train.step{step}.hidden"][:, : places.shape[1]])
            said = head.output(head._readout(places))
            assert_near(said, vectors[f"train.step{step}.logits"][:, : places.shape[1]])
    items = torch.tensor(3 * 64)  # masked places count in SpecForge's denominator
    previous = torch.zeros(())
    for step, wanted in enumerate(vectors["train.plosses"]):
        head.config.steps, head.config.step_decay = step + 1, 1.0
        total = head.loss(verified, mask, items).loss
        assert_near((total - previous).detach(), wanted)
        previous = total.detach()


def test_specforge_training() -> None:
    head = peer("specforge-eagle3")
    compare_specforge(head)


def test_specforge_gradients() -> None:
    """The recorded gradients are those of the sum over steps of 0.8^k loss_k, divided by the 7 steps."""
    head, vectors = peer("specforge-eagle3"), golden.tensors("specforge-eagle3")
    verified, mask, _ = specforge_batch(head, vectors)
    result = head.loss(verified, mask, torch.tensor(3 * 64))
    assert_near(result.loss.detach() / 7, vectors["train.total_loss_0.8decay_mean"])
    result.loss.backward()
    compare_gradients(head, vectors, 1 / 7)


def test_specforge_lk_losses() -> None:
    """SpecForge compares q with the teacher over all tokens, not renormalised on the draft vocabulary."""
    head, vectors = peer("specforge-eagle3"), golden.tensors("specforge-eagle3")
    verified, mask, _ = specforge_batch(head, vectors)
    assert verified.hidden is not None
    row, column = taught_places(verified, mask)
    log_p = head.target.model.lm_head(verified.hidden[row, column]).log_softmax(-1)[:, head.output.vocab.ids]
    restricted = teach(head.output, verified.hidden[row, column])
    whole = Teacher(log_p, restricted.first)
    for step, guesses in enumerate(head._passes(verified)):
        logits, real = head.output(head._readout(guesses[row, column - 1])), (column > step).float()
        accepted = ((1 - total_variation(logits, whole)) * real).sum() / real.sum()
        assert_near(accepted, vectors["train.acceptance_rates"][step])
        if step < 3:
            alpha = (lk_alpha(logits, whole) * real).sum() / real.sum()
            assert_near(alpha, vectors["train.lk_alpha.plosses"][step])
            weight = torch.exp(-accepted)  # their scale and decay are 1
            blend = weight * vectors["train.plosses"][step] + (1 - weight) * (1 - accepted)
            assert_near(blend, vectors["train.lk_lambda.plosses"][step])


SPECULATORS = [name for name in PEERS if name.startswith("speculators")]


def compare_speculators(head: Eagle3, name: str) -> None:
    """States, logits, losses of each step, and gradients.

    Two rows packed as two documents are two rows of ours; positions there start at 1, ours at 0, which rotary
    attention cannot see. Each step's loss is divided by the number of its own masked places.
    """
    vectors = golden.tensors(name)
    ids = vectors["train.row_ids"]
    out = head.target.features(ids, None, head.needs)
    following = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1)
    verified = Verified(ids, following, torch.tensor([64, 64]), out.hidden, out.layers)
    assert_near(torch.cat(out.layers, -1)[:, :63].flatten(0, 1), vectors["train.hidden_states"][0])
    for step, guesses in enumerate(head._passes(verified)):
        if f"train.step{step}.hidden_prenorm" in vectors:
            places = guesses[1:, step:63]
            assert_near(places, vectors[f"train.step{step}.hidden_prenorm"][:, : 63 - step])
            said = head.output(head._readout(places))
            assert_near(said, vectors[f"train.step{step}.logits"][:, : 63 - step])
    packed = vectors["train.loss_mask"].bool().reshape(2, 63)
    mask = torch.cat([torch.zeros(2, 1, dtype=torch.bool), packed], 1)
    row, column = taught_places(verified, mask)
    assert out.hidden is not None
    teacher = teach(head.output, out.hidden[row, column])
    total = torch.zeros(())
    for step, guesses in enumerate(head._passes(verified)):
        logits, real = head.output(head._readout(guesses[row, column - 1])), (column > step).float()
        loss = 0.8**step * (forward_kl(logits, teacher) * real).sum() / (real.sum() + 1e-5)
        assert_near(loss.detach(), vectors[f"train.metric.loss_{step}_sum"])
        right = ((logits.argmax(-1) == teacher.first) * real).sum()
        assert step or right == vectors["train.metric.full_acc_0_sum"]
        total = total + loss
    assert_near(total.detach(), vectors["train.loss"])
    total.backward()
    compare_gradients(head, vectors, 1.0)


@pytest.mark.parametrize("name", SPECULATORS)
def test_speculators_training(name: str) -> None:
    compare_speculators(peer(name), name)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("speculators-eagle3-nbr", {"norm_before_residual": False}),
        ("speculators-eagle3-normout", {"norm_output": False}),
        ("speculators-eagle3-headdim", {"rope_theta": 500000.0}),
    ],
    ids=str,
)
def test_speculators_vectors_catch_switches(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        compare_speculators(peer(name, **fields), name)


def test_speculators_vectors_catch_a_head_dim_derived_from_the_width() -> None:
    with pytest.raises(RuntimeError, match="size mismatch"):
        peer("speculators-eagle3-headdim", head_dim=16)


def test_speculators_vectors_catch_a_teacher_normed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    head = peer("speculators-eagle3")
    norm, taught = head.target.model.model.norm, head.output.teach
    monkeypatch.setattr(head.output, "teach", lambda hidden: taught(norm(hidden)))
    with pytest.raises(AssertionError):
        compare_speculators(head, "speculators-eagle3")


def test_specforge_vectors_catch_a_loss_averaged_over_the_mask() -> None:
    head, vectors = peer("specforge-eagle3", steps=1), golden.tensors("specforge-eagle3")
    verified, mask, _ = specforge_batch(head, vectors)
    with pytest.raises(AssertionError):
        assert_near(head.loss(verified, mask).loss.detach(), vectors["train.plosses"][0])


def test_specforge_vectors_catch_positions_that_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step at the positions of the first: a guess s steps below its root stands s places too early."""
    head, calls = peer("specforge-eagle3"), []
    run = head._run

    def still(features: Tensor, tokens: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        calls.append(1)
        return run(features, tokens, positions - (len(calls) - 1) % 7, *rest)

    monkeypatch.setattr(head, "_run", still)
    with pytest.raises(AssertionError):
        compare_specforge(head)
