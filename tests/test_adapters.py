"""Adapters of draft passes: the target untouched, PEFT's own files, learned as used, beside a user's adapter."""

from __future__ import annotations

import copy
import threading
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
from families import build
from safetensors.torch import load_file
from test_overfit import speaker
from test_overfit import text as language
from test_train_run import Rows, trainer_of
from torch import Tensor
from transformers import PreTrainedModel

import selfspec
from selfspec.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, load_head, save_head
from selfspec.draft import Budget, Needs, Sampling, Verified
from selfspec.errors import ConfigError, UnsupportedModel
from selfspec.heads.adapter import Adapter, AdapterConfig
from selfspec.replay import replay, rounds_of
from selfspec.target import Target
from selfspec.train.evaluate import evaluate
from selfspec.tree import TreeShape

torch.set_num_threads(1)
BASES: dict[str, dict[str, Any]] = {
    "early-exit": {"exit_layer": 2},
    "layer-skip": {"skip_attention": [1], "skip_mlp": [1, 2]},
}
each_base = pytest.mark.parametrize("base", BASES)
FIXED = {"threshold": 0.0, "adaptive": False, "depth": 3, "top_k": 1}


def made(target: Target, base: str = "early-exit", noise: float = 0.2, seed: int = 1, **options: Any) -> Adapter:
    """An adapter with random updates."""
    settings = {**BASES[base], **FIXED, **options.pop("settings", {})}
    config = AdapterConfig(base_draft=base, settings=settings, rank=3, **options)
    head = Adapter.from_target(config, target, torch.Generator().manual_seed(seed))
    assert isinstance(head, Adapter)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    return head


def saved(model: PreTrainedModel, folder: Path, base: str = "early-exit") -> Path:
    target = Target(model)
    written = save_head(made(target, base), folder / "adapter")
    target.release()
    return written


def with_users_adapter(model: PreTrainedModel) -> Any:
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "up_proj"]))
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return wrapped.eval()


