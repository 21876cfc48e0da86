"""A round reads from the device once; what it leaves out changes nothing."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import oracle
import pytest
import syncs
import tiny
import torch
from transformers import (
    LogitsProcessorList,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

from selfspec import registry
from selfspec.draft import Budget, Draft, Needs, Sampling
from selfspec.errors import DraftTreeError
from selfspec.heads import trees
from selfspec.inference import rounds as round_module
from selfspec.inference.engine import Generation, decode
from selfspec.inference.output import Output
from selfspec.inference.plain import decode_plain
from selfspec.inference.request import Request
from selfspec.resolve import resolve_draft
from selfspec.target import Target
from selfspec.tree import DraftTree, TreeShape

NEW = 24


class OnDevice:
    """A draft whose trees never pass through the host: the next tokens are the root plus 1, 2, ..."""

    kind = "on-device"
    needs = Needs(hidden=True)

    def __init__(self, shape: TreeShape) -> None:
        self.shape = shape

    def begin(self, verified: Any) -> Any:
        return oracle.Rows([[]], [0]), verified.root

    def observe(self, state: Any, verified: Any) -> Any:
        return state[0], verified.root

    def propose(self, state: Any, budget: Budget, sampling: Sampling, generator: Any) -> DraftTree:
        shape = TreeShape(self.shape.parents.clone())  # not seen before, as a tree grown by confidence is
        tokens = (state[1].unsqueeze(1) + torch.arange(shape.nodes, device=state[1].device)) % tiny.VOCAB
        return DraftTree(tokens, shape)


def request(rows: int = 1, **kwargs: Any) -> Request:
    stop = StoppingCriteriaList([MaxLengthCriteria(12 + NEW)])
    return Request(tiny.text(rows, 12), stopping=stop, **kwargs)


def trained(kind: str, target: Target) -> Any:
    method = registry.method(kind)
    return method.from_target(method.config_class(), target, torch.Generator().manual_seed(0)).eval()


def rounds(target: Target, draft: Draft, asked: Request, count: int = 3) -> list[list[str]]:
    """Where each of the first rounds waits."""
    with torch.no_grad():
        generation = Generation(target, draft, asked, Output(asked))
        generation.prefill()
        generation.round()  # what is measured or built at first use
        return [syncs.count(generation.round) for _ in range(count)]


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (round_module, trees):
        monkeypatch.setattr(module, "waits", lambda device: True)


@pytest.mark.parametrize(
    "action",
    [
        lambda x: x[0].item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: int(x.sum()),
        lambda x: float(x[0]),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: torch.equal(x, x + 1),
        lambda x: x.numpy(),
        lambda x: x.unique(),
        lambda x: x.masked_select(x > 1),
    ],
)
def test_the_counter_sees_every_kind_of_wait_once(action: Any) -> None:
    numbers = torch.arange(3)
    assert len(syncs.count(lambda: action(numbers))) == 1
    assert syncs.count(lambda: torch.where(numbers > 1, numbers, 0).cumsum(0) @ numbers) == []


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_round_waits_for_the_device_once(name: str, rows: int, sampled: bool) -> None:
    target = tiny.selfspec_target(name)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.8)] if sampled else [])
    asked = request(rows, do_sample=sampled, processors=processors, generator=torch.Generator().manual_seed(1))
    shape = TreeShape(torch.tensor([[-1, 0, 0, 1, 1, 2]]))
    for found in rounds(target, OnDevice(shape), asked):
        assert len(found) == 1, found
    target.release()


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3", "hydra", "lookup"])
def test_a_round_of_these_drafts_waits_once_too(kind: str) -> None:
    target = tiny.selfspec_target("llama")
    draft: Any = resolve_draft(kind, target) if kind == "lookup" else trained(kind, target)
    for found in rounds(target, draft, request()):
        assert len(found) == 1, found
    target.release()


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("processors", [[], [RepetitionPenaltyLogitsProcessor(1.3)]])
def test_picking_at_every_node_at_once_gives_the_text_of_generate(rows: int, processors: list[Any]) -> None:
    target = tiny.selfspec_target("llama")
    asked = request(rows, processors=LogitsProcessorList(processors))
    penalty = 1.3 if processors else None
    wanted = target.model.generate(asked.input_ids, do_sample=False, max_new_tokens=NEW, repetition_penalty=penalty)
    references = oracle.unpadded(wanted)
    for make in (oracle.chain(5, lambda row, turn: (row + turn) % 6), oracle.random_trees(3, 9, 0.7)):
        found = decode(target, oracle.Oracle(references, make), asked)
        assert found.sequences.tolist() == references
        assert found.stats.accepted > 0
    target.release()


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("token", [-1, tiny.VOCAB])
def test_a_token_outside_the_vocabulary_is_refused_before_it_is_used(token: int) -> None:
    class Wrong(OnDevice):
        def propose(self, state: Any, budget: Budget, sampling: Sampling, generator: Any) -> DraftTree:
            tree = super().propose(state, budget, sampling, generator)
            tree.tokens[:, -1] = token
            return tree

    target = tiny.selfspec_target("llama")
    with pytest.raises(DraftTreeError, match="tokens must lie in"):
        decode(target, Wrong(TreeShape.chain(3)), request())
    target.release()


def test_plain_decoding_waits_once_per_token() -> None:
    target = tiny.selfspec_target("llama")
    short, long = (StoppingCriteriaList([MaxLengthCriteria(12 + new)]) for new in (6, 16))
    ids = tiny.text(1, 12)
    decode_plain(target, Request(ids, stopping=short))  # what is measured at first use
    counts = [len(syncs.count(lambda s=stop: decode_plain(target, Request(ids, stopping=s)))) for stop in (short, long)]
    assert counts[1] - counts[0] == 10
    target.release()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sampled", [False, True])
def test_on_a_gpu_torch_sees_one_synchronisation_per_round(sampled: bool) -> None:
    target = Target(tiny.model("llama").cuda())
    asked = replace(request(do_sample=sampled), input_ids=tiny.text(1, 12).cuda())
    shape = TreeShape(torch.tensor([[-1, 0, 0, 1, 1, 2]], device="cuda"))
    with torch.no_grad():
        generation = Generation(target, OnDevice(shape), asked, Output(asked))
        generation.prefill()
        generation.round()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                generation.round()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in seen if "synchronizing" in str(w.message)]) == 1
    target.release()
