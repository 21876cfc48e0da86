"""The size of a draft's trees is chosen by tokens per second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from transformers import MaxLengthCriteria, StoppingCriteriaList

from selfspec.errors import ConfigError
from selfspec.heads.lookup import Lookup
from selfspec.inference import runs, sizes
from selfspec.inference.request import Request
from selfspec.inference.runs import Job, Sample


def _jobs(target: Any, count: int) -> list[Job]:
    ids = torch.arange(1, 9).unsqueeze(0)
    request = Request(ids, stopping=StoppingCriteriaList([MaxLengthCriteria(20)]))
    return [Job(target, ids[0].tolist(), request, {}, seed) for seed in range(count)]


def test_the_size_with_the_most_tokens_per_second_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.selfspec_target("llama")
    seconds = {3: 2.0, 5: 1.0, 8: 1.5}
    asked: list[int | None] = []

    def timed(job: Job, run: Any) -> Sample:
        result = run(job.request)
        nodes = asked[-1]
        return Sample(result.sequences[0, 8:].tolist(), 1, 0.0, seconds[nodes or 0], 0.0, result.stats)

    def decode(target: Any, draft: Any, request: Request) -> Any:
        asked.append(request.nodes)
        return original(target, draft, replace(request))

    original = runs.decode
    monkeypatch.setattr(runs, "_timed", timed)
    monkeypatch.setattr(runs, "decode", decode)
    best, rates = sizes.fastest_nodes(Lookup(), _jobs(target, 2), sizes=(3, 5, 8))
    assert best == 5
    assert rates == {3: 11 / 2.0, 5: 11 / 1.0, 8: 11 / 1.5}
    assert asked == [3, 3, 5, 8, 5, 8, 3], "one warm-up, then the sizes in turn, starting with another one each time"
    target.release()


def test_nothing_to_choose_from_is_refused() -> None:
    target = tiny.selfspec_target("llama")
    with pytest.raises(ConfigError, match="at least one prompt"):
        sizes.fastest_nodes(Lookup(), [])
    target.release()
