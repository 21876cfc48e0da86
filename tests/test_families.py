"""Every decoder family of transformers: guesses give the model's own logits and text, or are refused by name.

The judge is a fresh forward pass over the same text, and transformers' own `generate`.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import families
import oracle
import pytest
import torch
from oracle import patched, plain
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import selfspec
from selfspec.draft import Needs
from selfspec.errors import UnsupportedGeneration, UnsupportedModel
from selfspec.selfcheck import CHECKED_BY_TESTS, check_passes
from selfspec.target import Target
from selfspec.tree import DraftTree, Drawn, TreeShape

REFUSED = {
    "mamba": "Mamba-1",
    "jamba": "Mamba-1",
    "falcon_mamba": "Mamba-1",
    "recurrent_gemma": "on its modules",
    "deepseek_v32": "indexed_attention",
    "openai-gpt": "no cache",
    "t5": "encoder-decoder",
}
SUPPORTED = [kind for kind in families.TABLE if kind not in REFUSED]
QUICK = ["llama4_text", "gpt_oss", "deepseek_v3", "bloom", "qwen3_next", "falcon_h1"]
DOCS = Path(__file__).parent.parent / "docs" / "models.md"


@pytest.mark.parametrize("kind", SUPPORTED)
def test_logits_of_guesses_equal_those_of_fresh_passes(kind: str) -> None:
    assert families.tree_error(families.build(kind)) < families.EXACT


@pytest.mark.parametrize("kind", QUICK)
@pytest.mark.parametrize("do_sample", [False, True])
def test_text_with_guesses_equals_plain_text(kind: str, do_sample: bool) -> None:
    assert families.same_text(families.build(kind), do_sample=do_sample)


@pytest.mark.parametrize(("kind", "reason"), REFUSED.items())
def test_models_that_cannot_be_exact_are_refused_by_name(kind: str, reason: str) -> None:
    model = families.build(kind)
    with pytest.raises(UnsupportedModel, match=reason):
        selfspec.patch(model, "lookup")
    assert "generate" not in vars(model)


def test_all_families_that_skip_the_check_at_patch_are_in_the_table() -> None:
    named = {families.VARIANTS.get(kind, kind) for kind in SUPPORTED}
    assert named - {"gemma3", "qwen2_5_vl", "llava"} | {"qwen2_5_vl_text"} == CHECKED_BY_TESTS


# Layers with state


@pytest.mark.parametrize("right", [0, 1, 3])
def test_a_state_that_gathers_refused_guesses_for_many_rounds_stays_right(right: int) -> None:
    model = families.build("mamba2")
    prompt = torch.arange(3, 12).unsqueeze(0)
    wanted = plain(model, prompt, max_new_tokens=60, do_sample=False)
    with patched(model, oracle.Oracle(wanted.tolist(), oracle.chain(4, right))):
        assert torch.equal(model.generate(prompt, max_new_tokens=60, do_sample=False), wanted)
        rounds = model.speculation.last.rounds
    assert rounds <= 60
    assert right == 0 or rounds < 45


def test_no_cache_is_returned_of_a_model_with_state() -> None:
    model = families.build("lfm2")
    prompt = torch.arange(3, 12).unsqueeze(0)
    wanted = plain(model, prompt, max_new_tokens=20, do_sample=False)
    with patched(model, oracle.Oracle(wanted.tolist(), oracle.chain(4, 2))):
        found = model.generate(prompt, max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(found.sequences, wanted)
    assert found.cache is None


def test_several_prompts_of_a_model_with_state_are_decoded_plainly_with_a_warning() -> None:
    model = families.build("mamba2")
    prompts = torch.arange(3, 15).reshape(2, 6)
    wanted = plain(model, prompts, max_new_tokens=8, do_sample=False)
    with patched(model, "lookup"), pytest.warns(UserWarning, match=r"several prompts at once \(Mamba2"):
        assert torch.equal(model.generate(prompts, max_new_tokens=8, do_sample=False), wanted)


def test_a_target_with_state_takes_neither_trees_nor_batches() -> None:
    target = Target(families.build("mamba2"))
    with pytest.raises(UnsupportedGeneration, match="2 rows at once"):
        target.new_cache(2, 16)
    tree = DraftTree(torch.tensor([[3, 4, 5]]), TreeShape(torch.tensor([[-1, 0, 0]])))
    with pytest.raises(UnsupportedGeneration, match="a tree of guesses: Mamba2"):
        target.verify(tree, target.new_cache(1, 16), Needs())


def test_two_generations_of_a_model_with_state_do_not_disturb_each_other() -> None:
    model = families.build("mamba2")
    target = Target(model)
    texts = [torch.arange(3, 12).unsqueeze(0), torch.arange(40, 46).unsqueeze(0)]
    caches = [target.new_cache(1, 32) for _ in texts]
    guess = DraftTree(torch.tensor([[7, 8, 9]]), TreeShape.chain(2))
    with torch.no_grad():
        for text, cache in zip(texts, caches, strict=True):
            target.prefill(text, [text.shape[1]], cache, Needs())
        for cache in caches:
            target.verify(guess, cache, Needs())
            cache.keep([[0]])
        for text, cache in zip(texts, caches, strict=True):
            found = target.verify(DraftTree(torch.tensor([[8]]), TreeShape.chain(0)), cache, Needs()).logits
            whole = torch.cat([text, torch.tensor([[7, 8]])], 1)
            torch.testing.assert_close(found, model(input_ids=whole, use_cache=False).logits[:, -1:])
    target.release()


def test_hidden_states_of_a_chain_are_those_of_its_own_tokens() -> None:
    """The pass also carries accepted tokens that the state has not seen; a head must not be shown theirs."""
    model = families.build("qwen3_next")
    target, needs = Target(model), Needs(hidden=True, layers=(1,))
    cache, text = target.new_cache(1, 32), torch.arange(3, 12).unsqueeze(0)
    with torch.no_grad():
        target.prefill(text, [9], cache, needs)
        target.verify(DraftTree(torch.tensor([[7, 8, 9]]), TreeShape.chain(2)), cache, needs)
        cache.keep([[0, 1]])
        found = target.verify(DraftTree(torch.tensor([[5, 6]]), TreeShape.chain(1)), cache, needs)
        whole = target.features(torch.cat([text, torch.tensor([[7, 8, 5, 6]])], 1), None, needs)
    assert found.hidden is not None and whole.hidden is not None
    torch.testing.assert_close(found.hidden, whole.hidden[:, -2:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.layers[0], whole.layers[0][:, -2:], rtol=1e-4, atol=1e-4)
    target.release()


# Cutting a tree to its trunk


def test_the_trunk_is_the_line_of_first_children_and_ends_where_one_is_not_real() -> None:
    real = torch.tensor([[True, True, True, True, True, False, True, True]])
    shape = TreeShape(torch.tensor([[-1, 0, 0, 1, 1, 3, 3, 2]]), real)
    trunk = DraftTree(torch.arange(10, 18).unsqueeze(0), shape).trunk()
    assert trunk.tokens.tolist() == [[10, 11, 13]]
    assert trunk.shape.is_chain


def test_the_trunk_keeps_the_distributions_of_its_own_nodes() -> None:
    probs = torch.rand(2, 4, 5, generator=torch.Generator().manual_seed(0))
    flags = torch.tensor([[True, False, True, True]] * 2)
    shape = TreeShape(torch.tensor([[-1, 0, 0, 1], [-1, 0, 0, 2]]))
    tree = DraftTree(torch.arange(8).reshape(2, 4), shape, Drawn(probs, flags, with_replacement=False))
    trunk = tree.trunk()
    assert trunk.tokens.tolist() == [[0, 1, 3], [4, 5, 4]]
    assert trunk.real().tolist() == [[True, True, True], [True, True, False]]
    assert trunk.drawn is not None and trunk.drawn.drawn is not None
    assert torch.equal(trunk.drawn.probs[0], probs[0, [0, 1, 3]])
    assert torch.equal(trunk.drawn.drawn[0], flags[0, [0, 1, 3]])


@pytest.mark.nightly
def test_a_drawn_tree_cut_to_its_trunk_keeps_the_distribution_of_the_target() -> None:
    """Chi-square of the second new token on a model with state, with drawn siblings, against exact probabilities."""
    stats = pytest.importorskip("scipy.stats")
    model = families.build("mamba2", initializer_range=0.1)
    prompt = torch.arange(3, 9).unsqueeze(0)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": True, "top_k": 3}
    table = torch.rand(families.VOCAB, families.VOCAB, generator=torch.Generator().manual_seed(1)).softmax(-1)
    counts: dict[tuple[int, ...], int] = {}
    with patched(model, oracle.DrawnTree(table, (2, 2), with_replacement=False)):
        torch.manual_seed(3)
        for _ in range(400):
            new = tuple(model.generate(prompt, **options)[0, 6:8].tolist())
            counts[new] = counts.get(new, 0) + 1
    exact = _two_token_probabilities(model, prompt, top_k=3)
    assert set(counts) <= set(exact)
    seen = [counts.get(pair, 0) for pair in exact]
    assert stats.chisquare(seen, [400 * p for p in exact.values()]).pvalue > 1e-3


def _two_token_probabilities(model: PreTrainedModel, prompt: torch.Tensor, top_k: int) -> dict[tuple[int, ...], float]:
    def following(text: torch.Tensor) -> list[tuple[int, float]]:
        best = model(input_ids=text, use_cache=False).logits[0, -1].topk(top_k)
        return list(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))

    pairs = {}
    for first, p in following(prompt):
        for second, q in following(torch.cat([prompt, torch.tensor([[first]])], 1)):
            pairs[first, second] = p * q
    return pairs


# The check of unknown families


@pytest.mark.parametrize("kind", ["camembert", "roberta", "minimax", "hrm_text", "dory"])
def test_families_whose_guesses_would_change_the_text_are_refused_at_patch(kind: str) -> None:
    model = families.build(kind)
    with pytest.raises(UnsupportedModel, match=r"other logits|cannot read several"):
        selfspec.patch(model, "lookup")
    assert "generate" not in vars(model)


def test_an_encoder_used_as_a_decoder_is_refused_at_patch() -> None:
    model = families.build("bert", is_decoder=False)
    with pytest.raises(UnsupportedModel, match="other logits"):
        selfspec.patch(model, "lookup")


def test_a_model_that_ignores_tree_masks_is_limited_to_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("llama")
    inner = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda **kwargs: inner(**{**kwargs, "attention_mask": None}))
    target = Target(model)
    check_passes(target)
    assert target.chain_only is not None and "other logits on a tree" in target.chain_only
    target.release()


def test_a_model_that_drops_its_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.build("llama")
    inner = model.model.forward
    monkeypatch.setattr(model.model, "forward", lambda **kwargs: inner(**{**kwargs, "cache": None}))
    with pytest.raises(UnsupportedModel, match=r"other logits|cannot read several"):
        selfspec.patch(model, "lookup", self_check=True)


@pytest.mark.parametrize("kind", ["llama", "bloom", "qwen3_next"])
def test_the_check_passes_where_guesses_are_exact_and_leaves_the_model_as_it_was(kind: str) -> None:
    model = families.build(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    target = Target(model)
    reason = target.chain_only
    check_passes(target)
    assert target.chain_only == reason
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    target.release()


# The documentation


def _documented() -> dict[str, list[str]]:
    lines = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if re.match(r"\| .* \| `", line)]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[1].strip("`"): row for row in cells[1:]}


def test_the_documented_table_has_the_tested_families_and_at_least_22_exact_ones() -> None:
    documented = _documented()
    assert list(documented) == list(families.TABLE)
    assert {kind for kind, row in documented.items() if row[2] == "refused"} == set(REFUSED)
    exact = [kind for kind, row in documented.items() if row[7] == row[9] == "exact"]
    assert len(exact) >= 22


@pytest.mark.nightly
@pytest.mark.parametrize("kind", families.TABLE)
def test_the_documented_row_is_what_is_measured(kind: str) -> None:
    documented, measured = _documented()[kind], families.cells(kind, families.row(kind))
    places = [place for place in range(len(measured)) if place != 3]  # the size of rounding depends on the machine
    assert [documented[i] for i in places] == [measured[i] for i in places]
    assert "wrong" not in " ".join(measured)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_no_causal_model_of_transformers_is_silently_wrong(kind: str) -> None:
    try:
        model = families.build(kind)
    except families.TooLarge as large:
        pytest.skip(f"not built: {large}")
    except Exception as error:  # noqa: BLE001 - configurations fail in many ways on sizes they were not made for
        pytest.skip(f"not built: {type(error).__name__}: {error}")
    try:
        with warnings.catch_warnings():
            target = Target(model)
            check_passes(target)
    except UnsupportedModel as refusal:
        pytest.skip(f"refused: {refusal}")
    # Where transformers' own passes with and without a cache disagree (Moshi past its window), its text is the judge.
    assert families.tree_error(model, target=target) < 10 * families.EXACT or families.same_text(model)
