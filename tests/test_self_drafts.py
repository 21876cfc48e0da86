"""Drafts in which the target drafts for itself: unchanged text on every family, and a model left as it was."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import tiny
import torch
from oracle import left_padded, patched, plain
from torch import nn

from selfspec.draft import Draft
from selfspec.draft_pass import Plan
from selfspec.errors import ConfigError, UnsupportedModel
from selfspec.heads.layer_skip import LayerSkip, LayerSkipConfig, spread
from selfspec.target import Target
from selfspec.tree import TreeShape

PROMPTS = [tiny.text(1, length, seed=length)[0].tolist() for length in (13, 5, 21)]


def layer_skip(target: Target, **kw: Any) -> Draft:
    return LayerSkip.from_target(LayerSkipConfig(**{"skip_attention": [1], "skip_mlp": [0], **kw}), target)


MAKERS = {"layer-skip": layer_skip}
each = pytest.mark.parametrize("kind", MAKERS)
family = pytest.mark.parametrize("name", tiny.NAMES)
TREES = {
    "trunk": {"top_k": 1, "nodes": 5},
    "branches": {"top_k": 3, "nodes": 10},
    "beam": {"beam": 3, "nodes": 9},
    "exits": {"threshold": 0.35, "wanted_rate": 0.5, "top_k": 2, "nodes": 9, "threshold_step": 0.5},
    "reduced": {"draft_vocab_size": 40, "nodes": 8},
}


@each
@family
@pytest.mark.parametrize("tree", TREES)
def test_greedy_text_of_ragged_batches_is_that_of_transformers(kind: str, name: str, tree: str) -> None:
    model = tiny.model(name, "eager" if tree == "beam" else "sdpa")
    target = Target(model)
    ids, mask = left_padded(PROMPTS)
    draft = MAKERS[kind](target, **TREES[tree])
    with patched(model, draft):
        found = model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
        assert model.speculation.report()["rounds"] > 0
    assert torch.equal(found, plain(model, ids, attention_mask=mask, max_new_tokens=24, do_sample=False))
    target.release()


def own_forwards(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if "forward" in vars(module)}


@each
@family
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


@each
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
