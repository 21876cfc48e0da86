"""What keeps a call of `generate` from being speculative, by name.

A call that means something else than greedy decoding or sampling is refused. One that plain decoding can serve and
speculation cannot goes to transformers' own loop, with a warning that names the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from selfspec import hf
from selfspec.errors import UnsupportedGeneration
from selfspec.inference.stopping import Stopper
from selfspec.scoring import unsupported_processors
from selfspec.target import Target
from selfspec.wrapped import call_adapters

if TYPE_CHECKING:
    from selfspec.inference.call import Call

_HANDLED_KWARGS = {
    "attention_mask",
    "position_ids",
    "inputs_embeds",
    "cache",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
}


def refuse(config: GenerationConfig) -> None:
    """Raise UnsupportedGeneration for what is neither greedy decoding nor sampling."""
    wrong = {
        "num_beams": config.num_beams not in (None, 1),
        "penalty_alpha": bool(config.penalty_alpha),
        "dola_layers": getattr(config, "dola_layers", None) is not None,
        "constraints": getattr(config, "constraints", None) is not None,
        "force_words_ids": getattr(config, "force_words_ids", None) is not None,
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens is not None,
        "use_mtp": bool(getattr(config, "use_mtp", None)),
        "assistant_early_exit": getattr(config, "assistant_early_exit", None) is not None,
    }
    named = [f"{name}={getattr(config, name)}" for name, found in wrong.items() if found]
    if named:
        raise UnsupportedGeneration(
            f"speculative decoding is greedy or samples, it cannot honour {', '.join(named)}; leave it out, or "
            "call selfspec.unpatch(model) first"
        )


def obstacles(call: Call, target: Target, model_kwargs: dict[str, Any]) -> list[str]:
    """Reasons to decode plainly; empty when the call can be speculative."""
    config, batch = call.config, call.input_ids.shape[0]
    found = unsupported_processors(call.processors, batch)
    # Models with vision get a dict of their encoders' outputs, empty for text alone.
    given = {k for k, v in model_kwargs.items() if v is not None and not (isinstance(v, dict) and not v)}
    found += [f"argument {k}" for k in model_kwargs if k in given - _HANDLED_KWARGS]
    if batch > 1 and target.chain_only:
        found.append(f"several prompts at once ({target.chain_only})")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name) and config.return_dict_in_generate:
            found.append(name)
    if config.use_cache is False:
        found.append("use_cache=False")
    if config.cache_implementation not in (None, "dynamic"):
        found.append(f"cache_implementation={config.cache_implementation!r}")
    if "prepare_inputs_for_generation" in vars(target.model):
        found.append("inputs that something else prepares (prompt tuning)")
    found += call_adapters(target.model)
    found += Stopper(call.criteria).obstacles(batch, bool(config.return_dict_in_generate and config.output_scores))
    found += _cache_obstacles(call, target, model_kwargs)
    # The rest reads the cache, so it must be one that can be read.
    return found or _prompt_obstacles(call, target, model_kwargs) + _rope_obstacles(call, target, model_kwargs)


def taken_cache(model_kwargs: dict[str, Any]) -> DynamicCache | None:
    """The cache that the caller passed in, None if transformers made one for this call."""
    cache: DynamicCache | None = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
    return cache if getattr(cache, "_is_user_defined", False) else None


def columns(call: Call, model_kwargs: dict[str, Any]) -> int:
    """Columns of cached and new text together, as transformers counts them."""
    mask, embeds = model_kwargs.get("attention_mask"), model_kwargs.get("inputs_embeds")
    if mask is not None:
        return int(mask.shape[1])
    new = call.input_ids if embeds is None else embeds
    return int(getattr(call.config, "_mask_length", None) or new.shape[1])


def _cache_obstacles(call: Call, target: Target, model_kwargs: dict[str, Any]) -> list[str]:
    cache = taken_cache(model_kwargs)
    if cache is None:
        return []
    held = hf.held_by(cache)
    if held is not None:
        return [held]
    if len(cache.layers) not in (0, len(target.windows)):
        return [f"a cache of {len(cache.layers)} layers, where the model has {len(target.windows)}"]
    past = cache.get_seq_length()
    if past == 0:
        return []
    if model_kwargs.get("inputs_embeds") is not None:
        return ["inputs_embeds beside a cache that holds text"]
    rows = hf.batch_of(cache)
    if rows != call.input_ids.shape[0]:
        return [f"a cache of {rows} rows for {call.input_ids.shape[0]} prompts"]
    width = columns(call, model_kwargs)
    new = call.input_ids.shape[1] - (past if width == call.input_ids.shape[1] else 0)
    if new < 1 or past + new != width:
        return [f"a cache of {past} tokens, of which a prompt of {call.input_ids.shape[1]} leaves nothing to read"]
    return []


def _prompt_obstacles(call: Call, target: Target, model_kwargs: dict[str, Any]) -> list[str]:
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    embeds = model_kwargs.get("inputs_embeds")
    if embeds is None and call.input_ids.shape[1] == 0:
        raise UnsupportedGeneration("the prompt is empty; give at least one token")
    kind = call.input_ids.dtype
    if embeds is None and (kind.is_floating_point or kind == torch.bool):
        raise UnsupportedGeneration(f"the prompt is of {kind}; give token ids as int64")
    width = columns(call, model_kwargs)
    if embeds is not None and (call.input_ids.shape[1] not in (0, width) or embeds.shape[1] != width):
        return [f"inputs_embeds of {embeds.shape[1]} places beside {call.input_ids.shape[1]} input_ids"]
    wanted = torch.arange(width).unsqueeze(0)
    if mask is not None:
        if mask.ndim != 2 or (not bool(mask[:, -1].all()) and bool(mask.any(-1).all())):
            return ["padding that is not on the left"]
        if bool((mask[:, 1:] < mask[:, :-1]).any()) and any(isinstance(w, int) for w in target.windows):
            return ["padding inside the text of a model with sliding windows"]
        wanted = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0).cpu()
    if positions is not None and not _equal(positions.cpu(), wanted):
        return ["position_ids of the caller's own"]
    return []


def _equal(positions: Tensor, wanted: Tensor) -> bool:
    """Positions may cover the newest columns only."""
    return positions.shape[1] <= wanted.shape[1] and bool((positions == wanted[:, -positions.shape[1] :]).all())


def _rope_obstacles(call: Call, target: Target, model_kwargs: dict[str, Any]) -> list[str]:
    switch, longest = hf.rope_switch(target.config), Stopper(call.criteria).max_length
    width, mask = columns(call, model_kwargs), model_kwargs.get("attention_mask")
    # Without input_ids the limit counts new tokens only; with new ones beside a cache, not the cached ones.
    longest = None if longest is None else longest + width - call.input_ids.shape[1]
    shortest = width if mask is None else int(mask.sum(1).min())
    found = []
    if switch is not None and shortest <= switch and (longest is None or longest > switch):
        found.append(f"longrope, whose frequencies change at {switch} tokens")
    limit = hf.dynamic_rope_from(target.config)
    if limit is not None and call.input_ids.shape[0] > 1 and (longest is None or longest > limit):
        found.append(f"several prompts whose rope changes with the longest of them beyond {limit} tokens")
    return found
