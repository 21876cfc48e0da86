"""Everything that leans on the inside of transformers, in one place.

The supported range is in versions.py.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from selfspec import versions
from selfspec.errors import UnsupportedModel
from selfspec.wrapped import holds_numbers

try:
    from transformers import DynamicCache, LlamaConfig, PreTrainedModel, modeling_layers
    from transformers.cache_utils import (
        Cache,
        CacheLayerMixin,
        DummyLayer,
        DynamicLayer,
        DynamicSlidingWindowLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionAndSlidingWindowAttentionLayer,
        LinearAttentionLayer,
    )
    from transformers.generation import GenerationMixin
    from transformers.integrations import is_deepspeed_zero3_enabled
    from transformers.integrations.fsdp import is_fsdp_managed_module
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.pytorch_utils import Conv1D
except ImportError as error:
    raise versions.other_version() from error

MASKED_ATTENTION = ("eager", "sdpa")
"""Attention back ends that take an arbitrary 4-D mask."""
_ATTENTION = ("self_attn", "self_attention", "attention", "attn")
_MLP = ("mlp", "feed_forward", "block_sparse_moe", "ffn")
_HYBRIDS = (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer)

__all__ = [
    "Cache",
    "CacheLayerMixin",
    "Chunk",
    "DummyLayer",
    "LinearAttentionLayer",
    "Window",
    "attention_of",
    "batch_of",
    "blocks_of",
    "config_of",
    "decoder_of",
    "dynamic_cache",
    "dynamic_rope_from",
    "has_position_table",
    "held_by",
    "layer_states",
    "layer_windows",
    "mask_kinds",
    "matrix_of",
    "mlp_of",
    "mtp_layer",
    "ranks_share_weights",
    "refill",
    "rope_frequencies",
    "rope_switch",
    "rotary_of",
    "rows_of",
    "sample_plainly",
    "shortened",
    "supports_logits_to_keep",
]


class Chunk(int):
    """Attention within consecutive chunks of this many tokens (Llama 4), where a plain int is a sliding window."""


Window = int | type[DummyLayer] | None
"""What a layer keeps keys of: None all tokens, an int a sliding window, a Chunk its chunk, DummyLayer nothing."""


def config_of(model: PreTrainedModel) -> Any:
    """The configuration of the text decoder."""
    return model.config.get_text_config(decoder=True)


def decoder_of(model: Any) -> nn.Module:
    """The module whose output is the last hidden state (after the final norm)."""
    found = (model.base_model, model.get_decoder(), getattr(model, "model", model))
    return next((module for module in found if module is not model), model)


def blocks_of(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder blocks."""
    wanted = config_of(model).num_hidden_layers
    lists = [m for m in model.get_decoder().modules() if isinstance(m, nn.ModuleList) and len(m) == wanted]
    if not lists:
        raise UnsupportedModel(f"{type(model).__name__} holds no list of {wanted} decoder blocks to read from")
    return lists[0]


def attention_of(block: nn.Module) -> nn.Module | None:
    """The attention of a decoder block; None if it is no module of its own under a usual name."""
    return _child(block, _ATTENTION)


def mlp_of(block: nn.Module) -> nn.Module | None:
    """The MLP (or mixture of experts) of a decoder block; None if it is no module of its own under a usual name."""
    return _child(block, _MLP)


def matrix_of(module: nn.Module) -> Tensor | None:
    """The weight `[out, in]` of a linear layer, by reference; None for other modules and for packed weights."""
    weight = getattr(module, "weight", None)
    if type(module) not in (nn.Linear, Conv1D) or not isinstance(weight, Tensor):
        return None
    if weight.is_meta or weight.numel() == 0 or not holds_numbers(weight):
        return None
    return weight.detach().t() if type(module) is Conv1D else weight.detach()


