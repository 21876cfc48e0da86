"""Hydra heads as zankner/Hydra publishes them, in all four of its forms. No engine serves them.

The config holds no sizes: those of attention layers are the base model's, so the target must be given for them. The
file repeats the base model's embedding and output head.

Letters: M heads, N blocks per head, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfspec.errors import CheckpointError
from selfspec.head import DraftHead, HeadConfig
from selfspec.heads.formats.base import (
    Converted,
    Format,
    Written,
    add,
    build_config,
    drop_copy,
    embedding_scale,
    reduced,
    rows_of,
    settings_of,
    wanted_as,
)
from selfspec.heads.formats.llama import DEFAULT_THETA, square_heads, take_layer
from selfspec.heads.formats.source import Note, Source
from selfspec.target import Target

_FIRST = r"hydra_mlp\.(\d+)\.(\d+)\.res_connection\.weight"
_BLOCK = r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight"
_PREFIX = "prefix_embeding_layer."  # the project's spelling
_NORMS = ("input_layernorm", "post_attention_layernorm")
_FORMS = {"mlp": "hydra", "prefix-mlp": "hydra", "eagle-attn": "eagle", "cross-attn": "hydra-cross"}


class Hydra(Format):
    """`hydra_lm_head.pt` and a config with `hydra_head_arch`."""

    name = "hydra"
    kinds = ("hydra", "hydra-cross", "eagle")
    served_by = "zankner/Hydra"

    def detects(self, source: Source) -> bool:
        return "hydra_num_heads" in source.config or bool(source.matching(_FIRST))

    def read(self, source: Source, target: Target | None) -> Converted:
        fields = source.config
        fields.skip(("transformers_version", "hydra_num_heads", "hydra_num_layers"))
        form = fields.take("hydra_head_arch", str, "mlp")
        if form not in _FORMS:
            raise CheckpointError(f"{fields.place}: hydra_head_arch is {form!r}, known: {', '.join(_FORMS)}")
        if embedding_scale(target) != 1:
            raise CheckpointError("the target scales its embeddings, which the project's heads were never trained on")
        grounded, offset = fields.take("grounded_heads", bool, False), fields.take("hidden_state_offset", int, 0)
        base = fields.take("base_model_name_or_path", str, "")
        if form in ("mlp", "prefix-mlp"):
            converted = self._read_mlp(source, target, form == "prefix-mlp", grounded, offset)
        elif offset:
            raise CheckpointError(f"{fields.place}: hidden_state_offset {offset} with {form} cannot be read here")
        else:
            converted = self._read_attention(source, target, form)
        converted.config.base_model = converted.config.base_model or base
        source.drop_matching(r".*rotary_emb\.inv_freq", "computed from the fixed base 10000")
        source.drop(f"{_PREFIX}embed_tokens.weight", "never read")
        embedding = None if target is None else target.input_weight()
        drop_copy(source, "input_embed_fn.weight", embedding, "the embedding")
        drop_copy(source, "lm_head.weight", None if target is None else target.output_weight(), "the output head")
        return converted

    def _read_mlp(self, source: Source, target: Target | None, prefix: bool, grounded: bool, offset: int) -> Converted:
        """Dropout takes every other index of the prefix form: blocks are at 1, 3, 5, .., the output at 1."""
        first, step, tail = (1, 2, ".1") if prefix else (0, 1, "")
        size = source.shape(f"hydra_mlp.0.{first}.linear.weight")[0]
        places = [(int(match[1]), int(match[2])) for match in source.matching(_BLOCK)]
        heads, blocks = 1 + max(j for j, _ in places), 1 + (max(n for _, n in places) - first) // step
        vocab = source.shape(f"hydra_lm_head.0{tail}.weight")[0]
        tensors: dict[str, Tensor] = {}
        for j in range(heads):
            for n in range(blocks):
                at, inputs = f"hydra_mlp.{j}.{first + step * n}.", (j + 2 if grounded else 1) if n == 0 else 1
                for part in ("linear", "res_connection") if n == 0 else ("linear",):
                    to = f"heads.{j}.{part}" if n == 0 else f"heads.{j}.blocks.{n - 1}"
                    tensors[f"{to}.weight"] = source.take(f"{at}{part}.weight", size, inputs * size)
                    tensors[f"{to}.bias"] = source.take(f"{at}{part}.bias", size)
        names = [f"hydra_lm_head.{j}{tail}" for j in range(heads)]
        tensors["output.rows"] = torch.stack([source.take(f"{name}.weight", vocab, size) for name in names])
        tensors["output.own_bias"] = torch.stack([source.take(f"{name}.bias", vocab)[None] for name in names])
        tensors["output.vocab.ids"] = torch.arange(vocab)
        fixed: dict[str, Any] = {"hidden_size": size, "vocab_size": vocab, "draft_vocab_size": vocab}
        fixed |= {"num_heads": heads, "mlp_blocks": blocks, "grounded": grounded, "hidden_state_offset": offset}
        fixed |= {"prefix_attention": prefix, "embedding_norm": False}
        fixed |= {"output_per_head": True, "output_bias": True, "own_output": False}
        if prefix:
            sizes = self._sizes(source, target, f"{_PREFIX}layers.0.self_attn.", f"{_PREFIX}layers.0.mlp.")
            tensors |= take_layer(source, f"{_PREFIX}layers.0.", "layers.0.", sizes, _NORMS)
            tensors["norm.weight"] = source.take(f"{_PREFIX}norm.weight", size)
            fixed |= {"num_layers": 1, **sizes}
        return Converted(build_config(source, "hydra", fixed), tensors)

    def _read_attention(self, source: Source, target: Target | None, form: str) -> Converted:
        """The forms that guess features one after another: EAGLE with a norm before attention, or cross-attention."""
        cross = form == "cross-attn"
        at = ("cross_attn.", "mlp.") if cross else ("attn.self_attn.", "attn.mlp.")
        sizes = self._sizes(source, target, *at)
        size, inner = sizes["hidden_size"], sizes["num_attention_heads"] * sizes["head_dim"]
        outer, wide = sizes["num_key_value_heads"] * sizes["head_dim"], sizes["intermediate_size"]
        tensors: dict[str, Tensor] = {}
        if cross:
            shapes = {
                "cross_attn.q_proj": (inner, size),
                "cross_attn.k_proj": (outer, size),
                "cross_attn.v_proj": (outer, size),
                "cross_attn.o_proj": (size, inner),
                "mlp.gate_proj": (wide, size),
                "mlp.up_proj": (wide, size),
                "mlp.down_proj": (size, wide),
            }
            for name, shape in shapes.items():
                tensors[f"{name}.weight"] = source.take(f"{name}.weight", *shape)
            for name in _NORMS:
                tensors[f"{name}.weight"] = source.take(f"{name}.weight", size)
        else:
            tensors = take_layer(source, "attn.", "layers.0.", sizes, _NORMS)
            tensors |= {"fc.weight": source.take("fc.weight", size, 2 * size), "fc.bias": source.take("fc.bias", size)}
        assert target is not None
        vocab = target.vocab_size
        tensors["output.vocab.ids"] = torch.arange(vocab)
        fixed = {**sizes, "num_layers": 1, "vocab_size": vocab, "draft_vocab_size": vocab, "own_output": False}
        fixed |= {"attention_bias": False, "qk_norm": False}
        if not cross:
            fixed |= {"input_norms": False, "layer_norm": True, "output_norm": False, "fc_bias": True}
        return Converted(build_config(source, _FORMS[form], fixed), tensors)

    def _sizes(self, source: Source, target: Target | None, attention: str, mlp: str) -> dict[str, Any]:
        if target is None:
            raise CheckpointError(
                f"{source.folder} holds attention of the base model's sizes and does not name them; give the target"
            )
        heads = int(target.config.num_attention_heads)
        inner, size = source.shape(f"{attention}q_proj.weight")
        outer, wide = source.shape(f"{attention}k_proj.weight")[0], source.shape(f"{mlp}gate_proj.weight")[0]
        if inner % heads or outer % (inner // heads):
            raise CheckpointError(f"{source.folder}: attention of {inner} and {outer} rows is not of {heads} heads")
        return {
            "hidden_size": size,
            "intermediate_size": wide,
            "num_attention_heads": heads,
            "num_key_value_heads": outer // (inner // heads),
            "head_dim": inner // heads,
            "rms_norm_eps": float(getattr(target.config, "rms_norm_eps", 1e-6)),
            "rope_theta": DEFAULT_THETA,
            "rope_scaling": None,
        }

    def obstacles(self, config: HeadConfig) -> list[Note]:
        settings: Any = config
        notes = []
        if config.kind == "eagle":
            notes = wanted_as(config, input_norms=False, layer_norm=True, output_norm=False, fc_bias=True)
        elif config.kind == "hydra":
            notes = wanted_as(config, embedding_norm=False)
        layered = config.kind != "hydra" or settings.prefix_attention
        if layered:
            notes += wanted_as(config, num_layers=1, attention_bias=False, qk_norm=False)
            notes += wanted_as(config, rope_theta=DEFAULT_THETA, rope_scaling=None)
        if layered and settings.head_dim and not square_heads(config):
            notes.append(Note("head_dim", "the project divides the width by the heads", "fatal"))
        if reduced(config):
            notes.append(Note("draft vocabulary", "the project's heads rank all tokens", "fatal"))
        if config.own_output and config.kind != "hydra":
            notes.append(Note("own_output", "the form uses the target's output head", "fatal"))
        return notes

    def write(self, head: DraftHead) -> Written:
        config: Any = head.config
        embedding, output = head.target.input_weight(), head.target.output_weight()
        if embedding_scale(head.target) != 1 or embedding is None or output is None:
            raise CheckpointError("the project wants a target with unscaled embedding and output matrices")
        state = {name: value for name, value in head.owned_state().items() if not name.startswith("output.")}
        values = {"base_model_name_or_path": config.base_model, "hidden_state_offset": 0, "grounded_heads": True}
        if config.kind == "hydra":
            values |= {"hidden_state_offset": config.hidden_state_offset, "grounded_heads": config.grounded}
            values |= {"hydra_num_heads": config.num_heads, "hydra_num_layers": config.mlp_blocks}
            values["hydra_head_arch"] = "prefix-mlp" if config.prefix_attention else "mlp"
            tensors = _mlp_tensors(head, state)
        else:
            values |= {"hydra_num_heads": 1, "hydra_num_layers": 1}
            values["hydra_head_arch"] = "cross-attn" if config.kind == "hydra-cross" else "eagle-attn"
            tensors = {name.replace("layers.0.", "attn."): value for name, value in state.items()}
            tensors["lm_head.weight"] = output
        tensors["input_embed_fn.weight"] = embedding
        return Written(values | settings_of(config), tensors, "hydra_lm_head.pt")


def _mlp_tensors(head: DraftHead, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The MLP forms under the project's names."""
    config: Any = head.config
    first, step, tail = (1, 2, ".1") if config.prefix_attention else (0, 1, "")
    tensors = {}
    for name, value in state.items():
        part = name.split(".")
        if part[0] != "heads":
            tensors[_PREFIX + name] = value
        elif part[2] == "blocks":
            tensors[f"hydra_mlp.{part[1]}.{first + step * (1 + int(part[3]))}.linear.{part[4]}"] = value
        else:
            tensors[f"hydra_mlp.{part[1]}.{first}.{part[2]}.{part[3]}"] = value
    rows, bias = rows_of(head), head.output.own_bias
    for j in range(config.num_heads):
        weight = rows[j] if rows.ndim == 3 else rows
        tensors[f"hydra_lm_head.{j}{tail}.weight"] = weight
        zero = weight.new_zeros(weight.shape[0])
        tensors[f"hydra_lm_head.{j}{tail}.bias"] = zero if bias is None else bias[j, 0]
    return tensors


add(Hydra())
