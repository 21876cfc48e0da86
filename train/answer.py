"""Rows with what the target writes behind them: single answers, and conversations answered turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from selfspec.draft import Draft
from selfspec.target import Target
from selfspec.train.dialogue import DialogueState
from selfspec.train.rows import Row, derived_seed, room
from selfspec.train.settings import DistillConfig
from selfspec.train.write import Picking, batches, write, write_drafted


class _Job:
    """One planned row on its way: the prompt that is due, and the rows that came of it so far."""

    def __init__(self, row: Row, config: DistillConfig) -> None:
        self.config, self.row = config, row
        self.state: DialogueState | None = None if row.dialogue is None else row.dialogue.begin()
        self.prompt: list[int] | None = row.ids if self.state is None else self.state.prompt()
        self.turn = 0
        self.rows: list[Row] = []
        self.unanswered = 0

    @property
    def seed(self) -> int:
        return derived_seed(self.row.seed, self.turn) if self.turn else self.row.seed

    @property
    def room(self) -> int:
        return room(len(self.prompt or []), self.config)

    def answer(self, new: list[int]) -> None:
        assert self.prompt is not None
        learn = [self.config.learn_prompt] * len(self.prompt)
        if self.rows and self.prompt[: len(self.rows[-1].ids)] == self.rows[-1].ids:
            before = self.rows.pop()  # the conversation goes on as it was read and written: one row holds both
            learn = before.learn + learn[len(before.ids) :]
        self.rows.append(Row(self.prompt + new, learn + [True] * len(new)))
        self.prompt = None
        if self.state is not None:
            self.state.answer(new)
            self.turn += 1
            self.prompt = self.state.prompt()
            if self.prompt is not None and self.room < 1:
                self.prompt, self.unanswered = None, 1


def write_rows(
    target: Target,
    config: DistillConfig,
    rows: Sequence[Row],
    ends: tuple[int, ...],
    draft: Draft | None,
    tell: Callable[[int], object],
) -> tuple[list[Row], dict[str, int]]:
    """Let the target answer.

    Args:
        target: the model.
        config: how it writes.
        rows: prompts.
        ends: ids that end an answer.
        draft: to write faster with; None writes token by token.
        tell: called with the number of new tokens, prompts included.

    Returns:
        The answered rows, in the order of the prompts, and how many answers were cut or not written at all.
    """
    picking = Picking(config.temperature, config.top_k, config.top_p)
    jobs = [_Job(row, config) for row in rows]
    cut = 0
    while due := [job for job in jobs if job.prompt is not None]:
        for batch in batches([len(job.prompt or []) for job in due], config.batch_rows, by_rows=True):
            part = [due[i] for i in batch]
            prompts, seeds = [list(job.prompt or []) for job in part], [job.seed for job in part]
            most = max(job.room for job in part)
            if draft is None:
                written = write(target, prompts, most, picking, seeds, ends)
            else:
                written = write_drafted(target, draft, prompts, most, picking, seeds, ends)
            for job, prompt, new in zip(part, prompts, written, strict=True):
                new = new[: job.room]
                cut += new[-1] not in ends
                tell(len(new) + (0 if job.turn else len(prompt)))
                job.answer(new)
    return [row for job in jobs for row in job.rows], {
        "cut_answers": cut,
        "unanswered": sum(job.unanswered for job in jobs),
    }
