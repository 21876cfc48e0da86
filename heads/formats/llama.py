"""Fields of Llama-like configs, which most draft checkpoints have; by their names in Hugging Face configs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

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


def take_layer(
    source: Source, at: str, to: str, sizes: dict[str, Any], norms: tuple[str, ...], attention_size: int = 0
) -> dict[str, Tensor]:
    """The tensors of one decoder layer, under our names. Biases of q, k and v and norms on q and k come if there.

    Args:
        source: the checkpoint.
        at: prefix of the layer there.
        to: prefix of it here.
        sizes: as `read_layer` gives them.
        norms: names of the layer's norms.
        attention_size: width of what attention reads, if it is not the hidden size.
    """
    size, wide, head_dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    inner, outer = sizes["num_attention_heads"] * head_dim, sizes["num_key_value_heads"] * head_dim
    reads = attention_size or size
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (inner, reads),
        "self_attn.k_proj.weight": (outer, reads),
        "self_attn.v_proj.weight": (outer, reads),
        "self_attn.o_proj.weight": (size, inner),
        "mlp.gate_proj.weight": (wide, size),
        "mlp.up_proj.weight": (wide, size),
        "mlp.down_proj.weight": (size, wide),
        **{f"{name}.weight": (size,) for name in norms},
    }
    if f"{at}self_attn.q_proj.bias" in source:
        shapes |= {
            f"self_attn.{name}_proj.bias": (rows,) for name, rows in zip("qkv", (inner, outer, outer), strict=True)
        }
    if f"{at}self_attn.q_norm.weight" in source:
        shapes |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    return {f"{to}{name}": source.take(f"{at}{name}", *shape) for name, shape in shapes.items()}


def tensors_read_head_dim(source: Source, query: str) -> bool:
    """Some projects read `head_dim`, others divide; where the two differ the query projection tells."""
    fields = source.config
    heads, head_dim = fields.take("num_attention_heads", int, 0), fields.take("head_dim", int, 0)
    return source.shape(query)[0] == heads * head_dim


def write_layer(head: DraftHead, architecture: str) -> dict[str, Any]:
    """A Llama config of a draft's layers; the reverse of `read_layer`."""
    config: Any = head.config
    theta = config.rope_theta
    width = getattr(config, "draft_hidden_size", config.hidden_size)
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": width,
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
    width = getattr(config, "draft_hidden_size", config.hidden_size)
    return bool(sizes.head_dim * sizes.num_attention_heads == width)
