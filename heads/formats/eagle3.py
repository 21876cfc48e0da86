"""EAGLE-3 heads in folders with a Llama-like config: SafeAILab's, those of SpecForge and SGLang, and vLLM's.

What differs between them is how the tapped layers are numbered. vLLM counts inputs (k is what block k reads, as
transformers' `hidden_states` and our `target_layers`) in a list at the top of the config; SGLang and SpecForge count
outputs, one less, in a list inside `eagle_config`; SafeAILab's code knows the default layers only.

Letters: W width of the head, D hidden size of the target, K tapped layers, Q draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    id_maps,
    is_copy,
    rows_of,
    settings_of,
    take_ids,
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
from selfspec.heads.formats.source import Fields, Note, Source
from selfspec.target import Target

FIRST_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
_CHUNK_NAMES = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
_IDS = "eagle_aux_hidden_state_layer_ids"
_ARCHITECTURE = "LlamaForCausalLMEagle3"


def default_layers(count: int) -> list[int]:
    """The layers read where none are named, for a target of L layers."""
    return [2, count // 2, count - 3]


# Reading


def read_eagle3(
    source: Source, target: Target | None, sizes: dict[str, Any], flags: Fields, layers: list[int] | None, first: str
) -> Converted:
    """The head in a folder whose sizes and layer numbers are known.

    Args:
        source: the folder.
        target: the base model, if known.
        sizes: as `read_layer` gives them.
        flags: where `norm_before_residual` and its like are; the tensors have the last word where they can.
        layers: numbers of the tapped layers by our count; None if the config names none.
        first: prefix of the first layer.
    """
    width, vocab = sizes["hidden_size"], sizes["vocab_size"]
    base = flags.take("target_hidden_size", int, width)
    fused = source.shape("fc.weight")[-1]
    if fused % base or (layers is not None and fused != base * len(layers)):
        raise CheckpointError(
            f"{source.folder}: fc reads {fused} numbers, which are not those of {layers or 'some'} layers of {base}"
        )
    if layers is None and fused != 3 * base:
        raise CheckpointError(f"{source.folder}: fc reads {fused // base} layers, and the config does not say which")
    tensors = {"fc.weight": source.take("fc.weight", width, fused)}
    if "fc.bias" in source:
        tensors["fc.bias"] = source.take("fc.bias", width)
    chunks = _take_fusing_norms(source, tensors, base, fused)
    tensors |= take_layer(source, first, "layers.0.", sizes, FIRST_NORMS, 2 * width)
    count = 1 + max((int(match[1]) for match in source.matching(r"layers\.(\d+)\..*")), default=0)
    for index in range(1, count):
        tensors |= _take_later_layer(source, index, sizes)
    tensors["norm.weight"] = source.take("norm.weight", width)
    fixed = _take_output(source, target, tensors, flags, width, vocab)
    fixed |= {
        key: sizes[key]
        for key in (
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "rms_norm_eps",
            "rope_theta",
            "rope_scaling",
        )
    }
    fixed |= {
        "hidden_size": base,
        "vocab_size": vocab,
        "draft_hidden_size": width,
        "num_layers": count,
        "target_layers": _known_layers(source, layers, target),
        "own_embedding": _take_embedding(source, target, tensors, width, vocab, base),
        "attention_bias": f"{first}self_attn.q_proj.bias" in source,
        "qk_norm": f"{first}self_attn.q_norm.weight" in source,
        "fc_bias": "fc.bias" in source,
        "fc_norm": chunks,
        "norm_before_fc": "input_norm.weight" in source,
        "norm_before_residual": flags.take("norm_before_residual", bool, False),
        "norm_output": flags.take("norm_output", bool, False),
    }
    flags.skip(("norm_before_fc", "fc_norm", "use_aux_norm", "bias", "attention_bias", "num_hidden_layers"))
    flags.expect("logit_scale", 1, 1.0)
    source.drop_matching(r".*rotary_emb\.inv_freq", "computed from rope_theta")
    return Converted(build_config(source, "eagle3", fixed), tensors)


def _known_layers(source: Source, layers: list[int] | None, target: Target | None) -> list[int] | None:
    if layers is not None:
        return layers
    chosen = None if target is None else default_layers(target.num_layers)
    source.note("layers", f"not named, so the default: {chosen or '2, L // 2, L - 3 of L layers'}")
    return chosen


def _take_fusing_norms(source: Source, tensors: dict[str, Tensor], base: int, fused: int) -> bool:
    """The norms before `fc`: one on everything, or one per layer (true)."""
    if "input_norm.weight" in source:
        tensors["input_norm.weight"] = source.take("input_norm.weight", fused)
    names = [f"fc_norm.{index}.weight" for index in range(fused // base)]
    if f"{_CHUNK_NAMES[0]}.weight" in source:
        names = [f"{name}.weight" for name in _CHUNK_NAMES]
    if names[0] not in source:
        return False
    for index, name in enumerate(names):
        tensors[f"fc_norm.{index}.weight"] = source.take(name, base)
    return True


def _take_later_layer(source: Source, index: int, sizes: dict[str, Any]) -> dict[str, Tensor]:
    """A layer after the first. vLLM reads its `input_layernorm`, SGLang its `hidden_norm`; two must agree."""
    at = f"layers.{index}."
    both = [f"{at}{name}.weight" for name in ("input_layernorm", "hidden_norm")]
    there = [source.take(name, sizes["hidden_size"]) for name in both if name in source]
    if not there or not torch.equal(there[0], there[-1]):
        raise CheckpointError(f"{source.folder}: {both[0]} and {both[1]} differ or are missing; engines read either")
    rest = take_layer(source, at, at, sizes, ("post_attention_layernorm",))
    return {f"{at}input_layernorm.weight": there[0], **rest}


def _take_output(
    source: Source, target: Target | None, tensors: dict[str, Tensor], flags: Fields, width: int, vocab: int
) -> dict[str, Any]:
    """The output head and the draft vocabulary. A head without a matrix of its own uses the target's."""
    said = flags.take("draft_vocab_size", int, vocab)
    if "lm_head.weight" not in source:
        if said != vocab:
            raise CheckpointError(f"{source.folder} has {said} draft tokens and no output matrix for them")
        tensors["output.vocab.ids"] = torch.arange(vocab)
        return {"draft_vocab_size": vocab, "own_output": False}
    found = source.shape("lm_head.weight")[0]
    if found != said:
        source.note("field draft_vocab_size", f"says {said}, the weights hold {found}")
    ids, order = take_ids(source, found, vocab)
    rows = source.take("lm_head.weight", found, width)[order]
    tensors["output.vocab.ids"] = ids
    own = target is None or target.hidden_size != width or not is_copy(rows, target.output_rows(ids)[0])
    if own:
        tensors["output.rows"] = rows
    else:
        source.note("lm_head.weight", "rows of the target's output head, which are used instead")
    return {"draft_vocab_size": found, "own_output": own}


