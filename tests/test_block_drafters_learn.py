"""Block drafters learn a small language completely, and training counts what decoding finds."""

from __future__ import annotations

import functools
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
PERIOD = 12


def cycle(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Text in which token 40 + i is followed by 40 + (i + 5) mod 12, started anywhere."""
    start = torch.randint(PERIOD, (batch, 1), generator=generator)
    return 40 + (start + 5 * torch.arange(length)) % PERIOD


@functools.cache
def speaker(name: str) -> Target:
    """A tiny target that speaks it."""
    model = tiny.model(name).requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        ids = cycle(8, 24, generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss.detach()) < 0.15  # only the first token is a matter of chance, and it has no label
    return Target(model.eval().requires_grad_(False))


def trained(kind: str, target: Target, steps: int, **options: Any) -> tuple[DraftHead, list[float]]:
    """A head and its accuracy per depth on new text."""
    cls = registry.method(kind)
    head: DraftHead = cls.from_target(cls.config_class(**options), target, torch.Generator().manual_seed(0))
    optimizer = torch.optim.Adam(head.parameters(), 5e-3)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps + 1):
        ids = cycle(16, 25, generator)
        read = target.features(ids[:, :-1], None, head.needs)
        verified = Verified(ids[:, :-1], ids[:, 1:], torch.full((16,), 24), read.hidden, read.layers)
        result = head.loss(verified, torch.ones(16, 24, dtype=torch.bool))
        if step < steps:
            result.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return head.eval(), (result.correct / result.seen).tolist()


def accepted(head: DraftHead, ids: Tensor, new: int) -> list[float]:
    """Per depth, of the rounds that came so far, the share that accepted a guess."""
    limit = StoppingCriteriaList([MaxLengthCriteria(max_length=ids.shape[1] + new)])
    return decode(head.target, head, Request(ids, stopping=limit)).stats.conditional_by_depth


def learn_and_compare(kind: str, name: str) -> None:
    target = speaker(name)
    steps = 300 if kind == "dspark" else 180  # total variation learns slowly at first
    head, told = trained(kind, target, steps, block_size=5, tree_top_k=1, anchors=8, num_layers=1)
    found = accepted(head, cycle(12, 9, torch.Generator().manual_seed(2)), 15)  # no longer than the text of training
    assert len(found) == len(told) == 4
    assert min(found) > 0.99, found
    assert all(abs(a - b) < 0.01 for a, b in zip(told, found, strict=True)), (told, found)


def test_a_small_language_is_learned_whole_and_the_metrics_agree() -> None:
    learn_and_compare("dflash", "llama")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["dflash", "dspark", "jetspec"])
@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_small_language_is_learned_on_every_family(kind: str, name: str) -> None:
    learn_and_compare(kind, name)
