"""DFlash heads: as z-lab publishes them (which vLLM and SGLang load), and with vLLM's reduced draft vocabulary.

`target_layer_ids` count outputs of blocks, one less than our `taps`. Embedding and output head are the target's.

Letters: D hidden size, K tapped layers, Q draft vocabulary, V vocabulary.
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
    embedding_scale,
    id_maps,
    is_copy,
    reduced,
    rows_of,
    settings_of,
    take_ids,
    wanted_as,
)
from selfspec.heads.formats.llama import read_layer, take_layer, write_layer
from selfspec.heads.formats.source import Note, Source
from selfspec.target import Target

_NORMS = ("input_layernorm", "post_attention_layernorm")
_SIZES = (
    "vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
)


class ZLabDFlash(Format):
    """`DFlashDraftModel` with neither embedding nor output head."""

    name = "dflash"
    kinds = ("dflash",)
    served_by = "z-lab/dflash, vLLM (0.32 and 0.33), SGLang 0.5 (--speculative-algorithm DFLASH)"

    def detects(self, source: Source) -> bool:
        marks = ("hidden_norm.weight", "layers.0.self_attn.q_norm.weight", "fc.weight")
        return all(name in source for name in marks) and "transformer_layer_config" not in source.config

    def read(self, source: Source, target: Target | None) -> Converted:
        fields = source.config
        special = fields.inner("dflash_config")
        sizes = read_layer(source, fields, own_head_dim=True)
        size, ids = sizes["hidden_size"], [int(one) for one in special.take("target_layer_ids", list, [])]
        fused = source.shape("fc.weight")[-1]
        if fused % size or (ids and fused != size * len(ids)):
            raise CheckpointError(f"{source.folder}: fc reads {fused} numbers, not those of layers {ids} of {size}")
        taps = [one + 1 for one in ids] or self._default(source, target, fused // size)
        self._check(source)
        if (named := source.matching(r"(markov|confidence).*")) or "mask_embedding" in source:
            what = named[0].string if named else "mask_embedding"
            raise CheckpointError(f"{source.folder} holds {what}: it extends DFlash in a way that is not read here")
        count = 1 + max(int(match[1]) for match in source.matching(r"layers\.(\d+)\..*"))
        tensors = {
            "fc.weight": source.take("fc.weight", size, fused),
            "hidden_norm.weight": source.take("hidden_norm.weight", size),
            "norm.weight": source.take("norm.weight", size),
        }
        for index in range(count):
            tensors |= take_layer(source, f"layers.{index}.", f"layers.{index}.", sizes, _NORMS)
        fixed = {key: sizes[key] for key in _SIZES} | self._output(source, target, tensors, sizes)
        fixed |= {
            "hidden_size": size,
            "num_layers": count,
            "taps": taps,
            "block_size": fields.take("block_size", int, 16),
            "mask_token_id": special.need("mask_token_id", int),
            "causal": special.take("causal", bool, False),
            "attention_bias": "layers.0.self_attn.q_proj.bias" in source,
        }
        for key in special.unread():
            source.note(f"field dflash_config.{key}", "not understood", "lossy")
        return Converted(build_config(source, "dflash", fixed), tensors)

    def _check(self, source: Source) -> None:
        fields = source.config
        fields.skip(("attention_bias", "num_hidden_layers", "num_target_layers"))
        if fields.take("use_sliding_window", bool, False) or "sliding_attention" in fields.take(
            "layer_types", list, []
        ):
            raise CheckpointError(f"{fields.place}: sliding windows in the draft's layers are not read here")
        fields.skip(("sliding_window",))

    def _default(self, source: Source, target: Target | None, count: int) -> list[int]:
        """The project's default, `[L // 2]` or spread from 1 to L - 3, counted as outputs."""
        if target is None:
            raise CheckpointError(f"{source.folder} names no target_layer_ids; give the target, on which they depend")
        layers = target.num_layers
        spread = [layers // 2] if count == 1 else [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]
        source.note("target_layer_ids", f"not named, so the default: {spread}")
        return [one + 1 for one in spread]

    def _output(
        self, source: Source, target: Target | None, tensors: dict[str, Tensor], sizes: dict[str, Any]
    ) -> dict[str, Any]:
        vocab, size = sizes["vocab_size"], sizes["hidden_size"]
        source.config.skip(("draft_vocab_size",))
        if "lm_head.weight" not in source:
            tensors["output.vocab.ids"] = torch.arange(vocab)
            return {"draft_vocab_size": vocab, "own_output": False}
        draft = source.shape("lm_head.weight")[0]
        ids, order = take_ids(source, draft, vocab)
        rows = source.take("lm_head.weight", draft, size)[order]
        tensors["output.vocab.ids"] = ids
        own = target is None or not is_copy(rows, target.output_rows(ids)[0])
        if own:
            tensors["output.rows"] = rows
        return {"draft_vocab_size": draft, "own_output": own}

    def obstacles(self, config: HeadConfig) -> list[Note]:
        notes = wanted_as(config, own_output=False, causal=False)
        if reduced(config):
            notes.append(Note("draft vocabulary", "the format ranks all tokens of the target", "lossy"))
        return notes + self._layer_zero(config)

    def _layer_zero(self, config: Any) -> list[Note]:
        if 0 not in config.taps:
            return []
        return [Note("tap 0", "the format counts outputs of blocks; the embedding is none", "fatal")]

    def write(self, head: DraftHead) -> Written:
        config: Any = head.config
        if embedding_scale(head.target) != 1:
            raise CheckpointError("the target scales its embeddings; readers of this format hand over the bare rows")
        values = write_layer(head, "DFlashDraftModel") | {
            "model_type": "qwen3",
            "attention_bias": config.attention_bias,
            "block_size": config.block_size,
            "num_target_layers": head.target.num_layers,
            "layer_types": ["full_attention"] * config.num_layers,
            "dflash_config": {
                "mask_token_id": config.mask_token_id,
                "target_layer_ids": [tap - 1 for tap in config.taps],
            },
        }
        tensors = {name: value for name, value in head.owned_state().items() if not name.startswith("output.")}
        return Written(values | settings_of(config), tensors)


class VllmDFlash(ZLabDFlash):
    """The same with `lm_head` and `d2t` for a reduced draft vocabulary, and with causal blocks."""

    name = "vllm-dflash"
    served_by = "vLLM (0.32 and 0.33)"

    def detects(self, source: Source) -> bool:
        return False  # read as the layout it extends

    def obstacles(self, config: HeadConfig) -> list[Note]:
        return self._layer_zero(config)

    def write(self, head: DraftHead) -> Written:
        config: Any = head.config
        written = super().write(head)
        written.config["draft_vocab_size"] = config.draft_vocab_size
        if config.causal:
            written.config["dflash_config"]["causal"] = True
        if reduced(config) or config.own_output:
            written.tensors["lm_head.weight"] = rows_of(head)
            written.tensors.update(id_maps(head.output.vocab.ids.cpu(), config.vocab_size))
        return written


add(ZLabDFlash(), VllmDFlash())