def _take_embedding(
    source: Source, target: Target | None, tensors: dict[str, Tensor], width: int, vocab: int, base: int
) -> bool:
    """Whether the head has an embedding of its own; a copy of the target's is left out."""
    name = "embed_tokens.weight"
    if name not in source:
        if base != width:
            raise CheckpointError(f"{source.folder}: width {width} differs from the target's {base}, and no {name}")
        return False
    weight = source.take(name, vocab, width)
    bare = None if target is None else target.input_weight()
    if bare is not None and is_copy(weight, bare):
        source.note(name, "a copy of the embedding, which is used instead")
        return False
    tensors[name] = weight
    return True


class SafeAIEagle3(Format):
    """`yuhuili/EAGLE3-*`: the default layers, no biases, `hd = W / heads`, `rope_theta` 10000 where it is missing."""

    name = "safeai-eagle3"
    kinds = ("eagle3",)
    served_by = "SafeAILab/EAGLE"

    def detects(self, source: Source) -> bool:
        mark = "midlayer.hidden_norm.weight"
        return mark in source and _architecture(source) != _ARCHITECTURE and _IDS not in source.config

    def read(self, source: Source, target: Target | None) -> Converted:
        if "mask_hidden" in source:
            raise CheckpointError(f"{source.folder} is a parallel EAGLE (P-EAGLE) head; there is no such method here")
        first = "midlayer." if "midlayer.hidden_norm.weight" in source else "layers.0."
        fields = source.config
        nested = fields.inner("eagle_config")
        nested.expect("use_aux_hidden_state", True)
        own_size = tensors_read_head_dim(source, f"{first}self_attn.q_proj.weight")
        sizes = read_layer(source, fields, own_size, ignores_base=self.name == SafeAIEagle3.name)
        layers = self._layers(source, fields, nested)
        fields.skip(("num_aux_hidden_states",))
        return read_eagle3(source, target, sizes, fields, layers, first)

    def _layers(self, source: Source, fields: Fields, nested: Fields) -> list[int] | None:
        inputs, outputs = fields.take(_IDS, list, []), nested.take(_IDS, list, [])
        if not all(isinstance(one, int) for one in inputs + outputs):
            raise CheckpointError(f"{fields.place}: {_IDS} holds {inputs or outputs}, wanted numbers of layers")
        if inputs and outputs and inputs != [one + 1 for one in outputs]:
            raise CheckpointError(
                f"{fields.place}: layers are {inputs} at the top (inputs) and {outputs} in eagle_config (outputs, one "
                "less each); they contradict each other"
            )
        if outputs and not inputs:
            source.note(f"{_IDS} in eagle_config", f"{outputs} read as outputs of blocks, as SGLang and SpecForge do")
        return [int(one) for one in inputs] or [int(one) + 1 for one in outputs] or None

    def obstacles(self, config: HeadConfig) -> list[Note]:
        wanted: dict[str, Any] = {"num_layers": 1, "attention_bias": False, "qk_norm": False, "fc_bias": False}
        wanted |= {"fc_norm": False, "norm_before_fc": False, "norm_before_residual": False, "norm_output": False}
        notes = wanted_as(config, **wanted) + linear_scaling_only(config)
        if not square_heads(config):
            notes.append(Note("head_dim", "the project divides the width by the heads", "fatal"))
        return notes

    def write(self, head: DraftHead) -> Written:
        config: Any = head.config
        read, wanted = default_layers(head.target.num_layers), list(config.target_layers)
        if read != wanted:
            raise CheckpointError(f"{self.name} reads layers {read} of this target, the head was trained on {wanted}")
        values = write_safeai_layer(head, "LlamaForCausalLM") | {"draft_vocab_size": config.draft_vocab_size}
        tensors = write_tensors(head, "midlayer.")
        if config.draft_hidden_size != config.hidden_size:
            values["target_hidden_size"] = config.hidden_size
        return Written(values | settings_of(config), tensors, "pytorch_model.bin")


