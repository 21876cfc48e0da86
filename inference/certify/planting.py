"""Faults and how they are planted, see `selfspec.inference.certify.faults`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from selfspec.inference.certify.models import Peek

MakeDraft = Callable[[PreTrainedModel], Peek]
Plant = Callable[[], Any]


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Args:
        name: what is wrong.
        part: the part of `certify` that is tried first.
        draft: a name in `faults.DRAFTS`, or a draft that is the fault itself; not looked at by the part on draws
            without all logits.
        plant: a context in which the fault is there.
    """

    name: str
    part: str
    draft: str | MakeDraft
    plant: Plant = nullcontext


@dataclass(frozen=True)
class Outcome:
    """One line of the self-test: `passed` when a fault was caught, or a faultless draft passed."""

    name: str
    passed: bool
    outcome: str


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def instead(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """A plant that replaces a function by what `make` makes of the original."""
    return lambda: replaced(owner, name, make(vars(owner)[name]))
