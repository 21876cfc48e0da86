"""Calls, threads, interrupts and changes of the model do not leak into the next text; memory stays flat."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import tiny
import torch
from generate_tools import NEW, Breaks, Recorder, knows, tensors_alive
from oracle import Oracle, patched, plain
from torch import Tensor
from transformers import (
    PreTrainedModel,
)

import selfspec
from selfspec.draft import Verified

# Independence


def test_calls_do_not_depend_on_earlier_calls(model: PreTrainedModel, prompt: Tensor) -> None:
    other = tiny.text(2, 20, seed=9)
    before = model(prompt).logits
    with patched(model, "lookup"):
        first = model.generate(prompt, max_new_tokens=NEW)
        assert torch.equal(model(prompt).logits, before)
        model.generate(other, max_new_tokens=5)
        assert torch.equal(model.generate(prompt, max_new_tokens=NEW), first)
        assert torch.equal(model(prompt).logits, before)


def test_the_model_may_change_dtype_and_attention_after_it_was_patched(prompt: Tensor) -> None:
    own = tiny.model("gemma3")
    wanted = plain(own, prompt, max_new_tokens=NEW)
    with patched(own, Oracle(wanted.tolist(), oracle.bushy(3, 2))):
        own.to(torch.float64)
        assert torch.equal(own.generate(prompt, max_new_tokens=NEW), plain(own, prompt, max_new_tokens=NEW))
        own.to(torch.float32)
        own.set_attn_implementation("eager")
        assert torch.equal(own.generate(prompt, max_new_tokens=NEW), wanted)


@pytest.mark.parametrize("kind", ["early-exit", "layer-skip", "low-rank", "lookup"])
def test_drafts_of_the_targets_own_weights_follow_its_dtype(
    kind: str, prompt: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path))
    model = tiny.model("llama").to(torch.bfloat16)
    with patched(model, kind):
        model.generate(prompt, max_new_tokens=4)
        model.to(torch.float32)
        assert torch.equal(model.generate(prompt, max_new_tokens=NEW), plain(model, prompt, max_new_tokens=NEW))


def test_weights_edited_after_the_patch_count(prompt: Tensor) -> None:
    own = tiny.model("llama")
    with patched(own, "lookup"):
        own.generate(prompt, max_new_tokens=4)
        with torch.no_grad():
            own.lm_head.weight.copy_(own.lm_head.weight.roll(1, 0))
        assert torch.equal(own.generate(prompt, max_new_tokens=NEW), plain(own, prompt, max_new_tokens=NEW))


@pytest.mark.parametrize("where", ["output head", "whole model"])
def test_hooks_of_others_that_change_the_logits_count(where: str, prompt: Tensor) -> None:
    own = tiny.model("llama")
    bias = torch.zeros(tiny.VOCAB)
    with patched(own, "lookup"):
        own.generate(prompt, max_new_tokens=4)
        if where == "output head":
            own.lm_head.register_forward_hook(lambda module, args, output: output + bias)
        else:

            def shift(module: Any, args: Any, output: Any) -> Any:
                output.logits = output.logits + bias
                return output

            own.register_forward_hook(shift)
        own.generate(prompt, max_new_tokens=4)
        bias += 3 * torch.randn(tiny.VOCAB, generator=torch.Generator().manual_seed(0))
        assert torch.equal(own.generate(prompt, max_new_tokens=NEW), plain(own, prompt, max_new_tokens=NEW))


def test_an_interrupt_in_mid_round_leaves_the_next_call_exact(
    model: PreTrainedModel, prompt: Tensor, reference: list[int]
) -> None:
    draft = Breaks(KeyboardInterrupt(), 2, knows(model, prompt))
    stream = Recorder()
    with patched(model, draft):
        with pytest.raises(KeyboardInterrupt):
            model.generate(prompt, max_new_tokens=NEW, streamer=stream)
        assert stream.ends == 1
        draft.at = -1
        assert model.generate(prompt, max_new_tokens=NEW)[0, prompt.shape[1] :].tolist() == reference


def test_an_interrupt_inside_the_target_leaves_the_next_call_exact(prompt: Tensor) -> None:
    own = tiny.model("llama")
    wanted = plain(own, prompt, max_new_tokens=NEW)
    calls = 0

    def interrupt(module: Any, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    handle = own.model.layers[1].register_forward_pre_hook(interrupt)
    with patched(own, "lookup"):
        with pytest.raises(KeyboardInterrupt):
            own.generate(prompt, max_new_tokens=NEW)
        handle.remove()
        assert torch.equal(own.generate(prompt, max_new_tokens=NEW), wanted)


def _together(jobs: list[Callable[[], Tensor]]) -> list[Any]:
    found: list[Any] = [None] * len(jobs)

    def run(number: int) -> None:
        torch.set_num_threads(1)
        try:
            found[number] = jobs[number]()
        except Exception as error:  # noqa: BLE001 - shown by the assertion
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _slow(make: Any) -> Any:
    """The same guesses, with a pause that lets the other thread in."""

    def paused(*args: Any) -> oracle.Guess:
        time.sleep(0.001)
        guess: oracle.Guess = make(*args)
        return guess

    return paused


def test_two_threads_with_two_models_do_not_disturb_each_other() -> None:
    models = [tiny.model("llama", seed=1), tiny.model("gemma3", seed=2)]
    prompts = [tiny.text(1, 9, seed=4), tiny.text(2, 14, seed=5)]
    wanted = [plain(m, ids, max_new_tokens=40) for m, ids in zip(models, prompts, strict=True)]
    for own, text in zip(models, wanted, strict=True):
        selfspec.patch(own, Oracle(text.tolist(), _slow(oracle.bushy(3, 2))))
    found = _together(
        [lambda m=m, ids=ids: m.generate(ids, max_new_tokens=40) for m, ids in zip(models, prompts, strict=True)]
    )
    for mine, theirs in zip(found, wanted, strict=True):
        assert isinstance(mine, Tensor) and torch.equal(mine, theirs), mine


@pytest.mark.parametrize("kind", ["medusa", "eagle", "lookup"])
def test_one_model_may_be_used_by_two_threads_at_once(kind: str) -> None:
    from test_exactness import DRAFTS

    own = tiny.model("llama", seed=3)
    prompts = [tiny.text(1, 9, seed=4), tiny.text(1, 14, seed=5)]
    wanted = [plain(own, ids, max_new_tokens=40) for ids in prompts]
    selfspec.patch(own, DRAFTS[kind](own, [], 3))
    found = _together([lambda ids=ids: own.generate(ids, max_new_tokens=40) for ids in prompts])
    for mine, theirs in zip(found, wanted, strict=True):
        assert isinstance(mine, Tensor) and torch.equal(mine, theirs), mine
    report = own.speculation.report()
    assert report["rows"] == 2 and report["new_tokens"] == 80


# Memory


def test_nothing_is_left_behind_by_calls(prompt: Tensor) -> None:
    own = tiny.model("llama")
    with patched(own, "lookup"):
        for _ in range(3):
            own.generate(prompt, max_new_tokens=12)
        before = tensors_alive()
        for _ in range(10):
            own.generate(prompt, max_new_tokens=12)
        assert tensors_alive() <= before


def test_during_a_long_generation_only_the_cache_is_kept_and_no_graph(prompt: Tensor) -> None:
    own = tiny.model("llama").requires_grad_(True)
    counts: list[int] = []

    class Watch(oracle.Scripted):
        def observe(self, state: Any, verified: Verified) -> Any:
            if state.round % 50 == 49:
                counts.append(tensors_alive())
            return super().observe(state, verified)

        def tree(self, state: Any, budget: Any, generator: Any) -> Any:
            return oracle.as_tree([oracle.chain(2)(tokens[-1], [], 0, 0) for tokens in state.tokens])

    with patched(own, Watch()):
        found = own.generate(prompt, max_new_tokens=200)
    assert len(counts) >= 3
    assert max(counts[1:]) <= counts[1] + 5, counts
    assert not found.requires_grad
