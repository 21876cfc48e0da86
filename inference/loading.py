"""Base model and heads in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.checkpoint import heads_folder, read_config
from selfspec.errors import CheckpointError
from selfspec.inference.patch import patch
from selfspec.models import AUTO, load_target


def load(
    heads: str | Path,
    base: str | Path | None = None,
    *,
    dtype: str | torch.dtype = AUTO,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    token: str | None = None,
    nodes: int | None = None,
    guard: bool | None = None,
    **kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the base model that heads were trained on, patch it with them, and load its tokenizer.

    Args:
        heads: folder or Hub id of trained heads.
        base: folder or Hub id of the base model; the one named in the heads' config by default.
        dtype: of the base model, see `load_target`; the heads follow it.
        device: where to put the base model.
        revision: Hub revision of the heads.
        token: Hub token, for the heads and for the base model.
        nodes: see `patch`.
        guard: see `patch`.
        **kwargs: passed to `AutoModelForCausalLM.from_pretrained`.

    Raises:
        CheckpointError: the heads are damaged, or name no base model and none was given.
    """
    folder = heads_folder(heads, revision, token)
    config = read_config(folder)
    source = base or config.get("base_model")
    if not source:
        raise CheckpointError(f"{folder} names no base model; give one (base=..., or --target)")
    base_revision = None if base else config.get("base_revision")
    model, tokenizer = load_target(source, dtype=dtype, device=device, revision=base_revision, token=token, **kwargs)
    return patch(model, folder, nodes=nodes, guard=guard), tokenizer
