"""EAGLE-1 and EAGLE-2 heads (one checkpoint, two ways of decoding): as SafeAILab publishes them, for vLLM, for SGLang.

Letters: D hidden size, V vocabulary.
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
    settings_of,
    wanted_as,
)
from selfspec.heads.formats.llama import (
    linear_scaling_only,
    read_layer,
    square_heads,
    take_layer,
    tensors_read_head_dim,
    write_layer,
    write_safeai_layer,
)
from selfspec.heads.formats.source import Note, Source
from selfspec.target import Target

_LAYER = r"layers\.(\d+)\.self_attn\.q_proj\.weight"
_TOKEN_MAP = "token_map.pt"


class SafeAIEagle(Format):
    """`yuhuili/EAGLE-*`: no norm before attention in the first layer and none at the end, `fc` usually with a bias."""

    name = "safeai-eagle"
    kinds = ("eagle",)
    served_by = "SafeAILab/EAGLE"
    file = "pytorch_model.bin"
    architecture = "LlamaForCausalLM"

    def detects(self, source: Source) -> bool:
        marks = ("norm.weight", "mask_hidden", "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight")
        if "fc.weight" not in source or not source.matching(_LAYER) or any(name in source for name in marks):
            return False
        size, joined = source.shape("fc.weight")
        return joined == 2 * size

    def read(self, source: Source, target: Target | None) -> Converted:
        fields = source.config
        fixed = read_layer(
            source, fields, tensors_read_head_dim(source, source.matching(_LAYER)[0].string), ignores_base=True
        )
        size = fixed["hidden_size"]
        layers = 1 + max(int(match[1]) for match in source.matching(_LAYER))
        fields.skip(("num_hidden_layers", "bias", "qkv_bias", "attention_bias", "draft_vocab_size"))
        scale = embedding_scale(target)
        fc = source.take("fc.weight", size, 2 * size)
        tensors = {"fc.weight": _scaled(fc, size, 1 / scale)}
        fc_bias = "fc.bias" in source
        if fc_bias:
            tensors["fc.bias"] = source.take("fc.bias", size)
        if fc_bias and not bool(tensors["fc.bias"].any()):
            source.note("fc.bias", "all zero; left out")
            del tensors["fc.bias"]
            fc_bias = False
        for index in range(layers):
            norms = ("post_attention_layernorm", *(["input_layernorm"] if index else []))
            tensors |= take_layer(source, f"layers.{index}.", f"layers.{index}.", fixed, norms)
        source.drop_matching(r".*rotary_emb\.inv_freq", "computed from rope_theta")
        drop_copy(source, "embed_tokens.weight", None if target is None else target.input_weight(), "the embedding")
        drop_copy(source, "lm_head.weight", None if target is None else target.output_weight(), "the output head")
        ids = source.number_list(_TOKEN_MAP)
        tensors["output.vocab.ids"] = torch.arange(fixed["vocab_size"]) if ids is None else ids.sort().values
        fixed |= {
            "num_layers": layers,
            "fc_bias": fc_bias,
            "attention_bias": "layers.0.self_attn.q_proj.bias" in source,
            "own_output": False,
        }
        fixed |= {
            "draft_vocab_size": tensors["output.vocab.ids"].numel(),
            "input_norms": False,
            "layer_norm": False,
            "output_norm": False,
        }
        return Converted(build_config(source, "eagle", fixed), tensors)

    def obstacles(self, config: HeadConfig) -> list[Note]:
        notes = wanted_as(config, input_norms=False, layer_norm=False, output_norm=False, qk_norm=False)
        notes += self._vocabulary(config)
        if config.own_output:
            notes.append(Note("own_output", "the format always uses the target's output head", "fatal"))
        return notes + self._particular(config)

    def _vocabulary(self, config: HeadConfig) -> list[Note]:
        return [Note("draft vocabulary", "the format ranks all tokens", "lossy")] if reduced(config) else []

    def _particular(self, config: Any) -> list[Note]:
        notes = linear_scaling_only(config)
        if not square_heads(config):
            notes += wanted_as(config, head_dim=config.hidden_size // config.num_attention_heads)
        return notes

    def write(self, head: DraftHead) -> Written:
        config: Any = head.config
        tensors = _weights(head)
        if head.target.input_weight() is not None:
            tensors["embed_tokens.weight"] = _embedding(head)
        values = write_safeai_layer(head, self.architecture)
        values |= {"bias": config.fc_bias, "qkv_bias": config.attention_bias}
        return Written(values | settings_of(config), tensors, self.file)


class VllmEagle(SafeAIEagle):
    """`EagleLlamaForCausalLM` of vLLM: `fc` without a bias, embedding and output head the target's."""

    name = "vllm-eagle"
    served_by = "vLLM (0.32 and 0.33, a chain)"
    file = "model.safetensors"

    def detects(self, source: Source) -> bool:
        return False  # read as the layout it is a part of

    def _particular(self, config: Any) -> list[Note]:
        if not config.fc_bias:
            return []
        return [Note("fc.bias", "the engine has none and drops it without a word", "lossy")]

    def write(self, head: DraftHead) -> Written:
        config: Any = head.config
        tensors = _weights(head)
        tensors.pop("fc.bias", None)
        # `bias` would be read as the bias of the attention projections.
        values = write_layer(head, self.architecture) | {"attention_bias": False, "qkv_bias": config.attention_bias}
        return Written(values | settings_of(config), tensors, self.file)


class SglangEagle(SafeAIEagle):
    """`LlamaForCausalLMEagle` of SGLang: `fc.bias` must be there, or it starts at random (issue 5773 of SGLang)."""

    name = "sglang-eagle"
    served_by = "SGLang 0.5 (--speculative-algorithm EAGLE)"
    file = "model.safetensors"
    architecture = "LlamaForCausalLMEagle"

    def detects(self, source: Source) -> bool:
        return False  # read as the layout it is a part of

    def _vocabulary(self, config: HeadConfig) -> list[Note]:
        if not reduced(config):
            return []
        return [Note("draft vocabulary", f"in a file of its own; start with --speculative-token-map {_TOKEN_MAP}")]

    def _particular(self, config: Any) -> list[Note]:
        return wanted_as(config, attention_bias=False)

    def write(self, head: DraftHead) -> Written:
        config: Any = head.config
        tensors = _weights(head)
        tensors.setdefault("fc.bias", torch.zeros(config.hidden_size))
        beside = {_TOKEN_MAP: head.output.vocab.ids.tolist()} if reduced(config) else {}
        return Written(write_layer(head, self.architecture) | settings_of(config), tensors, self.file, beside)


def _weights(head: DraftHead) -> dict[str, Tensor]:
    """The head's own tensors under the format's names, which are ours."""
    scale = embedding_scale(head.target)
    state = {name: value for name, value in head.owned_state().items() if not name.startswith("output.")}
    return state | {"fc.weight": _scaled(state["fc.weight"], head.config.hidden_size, scale)}


def _scaled(fc: Tensor, size: int, scale: float) -> Tensor:
    """`fc` for bare embeddings where the model scales its own, or the other way round."""
    return fc if scale == 1 else torch.cat([fc[:, :size] * scale, fc[:, size:]], 1)


def _embedding(head: DraftHead) -> Tensor:
    weight = head.target.input_weight()
    if weight is None or weight.is_meta or weight.numel() == 0:
        raise CheckpointError("the target's embedding is not in memory, and the format wants a copy of it")
    return weight.detach()


add(SafeAIEagle(), VllmEagle(), SglangEagle())
