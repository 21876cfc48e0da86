"""The screened output head against the full product, and when it is used."""

from __future__ import annotations

import copy
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec import likeliest
from selfspec.inference.patch import patch, unpatch
from selfspec.likeliest import Likeliest
from selfspec.output_head import FewRowsHead
from selfspec.screen import Screen, _digits
from selfspec.target import Target

pytestmark = pytest.mark.skipif(
    not Screen.applies(torch.empty(1, 1).expand(40_000, 1)), reason="no kernels for bytes on this processor"
)
WIDTH, VOCAB = 24, 40_000


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[VOCAB, WIDTH]` with a few channels and a few rows much larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(VOCAB, WIDTH, generator=generator) * 0.05
    weight[:, 3] *= 20
    weight[::997] *= 3
    return weight.to(dtype)


def states(rows: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, WIDTH, generator=generator)
    hidden[:, 5] *= 30
    return hidden * torch.logspace(-3, 3, rows).unsqueeze(1)


def exact(weight: Tensor, hidden: Tensor, bias: Tensor | None = None) -> Tensor:
    """Logits by float64, as the judge."""
    logits = hidden.double() @ weight.double().t()
    return logits if bias is None else logits + bias.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_it_finds_the_largest(dtype: torch.dtype, rows: int, biased: bool) -> None:
    weight, hidden = weights(dtype=dtype), states(rows).to(dtype)
    bias = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2)).to(dtype) if biased else None
    wanted = exact(weight, hidden, bias).float().to(dtype).argmax(1)
    found = Screen(weight, bias, hidden.float().square().mean(0).sqrt())(hidden)
    assert found is not None and torch.equal(found, wanted)


@pytest.mark.parametrize("balanced", [False, True])
def test_the_bound_holds_for_every_token(balanced: bool) -> None:
    """The inequality of the module, term by term, in float64, on scores as the kernel gives them."""
    weight, hidden = weights(), states(16)
    screen = Screen(weight, None, states(99).abs().mean(0) if balanced else None)
    hidden, weight = hidden * screen.balance, weight / screen.balance
    unit = hidden / hidden.abs().amax(1, keepdim=True)
    digits, left = _digits(unit)
    scores = torch.cat([screen._scores(part, digits, None) for part in screen.parts], 1).double()
    errors = torch.cat([part.error for part in screen.parts]).double()
    size = unit.double().norm(dim=1, keepdim=True)
    bound = errors * (size + left) + screen.norm * (left + 2.0**-16 * size)
    missed = (exact(weight, unit) - scores).abs()
    assert (missed <= bound).all()
    assert missed.max() > 1e-3 * bound.max(), "a bound that is never approached says nothing"


def test_tokens_that_tie_are_taken_as_argmax_takes_them() -> None:
    for row in range(3):
        weight, hidden = weights(), states(3)[row : row + 1]
        best = int(exact(weight, hidden).argmax())
        weight[[11, 39_000]] = weight[best].clone()
        assert int(exact(weight, hidden).float().argmax()) == min(11, best)
        assert int(Screen(weight, None)(hidden)) == min(11, best)  # type: ignore[arg-type]


def test_a_runner_up_within_the_error_of_a_byte_is_still_told_apart() -> None:
    """Two rows that become the same bytes, and differ by 1e-5 of their size."""
    weight, hidden = weights(), states(1)
    token = int(exact(weight, hidden).argmax())
    for other in (token - 1, token + 1):
        near = weight[token].clone()
        near[0] += 1e-5 * near.abs().max() * (1 if hidden[0, 0] > 0 else -1)
        weight[other] = near
        assert int(Screen(weight, None)(hidden)) == int(exact(weight, hidden).argmax()) == other  # type: ignore[arg-type]
        weight[other] = 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_what_it_cannot_tell_it_leaves_to_all_logits(value: float) -> None:
    hidden = states(2)
    hidden[1] = value
    assert Screen(weights(), None)(hidden) is None
    flat = torch.ones(VOCAB, WIDTH)
    assert Screen(flat, None)(states(1)) is None, "all tokens are candidates"


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e-30, 1e30])
def test_sizes_of_channels_change_no_result(value: float) -> None:
    """They come from whatever was seen; at worst there are more candidates."""
    weight, hidden = weights(), states(3)
    sizes = states(9).abs().mean(0)
    sizes[7] = value
    found = Screen(weight, None, sizes)(hidden)
    assert found is None or torch.equal(found, exact(weight, hidden).argmax(1))


def test_balanced_channels_leave_fewer_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hidden = weights(), states(8)
    counted: list[int] = []
    found = Screen._candidates

    def count(*arguments: Any) -> Any:
        rows, tokens = found(*arguments)
        counted.append(len(rows))
        return rows, tokens

    monkeypatch.setattr(Screen, "_candidates", count)
    for sizes in (None, hidden.div(hidden.norm(dim=1, keepdim=True)).square().mean(0).sqrt()):
        Screen(weight, None, sizes)(hidden)
    assert counted[1] < counted[0]


def test_it_sees_that_weights_have_changed() -> None:
    weight = weights()
    screen = Screen(weight, None)
    assert not screen.outdated
    weight.data[17, 3] += 1e-3
    assert screen.outdated


def let_it_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products take longer than screens, whatever the clock says."""
    seconds = itertools.cycle([2.0, 1.0])
    monkeypatch.setattr(likeliest, "_timed", lambda work: (work(), next(seconds)))


def ready(weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> Likeliest:
    """Prepared, and told that it pays."""
    let_it_pay(monkeypatch)
    made = Likeliest(weight, None, lambda rows: rows @ weight.t())
    made.prepare()
    return made


def test_a_short_text_does_not_pay_for_the_copy() -> None:
    weight, hidden = weights(), states(1)
    made = Likeliest(weight, None, lambda rows: rows @ weight.t())
    assert made(hidden) is None and made._screen is None
    made.spent(2e-8 * weight.numel() / 2)
    assert made(hidden) is None and made._screen is None
    made.spent(2e-8 * weight.numel())
    made(hidden)
    assert made._screen is not None


def test_it_is_used_where_it_pays_only(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hidden = weights(), states(2)
    seconds = iter([2.0, 1.0, 1.0, 2.0])  # two rows: product, screen; one row: product, screen
    monkeypatch.setattr(likeliest, "_timed", lambda work: (work(), next(seconds)))
    made = Likeliest(weight, None, lambda rows: rows @ weight.t())
    made.prepare()
    assert made(hidden) is not None and made(hidden) is not None
    assert made(hidden[:1]) is None and made(hidden[:1]) is None
    assert made(states(65)) is None


def test_changed_weights_are_screened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hidden = weights(), states(4)
    made = ready(weight, monkeypatch)
    assert made(hidden) is not None
    weight.data.copy_(weights(seed=5))
    made.begin()
    assert made(hidden) is None
    made.prepare()
    assert torch.equal(made(hidden), exact(weight, hidden).argmax(1))  # type: ignore[arg-type]


def test_a_head_that_needs_all_logits_too_often_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made = ready(torch.ones(VOCAB, WIDTH), monkeypatch)
    for _ in range(20):
        assert made(states(1)) is None
    assert made.useless and made._screen is None


def test_a_wrong_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    made = ready(weights(), monkeypatch)
    monkeypatch.setattr(Screen, "__call__", lambda self, hidden: torch.zeros(len(hidden), dtype=torch.long))
    assert made(states(3)) is None and made.useless
    assert "wrong on this processor" in caplog.text


def test_threads_that_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hidden = weights(), states(3)
    made, wanted, found = ready(weight, monkeypatch), exact(weights(), states(3)).argmax(1), []
    monkeypatch.setattr(Likeliest, "_paid", lambda *_: True)  # clocks of several threads would mix
    threads = [threading.Thread(target=lambda: found.append(made(hidden))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = [one for one in found if one is not None]
    assert told and all(torch.equal(one, wanted) for one in told)


def wide_model(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(3)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=1, eos_token_id=None, bos_token_id=1, **sizes, **options)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("guard", [False, True])
def test_generate_writes_what_it_wrote(batch: int, guard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_model()
    prompt = torch.randint(2, VOCAB, (batch, 9), generator=torch.Generator().manual_seed(batch))
    arguments = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "do_sample": False}
    wanted = model.generate(prompt, max_new_tokens=40, **arguments)
    asked = []
    called = Screen.__call__
    monkeypatch.setattr(Screen, "__call__", lambda self, rows: asked.append(len(rows)) or called(self, rows))
    let_it_pay(monkeypatch)
    patch(model, {"kind": "lookup"}, guard=guard)
    model.speculation.target.screen()
    assert torch.equal(model.generate(prompt, max_new_tokens=40, **arguments), wanted)
    assert len(asked) > 5
    told = len(asked)
    scored = model.generate(prompt, max_new_tokens=12, output_scores=True, return_dict_in_generate=True, **arguments)
    assert torch.equal(scored.sequences, wanted[:, : 9 + 12]) and len(scored.scores) == 12
    penal = model.generate(prompt, max_new_tokens=12, repetition_penalty=1.3, **arguments)
    assert len(asked) == told, "scores and processors need all logits"
    unpatch(model)
    assert torch.equal(penal, model.generate(prompt, max_new_tokens=12, repetition_penalty=1.3, **arguments))


def test_the_guard_knows_that_sampled_rounds_cost_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They make all logits, so greedy and sampled calls have cost tables of their own."""
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    let_it_pay(monkeypatch)
    model = wide_model()
    prompt = torch.randint(2, VOCAB, (1, 9), generator=torch.Generator().manual_seed(4))
    patch(model, {"kind": "lookup"}, guard=True)
    guarding = model.speculation.guarding
    guarding.seconds = 0.0
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 0}, {"do_sample": False, "output_scores": True}):
        model.generate(prompt, max_new_tokens=8, **options)
    greedy, sampled = guarding._tables[False], guarding._tables[True]
    assert (greedy.circumstances["logits"], sampled.circumstances["logits"]) == ("likeliest", "all")
    assert len(list(tmp_path.glob("costs/*.json"))) == 2
    unpatch(model)


def test_weights_trained_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide_model()
    prompt = torch.randint(2, VOCAB, (1, 9), generator=torch.Generator().manual_seed(4))
    let_it_pay(monkeypatch)
    patch(model, {"kind": "lookup"}, guard=False)
    model.speculation.target.screen()
    first = model.generate(prompt, max_new_tokens=30, do_sample=False)
    model.lm_head.weight.data.copy_(wide_model().lm_head.weight.flip(0))
    second = model.generate(prompt, max_new_tokens=30, do_sample=False)
    unpatch(model)
    assert torch.equal(second, model.generate(prompt, max_new_tokens=30, do_sample=False))
    assert not torch.equal(first, second)


def test_soft_caps_and_negative_scales_are_not_screened() -> None:
    """They may make the largest logit equal to others, or the smallest one."""
    target = Target(wide_model())
    assert target.screens
    target.config.final_logit_softcapping = 30.0
    assert not Target(target.model).screens
    target.config.final_logit_softcapping, target.config.logit_scale = None, -1.0
    assert not Target(target.model).screens


def test_a_copy_of_a_head_starts_without() -> None:
    head = FewRowsHead(weights(), None, screened=True)
    head.prepare()
    head.likeliest(states(2).unsqueeze(0))
    assert copy.deepcopy(head).likeliest(states(2).unsqueeze(0)) is None
