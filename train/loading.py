"""Targets for training: whole on every process, split over the accelerators of one, or spread over all; quantised."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec.errors import ConfigError
from selfspec.models import load_target
from selfspec.train.distributed import Processes
from selfspec.train.recipe import Recipe
from selfspec.train.sharding import loading_in_pieces


def load(recipe: Recipe, joined: Processes) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target of a recipe and its tokenizer.

    A target that is to be spread over processes is loaded into main memory; `shard_target` spreads it.

    Raises:
        ConfigError: it cannot be had, a package for its quantisation is missing, or the placement does not fit.
    """
    several = joined.state.num_processes > 1
    if recipe.placement == "split" and several:
        raise ConfigError(
            "placement=split puts one target on all accelerators of one process; start one process, or set "
            "placement=sharded"
        )
    if recipe.placement == "sharded" and not several:
        raise ConfigError("placement=sharded needs several processes; with one, set placement=split")
    if recipe.placement == "sharded" and recipe.quantization:
        raise ConfigError(f"a target in {recipe.quantization} cannot be sharded; set placement=whole or split")
    device: Any = joined.state.device if recipe.device == "auto" else recipe.device
    options: dict[str, Any] = {}
    if recipe.placement == "split":
        options["device_map"] = "auto"
    if recipe.quantization:
        options |= {"quantization_config": quantization(recipe.quantization), "device_map": {"": str(device)}} | options
    try:
        if recipe.placement != "sharded":
            return load_target(recipe.target, dtype=recipe.dtype, device=device, **options)
        with loading_in_pieces(joined):
            return load_target(recipe.target, dtype=recipe.dtype, device="cpu")
    except ImportError as error:
        raise ConfigError(f"quantization={recipe.quantization}: {str(error).splitlines()[0]}") from error


def quantization(name: str) -> Any:
    """transformers' configuration for one of the names a recipe may have. Output heads stay in floating point.

    Raises:
        ConfigError: its package is not installed.
    """
    from transformers import BitsAndBytesConfig, TorchAoConfig

    try:
        if name == "bitsandbytes-8bit":
            return BitsAndBytesConfig(load_in_8bit=True)
        if name == "bitsandbytes-4bit":
            return BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            )
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    except ImportError as error:
        raise ConfigError(
            f"quantization={name} needs a package: {error}; run: pip install {name.split('-')[0]}"
        ) from error
