"""Kangaroo: shared lower layers, an early stop that looks at no draws, and a head that drafts what it learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from oracle import patched, plain
from test_adapters import late_speaker
from test_overfit import text as language
from test_train_run import Rows, trainer_of

from selfspec.draft import Budget, Sampling, Verified
from selfspec.draft_pass import DraftPasses
from selfspec.errors import ConfigError
from selfspec.heads.kangaroo import Kangaroo, KangarooConfig
from selfspec.target import Target
from selfspec.train.evaluate import evaluate

torch.set_num_threads(1)
FIXED: dict[str, Any] = {"threshold": 0.0, "depth": 3, "nodes": 4, "top_k": 1}


def made(target: Target, noise: float = 0.2, **options: Any) -> Kangaroo:
    config = KangarooConfig(**{"draft_vocab_size": 50, **FIXED, **options})
    head = Kangaroo.from_target(config, target, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    assert isinstance(head, Kangaroo)
    return head


@pytest.mark.parametrize("share", [True, False], ids=["shared", "in full"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_text_is_that_of_plain_decoding(name: str, share: bool) -> None:
    model = tiny.model(name)
    head = made(Target(model), share=share, top_k=3, nodes=8)
    prompt, mask = tiny.text(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    wanted = plain(model, prompt, attention_mask=mask, max_new_tokens=20, do_sample=False)
    with patched(model, head):
        found = model.generate(prompt, attention_mask=mask, max_new_tokens=20, do_sample=False)
    assert torch.equal(found, wanted)


def test_verification_does_not_repeat_the_layers_below_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.selfspec_target("llama")
    head, prompt = made(target, exit_layer=2), tiny.text(1, 12)
    tree = head.propose(_state(target, head, prompt), Budget(), Sampling(), None)
    assert tree.computed is not None and tree.computed.layer == 2
    assert tree.computed.hidden.shape[1] == tree.nodes - 1, "all but the trunk's last token"
    finished: list[int] = []
    finish = DraftPasses.finish

    def counting(self: Any, shape: Any, tokens: Any, cache: Any, computed: Any) -> Any:
        finished.append(computed.hidden.shape[1])
        return finish(self, shape, tokens, cache, computed)

    monkeypatch.setattr(DraftPasses, "finish", counting)
    with patched(target.model, head):
        target.model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert finished


def _state(target: Target, head: Kangaroo, text: Any) -> Any:
    cache = target.new_cache(text.shape[0], 64)
    counts = [text.shape[1] - 1] * text.shape[0]
    out = target.prefill(text[:, :-1], counts, cache, head.needs)
    read = Verified(text[:, :-1], text[:, 1:], torch.tensor(counts), out.hidden, out.layers, cache=cache)
    return head.begin(read)


def test_a_threshold_that_is_never_reached_stops_after_one_level() -> None:
    target = tiny.selfspec_target("llama")
    text = tiny.text(1, 12)
    head = made(target, threshold=1.0)
    assert head.propose(_state(target, head, text), Budget(), Sampling(), None).shape.max_depth == 1
    head = made(target, threshold=0.0)
    assert head.propose(_state(target, head, text), Budget(), Sampling(), None).shape.max_depth == 3


def test_it_learns_a_language_that_its_first_layer_does_not_speak_and_drafts_it(tmp_path: Path) -> None:
    target = late_speaker()
    head = made(target, noise=0.0, exit_layer=1, draft_vocab_size=0, loss="forward_kl")
    prompts = [language(1, 12, 500 + seed)[0].tolist() for seed in range(3)]

    def tokens_per_round() -> float:
        return float(evaluate(target, None, head.eval(), prompts, 24)["tokens_per_round"])

    before = tokens_per_round()
    trainer_of(head, Rows(language(40, 32, 3)), tmp_path, lr=1e-2, batch_tokens=320, epochs=10.0).train()
    after = tokens_per_round()
    assert after > before + 0.5, (before, after)


def test_impossible_configurations_are_refused_by_name() -> None:
    target = tiny.selfspec_target("llama")
    with pytest.raises(ConfigError, match=r"threshold 1\.5"):
        made(target, threshold=1.5)
    with pytest.raises(ConfigError, match="one attention layer"):
        made(target, num_layers=2)
    with pytest.raises(ConfigError, match="layers"):
        made(target, exit_layer=3)
