"""Every trainable head learns a small language fully, and decoding sees what training counted.

The language is one cycle of tokens in which a token's successor depends on the two before it. A head whose shift, norm,
positions or masks differ between training and decoding learns it all the same, and then drafts something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from transformers import MaxLengthCriteria, StoppingCriteriaList

from selfspec import registry
from selfspec.draft import Verified
from selfspec.head import DraftHead
from selfspec.inference.engine import decode
from selfspec.inference.request import Request
from selfspec.target import Target

torch.set_num_threads(1)

CYCLE = [5, 9, 5, 17, 9, 33, 5, 41, 17, 5, 52, 9, 41, 33, 60, 17]
"""Every pair of neighbours occurs once; single tokens have up to four successors."""
DEPTH, LENGTH = 3, 60
CHAIN = {"tree_nodes": DEPTH + 1, "tree_top_k": 1}
BLOCK = {"block_size": DEPTH + 1, "num_layers": 1, "position_decay": 0.0, **CHAIN}
EXIT = {"exit_layer": 2, "threshold": 0.0, "adaptive": False, "depth": DEPTH, "top_k": 1, "nodes": DEPTH + 1}
FORMS: dict[str, dict[str, Any]] = {
    "adapter": {"base_draft": "early-exit", "settings": EXIT, "train_depth": DEPTH},
    "blockwise": {"num_heads": DEPTH},
    "dflash": BLOCK,
    "dspark": {**BLOCK, "stop_below": 0.0, "markov_rank": 16},
    "eagle": {"steps": DEPTH, "step_decay": 1.0, **CHAIN},
    "eagle3": {"steps": DEPTH, "step_decay": 1.0, **CHAIN},
    "hydra": {"num_heads": DEPTH, "head_decay": 1.0, **CHAIN},
    "hydra-cross": {"steps": DEPTH, "step_decay": 1.0, **CHAIN},
    "jetspec": BLOCK,
    "medusa": {"num_heads": DEPTH, "num_layers": 2, "head_decay": 1.0, "choices": [[0], [0, 0], [0, 0, 0]]},
}
"""Forms that draft a chain of DEPTH tokens and count as many depths in training."""

BLIND = ("blockwise", "medusa")
"""Heads that do not see the tokens guessed before: they want more steps of training, and Medusa a second block."""

ELSEWHERE = {"kangaroo", "medusa-2", "mtp"}
"""Heads that count one depth in training (`test_heads_kangaroo.py`), change the target (`test_heads_medusa2.py`), or
need a target with layers of their own (`test_heads_mtp.py`)."""


def trainable() -> list[str]:
    return [kind for kind in registry.kinds() if issubclass(registry.method(kind), DraftHead)]


def text(batch: int, length: int, seed: int) -> Tensor:
    """Stretches of the cycle from random places."""
    start = torch.randint(len(CYCLE), (batch, 1), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(CYCLE)[(start + torch.arange(length)) % len(CYCLE)]


@cache
def speaker(name: str) -> Target:
    """A tiny target that has learned the language."""
    model = tiny.model(name).train().requires_grad_(True)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.3)  # the tests' random weights are too large to learn from
    optimiser = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(100):
        ids = text(4, 64, step)
        model(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return Target(model.eval().requires_grad_(False))


def read(target: Target, head: DraftHead, ids: Tensor) -> Verified:
    output = target.features(ids[:, :-1], None, head.needs)
    counts = torch.full((ids.shape[0],), ids.shape[1] - 1)
    return Verified(ids[:, :-1], ids[:, 1:], counts, output.hidden, output.layers)


@cache
def trained(kind: str, target: Target, steps: int) -> DraftHead:
    torch.manual_seed(0)  # dflash draws its anchors from the default generator
    method = registry.method(kind)
    config = method.config_class(**{"draft_vocab_size": 40, **FORMS[kind]})
    head: DraftHead = method.from_target(config, target, torch.Generator().manual_seed(0))
    head.output.set_vocab(_vocabulary())
    optimiser = torch.optim.AdamW(head.parameters(), lr=5e-3)
    falling = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.05 if kind in BLIND else 1.0, steps)
    for step in range(steps):
        verified = read(target, head, text(4, 60, 1000 + step))
        head.loss(verified, torch.ones(verified.tokens.shape, dtype=torch.bool)).loss.backward()
        optimiser.step()
        falling.step()
        optimiser.zero_grad()
    return head.eval()


def _vocabulary() -> Tensor:
    """40 tokens, those of the language among them and none at its own column."""
    others = [token for token in range(20, 97) if token not in CYCLE]
    return torch.tensor(sorted({*CYCLE, *others[: 40 - len(set(CYCLE))]}))


@torch.no_grad()
def counted(head: DraftHead, target: Target) -> list[float]:
    """What training reports on held-out text, depth by depth; the first places are left out as in decoding."""
    verified = read(target, head, text(16, LENGTH, 7))
    mask = torch.ones(verified.tokens.shape, dtype=torch.bool)
    mask[:, :12] = False
    result = head.loss(verified, mask)
    return (result.correct / result.seen).tolist()[:DEPTH]


def decoded(head: DraftHead, target: Target, prompts: int) -> list[float]:
    """Of the rounds that came to each depth in real decoding, the share that went on."""
    totals = None
    for seed in range(prompts):
        prompt = text(1, 12, 500 + seed)
        stop = StoppingCriteriaList([MaxLengthCriteria(max_length=LENGTH)])
        result = decode(target, head, Request(prompt, stopping=stop))
        assert result.sequences[0].tolist() == _continued(prompt, LENGTH)
        if totals is None:
            totals = result.stats
        else:
            totals.add(result.stats)
    assert totals is not None
    return totals.conditional_by_depth


def _continued(prompt: Tensor, length: int) -> list[int]:
    start = next(s for s in range(len(CYCLE)) if prompt[0].tolist() == [CYCLE[(s + i) % len(CYCLE)] for i in range(12)])
    return [CYCLE[(start + i) % len(CYCLE)] for i in range(length)]


def assert_learned(head: DraftHead, target: Target, prompts: int) -> None:
    training, decoding = counted(head, target), decoded(head, target, prompts)
    assert len(training) == len(decoding) == DEPTH
    for depth, (learned, used) in enumerate(zip(training, decoding, strict=True), 1):
        assert learned > 0.99 and used > 0.99, (depth, training, decoding)
        assert abs(learned - used) < 0.01, (depth, training, decoding)


def test_every_trainable_head_is_tried() -> None:
    assert sorted({*FORMS, *ELSEWHERE}) == trainable()


@pytest.mark.parametrize("kind", ["eagle3", "hydra"])
def test_heads_learn_the_language_and_draft_it(kind: str) -> None:
    target = speaker("llama")
    assert_learned(trained(kind, target, 110), target, prompts=2)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", list(FORMS))
def test_every_head_learns_the_language_and_drafts_it(kind: str, name: str) -> None:
    target = speaker(name)
    assert_learned(trained(kind, target, 1200 if kind in BLIND else 400), target, prompts=4)


def test_a_head_that_decodes_from_other_features_than_it_learned_from_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Features one place late in decoding alone: training counts well, decoding does not follow."""
    target = speaker("llama")
    head = trained("hydra", target, 110)
    for name in ("begin", "observe"):
        monkeypatch.setattr(head, name, _late(getattr(head, name)))
    with pytest.raises(AssertionError):
        assert_learned(head, target, prompts=2)


def _late(read: Callable[..., Any]) -> Callable[..., Any]:
    def harmed(*args: Any) -> Any:
        verified = args[-1]
        return read(*args[:-1], replace(verified, hidden=verified.hidden.roll(1, 1)))

    return harmed
