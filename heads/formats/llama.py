"""Fields of Llama-like configs, which most draft checkpoints have; by their names in Hugging Face configs."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from selfspec.errors import CheckpointError, ConfigError
from selfspec.head import DraftHead, HeadConfig
from selfspec.heads.formats.base import wanted_as
from selfspec.heads.formats.source import Fields, Note, Source
from selfspec.heads.rotary import check_scaling

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
_TAKEN_APART = ("rope_type", "type", "rope_theta")
_KNOW_THEIR_ORIGIN = ("llama3", "yarn", "longrope")


def read_layer(source: Source, fields: Fields, own_head_dim: bool, ignores_base: bool = False) -> dict[str, Any]:
    """Sizes, norms and rotary base of the draft's decoder layers, under our names.

    Args:
        source: gets the notes.
        fields: the Llama-like config.
        own_head_dim: whether the project reads `head_dim`; some always divide the hidden size by the heads.
        ignores_base: whether the project takes 10000 for `rope_theta`, whatever it is, where scaling is linear.
    """
    fields.skip(IRRELEVANT)
    fields.expect("hidden_act", "silu")
    fields.expect("mlp_bias", False)
    hidden, heads = fields.need("hidden_size", int), fields.need("num_attention_heads", int)
    if min(hidden, heads) < 1:
        raise CheckpointError(f"{fields.place}: hidden_size {hidden} and {heads} attention heads make no layer")
    head_dim = fields.take("head_dim", int, hidden // heads)
    head_dim = head_dim if own_head_dim else hidden // heads
    theta, scaling = _rope(source, fields, head_dim, ignores_base)
    return {
        "hidden_size": hidden,
        "vocab_size": fields.need("vocab_size", int),
        "intermediate_size": fields.need("intermediate_size", int),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.take("num_key_value_heads", int, heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.take("rms_norm_eps", float, 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def _rope(source: Source, fields: Fields, head_dim: int, ignores_base: bool) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of rotary positions. Older files name both at the top, transformers 5 in `rope_parameters`."""
    nested, older = fields.inner("rope_parameters"), fields.inner("rope_scaling")
    top, inner = fields.take("rope_theta", float, 0.0), nested.take("rope_theta", float, 0.0)
    if top and inner and top != inner:
        raise CheckpointError(f"{fields.place}: rope_theta is {top} and {inner} inside rope_parameters; remove one")
    named = [place for place in (nested, older) if "rope_type" in place or "type" in place]
    found = [_scaling(fields, place, head_dim) for place in named]
    scaling = found[0] if found else None
    if any(one != scaling for one in found):
        raise CheckpointError(f"{fields.place}: rope_parameters and rope_scaling contradict each other; remove one")
    if scaling is None:
        if not top and not inner:
            source.note("rope_theta", f"missing, so {DEFAULT_THETA:.0f}, whatever the target has")
        return top or inner or DEFAULT_THETA, None
    kind = scaling["rope_type"]
    source.note(
        "rope_scaling",
        f"{kind}, from the draft's own config and as transformers computes it, which is how vLLM, SGLang and SpecForge "
        "read it; SafeAILab's code knows linear only",
    )
    theta = top or inner or DEFAULT_THETA
    if ignores_base and kind == "linear" and not nested.values and theta != DEFAULT_THETA:
        source.note(
            "rope_theta", f"{theta:.0f}, but the project's code takes {DEFAULT_THETA:.0f} where scaling is linear"
        )
        theta = DEFAULT_THETA
    return theta, scaling


def _scaling(fields: Fields, place: Fields, head_dim: int) -> dict[str, Any] | None:
    """One description of scaling, complete by itself: what transformers takes from elsewhere is written into it."""
    kind = place.take("rope_type", str, "") or place.take("type", str, "default")
    if kind == "default":
        return None
    values = {key: value for key, value in place.values.items() if value is not None and key not in _TAKEN_APART}
    if values.get("partial_rotary_factor") == 1:
        del values["partial_rotary_factor"]
    longest = fields.take("max_position_embeddings", int, 0)
    original = fields.take("original_max_position_embeddings", int, 0) or longest
    if kind in _KNOW_THEIR_ORIGIN and original:
        original = values.setdefault("original_max_position_embeddings", original)
        if kind != "llama3" and longest and isinstance(original, int):
            values.setdefault("factor", longest / original)
    found = {"rope_type": kind, **values}
    try:
        check_scaling(found, head_dim)
    except ConfigError as error:
        raise CheckpointError(f"{place.place}: {error}") from error
    return found


def linear_scaling_only(config: HeadConfig) -> list[Note]:
    """Fatal notes for what SafeAILab's code cannot do: it refuses scalings but linear, and there ignores the base."""
    sizes: Any = config
    if sizes.rope_scaling is None:
        return []
    if sizes.rope_scaling["rope_type"] != "linear":
        return [
            Note(f"rope_scaling {sizes.rope_scaling['rope_type']}", "the project's code knows linear only", "fatal")
        ]
    return wanted_as(config, rope_theta=DEFAULT_THETA)


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
    theta, scaling = config.rope_theta, config.rope_scaling
    width = getattr(config, "draft_hidden_size", config.hidden_size)
    values = {
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
        "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": theta},
        "max_position_embeddings": head.target.max_positions or 1 << 20,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": str(next(head.parameters()).dtype).removeprefix("torch."),
    }
    # Readers older than `rope_parameters`.
    return values if scaling is None else values | {"rope_scaling": scaling}


def write_safeai_layer(head: DraftHead, architecture: str) -> dict[str, Any]:
    """The same for SafeAILab's config class, which wants scaling as `type` and `factor` and nothing else."""
    values = write_layer(head, architecture)
    if scaling := values.get("rope_scaling"):
        values["rope_scaling"] = {"type": scaling["rope_type"], "factor": scaling["factor"]}
    return values


def square_heads(config: HeadConfig) -> bool:
    """Whether `head_dim` is what readers get who do not look at it."""
    sizes: Any = config
    width = getattr(config, "draft_hidden_size", config.hidden_size)
    return bool(sizes.head_dim * sizes.num_attention_heads == width)
