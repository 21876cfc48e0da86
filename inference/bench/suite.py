"""`bench` under several conditions: tasks, temperatures, context lengths, batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any, TypeVar

from selfspec.draft import Draft
from selfspec.errors import ConfigError
from selfspec.inference.bench.guarded import guardings
from selfspec.inference.bench.measure import BenchSettings, bench_with_progress, check_prompts
from selfspec.inference.bench.throughput import throughput
from selfspec.prompting import Prompt
from selfspec.target import Target

T = TypeVar("T")


@dataclass(frozen=True)
class Conditions:
    """What is varied; every combination is measured, the first of all comes first.

    Args:
        temperatures: 0 is greedy.
        contexts: tokens that every prompt is lengthened to with text of other prompts; None leaves them as they are.
        batches: rows at once; 1 is `bench` itself, larger ones measure throughput.
    """

    temperatures: Sequence[float] = (0.0,)
    contexts: Sequence[int | None] = (None,)
    batches: Sequence[int] = (1,)


def in_turn(prompts: Sequence[Prompt], tasks: Sequence[str], limit: int) -> list[Prompt]:
    """The first prompts of every task, one of each in turn, until there are enough.

    Args:
        prompts: with or without a category.
        tasks: categories to take; none takes all.
        limit: the most prompts.

    Raises:
        ConfigError: a task that no prompt belongs to.
    """
    found: dict[str | None, list[Prompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.category, []).append(prompt)
    unknown = [task for task in tasks if task not in found]
    if unknown:
        known = ", ".join(sorted(str(task) for task in found if task is not None)) or "none"
        raise ConfigError(f"no prompt belongs to task {unknown[0]!r}; tasks at hand: {known}")
    groups = [group for task, group in found.items() if not tasks or task in tasks]
    turns = chain.from_iterable(zip_longest(*groups))
    return [prompt for prompt in turns if prompt is not None][:limit]


def lengthened(prompts: Sequence[list[int]], length: int | None) -> list[list[int]]:
    """Prompts with text of the prompts after them in front, so that each has `length` tokens; longer ones stay."""
    if length is None:
        return [list(prompt) for prompt in prompts]
    found = []
    for place, prompt in enumerate(prompts):
        before: list[int] = []
        wanted, turn = length - len(prompt), place
        while len(before) < wanted:
            turn = (turn + 1) % len(prompts)
            before = [*prompts[turn], *before]
        found.append([*before[len(before) - max(wanted, 0) :], *prompt])
    return found


def run_suite(
    target: Target,
    drafts: dict[str, Draft],
    prompts: Sequence[list[int]],
    settings: BenchSettings,
    conditions: Conditions,
    tasks: Sequence[str | None] = (),
) -> dict[str, Any]:
    """Measure under every condition.

    Returns:
        The result of `bench` under the first condition with one row at a time (of the first condition, if there is
        none such: without `runs`), and `conditions`: all of them, each with `temperature`, `context`, `batch` and
        either the fields of `bench` or those of `throughput`.
    """
    texts = {context: lengthened(prompts, context) for context in conditions.contexts}
    for lengthy in texts.values():
        check_prompts(target, lengthy, settings)
    found = []
    for context, ids in texts.items():
        for temperature in conditions.temperatures:
            here = replace(settings, temperature=temperature)
            for batch in conditions.batches:
                if batch == 1:
                    result = bench_with_progress(target, drafts, ids, here, tasks)
                else:
                    arguments = here.generate_arguments(here.max_new_tokens)
                    nodes = here.nodes if isinstance(here.nodes, int) else None
                    steered = {}
                    if here.guard != "raw":
                        steered = guardings(target, drafts, lambda _, most=nodes: most, here.known)  # type: ignore[misc]
                    raw = here.guard != "guard"
                    result = throughput(target, drafts, ids, batch, arguments, nodes, here.seed, steered, raw)
                found.append({"temperature": temperature, "context": context, "batch": batch, **result})
    first = next((result for result in found if result["batch"] == 1), {})
    return {**first, "conditions": found}
