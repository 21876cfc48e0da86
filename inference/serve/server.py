"""`selfspec serve`: sockets, signals and the end."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType

import uvicorn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.draft import Draft
from selfspec.errors import ConfigError
from selfspec.inference.guard.setup import Guarding
from selfspec.inference.guard.steering import Steering
from selfspec.inference.serve.app import Front, build
from selfspec.inference.serve.metrics import Metrics
from selfspec.inference.serve.scheduler import Limits, Scheduler
from selfspec.inference.serve.work import Kitchen
from selfspec.target import Target

_TEXT = (
    "Two and two make four, and four and four make eight. Two and two make four, so two and two and four make eight. "
)


@dataclass(frozen=True)
class Settings:
    """How to serve.

    Args:
        front: name, key and size of requests.
        limits: what is taken on at once.
        nodes: the most nodes of a tree; None leaves it to the draft.
        longest: the most tokens of prompt and answer together; None takes what the model allows.
        grace: seconds that running answers get when the server is told to stop.
        guard: before every pass, choose the tree that promises the most tokens per second, or none.
        known: chances of acceptance by depth known beforehand; empty if none are.
    """

    front: Front
    limits: Limits = field(default_factory=Limits)
    nodes: int | None = None
    longest: int | None = None
    grace: float = 30.0
    guard: bool = False
    known: Sequence[float] = ()


class Server(uvicorn.Server):
    """A server that is stopped by SIGTERM or SIGINT: no new requests, running answers get their time, then the end."""

    def __init__(self, config: uvicorn.Config, scheduler: Scheduler, grace: float) -> None:
        super().__init__(config)
        self.scheduler = scheduler
        self.grace = grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn, which would end by raising the signal again; this ends with status 0. A second one hurries."""
        self.scheduler.close(0 if self.should_exit else self.grace)
        self.force_exit = self.should_exit
        self.should_exit = True


def make_server(
    model: PreTrainedModel | Target, tokenizer: PreTrainedTokenizerBase, draft: Draft | None, settings: Settings
) -> Server:
    """A server that is not running yet. With the guard, what rounds cost is measured here, unless it is known.

    Args:
        model: a model, or a target around one.
        tokenizer: of the model.
        draft: None decodes plainly.
        settings: how to serve.
    """
    target = model if isinstance(model, Target) else Target(model)
    metrics = Metrics()
    if target.draws:  # on a text of our own, and before any other, so that a seed draws alike after the next start
        target.screen(_tokens(tokenizer))
    steering = _steering(target, tokenizer, draft, settings)
    scheduler = Scheduler(target, draft, settings.limits, settings.nodes, metrics.rows.observe, steering)
    metrics.watch(scheduler)
    kitchen = Kitchen(scheduler, tokenizer, metrics, settings.longest, choices=settings.limits.rows)
    config = uvicorn.Config(
        build(settings.front, scheduler, kitchen, metrics),
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=int(settings.grace) + 5,
    )
    return Server(config, scheduler, settings.grace)


def _steering(
    target: Target, tokenizer: PreTrainedTokenizerBase, draft: Draft | None, settings: Settings
) -> Steering | None:
    """The guard, once costs are known of one row, of eight, and of as many as are served at once."""
    if draft is None or not settings.guard:
        return None
    guarding = Guarding(target, draft, settings.nodes, [settings.known])
    most = 1 if target.chain_only else 1 << (settings.limits.rows - 1).bit_length()
    return Steering(guarding) if guarding.prepare(_tokens(tokenizer), {1, min(8, most), most}) else None


def _tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(8 * _TEXT, add_special_tokens=False)["input_ids"])


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        ConfigError: the address is taken or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror or error}); give another --port") from error


def address(sock: socket.socket) -> str:
    """What a browser wants."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(server: Server, sock: socket.socket) -> None:
    """Serve until a signal comes."""
    try:
        server.run(sockets=[sock])
    finally:
        sock.close()
