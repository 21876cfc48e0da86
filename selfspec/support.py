"""Which models can be served exactly, and which can follow no more than a chain of guesses."""

from __future__ import annotations

import inspect

from transformers import PreTrainedModel

from selfspec import hf
from selfspec.errors import UnsupportedModel

_ADDS_BIAS_FROM_A_2D_MASK = {"bloom", "mpt"}
_STARTS_FROM_NOTHING = {"mamba", "falcon_mamba", "jamba", "zamba"}


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel for a model with a part that cannot be served exactly; the message names it."""
    name, config = type(model).__name__, hf.config_of(model)
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder; only decoder-only models are supported")
    if not model.can_generate():
        raise UnsupportedModel(f"{name} has no language-model head; load it with AutoModelForCausalLM")
    if hf.decoder_of(model) is model:
        raise UnsupportedModel(f"{name} keeps no decoder apart from its head, so its hidden states cannot be read")
    if config.model_type in _STARTS_FROM_NOTHING:
        raise UnsupportedModel(
            f"{name}: transformers' scan of Mamba-1 starts from an empty state whenever it reads several tokens, "
            "so guesses cannot be checked behind a text; Mamba-2 models are supported"
        )
    if hasattr(hf.decoder_of(model), "_setup_cache"):
        raise UnsupportedModel(f"{name} keeps its recurrent state on its modules, where it cannot be rolled back")
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise UnsupportedModel(f"{name} has bidirectional attention: later tokens change what earlier ones see")
    takes = inspect.signature(model.forward).parameters
    if "cache" not in takes:
        raise UnsupportedModel(f"{name}.forward takes no cache, so it reads the whole text at every step")
    attention = config._attn_implementation
    if attention not in hf.MASKED_ATTENTION:
        raise UnsupportedModel(
            f"attention back end {attention!r} takes no tree mask; load the model with "
            f"attn_implementation='sdpa' (supported: {', '.join(hf.MASKED_ATTENTION)})"
        )


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether `forward` can be told the position of each token."""
    return "position_ids" in inspect.signature(model.forward).parameters


def why_chain_only(model: PreTrainedModel) -> str | None:
    """Why the model can follow nothing wider than a chain of guesses of one row; None when it can follow trees."""
    name, config = type(model).__name__, hf.config_of(model)
    if any(hf.layer_states(config)):
        return f"{name} has layers with recurrent state, which follows one line of text"
    if config.model_type in _ADDS_BIAS_FROM_A_2D_MASK or getattr(config, "alibi", False):
        return f"{name} derives ALiBi from places in the cache, which are no positions in a tree"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return f"{name} has local attention with a causal mask of its own"
    if not takes_positions(model):
        return f"{name}.forward takes no position_ids, so nodes of a tree cannot be placed"
    return None
