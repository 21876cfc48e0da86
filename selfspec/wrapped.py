"""Models that are more than their own code and weights: adapters, packed weights, offloading, compiled passes."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.errors import UnsupportedModel
from selfspec.few_rows import is_own

_LLM_INT8 = "Linear8bitLt"
_PACKERS = ("torchao", "bitsandbytes")
UNPACKED = "none"
_PER_CALL = {"adapter_names": "adapters named for each row", "alora_offsets": "aLoRA adapters, counted from the end"}


def unwrapped(model: Any) -> PreTrainedModel:
    """The transformers model itself; PEFT models and `torch.compile`'s wrapper hand `generate` on to it.

    Raises:
        UnsupportedModel: a wrapper of another kind, or adapters that prepare the model's inputs or look at the whole
            text.
    """
    if isinstance(model, PreTrainedModel):
        return model
    name = type(model).__name__
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        return unwrapped(model._orig_mod)
    if not hasattr(model, "get_base_model"):
        raise UnsupportedModel(
            f"{name} is no transformers model; give the model inside it (as a rule {name}.module). Models whose "
            "weights are spread over ranks cannot be patched"
        )
    _refuse_adapter(name, getattr(model, "active_peft_config", None))
    return unwrapped(model.get_base_model())


def _refuse_adapter(name: str, config: Any) -> None:
    if getattr(config, "is_prompt_learning", False):
        raise UnsupportedModel(
            f"{name} puts trained prompts in front of the text ({config.peft_type}), which a tree of guesses would not "
            "see; adapters on weights (LoRA and its kin) are supported"
        )
    if getattr(config, "peft_type", None) == "XLORA":
        raise UnsupportedModel(
            f"{name} mixes its adapters by what a pass reads (XLORA), so guesses would change the tokens before them; "
            "adapters on weights (LoRA and its kin) are supported"
        )


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` stands behind a pass of the model or of a part of it."""
    return any(
        module._compiled_call_impl is not None
        or hasattr(module, "_orig_mod")
        or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def holds_numbers(weight: Any) -> TypeGuard[Tensor]:
    """Whether a weight is a matrix or vector of plain floating-point numbers: not packed, quantised or sharded."""
    return type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point()


def execution_device(module: nn.Module) -> torch.device:
    """Where a module with a weight computes; accelerate brings offloaded weights there for each pass.

    Raises:
        UnsupportedModel: the weight is nowhere (meta) and nothing brings it.
    """
    weight: Tensor = module.weight  # type: ignore[assignment]
    if not weight.is_meta:
        return weight.device
    hook = getattr(module, "_hf_hook", None)
    for part in (hook, *getattr(hook, "hooks", ())):
        device = getattr(part, "execution_device", None)
        if device is not None:
            return torch.device(device)
    raise UnsupportedModel("the model's weights are on the meta device; load it with its weights")


def is_wrapped(model: PreTrainedModel) -> bool:
    """Whether something else than the model's own code and weights takes part in a pass; compilers do not count."""
    replaced = [vars(module)["forward"] for module in model.modules() if "forward" in vars(module)]
    if not all(hasattr(forward, "_torchdynamo_orig_callable") or is_own(forward) for forward in replaced):
        return True
    if getattr(model.config, "quantization_config", None) is not None or getattr(model, "peft_config", None):
        return True
    return not all(holds_numbers(weight) for weight in model.parameters())


def quantisation(model: PreTrainedModel) -> str:
    """How a model's weights are packed, in words as `bitsandbytes, 4 bits`; UNPACKED where they are plain numbers."""
    told = getattr(model.config, "quantization_config", None)
    if told is not None:
        find = told.get if isinstance(told, dict) else lambda name: getattr(told, name, None)
        method = find("quant_method") or type(told).__name__
        bits = next((count for count in (4, 8) if find(f"load_in_{count}bit")), find("bits"))
        return f"{getattr(method, 'value', method)}" + (f", {bits} bits" if bits else "")
    packed = [type(weight) for weight in model.parameters() if type(weight).__module__.split(".")[0] in _PACKERS]
    return f"{packed[0].__module__.split('.')[0]}, {packed[0].__name__}" if packed else UNPACKED


def why_inexact(model: PreTrainedModel) -> str | None:
    """What rounds one token by what else a pass reads, so that guesses change logits; None when nothing is known to."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
            return f"{name} (torch.ao's dynamic quantisation) scales the activations of a whole pass together"
        if type(module).__name__ == _LLM_INT8 and module.state.threshold > 0:
            return f"{name} (LLM.int8) treats a channel by the largest activation of the whole pass"
        if _granularity(module) == "PerTensor":
            return f"{name} (torchao) scales the activations of a whole pass together"
    return None


def why_coarse(model: PreTrainedModel) -> str | None:
    """What rounds the activations of each token to few bits, by name; None when nothing is known to."""
    for name, module in model.named_modules():
        if type(module).__name__ == _LLM_INT8 or _granularity(module) is not None:
            return f"{name} ({type(module).__name__}) rounds the activations of each token to few bits"
    return None


def _granularity(module: nn.Module) -> str | None:
    """What shares a scale when a torchao weight has activations quantised, by torchao's name; None when it has not."""
    options = getattr(getattr(module, "weight", None), "act_quant_kwargs", None)
    return None if options is None else type(getattr(options, "granularity", None)).__name__


def call_adapters(model: PreTrainedModel) -> list[str]:
    """Adapters that PEFT switches on for one call by place in the batch or in the text, by name."""
    if not getattr(model, "peft_config", None):
        return []
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    given = {key for hook in hooks if isinstance(hook, partial) for key in hook.keywords}
    return [said for key, said in _PER_CALL.items() if key in given]