class VllmEagle3(SafeAIEagle3):
    """`Eagle3LlamaForCausalLM` and `Eagle3Qwen3ForCausalLM` of vLLM, with every flag written out."""

    name = "vllm-eagle3"
    served_by = "vLLM (0.32 and 0.33, a chain)"

    def detects(self, source: Source) -> bool:
        if "layers.0.hidden_norm.weight" in source:
            return "transformer_layer_config" not in source.config
        return "midlayer.hidden_norm.weight" in source and _IDS in source.config

    def obstacles(self, config: HeadConfig) -> list[Note]:
        sizes: Any = config
        notes = [Note("fc.bias", "the engine has none", "lossy")] if sizes.fc_bias else []
        if 0 in (sizes.target_layers or ()):
            notes.append(Note("layer 0", "engines hand over outputs of blocks, not the embedding", "fatal"))
        return notes

    def write(self, head: DraftHead) -> Written:
        config: Any = head.config
        values = write_layer(head, "Eagle3Qwen3ForCausalLM" if config.qk_norm else _ARCHITECTURE)
        values |= {"model_type": "qwen3"} if config.qk_norm else {}
        values |= {"attention_bias": config.attention_bias, _IDS: list(config.target_layers)} | _flags(config)
        values |= {"norm_before_residual": config.norm_before_residual}
        tensors = write_tensors(head, "midlayer.")
        tensors.pop("fc.bias", None)
        return Written(values | settings_of(config), tensors)