def _child(block: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    children = dict(block.named_children())
    return next((children[name] for name in names if name in children), None)


def layer_windows(config: Any) -> list[Window]:
    """Which keys each layer of the target keeps.

    Raises:
        UnsupportedModel: a layer whose cache holds something else (compressed or indexed keys); the message names it.
    """
    plan: list[Window] = []
    layers: list[Any] = list(DynamicCache(config=config).layers)
    for index, layer in enumerate(layers):
        if _is_known(layer, DynamicSlidingWindowLayer):
            window = layer.sliding_window
            plan.append(Chunk(window) if _kind(config, index) == "chunked_attention" else window)
        elif _is_known(layer, DynamicLayer):
            plan.append(None)
        elif isinstance(layer, DummyLayer) or type(layer) is LinearAttentionLayer:
            plan.append(DummyLayer)
        else:
            raise UnsupportedModel(
                f"layer {index} of {config.model_type!r} ({_kind(config, index)}, {type(layer).__name__}) cannot be "
                f"rolled back after a guess; layers of full, sliding-window or linear attention are supported"
            )
    return plan


def _is_known(layer: Any, keys: type) -> bool:
    """Whether a layer keeps exactly this kind of keys, with or without recurrent state beside them."""
    if type(layer) is keys:
        return True
    return type(layer) in _HYBRIDS and isinstance(layer, keys)


def layer_states(config: Any) -> list[int]:
    """How many recurrent or convolution states each layer carries from token to token; 0 for attention alone."""
    layers = DynamicCache(config=config).layers
    return [getattr(layer, "number_of_states", 0) for layer in layers]


def _kind(config: Any, index: int) -> str:
    kinds = getattr(config, "layer_types", None)
    return kinds[index] if kinds else "attention"


def mask_kinds(config: Any, windows: list[Window]) -> dict[str | None, int | None]:
    """The masks that `forward` wants: layer type to window; the single key None when one mask serves all layers."""
    real = [w for w in windows if not isinstance(w, type)]
    if len(set(real)) <= 1:
        return {None: real[0] if real else None}
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        raise UnsupportedModel(f"{config.model_type!r} mixes attention windows {sorted(map(str, set(real)))} unnamed")
    found: dict[str | None, int | None] = {}
    for kind, window in zip(kinds, windows, strict=True):
        if not isinstance(window, type) and found.setdefault(kind, window) != window:
            raise UnsupportedModel(f"layers of type {kind!r} in {config.model_type!r} have different windows")
    return found


def _rope_kinds(config: Any) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def dynamic_rope_from(config: Any) -> int | None:
    """The length beyond which `dynamic` rope takes its frequencies from the longest position of each pass, or None."""
    if not any(kind.get("rope_type") == "dynamic" for kind in _rope_kinds(config)):
        return None
    return int(config.max_position_embeddings)


def has_position_table(model: PreTrainedModel) -> bool:
    """Whether positions are looked up in a table of `max_position_embeddings` rows (and a few more, as OPT has)."""
    limit, words = getattr(config_of(model), "max_position_embeddings", None), model.get_input_embeddings()
    tables = [m for m in decoder_of(model).modules() if isinstance(m, nn.Embedding) and m is not words]
    return limit is not None and any(limit <= table.num_embeddings <= limit + 8 for table in tables)


def ranks_share_weights(model: PreTrainedModel) -> str | None:
    """What makes all ranks run every pass together (weights gathered pass by pass), by name; None on one rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    if torch.distributed.get_world_size() < 2:
        return None
    if is_deepspeed_zero3_enabled():
        return "DeepSpeed ZeRO-3"
    return "FSDP" if is_fsdp_managed_module(model) else None


def rope_switch(config: Any) -> int | None:
    """The length at which `longrope` changes its frequencies, None without it.

    transformers reads the whole text anew there, so a cache of the shorter text is of no use beyond it.
    """
    kinds = _rope_kinds(config)
    if not any(kind.get("rope_type") == "longrope" for kind in kinds):
        return None
    lengths = [kind.get("original_max_position_embeddings") for kind in kinds]
    lengths.append(getattr(config, "original_max_position_embeddings", None))
    return min((int(length) for length in lengths if length), default=None)


def rope_frequencies(size: int, theta: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Scaled rotary frequencies, float32 on the CPU, and the factor on cosine and sine.

    Args:
        size: d, the head size.
        theta: base of the frequencies.
        scaling: `rope_parameters` without the base.

    Returns:
        `[1, d / 2]`, or for `longrope` `[2, d / 2]`: up to `original_max_position_embeddings`, and beyond.
    """
    kind, original = scaling["rope_type"], scaling.get("original_max_position_embeddings")
    limit = round(scaling["factor"] * original) if original else 1
    parameters = {**scaling, "rope_theta": theta}
    config = LlamaConfig(head_dim=size, max_position_embeddings=limit, rope_parameters=parameters)
    lengths = (None, original + 1) if kind == "longrope" and original else (None,)
    made = [ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length) for length in lengths]
    return torch.stack([frequencies.float() for frequencies, _ in made]), float(made[0][1])


def supports_logits_to_keep(model: Any) -> bool:
    """Whether `forward` can leave out logits that nobody reads."""
    return bool(model._supports_logits_to_keep())


def dynamic_cache(config: Any, layers: list[tuple[Tensor, Tensor] | None]) -> DynamicCache:
    """A transformers cache holding these keys and values (`[B, H, S, d]` each); None for layers that keep nothing."""
    cache = DynamicCache(config=config)
    for index, pair in enumerate(layers):
        if pair is not None:
            cache.update(*pair, index)
    return cache


