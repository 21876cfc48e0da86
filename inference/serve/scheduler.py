"""One thread that runs the model: jobs wait in a queue, join the running batch between rounds, and leave it.

Everything of the model and of torch happens on this thread; other threads submit and cancel. While there is nothing to
do it sleeps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from selfspec.draft import Draft
from selfspec.errors import SelfspecError
from selfspec.inference.batching import Batch, cost
from selfspec.inference.guard.steering import Steering
from selfspec.inference.rows import Listener, Row
from selfspec.inference.undrafted import Undrafted
from selfspec.stats import Stats
from selfspec.target import Target

_log = logging.getLogger(__name__)


class Refused(SelfspecError):
    """A job that the server does not take, or gives up.

    Args:
        message: for the client.
        reason: `invalid`, `too_long`, `full`, `stopping`, `timeout` or `failed`.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Client(Listener, Protocol):
    """Who asked: gets the tokens, or the reason why there are none. Called on the model's thread; must not raise."""

    def fail(self, error: Refused) -> None:
        """The job is over without an end of its text."""


@dataclass(frozen=True)
class Limits:
    """What the server takes on at once.

    Args:
        rows: texts in the making.
        tokens: slots of the target's cache over all rows; a batch is as wide as its widest row.
        queue: jobs that wait.
        seconds: of one job, waiting included.
        prefill: prompt tokens read between two rounds (one prompt at least), padding included.
        chunk: prompt tokens read in one pass of the target.
    """

    rows: int = 32
    tokens: int = 65536
    queue: int = 256
    seconds: float = 600.0
    prefill: int = 4096
    chunk: int = 1024


@dataclass(eq=False)
class Job:
    """One text to write.

    Args:
        make: prepares the row; called on the model's thread.
        client: who asked.
        reserved: slots of the cache it may need.
        width: tokens of the prompt.
    """

    make: Callable[[], Row]
    client: Client
    reserved: int
    width: int
    cancelled: bool = False
    row: Row | None = None
    deadline: float = field(default=0.0)


