"""EAGLE-3 heads as vllm-project/speculators writes them and vLLM serves them.

The config has no `model_type` of its own (vLLM's detection depends on it) and keeps the draft's layers in
`transformer_layer_config`. Layers are numbered by their inputs, as ours.
"""

from __future__ import annotations

from typing import Any

from selfspec.errors import CheckpointError
from selfspec.head import DraftHead, HeadConfig
from selfspec.heads.formats.base import Converted, Format, Written, add, settings_of
from selfspec.heads.formats.eagle3 import read_eagle3, write_tensors
from selfspec.heads.formats.llama import IRRELEVANT, read_layer, write_layer
from selfspec.heads.formats.source import Note, Source
from selfspec.target import Target

_IDS = "eagle_aux_hidden_state_layer_ids"
_TYPE = "speculators_model_type"
_GUESSES = 5


class Speculators(Format):
    """`Eagle3DraftModel`; vLLM serves the folder by itself, base model and number of guesses are in it."""

    name = "speculators"
    kinds = ("eagle3",)
    served_by = "vLLM (0.32 and 0.33, a chain; `vllm serve FOLDER`)"

    def detects(self, source: Source) -> bool:
        return _TYPE in source.config

    def read(self, source: Source, target: Target | None) -> Converted:
        fields = source.config
        kind = fields.take(_TYPE, str, "")
        if kind != "eagle3":
            raise CheckpointError(f"{fields.place}: {_TYPE} is {kind!r}; of this format only eagle3 can be read")
        layer = fields.inner("transformer_layer_config")
        layer.skip(("attention_bias", "num_hidden_layers"))
        sizes = read_layer(source, layer, own_head_dim=True)
        fields.skip((*IRRELEVANT, "speculators_version"))
        verifier = fields.inner("speculators_config").inner("verifier").take("name_or_path", str, "")
        layers = [int(one) for one in fields.take(_IDS, list, [])]
        if fields.values.get("norm_before_residual") is None:
            source.note("norm_before_residual", "missing: false, as the project has it; vLLM would take true")
        for key in layer.unread():
            source.note(f"field transformer_layer_config.{key}", "not understood", "lossy")
        converted = read_eagle3(source, target, sizes, fields, layers or None, "layers.0.")
        converted.config.base_model = converted.config.base_model or verifier
        return converted

    def obstacles(self, config: HeadConfig) -> list[Note]:
        sizes: Any = config
        notes = [Note("fc.bias", "the format has none", "lossy")] if sizes.fc_bias else []
        if 0 in (sizes.target_layers or ()):
            notes.append(Note("layer 0", "engines hand over outputs of blocks, not the embedding", "fatal"))
        return notes

    def write(self, head: DraftHead) -> Written:
        config: Any = head.config
        layer = write_layer(head, "LlamaForCausalLM") | {"attention_bias": config.attention_bias, "mlp_bias": False}
        layer |= {"model_type": "qwen3"} if config.qk_norm else {}
        base = head.target.model
        values = {
            "architectures": ["Eagle3DraftModel"],
            _TYPE: "eagle3",
            "speculators_version": "0.8.0",
            "transformer_layer_config": layer,
            "draft_vocab_size": config.draft_vocab_size,
            _IDS: list(config.target_layers),
            "target_hidden_size": config.hidden_size if config.draft_hidden_size != config.hidden_size else None,
            "embed_requires_grad": config.own_embedding,
            "tie_word_embeddings": False,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": _GUESSES,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {"name_or_path": config.base_model, "architectures": [type(base).__name__]},
            },
        }
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            values[name] = getattr(config, name)
        tensors = write_tensors(head, "layers.0.")
        tensors.pop("fc.bias", None)
        return Written(values | settings_of(config), tensors)


add(Speculators())
