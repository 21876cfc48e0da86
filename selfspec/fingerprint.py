"""A short fingerprint of a target model, so that heads are never run on another base by accident."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from selfspec.sharded import gathered, spread_over_processes, whole
from selfspec.target import Target
from selfspec.wrapped import holds_numbers

_ROWS = 64


def fingerprint(target: Target) -> str:
    """A hash of the architecture and of samples of the weights.

    Values are rounded to bfloat16 first, so a model loaded in bfloat16 and the same one in float32 agree. Weights
    that are not plain floating-point tensors on a real device (quantised, offloaded) are left out and the print is
    marked `config:`; such a print compares the architecture only. Of a model that is spread over processes all of them
    must take part.
    """
    if target.known_fingerprint is not None:
        return target.known_fingerprint
    samples = [target.input_weight(), target.output_weight(), *target.norm_weights()]
    with gathered(*samples):
        made = _made(target, samples)
    if spread_over_processes(*samples):
        target.known_fingerprint = made
    return made


def _made(target: Target, samples: list[Tensor | None]) -> str:
    digest = hashlib.sha256()
    shape = (target.model_type, target.num_layers, target.hidden_size, target.vocab_size)
    digest.update(repr(shape).encode())
    architecture = digest.hexdigest()[:16]
    if any(w is None or not holds_numbers(w) or w.is_meta or w.numel() == 0 for w in samples):
        return f"config:{architecture}"
    for weight in samples:
        assert weight is not None
        digest.update(sample(whole(weight)))
    return f"weights:{architecture}:{digest.hexdigest()[:32]}"


def matches(saved: str, found: str) -> bool:
    """Whether two prints can belong to one model; a print without weights is compared by architecture."""
    if saved.startswith("weights:") and found.startswith("weights:"):
        return saved == found
    return saved.split(":")[1] == found.split(":")[1]


def sample(weight: Tensor) -> bytes:
    """Bytes of the first and the last rows of a weight, rounded to bfloat16."""
    rows = weight if weight.ndim == 1 else torch.cat([weight[:_ROWS], weight[-_ROWS:]])
    return rows.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
