"""Medusa heads: as FasterDecoding publishes them, and as vLLM up to 0.32 serves them (a chain of first choices).

Letters: M heads, N blocks per head, D hidden size, Q draft vocabulary, V vocabulary.
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
    is_copy,
    reduced,
    rows_of,
    settings_of,
)
from selfspec.heads.formats.source import Note, Source
from selfspec.target import Target

_PREFIX = r"(?:medusa_heads?\.)?"
_OLD_WEIGHT = _PREFIX + r"(\d+)\.(\d+)\.linear\.weight"
_NEW_WEIGHT = r"blocks\.(\d+)\.layers\.(\d+)\.weight"


class FasterDecodingMedusa(Format):
    """`medusa_lm_head.pt` or `.safetensors`; "version 2" heads have no output matrices and share the target's."""

    name = "medusa"
    kinds = ("medusa",)
    served_by = "FasterDecoding/Medusa; vLLM 0.32 reads it, but drops the biases"

    def detects(self, source: Source) -> bool:
        return bool(source.matching(_OLD_WEIGHT))

    def read(self, source: Source, target: Target | None) -> Converted:
        first = source.matching(_OLD_WEIGHT)[0].string
        prefix = first[: -len(first.split("medusa_head.")[-1].split("medusa_heads.")[-1])]
        heads, layers, size = _count(source, _OLD_WEIGHT)
        source.config.skip(("transformers_version", "version", "model_type", "architectures"))
        for key, found in (("medusa_num_heads", heads), ("medusa_num_layers", layers)):
            said = source.config.take(key, int, found)
            if said != found:
                source.note(f"field {key}", f"says {said}, the weights hold {found}")
        if prefix:
            source.drop_matching(r"(?!medusa_head).*", "the fine-tuned backbone; load it as the target")
        names = [[f"{prefix}{j}.{n}.linear" for j in range(heads)] for n in range(layers)]
        tensors = _take_blocks(source, names, size)
        outputs = [f"{prefix}{j}.{layers}.weight" for j in range(heads)]
        own = any(name in source for name in outputs)
        vocab = source.shape(outputs[0])[0] if own else 0 if target is None else target.vocab_size
        if not vocab:
            raise CheckpointError(f"{source.folder} holds no output matrices; give the target, whose own they share")
        if own:
            tensors["output.rows"] = torch.stack([source.take(name, vocab, size) for name in outputs])
        tensors["output.vocab.ids"] = torch.arange(vocab)
        fixed = {"num_heads": heads, "num_layers": layers, "hidden_size": size, "vocab_size": vocab}
        fixed |= {"draft_vocab_size": vocab, "own_output": False, "output_per_head": own}
        base = source.config.take("base_model_name_or_path", str, "")
        return Converted(build_config(source, "medusa", fixed | ({"base_model": base} if base else {})), tensors)

    def obstacles(self, config: HeadConfig) -> list[Note]:
        return _reduced_notes(config)

    def write(self, head: DraftHead) -> Written:
        config = _config(head)
        tensors: dict[str, Tensor] = {}
        for j in range(config.num_heads):
            for n, (weight, bias) in enumerate(_blocks(head, j)):
                tensors |= {f"{j}.{n}.linear.weight": weight, f"{j}.{n}.linear.bias": bias}
            if head.output.own:
                rows = rows_of(head)
                tensors[f"{j}.{config.num_layers}.weight"] = rows[j] if rows.ndim == 3 else rows
        values = {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers}
        values |= {} if head.output.own else {"version": "2"}
        return Written(
            {"base_model_name_or_path": config.base_model, **values, **settings_of(config)},
            tensors,
            "medusa_lm_head.pt",
        )


