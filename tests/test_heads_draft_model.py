"""A second model as draft: its guesses are its own, read from its own cache, and the text stays the target's."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import oracle
import pytest
import tiny
import tiny_folder
import torch
from scipy.stats import chisquare
from transformers import AutoTokenizer, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import selfspec
from selfspec.draft import Budget, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.heads.draft_model import DraftModel, _without_replacement
from selfspec.tree import DraftTree

torch.set_num_threads(1)


def begin(draft: DraftModel, text: torch.Tensor) -> Any:
    counts = torch.full((text.shape[0],), text.shape[1] - 1)
    return draft.begin(Verified(text[:, :-1], text[:, 1:], counts))


def path(tree: DraftTree, row: int, node: int) -> list[int]:
    tokens: list[int] = []
    while node:
        tokens.insert(0, int(tree.tokens[row, node]))
        node = int(tree.parents.expand_as(tree.tokens)[row, node])
    return tokens


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_draft_equal_to_the_target_is_right_in_every_round(name: str, top_k: int) -> None:
    model = tiny.model(name)
    ids, mask = oracle.left_padded([tiny.text(1, n, seed=n)[0].tolist() for n in (5, 19, 12)])
    wanted = oracle.plain(model, ids, attention_mask=mask, max_new_tokens=17)
    draft = DraftModel.from_model(tiny.model(name), depth=3, nodes=1 + 3 * top_k, top_k=top_k)
    with oracle.patched(model, draft):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=17), wanted)
        found = model.speculation.report()["tokens_per_round"]
        assert found == 4.0 if top_k == 1 else found > 3.0  # a beam may lose the greedy path to likelier ones


@pytest.mark.parametrize("name", tiny.NAMES)
def test_another_model_drafts_for_ragged_rows_and_the_text_stays(name: str) -> None:
    model = tiny.model("llama")
    ids, mask = oracle.left_padded([tiny.text(1, n, seed=n)[0].tolist() for n in (3, 21, 10)])
    wanted = oracle.plain(model, ids, attention_mask=mask, max_new_tokens=20)
    with oracle.patched(model, DraftModel.from_model(tiny.model(name, seed=3))):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=20), wanted)


def test_sampling_from_a_draft_equal_to_the_target_accepts_every_draw() -> None:
    model = tiny.model("gemma3")
    with oracle.patched(model, DraftModel.from_model(tiny.model("gemma3"), depth=3, top_k=1)):
        model.generate(tiny.text(2, 9), max_new_tokens=17, do_sample=True, temperature=0.8, top_k=20, top_p=0.95)
        assert model.speculation.report()["tokens_per_round"] == 4.0


@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_node_carries_the_q_that_a_fresh_pass_gives(name: str) -> None:
    small = tiny.model(name, seed=3)
    draft = DraftModel.from_model(small, depth=3, nodes=9, top_k=3)
    text = tiny.text(2, 14)
    sampling = Sampling(do_sample=True, temperature=0.7, top_k=12, top_p=0.9)
    state = begin(draft, text)
    for step in range(2):
        tree = draft.propose(state, Budget(), sampling, torch.Generator().manual_seed(step))
        tree.check(text[:, -1], tiny.VOCAB)
        assert tree.drawn is not None and tree.nodes == 9 and tree.shape.max_depth == 3
        inner = sorted({int(p) for p in tree.parents[0] if p >= 0})
        for row, node in itertools.product(range(2), inner):
            if not tree.real()[row, node]:
                continue
            ids = torch.cat([text[row], torch.tensor(path(tree, row, node), dtype=torch.long)]).unsqueeze(0)
            scores = small(ids).logits[:, -1].float()
            for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(12), TopPLogitsWarper(0.9)):
                scores = warper(ids, scores)
            torch.testing.assert_close(tree.drawn.probs[row, node], scores.softmax(-1)[0], atol=2e-4, rtol=1e-3)


def test_q_has_a_temperature_of_its_own_when_asked() -> None:
    draft = DraftModel.from_model(tiny.model("llama"), temperature=0.5, sampling_top_k=3)
    state = begin(draft, tiny.text(1, 9))
    tree = draft.propose(state, Budget(), Sampling(True, 1.3), torch.Generator().manual_seed(0))
    assert tree.drawn is not None
    assert int((tree.drawn.probs[0, 0] > 0).sum()) == 3
    greedy = draft.propose(state, Budget(), Sampling(), None)
    assert greedy.drawn is None


def test_fewer_possible_tokens_than_siblings_leave_nodes_that_are_not_real() -> None:
    draft = DraftModel.from_model(tiny.model("llama"), sampling_top_k=1, top_k=3, nodes=8)
    tree = draft.propose(begin(draft, tiny.text(1, 9)), Budget(), Sampling(True), torch.Generator().manual_seed(0))
    ranks = [sum(int(p) == int(tree.parents[0, n]) for p in tree.parents[0, :n]) for n in range(1, tree.nodes)]
    assert tree.real()[0, 1:].tolist()[: len(ranks)] == [
        rank == 0 and bool(tree.real()[0, tree.parents[0, n]]) for n, rank in enumerate(ranks, 1)
    ]


def test_draws_without_replacement_follow_the_distribution() -> None:
    q = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    pairs = _without_replacement(q.expand(1, 20000, 5), 2, torch.Generator().manual_seed(0))[0]
    cells = [(i, j) for i in range(4) for j in range(4) if i != j]
    hoped = [float(q[i] * q[j] / (1 - q[i])) * 20000 for i, j in cells]
    seen = [int(((pairs[:, 0] == i) & (pairs[:, 1] == j)).sum()) for i, j in cells]
    assert sum(seen) == 20000
    assert chisquare(seen, hoped, sum_check=False).pvalue > 1e-6


def test_a_text_longer_than_the_small_model_can_read_is_finished_without_drafts() -> None:
    model, small = tiny.model("llama"), tiny.model("llama")
    small.config.max_position_embeddings = 20
    wanted = oracle.plain(model, ids := tiny.text(2, 9), max_new_tokens=30)
    with oracle.patched(model, DraftModel.from_model(small, depth=3)):
        assert torch.equal(model.generate(ids, max_new_tokens=30), wanted)
        assert 1 < model.speculation.report()["tokens_per_round"] < 3


def test_a_model_in_a_folder_is_named_after_a_colon(tmp_path: Path) -> None:
    folder = tiny_folder.small()
    model = tiny.model("llama")
    wanted = oracle.plain(model, ids := tiny.text(1, 9), max_new_tokens=12)
    for given in (f"draft-model:{folder}", {"kind": "draft-model", "model": folder, "top_k": 1}):
        with oracle.patched(model, given):
            assert torch.equal(model.generate(ids, max_new_tokens=12), wanted)
            assert model.speculation.report()["draft"] == "draft-model"


def test_vocabularies_of_other_sizes_and_other_tokenizers_are_refused(tmp_path: Path) -> None:
    model = tiny.model("llama")
    bytes_model = tiny_folder.save(tmp_path / "bytes")
    with pytest.raises(ConfigError, match=r"258 tokens, the target 97.*not at hand"):
        selfspec.patch(model, f"draft-model:{bytes_model}")
    words = AutoTokenizer.from_pretrained(tiny_folder.small())
    model.config._name_or_path = str(tmp_path / "bytes")
    with pytest.raises(ConfigError, match=r"another tokenizer than the target: '.+' is no token there"):
        selfspec.patch(model, DraftModel.from_model(tiny.model("llama"), words))
    with pytest.raises(ConfigError, match="write draft-model:FOLDER"):
        selfspec.patch(model, "draft-model")
    assert "generate" not in vars(model)


def test_padded_vocabularies_of_one_tokenizer_draft_the_common_part(tmp_path: Path) -> None:
    """Models of one family pad their embeddings to different sizes."""
    folder = tiny_folder.small()
    for own, other in ((97, 110), (110, 97)):
        model, small = tiny.model("llama"), tiny.model("llama", seed=3)
        model.resize_token_embeddings(own, mean_resizing=False)
        small.resize_token_embeddings(other, mean_resizing=False)
        model.config._name_or_path = small.config._name_or_path = folder
        wanted = oracle.plain(model, ids := tiny.text(2, 9), max_new_tokens=12)
        with oracle.patched(model, DraftModel.from_model(small)):
            assert torch.equal(model.generate(ids, max_new_tokens=12), wanted)
            model.generate(ids, max_new_tokens=12, do_sample=True)


@pytest.mark.parametrize(
    "settings",
    [{"nodes": 0}, {"depth": 0}, {"temperature": 0.0}, {"sampling_top_p": 0.0}, {"sampling_top_k": -1}],
    ids=str,
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DraftModel.from_model(tiny.model("llama"), **settings)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "lookup", "stranger": 1}, "no settings.*stranger.*max_ngram"),
        ({"model": "x"}, "wants a `kind`"),
        ("layer-skip:x", "takes nothing after a colon"),
        ({"kind": "medusa"}, "must be trained first"),
    ],
    ids=str,
)
def test_drafts_named_wrongly_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        selfspec.patch(tiny.model("llama"), given)
