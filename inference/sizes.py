"""How large a tree pays on this machine: decode a little with each size and keep the fastest.

A pass over more nodes accepts more and costs more; by how much depends on the processor, the dtype and the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from selfspec.draft import Draft
from selfspec.errors import ConfigError
from selfspec.inference.runs import Job, draft_runner

SIZES = (3, 5, 8, 12)


def fastest_nodes(
    draft: Draft, jobs: Sequence[Job], sizes: Sequence[int] = SIZES, progress: Callable[[], None] | None = None
) -> tuple[int, dict[int, float]]:
    """The size with the most tokens per second over all jobs, and the rate of every size.

    Sizes take turns on each prompt, after one call that counts nowhere.

    Args:
        draft: any draft; sizes above its own are the same as its own.
        jobs: prompts to decode, not those of a later comparison.
        sizes: nodes per tree, the root included.
        progress: called after each decoding.

    Returns:
        The best size and tokens per second by size.
    """
    if not jobs or not sizes:
        raise ConfigError("there is nothing to choose a tree size from; give at least one prompt and one size")
    draft_runner(draft, sizes[0])(jobs[0])
    tokens, seconds = dict.fromkeys(sizes, 0), dict.fromkeys(sizes, 0.0)
    for turn, job in enumerate(jobs):
        for place in range(len(sizes)):
            size = sizes[(place + turn) % len(sizes)]
            sample = draft_runner(draft, size)(job)
            tokens[size] += len(sample.tokens) - sample.first
            seconds[size] += sample.seconds
            if progress is not None:
                progress()
    rates = {size: tokens[size] / seconds[size] if seconds[size] > 0 else 0.0 for size in sizes}
    return max(sizes, key=lambda size: rates[size]), rates