class VllmMedusa(Format):
    """`MedusaModel` of vLLM up to 0.32; later versions have none."""

    name = "vllm-medusa"
    kinds = ("medusa",)
    served_by = "vLLM <= 0.32 (a chain of first choices)"

    def detects(self, source: Source) -> bool:
        return bool(source.matching(_NEW_WEIGHT))

    def read(self, source: Source, target: Target | None) -> Converted:
        heads, layers, size = _count(source, _NEW_WEIGHT)
        fields = source.config
        fields.skip(
            ("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "max_paths", "topk")
        )
        fields.skip(("num_heads", "num_hidden_layers", "hidden_size", "max_seq_len", "num_lookahead_tokens"))
        vocab = fields.take("vocab_size", int, 32001)
        draft = fields.take("truncated_vocab_size", int, vocab)
        names = [[f"blocks.{j}.layers.{n}" for j in range(heads)] for n in range(layers)]
        biased = fields.take("medusa_fc_bias", bool, False)
        if not biased:
            source.drop_matching(r"blocks\..*\.bias", "medusa_fc_bias is not set, so the engine leaves it out")
        tensors = _take_blocks(source, names, size, biased)
        ids, order = torch.arange(vocab), torch.arange(draft)
        if draft < vocab:
            ids, order = source.take("token_map", draft).long().sort()
        tensors["output.vocab.ids"] = ids
        shared = fields.take("original_lm_head", bool, False)
        fixed = {"num_heads": heads, "num_layers": layers, "hidden_size": size, "vocab_size": vocab}
        fixed |= {"draft_vocab_size": draft, "output_per_head": not shared, "own_output": False}
        if shared:
            rows = source.take("lm_heads.0.weight", draft, size)[order]
            if target is not None and is_copy(rows, target.output_rows(ids)[0]):
                source.note("lm_heads.0.weight", "a copy of the target's output head, which is used instead")
            else:
                fixed["own_output"], tensors["output.rows"] = True, rows
        else:
            stacked = [source.take(f"lm_heads.{j}.weight", draft, size) for j in range(heads)]
            tensors["output.rows"] = torch.stack(stacked)[:, order]
        return Converted(build_config(source, "medusa", fixed), tensors)

    def obstacles(self, config: HeadConfig) -> list[Note]:
        return _reduced_notes(config)

    def write(self, head: DraftHead) -> Written:
        config, rows = _config(head), rows_of(head)
        if reduced(config):  # of the target's rows then, or `obstacles` would have refused
            rows = head.target.output_rows(torch.arange(config.vocab_size))[0]
        tensors: dict[str, Tensor] = {}
        for j in range(config.num_heads):
            for n, (weight, bias) in enumerate(_blocks(head, j)):
                tensors |= {f"blocks.{j}.layers.{n}.weight": weight, f"blocks.{j}.layers.{n}.bias": bias}
        shared = rows.ndim == 2
        for j in range(1 if shared else config.num_heads):
            tensors[f"lm_heads.{j}.weight"] = rows if shared else rows[j]
        values: dict[str, Any] = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "medusa_fc_bias": True,
            "original_lm_head": shared,
        }
        return Written(values | settings_of(config), tensors)


def _reduced_notes(config: HeadConfig) -> list[Note]:
    """Neither format has a reduced draft vocabulary: vLLM 0.32 has fields for one, but no such folder passes its loader
    ("weights were not initialized from checkpoint: token_map").
    """
    if not reduced(config):
        return []
    if config.own_output or getattr(config, "output_per_head", False):
        return [Note("draft vocabulary", "output matrices of the format have a row for every token", "fatal")]
    return [Note("draft vocabulary", "the format's heads rank all tokens of the target", "lossy")]


def _config(head: DraftHead) -> Any:
    return head.config


def _count(source: Source, pattern: str) -> tuple[int, int, int]:
    """M, N and D from the tensors' names and shapes; configs of published heads are known to be wrong."""
    found = [(int(match[1]), int(match[2])) for match in source.matching(pattern)]
    heads, layers = (1 + max(numbers) for numbers in zip(*found, strict=True))
    if len(found) != heads * layers:
        raise CheckpointError(f"{source.folder} holds {len(found)} blocks, not {layers} for each of {heads} heads")
    return heads, layers, source.shape(source.matching(pattern)[0].string)[0]


def _take_blocks(source: Source, names: list[list[str]], size: int, biased: bool = True) -> dict[str, Tensor]:
    """`blocks.weight` `[N, M, D, D]` and `blocks.bias` `[N, M, 1, D]` from one prefix per block."""
    weight = torch.stack([torch.stack([source.take(f"{name}.weight", size, size) for name in row]) for row in names])
    bias = torch.zeros(*weight.shape[:2], 1, size, dtype=weight.dtype)
    if biased:
        bias = torch.stack([torch.stack([source.take(f"{name}.bias", size)[None] for name in row]) for row in names])
    return {"blocks.weight": weight, "blocks.bias": bias}


def _blocks(head: DraftHead, j: int) -> list[tuple[Tensor, Tensor]]:
    state = head.state_dict()
    weight, bias = state["blocks.weight"][:, j], state["blocks.bias"][:, j, 0]
    return list(zip(weight, bias, strict=True))


add(VllmMedusa(), FasterDecodingMedusa())