def held_by(cache: Any) -> str | None:
    """What keeps a caller's cache from being taken over: a name, or None for a plain DynamicCache."""
    if type(cache) is not DynamicCache:
        return f"a {type(cache).__name__} of the caller's own"
    if getattr(cache, "offloading", False):
        return "an offloaded cache of the caller's own"
    known = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
    other = [type(layer).__name__ for layer in cache.layers if type(layer) not in known]
    return f"a cache with {other[0]} in it" if other else None


def batch_of(cache: DynamicCache) -> int:
    """Rows of a cache that holds text."""
    return next(
        layer.keys.shape[0] for layer in cache.layers if isinstance(layer, DynamicLayer) and layer.keys is not None
    )


def rows_of(cache: DynamicCache, real: Tensor) -> list[list[tuple[Tensor, Tensor] | None]]:
    """Keys and values of the real tokens (`real`: `[B, S]` bool) of each row, `[H, S', d]` per layer.

    A sliding layer has forgotten the oldest ones; zeros stand for them, which nothing looks at any more.
    """
    found: list[list[tuple[Tensor, Tensor] | None]] = [[] for _ in range(real.shape[0])]
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            for row in found:
                row.append(None)
            continue
        missing = real.shape[1] - layer.keys.shape[-2]
        keys, values = (nn.functional.pad(part, (0, 0, missing, 0)) for part in (layer.keys, layer.values))
        for row, kept, key, value in zip(found, real.to(keys.device), keys, values, strict=True):
            row.append((key[:, kept], value[:, kept]))
    return found


def refill(cache: DynamicCache, config: Any, layers: list[tuple[Tensor, Tensor] | None]) -> DynamicCache:
    """Put these keys and values in place of what a caller's cache holds; the object stays the same."""
    sliding = any(isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers)
    if sliding or cache.layer_class_to_replicate is None:
        cache.layers = dynamic_cache(config, layers).layers
    else:
        cache.layers = []
        for index, pair in enumerate(layers):
            if pair is not None:
                cache.update(*pair, index)
    return cache


def sample_plainly(model: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' own greedy and sampling loop, on arguments that `generate` has prepared."""
    return GenerationMixin._sample(model, *args, **kwargs)


class MtpModel(modeling_layers.MtpModel):  # the name decides which key conversions apply
    """transformers' MTP layers, found in checkpoints of any number of layers.

    Its own patterns name the layer numbers of the published sizes only.
    """

    @classmethod
    def is_custom_code(cls) -> bool:
        """No: conversions of transformers' own class apply."""
        return False

    @staticmethod
    def get_mtp_weights_regex(main_model: PreTrainedModel) -> re.Pattern[str]:
        """Names of layers behind the last one of the model, or under `mtp`."""
        config = config_of(main_model)
        behind = "|".join(str(config.num_hidden_layers + k) for k in range(config.num_mtp_layers))
        return re.compile(rf"(^|\.)layers\.({behind})\.|(^|\.)mtp\.")


def mtp_layer(model: PreTrainedModel, load: bool) -> nn.Module:
    """The first multi-token-prediction layer of a model: `enorm`, `hnorm`, `eh_proj`, `mtp_block`, `post_norm`.

    Args:
        model: the target; it is not changed.
        load: read the weights from the model's checkpoint, else leave them as they are made.

    Raises:
        UnsupportedModel: the configuration names no such layers, they are of a kind that cannot be rolled back, or the
            checkpoint lacks their tensors.
    """
    config, name = config_of(model), type(model).__name__
    if not getattr(config, "num_mtp_layers", None):
        raise UnsupportedModel(
            f"{name} has no multi-token-prediction layers that transformers knows; train other heads"
        )
    try:
        mtp_config = model.config.get_mtp_config()
        if any(window is not None for window in layer_windows(mtp_config)):
            raise UnsupportedModel(f"the multi-token-prediction layers of {name} do not attend to the whole text")
        built = MtpModel.from_pretrained(model) if load else MtpModel(model, config.num_mtp_layers)
    except (ValueError, RuntimeError, OSError) as error:
        if isinstance(error, UnsupportedModel):
            raise
        raise UnsupportedModel(f"the multi-token-prediction layers of {name} cannot be used: {error}") from error
    layer: nn.Module = built.layers[0]
    if built.has_per_layer_rope or not getattr(layer, "use_post_norm", False) or built.use_shared_post_norm:
        raise UnsupportedModel(f"multi-token-prediction layers of the kind {name} has are not supported")
    return layer


def rotary_of(model: PreTrainedModel, x: Tensor, positions: Tensor) -> Any:
    """What the model's layers take as `position_embeddings`."""
    return model.get_decoder().rotary_emb(x, position_ids=positions)


def shortened(cache: Cache, length: int) -> bool:
    """Cut a cache to its first `length` tokens; False, with nothing done, where a layer does not keep all of them."""
    if any(type(layer) is not DynamicLayer for layer in cache.layers):
        return False
    cache.crop(length - cache.get_seq_length())
    return True
