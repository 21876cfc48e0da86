"""Linear layers for few rows: the same products, chosen by the clock, and only while a tree is verified."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec import few_rows
from selfspec.draft import Needs
from selfspec.few_rows import FewRowsForward, FewRowsLayers, by_blocks, by_rows, is_own
from selfspec.inference.patch import patch, unpatch
from selfspec.target import Target
from selfspec.tree import DraftTree, TreeShape
from selfspec.wrapped import is_wrapped

SIZE, VOCAB = 384, 211


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=SIZE,
        intermediate_size=2 * SIZE,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        attention_bias=True,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def blocks_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Only the other form is used; the numbers of rows it was used for."""
    used: list[int] = []

    def noted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        used.append(len(x))
        return by_blocks(x, weight)

    monkeypatch.setattr(few_rows.Contest, "forms", (noted,))
    yield used


@pytest.mark.parametrize("rows", range(1, 18))
def test_the_forms_give_one_product(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 40, generator=generator), torch.randn(30, 40, generator=generator)
    wanted = x.double() @ weight.double().t()
    for form in (by_rows, by_blocks):
        found = form(x, weight)
        assert found.is_contiguous() and torch.allclose(found.double(), wanted, atol=1e-5)


def test_the_faster_form_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def slow(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        now[0] += 2.0
        return by_rows(x, weight)

    def quick(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        now[0] += 1.0
        return by_blocks(x, weight)

    monkeypatch.setattr(few_rows.time, "perf_counter", lambda: now[0])
    for forms in ((slow, quick), (quick, slow)):
        monkeypatch.setattr(few_rows.Contest, "forms", forms)
        contest = few_rows.Contest()
        for _ in range(2 * few_rows._FEW_TRIES):
            assert contest.winner is None
            contest(torch.ones(2, 4), torch.ones(3, 4))
        assert contest.winner is quick, "twice as slow is clear after a few tries"


def test_forms_that_are_nearly_alike_are_tried_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    took = {"by_rows": 1.1, "by_columns": 1.0, "by_fours": 3.0}
    used: list[str] = []

    def form(name: str) -> few_rows.Product:
        def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            used.append(name)
            now[0] += took[name]
            return by_rows(x, weight)

        return product

    monkeypatch.setattr(few_rows.time, "perf_counter", lambda: now[0])
    contest = few_rows.Contest(tuple(map(form, took)))
    while contest.winner is None:
        contest(torch.ones(2, 4), torch.ones(3, 4))
    contest(torch.ones(2, 4), torch.ones(3, 4))
    assert used[-1] == "by_columns"
    assert used.count("by_fours") == few_rows._FEW_TRIES and used.count("by_rows") == few_rows._TRIES


def test_text_is_exact_and_the_model_gets_its_layers_back(model: LlamaForCausalLM, blocks_win: list[int]) -> None:
    prompt = torch.randint(2, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    arguments = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "do_sample": False}
    wanted = model.generate(prompt, max_new_tokens=40, **arguments)
    patch(model, "lookup", guard=False)
    assert torch.equal(model.generate(prompt, max_new_tokens=40, **arguments), wanted)
    assert blocks_win and set(blocks_win) <= set(range(2, 17))
    assert not is_wrapped(model), "such layers do nothing by themselves"
    unpatch(model)
    assert not any("forward" in vars(part) for part in model.modules())


def test_calls_that_come_at_once_leave_nothing_behind(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would replace some of the layers, and only one would give them back."""
    target, applies = Target(model), few_rows._applies
    monkeypatch.setattr(few_rows, "_applies", lambda weight: time.sleep(0.01) or applies(weight))
    threads = [threading.Thread(target=target.few_rows) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    target.release()
    assert not any("forward" in vars(part) for part in model.modules())


def test_only_verification_uses_them(model: LlamaForCausalLM, blocks_win: list[int]) -> None:
    target = Target(model)
    cache = target.new_cache(1, 64)
    text = torch.randint(2, VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        target.prefill(text[:, :8], [8], cache, Needs())
        found = target.verify(DraftTree(text[:, 8:], TreeShape.chain(3)), cache, Needs()).logits
        assert len(blocks_win) == 14, "seven products in each of two layers"
        wanted = model(text).logits
        model(text[:, :3])
        target.features(text, None, Needs(hidden=True))
    assert len(blocks_win) == 14
    assert torch.allclose(found, wanted[:, 8:], atol=1e-5)
    other = threading.Thread(target=lambda: model(text[:, :3]))
    with target.few_rows():
        other.start()
        other.join()
        assert len(blocks_win) == 14, "a context is that of one thread"
        assert torch.equal(model.to(torch.bfloat16)(text[:, :3]).logits, model(text[:, :3]).logits)
        assert len(blocks_win) == 14, "other dtypes are left alone"
    target.release()


def test_a_copy_of_the_model_has_layers_of_its_own(model: LlamaForCausalLM, blocks_win: list[int]) -> None:
    target = Target(model)
    with target.few_rows():
        twin = copy.deepcopy(model)
        twin.model.layers[0].mlp.up_proj.weight.data.zero_()
        text = torch.arange(3, 7).unsqueeze(0)
        assert not torch.allclose(model(text).logits, twin(text).logits)
    stand_in = vars(twin.model.layers[0].mlp.up_proj)["forward"]
    assert is_own(stand_in) and stand_in.layer is twin.model.layers[0].mlp.up_proj
    target.release()
    assert not any("forward" in vars(part) for part in model.modules())


def test_layers_that_were_replaced_or_are_small_stay_as_they_are() -> None:
    large, small, replaced = nn.Linear(512, 512), nn.Linear(8, 8), nn.Linear(512, 512)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    half = nn.Linear(512, 512, dtype=torch.bfloat16)
    layers = FewRowsLayers([large, small, replaced, half])
    assert isinstance(vars(large)["forward"], FewRowsForward)
    assert not any(is_own(vars(part).get("forward")) for part in (small, replaced, half))
    wrapped = vars(large)["forward"]
    large.forward = lambda x: wrapped(x) + 1  # type: ignore[method-assign]
    layers.release()
    x = torch.ones(2, 512)
    assert torch.equal(large(x), nn.functional.linear(x, large.weight, large.bias) + 1), "wrapped since: left in place"
