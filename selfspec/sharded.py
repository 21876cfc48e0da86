"""Weights that are spread over processes: DeepSpeed ZeRO-3 leaves empty tensors on the modules, FSDP2 pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def spread_over_processes(*tensors: Tensor | None) -> bool:
    """Whether any of them lies in pieces on several processes."""
    return any(t is not None and (_in_zero3(t) or isinstance(t, DTensor)) for t in tensors)


def _in_zero3(tensor: Tensor) -> bool:
    return hasattr(tensor, "ds_id")


def shape_of(tensor: Tensor) -> torch.Size:
    """The shape of the whole tensor."""
    shape: torch.Size = getattr(tensor, "ds_shape", tensor.shape)
    return shape


@contextmanager
def gathered(*tensors: Tensor | None, keep: bool = False) -> Iterator[None]:
    """Tensors of ZeRO-3 are whole while the block runs; others are left as they are. All processes must take part.

    Args:
        tensors: parameters.
        keep: what the first process writes into them stays.
    """
    pieces = list({id(t): t for t in tensors if t is not None and _in_zero3(t)}.values())  # tied weights come twice
    if not pieces:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(pieces, modifier_rank=0 if keep else None):
        yield


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, inside `gathered`. All processes must take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