class Scheduler:
    """Runs jobs on one model.

    Args:
        target: the door to the model.
        draft: None decodes plainly.
        limits: see `Limits`.
        nodes: the most nodes of a tree; None leaves it to the draft.
        after_round: called on the model's thread after each round of a batch with the number of its rows.
        steering: the guard; None asks the draft in every round.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        limits: Limits | None = None,
        nodes: int | None = None,
        after_round: Callable[[int], None] | None = None,
        steering: Steering | None = None,
    ) -> None:
        self.target = target
        self.draft: Draft = draft or Undrafted()
        self.limits = limits or Limits()
        self.nodes = nodes
        self.steering = steering
        self.stats = Stats()
        self._after_round = after_round
        self._queue: deque[Job] = deque()
        self._running: list[Job] = []
        self._batches: list[Batch] = []
        self._wake = threading.Condition()
        self._until: float | None = None
        self._thread = threading.Thread(target=self._run, name="selfspec-model", daemon=True)

    # Other threads

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Jobs in the batch."""
        return len(self._running)

    @property
    def alive(self) -> bool:
        """Whether jobs are taken."""
        return self._until is None and self._thread.is_alive()

    def submit(self, jobs: list[Job]) -> None:
        """Take on some jobs, all or none.

        Raises:
            Refused: the queue is full, a job can never fit, or the server is about to stop.
        """
        now = time.monotonic()
        for job in jobs:
            if job.reserved > self.limits.tokens:
                raise Refused(
                    f"prompt and answer may need {job.reserved} places of memory, the server has {self.limits.tokens}; "
                    "shorten the prompt or lower max_tokens",
                    "too_long",
                )
        with self._wake:
            if not self.alive:
                raise Refused("the server is stopping; ask another one", "stopping")
            if len(self._queue) + len(jobs) > self.limits.queue:
                raise Refused(f"{len(self._queue)} requests are waiting already; try again later", "full")
            for job in jobs:
                job.deadline = now + self.limits.seconds
                self._queue.append(job)
            self._wake.notify()

    def cancel(self, jobs: list[Job]) -> None:
        """Nobody waits for these any more: they leave before the next round."""
        with self._wake:
            for job in jobs:
                job.cancelled = True
            self._wake.notify()

    def close(self, seconds: float) -> None:
        """Take no more jobs, and give those at hand so many seconds to end. Returns at once."""
        with self._wake:
            until = time.monotonic() + seconds
            self._until = until if self._until is None else min(self._until, until)
            self._wake.notify()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended after `close`."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    # The model's thread

    def _run(self) -> None:
        while self._wait():
            self._let_go()
            if self._until is not None and time.monotonic() >= self._until:
                break
            self._admit()
            for batch in list(self._batches):
                self._step(batch)
        with self._wake:
            self._until = time.monotonic()
            left, self._queue = [*self._running, *self._queue], deque()
        for job in left:
            if not job.cancelled:
                job.client.fail(Refused("the server stopped before the answer was complete", "stopping"))
        self._running, self._batches = [], []

    def _wait(self) -> bool:
        """Sleep while there is nothing to do; False when there will be nothing more."""
        with self._wake:
            while not (self._queue or self._batches):
                if self._until is not None:
                    return False
                self._wake.wait()
        return True

    def _let_go(self) -> None:
        """Drop jobs that were cancelled or took too long."""
        now = time.monotonic()
        with self._wake:
            jobs = [*self._running, *self._queue]
            gone = [job for job in jobs if job.cancelled or now >= job.deadline]
            if not gone:
                return
            self._queue = deque(job for job in self._queue if job not in gone)
        for job in gone:
            if not job.cancelled:
                job.client.fail(Refused(f"no answer within {self.limits.seconds:g} seconds", "timeout"))
        for batch in self._batches:
            batch.drop([job.row for job in gone if job.row is not None])
        self._settle()

    def _settle(self) -> None:
        """Forget batches without rows and jobs without a batch."""
        self._batches = [batch for batch in self._batches if batch.rows]
        rows = {id(row) for batch in self._batches for row in batch.rows}
        self._running = [job for job in self._running if id(job.row) in rows]
        if self.steering is not None and not self._batches:
            self.steering.renew()

    def _admit(self) -> None:
        jobs = self._next()
        if not jobs:
            return
        ready = []
        for job in jobs:
            try:
                job.row = job.make()
                ready.append(job)
            except (SelfspecError, ValueError, TypeError) as error:
                job.client.fail(Refused(f"this request cannot be served: {error}", "invalid"))
        groups = [[job] for job in ready] if self.target.chain_only else [ready] if ready else []
        for group in groups:
            self._begin(group)

    def _next(self) -> list[Job]:
        """The jobs at the head of the queue that fit; nobody overtakes."""
        taken: list[Job] = []
        reserved = [job.reserved for job in self._running]
        with self._wake:
            while self._queue:
                job = self._queue[0]
                widths = [*(j.width for j in taken), job.width]
                if len(reserved) >= self.limits.rows or cost([*reserved, job.reserved]) > self.limits.tokens:
                    break
                if taken and cost(widths) > self.limits.prefill:
                    break
                reserved.append(job.reserved)
                taken.append(self._queue.popleft())
        return taken

    def _begin(self, jobs: list[Job]) -> None:
        rows = [job.row for job in jobs if job.row is not None]
        self._running += jobs
        try:
            batch = Batch(self.target, self.draft, rows, self.stats, self.nodes, self.limits.chunk, self.steering)
        except Exception:  # noqa: BLE001 - whatever a model or a draft raises must not end the server
            self._fail(rows)
            return
        home = next((b for b in self._batches if batch.rows and b.joins(batch)), None)
        if home is None:
            self._batches.append(batch)
            self._settle()
            return
        try:
            home.join(batch)
        except Exception:  # noqa: BLE001
            self._fail([*home.rows, *batch.rows])
            home.rows = []
        self._settle()

    def _step(self, batch: Batch) -> None:
        count = len(batch.rows)
        try:
            batch.round()
        except Exception:  # noqa: BLE001 - as above
            self._fail(batch.rows)
            batch.rows = []
        self._settle()
        if self._after_round is not None:
            self._after_round(count)

    def _fail(self, rows: list[Row]) -> None:
        _log.exception("a batch of %d rows failed", len(rows))
        gone = {id(row) for row in rows}
        for job in self._running:
            if id(job.row) in gone:
                job.client.fail(Refused("the model failed on this request; the server's log says why", "failed"))
        self._running = [job for job in self._running if id(job.row) not in gone]
