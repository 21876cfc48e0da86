"""Heads that draft in 8 bits a weight: near the float product, exact text, and nothing of it in training and files."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from selfspec.checkpoint import load_head, save_head
from selfspec.heads.eagle import Eagle, EagleConfig
from selfspec.heads.hydra import Hydra, HydraConfig
from selfspec.heads.medusa import Medusa, MedusaConfig
from selfspec.inference.guard.costs import draft_key
from selfspec.inference.patch import patch, unpatch
from selfspec.light import LightProduct, packs
from selfspec.resolve import resolve_draft
from selfspec.target import Target

pytestmark = pytest.mark.skipif(not packs(torch.empty(256, 256)), reason="no kernels for bytes on this processor")
SIZE, VOCAB = 256, 512
HEADS: dict[str, Any] = {
    "eagle": lambda target: Eagle.from_target(EagleConfig(num_layers=1), target),
    "medusa": lambda target: Medusa.from_target(MedusaConfig(num_heads=2), target),
    "medusa, an output each": lambda target: Medusa.from_target(
        MedusaConfig(num_heads=2, output_per_head=True), target
    ),
    "hydra": lambda target: Hydra.from_target(HydraConfig(num_heads=2), target),
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=SIZE,
        intermediate_size=SIZE,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def test_a_product_is_near_the_float_one() -> None:
    """A weight of 8 bits is off by at most 1/254 of its row's largest, an input of 7 bits by 1/127 of their range."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(300, SIZE, generator=generator), torch.randn(2, 3, SIZE, generator=generator)
    bias = torch.randn(300, generator=generator)
    wanted = x.double() @ weight.double().t() + bias
    found = LightProduct()(x, weight, bias)
    assert found.shape == wanted.shape
    of_weight = weight.abs().amax(1) / 254 * x.abs().sum(-1, keepdim=True)
    of_input = (x.max() - x.min()) / 127 / 2 * weight.abs().sum(1) * 1.01
    error = (found - wanted).abs()
    assert (error <= of_weight + of_input).all() and error.max() > 1e-4
    assert error.square().mean().sqrt() < 0.02 * wanted.square().mean().sqrt()


def test_a_weight_that_changes_is_packed_anew() -> None:
    weight, x = torch.ones(300, SIZE), torch.ones(1, SIZE)
    product = LightProduct()
    assert product(x, weight, None)[0, 0] == pytest.approx(SIZE, rel=0.01)
    weight.mul_(2)
    assert product(x, weight, None)[0, 0] == pytest.approx(2 * SIZE, rel=0.01)
    assert product(x, weight.clone().mul_(2), None)[0, 0] == pytest.approx(4 * SIZE, rel=0.01)


def test_a_weight_in_the_memory_of_another_is_packed_anew() -> None:
    """An allocator hands out the memory of a weight that is gone as soon as another of its size is asked for."""
    layer, x, product = torch.nn.Linear(SIZE, 300, bias=False), torch.ones(1, SIZE), LightProduct()
    with torch.no_grad():
        for value in range(1, 9):
            del layer.weight
            layer.weight = torch.nn.Parameter(torch.full((300, SIZE), float(value)))
            assert product(x, layer.weight, None)[0, 0] == pytest.approx(value * SIZE, rel=0.01)


def test_a_bias_that_changes_is_packed_anew() -> None:
    weight, bias, x = torch.ones(300, SIZE), torch.zeros(300), torch.ones(1, SIZE)
    product = LightProduct()
    product(x, weight, bias)
    assert product(x, weight, bias + 100)[0, 0] == pytest.approx(SIZE + 100, rel=0.01)


def test_weights_made_in_inference_mode_count_no_versions() -> None:
    with torch.inference_mode():
        weight, x = torch.ones(300, SIZE), torch.ones(1, SIZE)
        assert LightProduct()(x, weight, None)[0, 0] == pytest.approx(SIZE, rel=0.01)


def test_a_product_can_be_copied_and_sent() -> None:
    product, weight, x = LightProduct(), torch.ones(300, SIZE), torch.ones(1, SIZE)
    wanted = product(x, weight, None)
    for copied in (copy.deepcopy(product), pickle.loads(pickle.dumps(product))):
        assert torch.equal(copied(x, weight, None), wanted)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_row_leaves_the_others(value: float) -> None:
    weight, x = torch.randn(300, SIZE), torch.randn(2, SIZE)
    x[0, 3] = value
    found = LightProduct()(x, weight, None)
    assert torch.allclose(found[1], x[1] @ weight.t(), atol=1.0) and found.shape == (2, 300)


@pytest.mark.parametrize("kind", HEADS)
def test_text_is_exact_and_guesses_are_about_the_same(kind: str, model: LlamaForCausalLM, tmp_path: Path) -> None:
    target = Target(model)
    torch.manual_seed(1)
    save_head(HEADS[kind](target), tmp_path / "head")
    target.release()
    prompt = torch.arange(3, 20).unsqueeze(0)
    wanted = model.generate(prompt, max_new_tokens=30, do_sample=False)
    for light in (False, True):
        patch(model, tmp_path / "head", light=light, guard=False)
        try:
            assert model.speculation.draft.light is light
            assert torch.equal(model.generate(prompt, max_new_tokens=30, do_sample=False), wanted)
        finally:
            unpatch(model)