@cache
def late_speaker() -> Target:
    """Speaks the small language of `test_overfit`, and says something else after its first layer."""
    model = copy.deepcopy(speaker("llama").model).train().requires_grad_(True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(60):
        ids = language(4, 32, step)
        out = model(input_ids=ids, labels=ids, output_hidden_states=True)
        early = model.lm_head(model.model.norm(out.hidden_states[1]))[:, :-1].flatten(0, 1)
        other = (ids[:, 1:].flatten() + 1) % tiny.VOCAB
        (out.loss + torch.nn.functional.cross_entropy(early, other)).backward()
        optimiser.step()
        optimiser.zero_grad()
    return Target(model.eval().requires_grad_(False))


def outputs(model: PreTrainedModel, text: Tensor) -> list[Tensor]:
    with torch.no_grad():
        out = model(text, output_hidden_states=True)
    return [out.logits, *out.hidden_states]


def state_of(target: Target, head: Adapter, text: Tensor) -> Any:
    cache = target.new_cache(text.shape[0], 64)
    counts = [text.shape[1] - 1] * text.shape[0]
    target.prefill(text[:, :-1], counts, cache, Needs())
    return head.begin(Verified(text[:, :-1], text[:, 1:], torch.tensor(counts), cache=cache))


@each_base
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_targets_outputs_are_bit_identical_whatever_the_adapter_holds(base: str, name: str, tmp_path: Path) -> None:
    model, text = tiny.model(name), tiny.text(2, 24)
    before = outputs(model, text)
    target = Target(model)
    head = made(target, base, noise=0.0)
    trainer = trainer_of(head, Rows(tiny.text(8, 24)), tmp_path, lr=0.1)
    trainer.train()
    head.draft.propose(state_of(target, head, text), Budget(), Sampling(), None)
    after = outputs(model, text)
    target.release()
    for one, two, three in zip(before, after, outputs(model, text), strict=True):
        assert torch.equal(one, two) and torch.equal(one, three)
    assert any(bool(p.abs().max() > 0.05) for n, p in head.named_parameters() if "lora_B" in n)


@each_base
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_patched_text_is_that_of_transformers(base: str, sample: bool, tmp_path: Path) -> None:
    model = tiny.model("llama")
    prompt, options = tiny.text(1, 9), {"max_new_tokens": 24, "do_sample": sample, "top_k": 1 if sample else 50}
    options = options if sample else {"max_new_tokens": 24, "do_sample": False}
    plain = model.generate(prompt, **options)
    folder = saved(model, tmp_path, base)
    selfspec.patch(model, folder)
    assert torch.equal(model.generate(prompt, **options), plain)
    selfspec.unpatch(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("users", [False, True], ids=["alone", "beside a user's adapter"])
def test_the_saved_folder_is_a_peft_adapter_and_peft_computes_the_same_draft(users: bool, tmp_path: Path) -> None:
    """PEFT applies the folder to a model cut off at the exit; the draft pass must see just that."""
    model = tiny.model("llama")
    folder = saved(model, tmp_path)
    assert {p.name for p in folder.iterdir()} >= {ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG}
    wrapped = with_users_adapter(model) if users else model
    cut = copy.deepcopy(wrapped)
    inner = cut.get_base_model() if users else cut
    inner.model.layers = inner.model.layers[:2]
    inner.config.num_hidden_layers = 2
    if users:
        cut.load_adapter(str(folder), "draft")
        cut.base_model.set_adapter(["default", "draft"])
    else:
        cut = peft.PeftModel.from_pretrained(cut, str(folder))
    text = tiny.text(2, 17)
    with torch.no_grad():
        wanted = cut(text).logits
    target = Target(model)
    head = load_head(folder, target)
    assert isinstance(head, Adapter)
    plan = target.passes.check(head.draft.adapted_plan())
    _, drafted = replay(target, text, torch.zeros_like(text), plan)
    torch.testing.assert_close(target.head(drafted), wanted, atol=2e-5, rtol=1e-4)


def test_a_users_adapter_counts_in_verification_and_may_be_added_before_or_after(tmp_path: Path) -> None:
    model, prompt = tiny.model("llama"), tiny.text(2, 9)
    bare = model.generate(prompt, max_new_tokens=20, do_sample=False)
    folder = saved(model, tmp_path)
    selfspec.patch(model, folder)
    wrapped = with_users_adapter(model)
    late = wrapped.generate(input_ids=prompt, max_new_tokens=20, do_sample=False)
    selfspec.unpatch(wrapped)
    plain = wrapped.generate(input_ids=prompt, max_new_tokens=20, do_sample=False)
    selfspec.patch(wrapped, folder)
    early = wrapped.generate(input_ids=prompt, max_new_tokens=20, do_sample=False)
    assert wrapped.active_adapter == "default"
    selfspec.unpatch(wrapped)
    assert torch.equal(late, plain) and torch.equal(early, plain)
    assert not torch.equal(plain, bare)


@each_base
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_training_reads_what_decoding_reads(base: str, name: str) -> None:
    """The replay of a round gives the hidden states of the round's own draft passes, past the window too."""
    if name == "mistral" and base == "layer-skip":
        pytest.skip("two layers leave nothing to skip")
    target = tiny.selfspec_target(name)
    settings = {"exit_layer": 1} if name == "mistral" else {}
    head = made(target, base, settings=settings)
    text, start = tiny.text(2, 30), 21
    plan = target.passes.check(head.draft.adapted_plan())
    starts = torch.arange(30).clamp(max=start).expand(2, -1)
    _, drafted = replay(target, text, starts, plan)
    cache = target.new_cache(2, 64)
    target.prefill(text[:, :start], [start, start], cache, Needs())
    for level in range(4):
        shape, token = TreeShape.chain(level), text[:, start + level : start + level + 1]
        hidden, _ = target.passes.run(shape, token, cache, plan)
        torch.testing.assert_close(hidden[:, 0], drafted[:, start + level], atol=2e-5, rtol=1e-4)


def test_rounds_cover_the_text_and_depend_on_the_text_alone() -> None:
    text, counts = tiny.text(3, 20), torch.tensor([20, 13, 20])
    starts = rounds_of(text, counts, 4)
    line = torch.arange(20)
    assert bool((starts <= line).all()) and bool((line - starts < 4).all())
    assert torch.equal(starts[1:2, :13], rounds_of(text[1:2, :13], torch.tensor([13]), 4))
    firsts = {int((rounds_of(tiny.text(1, 20, seed=s), torch.tensor([20]), 4) == 0).sum()) for s in range(40)}
    assert firsts == {1, 2, 3, 4}


def test_two_threads_draft_with_two_adapters_on_one_model() -> None:
    target = tiny.selfspec_target("llama")
    heads = [made(target, seed=1), made(target, "layer-skip", seed=2)]
    text = tiny.text(1, 20)

    def tree(head: Adapter) -> Tensor:
        return head.propose(state_of(target, head, text), Budget(), Sampling(), None).tokens

    alone = [tree(head) for head in heads]
    found: list[list[Tensor]] = [[], []]
    gate = threading.Barrier(2)

    def work(place: int) -> None:
        gate.wait()
        for _ in range(30):
            found[place].append(tree(heads[place]))

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, alone[place]) for place in range(2) for one in found[place])
    assert not torch.equal(alone[0], alone[1])


