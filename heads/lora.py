"""Low-rank updates of the target's linear modules, in the names and the file format of PEFT.

Hu et al. 2021, "LoRA", equation 3: a module that is given x adds `(alpha / r) B A x`, with A drawn and B zero at first.
The target's modules are not touched: who runs a pass says whether the updates count (`Plan.added`).

Letters: r rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec import hf
from selfspec.errors import ConfigError
from selfspec.switches import Plan
from selfspec.target import Target

_PEFT_ROOT = "base_model.model"


@dataclass(frozen=True)
class Linear:
    """A linear module of the target: its name in the whole model and in the decoder, and its sizes."""

    name: str
    inner_name: str
    inputs: int
    outputs: int


class _Update(nn.Module):
    def __init__(self, inputs: int, outputs: int, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.lora_A = nn.Linear(inputs, rank, bias=False)
        self.lora_B = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down, up = self.lora_A.weight.to(x.device), self.lora_B.weight.to(x.device)
        return F.linear(F.linear(x.to(down.dtype), down), up) * self.scale


class LoraUpdates(nn.Module):
    """Updates of some linear modules. Its state dict has the keys of PEFT's `adapter_model.safetensors`.

    Args:
        modules: what is updated.
        rank: r.
        alpha: see above.
    """

    def __init__(self, modules: Sequence[Linear], rank: int, alpha: float) -> None:
        super().__init__()
        self.rank, self.alpha = rank, alpha
        self.names = [module.name for module in modules]
        self.inner_names = [module.inner_name for module in modules]
        for module in modules:
            path = f"{_PEFT_ROOT}.{module.name}".split(".")
            holder: nn.Module = self
            for part in path[:-1]:
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            holder.add_module(path[-1], _Update(module.inputs, module.outputs, rank, alpha / rank))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """A as PEFT draws it, B zero: at first nothing is added."""
        for update in self.updates.values():
            nn.init.kaiming_uniform_(update.lora_A.weight, a=math.sqrt(5), generator=generator)
            nn.init.zeros_(update.lora_B.weight)

    @property
    def updates(self) -> Mapping[str, _Update]:
        """By the module's name in the decoder, as `Plan.added` wants them."""
        found = (self.get_submodule(f"{_PEFT_ROOT}.{name}") for name in self.names)
        return {inner: update for inner, update in zip(self.inner_names, found, strict=True)}  # type: ignore[misc]

    def peft_config(self, base_model: str) -> dict[str, Any]:
        """What `adapter_config.json` holds.

        Raises:
            ConfigError: PEFT is not installed.
        """
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise ConfigError(
                "adapters are saved as PEFT adapters, and PEFT is not installed; run: pip install 'selfspec[peft]'"
            ) from error
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            target_modules=self.names,
            base_model_name_or_path=base_model or None,
            inference_mode=True,
            task_type="CAUSAL_LM",
        )
        return {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}


def choose_linear(target: Target, plan: Plan, wanted: Sequence[str]) -> list[Linear]:
    """The linear modules of the blocks that a pass with this plan runs.

    Args:
        target: the model.
        plan: of the pass.
        wanted: last parts of their names, as `q_proj`; empty takes all.

    Raises:
        ConfigError: the model has no such module.
    """
    found = list(_linear(target, plan))
    chosen = [module for module in found if not wanted or module.name.rpartition(".")[2] in wanted]
    known = sorted({module.name.rpartition(".")[2] for module in found})
    missing = sorted(set(wanted) - set(known))
    if missing or not chosen:
        raise ConfigError(f"the draft pass runs no linear module called {missing or 'anything'}; there are {known}")
    return chosen


def _linear(target: Target, plan: Plan) -> Iterator[Linear]:
    decoder, blocks = hf.decoder_of(target.model), hf.blocks_of(target.model)
    names = {id(module): name for name, module in target.model.named_modules()}
    root = names[id(decoder)]
    for layer, block in enumerate(blocks):
        if plan.leaves_out(layer):
            continue
        out = [hf.attention_of(block)] if layer in plan.attention else []
        out += [hf.mlp_of(block)] if layer in plan.mlp else []
        for name, module in _leaves(names[id(block)], block, {id(part) for part in out}):
            outputs, inputs = _sizes(module)
            yield Linear(name, name.removeprefix(f"{root}."), inputs, outputs)


def _leaves(name: str, module: nn.Module, out: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Linear modules below one; what stands inside a linear module (as an adapter of the user's) belongs to it."""
    if id(module) in out:
        return
    if _sizes(module) != (0, 0):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _leaves(f"{name}.{child_name}", child, out)


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear module, packed or plain, bare or with adapters; zeros for any other."""
    inner = getattr(module, "base_layer", module)
    if isinstance(inner, nn.Linear):
        return inner.out_features, inner.in_features
    matrix = hf.matrix_of(inner)
    return (0, 0) if matrix is None else (matrix.shape[0], matrix.shape[1])
