"""Fields of Llama-like configs, which most draft checkpoints have; by their names in Hugging Face configs."""

from __future__ import annotations

from typing import Any

from selfspec.errors import CheckpointError
from selfspec.head import DraftHead, HeadConfig
from selfspec.heads.formats.source import Fields, Source

# Say nothing about what a head computes.
IRRELEVANT = (
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "embed_requires_grad",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "max_window_layers",
    "model_type",
    "pad_token_id",
    "pretraining_tp",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "_name_or_path",
)
DEFAULT_THETA = 10000.0


def read_layer(source: Source, fields: Fields, own_head_dim: bool) -> dict[str, Any]:
    """Sizes, norms and rotary base of the draft's decoder layers, under our names.

    Args:
        source: gets the notes.
        fields: the Llama-like config.
        own_head_dim: whether the project reads `head_dim`; some always divide the hidden size by the heads.
    """
    fields.skip(IRRELEVANT)
    fields.expect("hidden_act", "silu")
    fields.expect("mlp_bias", False)
    hidden, heads = fields.need("hidden_size", int), fields.need("num_attention_heads", int)
    if min(hidden, heads) < 1:
        raise CheckpointError(f"{fields.place}: hidden_size {hidden} and {heads} attention heads make no layer")
    head_dim = fields.take("head_dim", int, hidden // heads)
    return {
        "hidden_size": hidden,
        "vocab_size": fields.need("vocab_size", int),
        "intermediate_size": fields.need("intermediate_size", int),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.take("num_key_value_heads", int, heads),
        "head_dim": head_dim if own_head_dim else hidden // heads,
        "rms_norm_eps": fields.take("rms_norm_eps", float, 1e-6),
        "rope_theta": _rope_theta(source, fields),
    }


def _rope_theta(source: Source, fields: Fields) -> float:
    """The rotary base. Older files name it at the top, transformers 5 inside `rope_parameters`."""
    nested = fields.inner("rope_parameters")
    top, inner = fields.take("rope_theta", float, 0.0), nested.take("rope_theta", float, 0.0)
    if top and inner and top != inner:
        raise CheckpointError(f"{fields.place}: rope_theta is {top} and {inner} inside rope_parameters; remove one")
    for place in (nested, fields.inner("rope_scaling")):
        for key in ("rope_type", "type"):
            place.expect(key, "default")
    if not top and not inner:
        source.note("rope_theta", f"missing, so {DEFAULT_THETA:.0f}, whatever the target has")
    return top or inner or DEFAULT_THETA


def write_layer(head: DraftHead, architecture: str) -> dict[str, Any]:
    """A Llama config of a draft's layers; the reverse of `read_layer`."""
    config: Any = head.config
    theta = config.rope_theta
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": config.num_layers,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": head.target.max_positions or 1 << 20,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(next(head.parameters()).dtype).removeprefix("torch."),
    }


def square_heads(config: HeadConfig) -> bool:
    """Whether `head_dim` is what readers get who do not look at it."""
    sizes: Any = config
    return bool(sizes.head_dim * sizes.num_attention_heads == sizes.hidden_size)