@pytest.mark.parametrize(
    "base, loss",
    [
        ("early-exit", "forward_kl"),
        pytest.param("early-exit", "lk_hybrid", marks=pytest.mark.nightly),
        pytest.param("layer-skip", "forward_kl", marks=pytest.mark.nightly),
        pytest.param("layer-skip", "lk_alpha", marks=pytest.mark.nightly),
    ],
)
def test_training_raises_tokens_per_round_on_held_out_text(base: str, loss: str, tmp_path: Path) -> None:
    """On a model that has learned a small language; the prompts start at other places than the text learned from."""
    target = late_speaker()
    settings = {"exit_layer": 1} if base == "early-exit" else {"skip_attention": [1, 2], "skip_mlp": [0, 2]}
    head = made(target, base, noise=0.0, loss=loss, settings=settings)
    prompts = [language(1, 12, 500 + seed)[0].tolist() for seed in range(3)]

    def tokens_per_round() -> float:
        return float(evaluate(target, None, head.eval(), prompts, 24)["tokens_per_round"])

    before = tokens_per_round()
    trainer_of(head, Rows(language(40, 32, 3)), tmp_path, lr=1e-2, batch_tokens=320, epochs=10.0).train()
    after = tokens_per_round()
    assert after > before + 0.5, (before, after)


def test_what_cannot_be_adapted_is_refused_by_name() -> None:
    target = tiny.selfspec_target("llama")
    with pytest.raises(ConfigError, match="base_draft is 'swift'"):
        AdapterConfig(base_draft="swift")
    with pytest.raises(ConfigError, match=r"no settings \['exit'\]"):
        AdapterConfig(base_draft="early-exit", settings={"exit": 3})
    with pytest.raises(ConfigError, match=r"called \['c_attn'\].*'q_proj'"):
        made(target, target_modules=["c_attn"])
    with pytest.raises(UnsupportedModel, match="read the keys of others"):
        made(Target(build("gemma3n_text")), "layer-skip")


def test_only_modules_that_the_draft_pass_runs_are_adapted(tmp_path: Path) -> None:
    target = tiny.selfspec_target("llama")
    names = set(load_file(save_head(made(target, "layer-skip"), tmp_path / "adapter") / ADAPTER_WEIGHTS))
    layers = {layer: {n.split(".")[6] for n in names if f".layers.{layer}." in n} for layer in range(3)}
    both = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert layers == {0: both[0] | both[1], 1: set(), 2: both[0]}
