"""A head whose weights, gradients and optimizer state are spread over processes, and how to have it whole again.

With FSDP the whole head is one unit of sharding: heads call their parts in ways of their own (several passes, shared
layers), and one gather at the beginning of `forward` serves them all. ZeRO-3 gathers module by module: told of one unit
(its leaf modules), it exchanges the gradients before there are any, because a head's inputs need none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from selfspec.errors import ConfigError, TrainingError
from selfspec.fingerprint import fingerprint
from selfspec.hf import blocks_of
from selfspec.sharded import gathered
from selfspec.sharded import whole as full
from selfspec.target import Target
from selfspec.train.distributed import Processes

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def shard(model: nn.Module, device: torch.device) -> None:
    """Spread the parameters over all processes with FSDP2, in place.

    Raises:
        TrainingError: a parameter that trains was left whole, so its gradients would stay with their process.
    """
    fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    left = [name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if left or not isinstance(model, FSDPModule):
        raise TrainingError(f"FSDP left parameters whole on every process: {left}; use optimisation.strategy=zero2")


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """All parameters of `model` on every process while the block runs. All processes must take part.

    What the block does to them is lost.
    """
    if isinstance(model, FSDPModule):
        model.reshard()  # a pass without gradients leaves the parameters whole, out of sight of what follows
    own = [(m, name, p) for m in model.modules() for name, p in m.named_parameters(recurse=False)]
    pieces = [(module, name, piece) for module, name, piece in own if isinstance(piece, DTensor)]
    with gathered(*model.parameters()):
        # Not FSDP2's own unshard: reading the state dict would shard the parameters again.
        for module, name, piece in pieces:
            setattr(module, name, nn.Parameter(full(piece.detach()), piece.requires_grad))
        try:
            yield
        finally:
            for module, name, piece in pieces:
                setattr(module, name, piece)


@contextmanager
def for_writing(model: nn.Module) -> Iterator[None]:
    """Parameters of ZeRO-3 are whole, and keep what the first process writes into them; others are left as they are."""
    with gathered(*model.parameters(), keep=True):
        yield


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's whole state by parameter names (on the first process). All processes must take part."""
    return get_optimizer_state_dict(model, optimizer, options=_WHOLE)


def set_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Take each process's share of a whole state; the state must be there on every process."""
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(full_state_dict=True))


def load_whole(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Load whole tensors, by the names of `model`, into a model that is sharded with FSDP2."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True, strict=True))


def shard_target(target: Target, joined: Processes) -> None:
    """Spread a target's weights over all processes, in place; every pass of it then needs all of them.

    With ZeRO by DeepSpeed's stage 3, whatever the stage of the head; otherwise the decoder layers with FSDP2, while
    embedding, norm and output head stay whole.

    Raises:
        ConfigError: there is one process.
    """
    if joined.state.num_processes == 1:
        raise ConfigError("placement=sharded needs several processes; with one, set placement=split")
    target.known_fingerprint = fingerprint(target)
    if joined.zero_stage:
        _shard_with_zero(target.model)
    else:
        mesh = init_device_mesh(joined.state.device.type, (dist.get_world_size(),))
        for block in blocks_of(target.model):
            fully_shard(block, mesh=mesh)
        target.model.to(joined.state.device)


@contextmanager
def loading_in_pieces(joined: Processes) -> Iterator[None]:
    """With ZeRO, transformers loads a model inside this block in pieces, so that no process ever holds it whole."""
    if not joined.zero_stage:
        yield
        return
    from transformers.integrations import HfDeepSpeedConfig

    known = HfDeepSpeedConfig(_target_settings(torch.bfloat16))
    try:
        yield
    finally:
        del known  # transformers holds it weakly: models loaded later are whole again


def _target_settings(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "train_batch_size": dist.get_world_size(),
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": dtype is torch.bfloat16},
        "fp16": {"enabled": dtype is torch.float16},
    }


def _shard_with_zero(model: nn.Module) -> None:
    import deepspeed

    dtype = next(model.parameters()).dtype
    deepspeed.initialize(model=model, config=_target_settings(dtype))[0].eval()