@pytest.mark.parametrize("kind", HEADS)
def test_heads_of_a_bfloat16_model_are_light_too_unless_they_are_too_large(
    kind: str, model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = copy.deepcopy(model).bfloat16()
    target = Target(short)
    torch.manual_seed(1)
    save_head(HEADS[kind](target), tmp_path / "head")
    target.release()

    def drafted(**options: Any) -> tuple[set[torch.dtype], bool, int]:
        patch(short, tmp_path / "head", guard=False, **options)
        try:
            draft = short.speculation.draft
            found = short.generate(torch.arange(3, 20).unsqueeze(0), max_new_tokens=12, do_sample=False)
            return {p.dtype for p in draft.parameters()}, draft.light, found.shape[1]
        finally:
            unpatch(short)

    assert drafted() == ({torch.float32}, True, 29)
    assert drafted(light=False) == ({torch.bfloat16}, False, 29)
    monkeypatch.setattr("selfspec.light._LARGEST", 2**14)
    dtypes, _, length = drafted()
    assert dtypes == {torch.bfloat16} and length == 29


@pytest.mark.parametrize("kind", HEADS)
def test_training_and_files_know_nothing_of_it(kind: str, model: LlamaForCausalLM, tmp_path: Path) -> None:
    target = Target(model)
    torch.manual_seed(1)
    head = HEADS[kind](target)
    save_head(head, tmp_path / "float")
    plain = head.output(torch.ones(head.output.rows.shape[0] if head.output.rows.ndim == 3 else 1, 1, SIZE))
    head.lighten()
    copied = copy.deepcopy(head)
    for one in (head, copied):
        hidden = torch.ones(one.output.rows.shape[0] if one.output.rows.ndim == 3 else 1, 1, SIZE)
        assert torch.equal(one.output(hidden), plain), "with gradients the float weights are used"
        with torch.no_grad():
            near = one.output(hidden)
        assert not torch.equal(near, plain) and torch.allclose(near, plain, atol=0.05 * float(plain.abs().max()))
    save_head(copied, tmp_path / "light")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("float", "light"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    target.release()


def copied_over(head: Any, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in head.named_parameters():
            value.copy_(weights[name])


def trained(head: Any, weights: dict[str, torch.Tensor]) -> None:
    """One step of gradient descent of rate 1, whose gradient is the way to the new weights."""
    for name, value in head.named_parameters():
        value.grad = value.detach() - weights[name]
    torch.optim.SGD(head.parameters(), lr=1.0).step()


def through_data(head: Any, weights: dict[str, torch.Tensor]) -> None:
    """As docs/cpu.md says: the light head does not see this, and has to be told."""
    for name, value in head.named_parameters():
        value.data.copy_(weights[name])
    head.lighten()


CHANGES: dict[str, Any] = {
    "copy_": copied_over,
    "load_state_dict": lambda head, weights: head.load_state_dict(weights),
    "load_state_dict, assign": lambda head, weights: head.load_state_dict(
        {name: value.clone() for name, value in weights.items()}, assign=True
    ),
    "a step of training": trained,
    ".data, then lighten()": through_data,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["eagle", "medusa, an output each"])  # one with light layers, one with light outputs
def test_weights_of_a_light_head_that_change_are_seen(kind: str, change: str, model: LlamaForCausalLM) -> None:
    target = Target(model)
    torch.manual_seed(1)
    head, other = HEADS[kind](target), HEADS[kind](target)
    with torch.no_grad():
        for value in other.parameters():
            value.copy_(torch.randn(value.shape))
    head.lighten()
    x = torch.randn(2, 1, 2 * SIZE)
    parts = [part for part in head.modules() if "forward" in vars(part)] or [head.output]

    def read() -> list[torch.Tensor]:
        return [part(x[..., : part.in_features] if part is not head.output else x[..., :SIZE]) for part in parts]

    with torch.no_grad():
        before = read()
    CHANGES[change](head, other.state_dict())
    with torch.no_grad():
        found = read()
    for old, new, exact in zip(before, found, read(), strict=True):  # with gradients the float weights are used
        near = 0.05 * float(exact.abs().max())
        assert torch.allclose(new, exact, atol=near) and not torch.allclose(old, exact, atol=near)
    target.release()


def test_the_targets_own_layers_stay_exact(model: LlamaForCausalLM, tmp_path: Path) -> None:
    target = Target(model)
    save_head(HEADS["eagle"](target), tmp_path / "head")
    head = resolve_draft(tmp_path / "head", target)
    assert not any("forward" in vars(part) for part in model.modules())
    assert any("forward" in vars(part) for part in head.modules())  # type: ignore[attr-defined]
    assert draft_key(head) != draft_key(load_head(tmp_path / "head", target)), "they cost differently"
    target.release()


def test_small_layers_stay_as_they_are() -> None:
    assert not packs(torch.empty(64, 64)) and not packs(torch.empty(256, 256, dtype=torch.bfloat16))
    assert not packs(torch.empty(1, 1).expand(2**14, 2**13)), "packing would take seconds"
