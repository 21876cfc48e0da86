"""A server of a tiny model in a thread of this process, and what transformers itself would answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import tiny_folder
import torch
from oracle import plain
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.inference.serve.app import Front
from selfspec.inference.serve.server import Settings, address, listen, make_server, run
from selfspec.models import load_target
from selfspec.resolve import resolve_draft
from selfspec.target import Target

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@cache
def tiny_model(folder: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model over bytes that repeats itself now and then, and its tokenizer."""
    tiny_folder.save(Path(folder))
    return load_target(folder, torch.float32)


class Serving:
    """A running server."""

    def __init__(self, server: Any, url: str) -> None:
        self.server = server
        self.url = url
        self.scheduler = server.scheduler if server is not None else None


@contextmanager
def serving(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    draft: Any = "lookup",
    front: Front | None = None,
    **settings: Any,
) -> Iterator[Serving]:
    """Start a server on a free port, and stop it."""
    target = Target(model)
    made = None if draft is None else resolve_draft(draft, target)
    server = make_server(target, tokenizer, made, Settings(front or Front("tiny"), **settings))
    sock = listen("127.0.0.1", 0)
    url = address(sock)
    thread = threading.Thread(target=run, args=(server, sock))
    thread.start()
    try:
        yield Serving(server, url)
    finally:
        server.should_exit = True
        server.scheduler.close(0)
        thread.join(30)
        target.release()
        assert not thread.is_alive()


def offline(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, seed: int | None = None, **arguments: Any
) -> str:
    """The text that transformers' `generate` adds to a prompt."""
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.random.fork_rng():
        torch.manual_seed(seed or 0)
        out = plain(model, ids, attention_mask=torch.ones_like(ids), **arguments)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