class SglangEagle3(SafeAIEagle3):
    """`LlamaForCausalLMEagle3` of SGLang, which is also what SpecForge writes."""

    name = "sglang-eagle3"
    served_by = "SGLang 0.5 (--speculative-algorithm EAGLE3); SpecForge reads and writes the same"

    def detects(self, source: Source) -> bool:
        mark = "midlayer.hidden_norm.weight"
        return mark in source and _architecture(source) == _ARCHITECTURE and _IDS not in source.config

    def read(self, source: Source, target: Target | None) -> Converted:
        if source.config.take("norm_output", bool, False):
            source.note(
                "norm_output",
                "true, read as: the normed output is fed back. SpecForge before its pull request 879 meant only that "
                "the output is normed; set it to false in files of that time",
            )
        return super().read(source, target)

    def obstacles(self, config: HeadConfig) -> list[Note]:
        sizes: Any = config
        notes = wanted_as(config, norm_before_residual=False, attention_bias=False, qk_norm=False)
        layers = sizes.target_layers or ()
        if 0 in layers:
            notes.append(Note("layer 0", "engines hand over outputs of blocks, not the embedding", "fatal"))
        if len(layers) == 1 and sizes.draft_hidden_size == sizes.hidden_size:
            notes.append(Note("one layer", "fc is skipped where it would not change the width", "fatal"))
        if sizes.own_embedding and sizes.draft_hidden_size == sizes.hidden_size:
            notes.append(Note("own_embedding", "the engine takes the target's embedding", "lossy"))
        return notes

    def write(self, head: DraftHead) -> Written:
        config: Any = head.config
        values = write_layer(head, _ARCHITECTURE) | _flags(config)
        outputs = [layer - 1 for layer in config.target_layers]
        values["eagle_config"] = {"use_aux_hidden_state": True, _IDS: outputs}
        values["bias"] = config.fc_bias
        tensors = write_tensors(head, "midlayer.")
        for index in range(1, config.num_layers):
            tensors[f"layers.{index}.hidden_norm.weight"] = tensors[f"layers.{index}.input_layernorm.weight"]
        return Written(values | settings_of(config), tensors)


def _architecture(source: Source) -> str:
    found: Sequence[Any] = source.config.take("architectures", list, [])
    return str(found[0]) if found else ""


def _flags(config: Any) -> dict[str, Any]:
    """What both engines read. They multiply a null `target_hidden_size`, so it is there only where it differs."""
    values = {"draft_vocab_size": config.draft_vocab_size, "num_aux_hidden_states": len(config.target_layers)}
    values |= {name: getattr(config, name) for name in ("norm_before_fc", "fc_norm", "norm_output")}
    if config.draft_hidden_size != config.hidden_size:
        values["target_hidden_size"] = config.hidden_size
    return values


def write_tensors(head: DraftHead, first: str) -> dict[str, Tensor]:
    """The head's tensors by the formats' names, the output matrix always among them.

    Args:
        head: an EAGLE-3 head.
        first: prefix of the first layer.
    """
    tensors = {}
    for name, value in head.owned_state().items():
        if not name.startswith("output."):
            tensors[first + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name] = value
    tensors["lm_head.weight"] = rows_of(head)
    return tensors | id_maps(head.output.vocab.ids.cpu(), head.config.vocab_size)


add(VllmEagle3(), SglangEagle3(), SafeAIEagle3())
