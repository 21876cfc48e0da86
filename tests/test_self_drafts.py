"""Drafts in which the target drafts for itself: unchanged text on every family, and a model left as it was."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import tiny
import torch
from oracle import left_padded, patched, plain
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from selfspec.draft import Budget, Draft, Needs, Sampling, Verified
from selfspec.draft_pass import Plan
from selfspec.errors import ConfigError, UnsupportedModel
from selfspec.heads.early_exit import EarlyExit, EarlyExitConfig
from selfspec.heads.layer_skip import LayerSkip, LayerSkipConfig, spread
from selfspec.heads.low_rank import LowRank, LowRankConfig, factorised, matrices
from selfspec.heads.swift import Search, Swift, SwiftConfig
from selfspec.target import Target
from selfspec.tree import TreeShape


@pytest.fixture(autouse=True, scope="module")
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Factors of low-rank drafts are kept here."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SELFSPEC_CACHE", str(folder))
        yield folder


PROMPTS = [tiny.text(1, length, seed=length)[0].tolist() for length in (13, 5, 21)]


def layer_skip(target: Target, **kw: Any) -> Draft:
    return LayerSkip.from_target(LayerSkipConfig(**{"skip_attention": [1], "skip_mlp": [0], **kw}), target)


def early_exit(target: Target, **kw: Any) -> Draft:
    return EarlyExit.from_target(EarlyExitConfig(**{"exit_layer": target.num_layers - 1, **kw}), target)


def low_rank(target: Target, **kw: Any) -> Draft:
    return LowRank.from_target(LowRankConfig(**{"rank": 0.9, **kw}), target)


def swift(target: Target, **kw: Any) -> Draft:
    return Swift.from_target(SwiftConfig(**{"trials": 5, "window": 8, **kw}), target)


MAKERS: dict[str, Callable[..., Draft]] = {
    "early-exit": early_exit,
    "layer-skip": layer_skip,
    "low-rank": low_rank,
    "swift": swift,
}
NIGHTLY = [pytest.mark.nightly]
each = pytest.mark.parametrize("kind", MAKERS)
family = pytest.mark.parametrize("name", tiny.NAMES)
TREES = {
    "trunk": {"top_k": 1, "nodes": 5},
    "branches": {"top_k": 3, "nodes": 10},
    "beam": {"beam": 3, "nodes": 9},
    "exits": {"threshold": 0.35, "wanted_rate": 0.5, "top_k": 2, "nodes": 9, "threshold_step": 0.5},
    "reduced": {"draft_vocab_size": 40, "nodes": 8},
}


def _usual(kind: str, name: str, tree: str) -> bool:
    """Every family with every method, every tree with two methods on two families; the rest at night."""
    two = (kind, name) in {("layer-skip", "llama"), ("early-exit", "gemma3")}
    return tree == "branches" or two


GREEDY = [
    pytest.param(kind, name, tree, id=f"{kind}-{name}-{tree}", marks=[] if _usual(kind, name, tree) else NIGHTLY)
    for kind in MAKERS
    for name in tiny.NAMES
    for tree in TREES
]


@pytest.mark.parametrize(("kind", "name", "tree"), GREEDY)
def test_greedy_text_of_ragged_batches_is_that_of_transformers(kind: str, name: str, tree: str) -> None:
    model = tiny.model(name, "eager" if tree == "beam" else "sdpa")
    target = Target(model)
    ids, mask = left_padded(PROMPTS)
    draft = MAKERS[kind](target, **TREES[tree])
    with patched(model, draft):
        found = model.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
        assert model.speculation.report()["rounds"] > 0
    assert torch.equal(found, plain(model, ids, attention_mask=mask, max_new_tokens=16, do_sample=False))
    target.release()


def own_forwards(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if "forward" in vars(module)}


@each
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_releasing_leaves_no_wrapper_behind(kind: str, name: str) -> None:
    model = tiny.model(name)
    before = own_forwards(model)
    target, other = Target(model), Target(model)
    MAKERS[kind](target)
    MAKERS[kind](other)
    assert own_forwards(model) > before
    target.release()
    assert own_forwards(model) > before
    other.release()
    assert own_forwards(model) == before


def reference_states(target: Target, ids: torch.Tensor, skip: Plan) -> torch.Tensor:
    """The last hidden states of a copy of the model in which the weights of left-out parts are zero."""
    model = tiny.model(target.model_type if target.model_type != "gemma3_text" else "gemma3")
    for layer, block in enumerate(target.passes.blocks):
        del block
        own = Target(model).passes.blocks[layer]
        for part, skipped in (("self_attn", skip.attention), ("attention", skip.attention), ("mlp", skip.mlp)):
            if layer in skipped and hasattr(own, part):
                for parameter in getattr(own, part).parameters():
                    parameter.zero_()
    return model.base_model(input_ids=ids).last_hidden_state


@family
def test_leaving_out_a_part_equals_zero_weights_in_it(name: str) -> None:
    target = tiny.selfspec_target(name)
    plan = target.passes.check(Plan(frozenset({1}), frozenset({0})))
    ids = tiny.text(1, 7)
    cache = target.new_cache(1, 16)
    hidden, _ = target.passes.run(TreeShape.chain(6), ids, cache, plan)
    torch.testing.assert_close(hidden, reference_states(target, ids, plan), atol=1e-5, rtol=1e-5)
    assert cache.lengths == [0]


@pytest.mark.parametrize(
    "kind", ["early-exit", *(pytest.param(kind, marks=NIGHTLY) for kind in ("layer-skip", "swift"))]
)
def test_two_threads_at_once_write_what_each_writes_alone(kind: str) -> None:
    model = tiny.model("llama")
    prompts = [tiny.text(1, 9, seed=3), tiny.text(1, 12, seed=4)]
    wanted = [plain(model, ids, max_new_tokens=40, do_sample=False) for ids in prompts]
    found: dict[int, torch.Tensor] = {}
    target = Target(model)
    with patched(model, MAKERS[kind](target)):
        threads = [
            threading.Thread(
                target=lambda i=i: found.update({i: model.generate(prompts[i], max_new_tokens=40, do_sample=False)})
            )
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(found[i], wanted[i]) for i in range(2))
    target.release()


def test_impossible_sets_are_refused_by_name() -> None:
    target = tiny.selfspec_target("llama")
    with pytest.raises(ConfigError, match=r"\[7\]"):
        layer_skip(target, skip_mlp=[7])
    with pytest.raises(ConfigError, match="all layers"):
        layer_skip(target, skip_attention=[0, 1, 2], skip_mlp=[0, 1, 2])
    with pytest.raises(ConfigError, match="draws or beam"):
        layer_skip(target, beam=2, draws=True)


def test_the_default_set_leaves_the_first_and_the_last_layer_in() -> None:
    for layers in range(1, 40):
        chosen = spread(layers)
        assert len(set(chosen)) == len(chosen) == min(max(layers - 2, 0), round(0.45 * layers))
        assert not {0, layers - 1} & set(chosen)


def test_a_model_without_an_mlp_module_can_leave_out_whole_layers_only() -> None:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=97, hidden_size=32, ffn_dim=64, num_attention_heads=4, num_hidden_layers=3, word_embed_proj_dim=32
    )
    model = OPTForCausalLM(config).eval()
    target = Target(model)
    with pytest.raises(UnsupportedModel, match="no module of its own for mlp of layer 0"):
        layer_skip(target)
    ids = tiny.text(2, 9)
    with patched(model, layer_skip(target, skip_attention=[1], skip_mlp=[1])):
        found = model.generate(ids, max_new_tokens=16, do_sample=False)
    assert torch.equal(found, plain(model, ids, max_new_tokens=16, do_sample=False))


# Sampling


def outcomes(model: PreTrainedModel, ids: torch.Tensor, tokens: int, top_k: int) -> dict[tuple[int, ...], float]:
    """The chance of every continuation under top-k sampling, from plain forward passes."""
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        longer = {}
        for path, chance in chances.items():
            text = torch.cat([ids, torch.tensor([path], dtype=torch.long)], 1)
            best = model(input_ids=text).logits[0, -1].topk(top_k)
            for token, share in zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True):
                longer[(*path, token)] = chance * share
        chances = longer
    return chances


SAMPLED = [
    pytest.param(kind, draws, id=f"{kind}-{'drawn' if draws else 'chosen'}", marks=[] if default else NIGHTLY)
    for kind, draws, default in [
        ("layer-skip", True, True),
        ("early-exit", True, True),
        ("early-exit", False, False),
        ("low-rank", True, False),
        ("swift", True, False),
        ("layer-skip", False, False),
    ]
]


@pytest.mark.parametrize(("kind", "draws"), SAMPLED)
def test_sampled_text_has_the_distribution_of_the_target(kind: str, draws: bool) -> None:
    """Chi-square over all 3-token continuations; a right sampler fails once in ten thousand seeds."""
    model = tiny.model("llama")
    target = Target(model)
    ids, top_k, rows, calls = tiny.text(1, 6), 3, 200, 4
    wanted = outcomes(model, ids, 3, top_k)
    # the exit depends on the text, siblings are drawn without replacement, and the draft's vocabulary is not the whole
    draft = MAKERS[kind](target, draws=draws, depth=2, top_k=2, nodes=5, threshold=0.3, adaptive=False)
    found: Counter[tuple[int, ...]] = Counter()
    with patched(model, draft):
        for call in range(calls):
            batch = model.generate(
                ids.expand(rows, -1),
                attention_mask=torch.ones(rows, ids.shape[1], dtype=torch.long),
                generator=torch.Generator().manual_seed(call),
                max_new_tokens=3,
                do_sample=True,
                top_k=top_k,
            )
            found.update(tuple(row) for row in batch[:, ids.shape[1] :].tolist())
        assert model.speculation.report()["accepted_per_round"] > 0
    assert set(found) <= set(wanted)
    total = rows * calls
    often = [path for path, chance in wanted.items() if chance * total >= 5]
    rest = 1 - sum(wanted[path] for path in often)
    seen = [found[path] for path in often]
    expected = [wanted[path] * total for path in often]
    if rest * total >= 1:
        seen, expected = [*seen, total - sum(seen)], [*expected, rest * total]
    scale = sum(seen) / sum(expected)
    assert scipy.stats.chisquare(seen, [value * scale for value in expected]).pvalue > 1e-4
    target.release()


# Early exit: shared work


@family
@pytest.mark.parametrize("share", [True, False], ids=["shared", "in full"])
def test_lower_layers_read_each_node_once_when_shared(name: str, share: bool) -> None:
    """Only verification runs the last layer, so with shared work the first layer reads as many tokens."""
    model = tiny.model(name)
    target = Target(model)
    ids, mask = left_padded(PROMPTS[:2])
    read = {"first": 0, "last": 0}

    def count(place: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            read[place] += output.shape[0] * output.shape[1]

        return hook

    draft = early_exit(target, exit_layer=1, share=share, nodes=6, top_k=2)
    blocks = target.passes.blocks
    handles = [blocks[0].mlp.register_forward_hook(count("first")), blocks[-1].mlp.register_forward_hook(count("last"))]
    with patched(model, draft):
        found = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
    for handle in handles:
        handle.remove()
    assert read["first"] == read["last"] if share else read["first"] > read["last"]
    assert torch.equal(found, plain(model, ids, attention_mask=mask, max_new_tokens=20, do_sample=False))
    target.release()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_verification_that_goes_on_from_shared_states_gives_the_logits_of_one_in_full(name: str) -> None:
    target = tiny.selfspec_target(name)
    ids = tiny.text(1, 19)
    cache = target.new_cache(1, 64)
    target.prefill(ids, [19], cache, Needs())
    root = torch.tensor([5])
    verified = Verified(ids, ids, torch.tensor([19]), cache=cache)
    draft = early_exit(target, exit_layer=1, top_k=3, nodes=9, depth=4, threshold=0.0)
    state = draft.begin(verified)
    state.root = root
    tree = draft.propose(state, Budget(), Sampling(), None)
    assert tree.computed is not None and tree.computed.hidden.shape[1] == 4 and tree.nodes == 9
    short = target.verify(tree, cache, Needs(hidden=True))
    whole = target.verify(replace(tree, computed=None), cache, Needs(hidden=True))
    torch.testing.assert_close(short.logits, whole.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(short.hidden, whole.hidden, atol=1e-5, rtol=1e-5)
    low = target.verify(tree, cache, Needs(layers=(0,)))
    assert torch.equal(low.layers[0], target.verify(replace(tree, computed=None), cache, Needs(layers=(0,))).layers[0])


# When to stop


def state_of(draft: Draft, target: Target, length: int = 19) -> Any:
    ids = tiny.text(2, length)
    cache = target.new_cache(2, 64)
    target.prefill(ids, [length, length], cache, Needs())
    return draft.begin(Verified(ids, ids.roll(-1, 1), torch.tensor([length, length]), cache=cache))


def test_drafting_stops_after_a_token_of_little_confidence() -> None:
    target = tiny.selfspec_target("llama")
    for threshold, depth in [(1.0, 1), (0.0, 4)]:
        draft = layer_skip(target, threshold=threshold, depth=4, top_k=1)
        assert draft.propose(state_of(draft, target), Budget(), Sampling(), None).shape.max_depth == depth


def test_the_threshold_follows_the_acceptance_as_in_the_paper() -> None:
    """Hand-made numbers: row 0 accepted 1 of 4 tokens (too few), row 1 all 4."""
    target = tiny.selfspec_target("llama")
    draft = layer_skip(target, threshold=0.6, wanted_rate=0.9, threshold_step=0.1)
    state = state_of(draft, target)
    state.drafted = [4, 4]
    two = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]])
    state = draft.observe(state, Verified(two, two, torch.tensor([2, 5]), cache=state.cache))
    torch.testing.assert_close(state.rate, torch.tensor([0.5 * 0.9 + 0.5 * 0.25, 0.5 * 0.9 + 0.5 * 1.0]))
    torch.testing.assert_close(state.threshold, torch.tensor([0.6 + 0.1 * 0.1, 0.6 - 0.1 * 0.1]))
    state.drafted = [0, 0]
    again = draft.observe(state, Verified(two, two, torch.tensor([1, 1]), cache=state.cache))
    torch.testing.assert_close(again.threshold, torch.tensor([0.61, 0.59]))


# SWIFT


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox"])
def test_tokens_read_anew_have_the_states_they_have_in_the_text(name: str) -> None:
    target = tiny.selfspec_target(name)
    ids, counts = tiny.text(2, 20), [20, 14]
    cache = target.new_cache(2, 64)
    target.prefill(ids, counts, cache, Needs())
    newest = torch.stack([ids[row, count - 6 : count] for row, count in enumerate(counts)])
    found = target.passes.read_again(newest, cache, Plan())
    whole = target.features(ids, None, Needs(hidden=True)).hidden
    assert whole is not None
    wanted = torch.stack([whole[row, count - 6 : count] for row, count in enumerate(counts)])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    assert cache.lengths == counts


@pytest.mark.parametrize("apart", [True, False])
def test_the_search_finds_a_planted_set(apart: bool) -> None:
    layers = 10
    best = frozenset((layer, mlp) for layer in (2, 3, 5, 7) for mlp in (False, True))
    start = frozenset((layer, mlp) for layer in (1, 4, 6, 8) for mlp in (False, True))
    search = Search(layers, apart, random.Random(0), start, left=2000)
    scores = []
    while search.left and search.score != 1.0:
        tried = search.candidate()
        assert len(tried) == 8 and not {layer for layer, _ in tried} & {0, layers - 1}
        assert apart or all((layer, not mlp) in tried for layer, mlp in tried)
        search.tell(tried, len(tried & best) / 8)
        scores.append(search.score)
    assert scores[0] == 0.0 and search.best == best and scores == sorted(scores)


def test_swift_starts_from_what_it_found_before_only_when_told_to() -> None:
    model = tiny.model("gemma3")
    target = Target(model)
    for remember in (True, False):
        draft = swift(target, share=0.25, trials=40, patience=40, good_enough=1.0, remember=remember)
        first = draft.plan()
        with patched(model, draft):
            model.generate(tiny.text(1, 30, seed=8), max_new_tokens=60, do_sample=False)
        later = draft.plan()
        assert ((first.attention, first.mlp) != (later.attention, later.mlp)) == remember
        assert len(first.attention) + len(first.mlp) == len(later.attention) + len(later.mlp) > 0


# Low rank


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_exact_factors_change_nothing(name: str) -> None:
    """Every weight W as the product of W and the identity."""
    target = Target(gpt2()) if name == "gpt2" else tiny.selfspec_target(name)
    factors = {key: (weight, torch.eye(weight.shape[0])) for key, weight in matrices(target).items()}
    assert len(factors) == {"llama": 3 * 7, "gemma3": 4 * 7, "gpt2": 2 * 4}[name]
    plan = target.passes.check(Plan(factors=factors))
    ids = tiny.text(1, 7)
    hidden, _ = target.passes.run(TreeShape.chain(6), ids, target.new_cache(1, 16), plan)
    torch.testing.assert_close(hidden, target.features(ids, None, Needs(hidden=True)).hidden, atol=1e-4, rtol=1e-4)


def gpt2() -> PreTrainedModel:
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    return GPT2LMHeadModel(config).eval().requires_grad_(False)


def test_low_rank_works_on_transposed_weights() -> None:
    model = gpt2()
    target = Target(model)
    ids = tiny.text(2, 9)
    with patched(model, low_rank(target)):
        found = model.generate(ids, max_new_tokens=16, do_sample=False)
    assert torch.equal(found, plain(model, ids, max_new_tokens=16, do_sample=False))


def test_factors_are_the_best_of_their_rank(tmp_path: Path) -> None:
    target = tiny.selfspec_target("llama")
    weights = matrices(target)
    ranks = {name: 5 for name in weights if name.endswith("up_proj")}
    for name, (down, up) in factorised(target, weights, ranks, tmp_path).items():
        assert down.shape[0] == up.shape[1] == 5
        lost = np.linalg.svd(weights[name].numpy(), compute_uv=False)[5:]
        np.testing.assert_allclose(float((up @ down - weights[name]).norm()), np.linalg.norm(lost), rtol=1e-4)


def test_factors_are_computed_once_per_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.selfspec_target("llama")

    def files() -> set[Path]:
        return set((tmp_path / "low-rank").glob("*.safetensors"))

    low_rank(target, folder=str(tmp_path))
    (first,) = files()
    content = first.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "svd", None)
        low_rank(tiny.selfspec_target("llama"), folder=str(tmp_path), ranks={"down_proj": 0.5, "q_proj": 1.0})
    first.write_bytes(content[:100])
    low_rank(target, folder=str(tmp_path))
    assert first.read_bytes() == content
    other = tiny.selfspec_target("llama")
    other.passes.blocks[1].mlp.up_proj.weight[0] += 1  # same embeddings and norms, so the same fingerprint
    low_rank(other, folder=str(tmp_path))
    assert len(files()) == 2
    with pytest.raises(ConfigError, match="no matrices called"):
        low_rank(target, folder=str(tmp_path), ranks={"w1": 0.5})
