"""A PEFT adapter put into a transformers model in place, and taken out again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from selfspec.errors import ConfigError

NAME = "selfspec"


def put_in(model: PreTrainedModel, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Callable[[], None]:
    """Let an adapter count in every pass of the model.

    Args:
        model: changed in place.
        config: of a LoRA, as `adapter_config.json` holds it.
        tensors: by PEFT's names.

    Returns:
        What takes it out again: the modules are then the very objects they were.

    Raises:
        ConfigError: PEFT is not installed, or the model carries adapters already.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise ConfigError("this needs PEFT; run: pip install 'selfspec[peft]'") from error
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ConfigError(
            "the model carries PEFT adapters already, and this method puts in one of its own; merge yours first "
            "(merge_and_unload), and train on the merged model"
        )
    known = {key: value for key, value in config.items() if key not in ("auto_mapping", "peft_version")}
    lora = LoraConfig(**{**known, "inference_mode": True})
    modules = {name: model.get_submodule(name) for name in config["target_modules"]}
    trained = [(p, p.requires_grad) for p in model.parameters()]
    before, training = set(vars(model)), model.training

    def take_out() -> None:
        for name, module in modules.items():
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, module)
        for parameter, wanted in trained:
            parameter.requires_grad_(wanted)
        for added in set(vars(model)) - before:
            delattr(model, added)

    try:
        inject_adapter_in_model(lora, model, adapter_name=NAME)
        found: Any = set_peft_model_state_dict(model, dict(tensors), adapter_name=NAME)
        if found.unexpected_keys:
            raise ConfigError(f"the adapter holds tensors that the model has no place for: {found.unexpected_keys[:3]}")
    except Exception:
        take_out()
        raise
    for name in modules:
        model.get_submodule(name).requires_grad_(False)
    model.train(training)
    return take_out
