"""What a target model is, and the parts of it that drafts borrow by reference.

Letters: V vocabulary, D hidden size, L layers, Q draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec import hf
from selfspec.errors import UnsupportedModel


class TargetParts:
    """Sizes, embedding, output head and norms of a model.

    Args:
        model: with a causal language-model head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config: Any = hf.config_of(model)
        self.has_position_table = hf.has_position_table(model)

    @property
    def attention(self) -> str:
        """The attention back end, by transformers' name."""
        return str(self.config._attn_implementation)

    @property
    def model_type(self) -> str:
        """transformers' `model_type`."""
        return str(self.config.model_type)

    @property
    def hidden_size(self) -> int:
        """D."""
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """V, the number of logits."""
        weight = self.output_weight()
        return int(self.config.vocab_size) if weight is None or weight.numel() == 0 else weight.shape[0]

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        device: torch.device = self.model.get_input_embeddings().weight.device  # type: ignore[assignment]
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states."""
        return self.model.dtype

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model is made for, None if it does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def drafting_limit(self) -> int | None:
        """The length beyond which a pass over several tokens is not exact or not possible; None without one."""
        return self.max_positions if self.has_position_table else hf.dynamic_rope_from(self.config)

    def input_weight(self) -> Tensor | None:
        """`[V, D]` input embedding, None if the model has none."""
        return getattr(self.model.get_input_embeddings(), "weight", None)

    def _output_head(self) -> nn.Module:
        head = self.model.get_output_embeddings()
        if head is None:
            raise UnsupportedModel(f"{type(self.model).__name__} exposes no output embeddings")
        return head

    def output_weight(self) -> Tensor | None:
        """`[V, D]` output head, by reference; None if it is not a tensor (quantised modules pack theirs)."""
        weight = getattr(self._output_head(), "weight", None)
        return weight if isinstance(weight, Tensor) else None

    def norm_weights(self) -> list[Tensor]:
        """A few vectors of the norms, for fingerprints."""
        vectors = [p for p in hf.decoder_of(self.model).parameters() if p.shape == (self.hidden_size,)]
        return [*vectors[:2], *vectors[-2:]]

    # Parts that drafts borrow

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings `[..., D]` of token ids `[...]`, scaled as the model scales them."""
        return self.model.get_input_embeddings()(tokens)

    def output_rows(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows of the output head for `[Q]` token ids: weight `[Q, D]` and bias `[Q]` or None (copies).

        Raises:
            UnsupportedModel: the head's weight is not in memory (offloaded) or not plain numbers (quantised).
        """
        head = self._output_head()
        weight = self.output_weight()
        if weight is None or weight.is_meta or not weight.is_floating_point() or weight.numel() == 0:
            raise UnsupportedModel(
                "the target's output head is offloaded, sharded or quantised, so a draft cannot borrow rows of it; "
                "keep the output head in memory in a floating-point dtype"
            )
        bias = getattr(head, "bias", None)
        index = token_ids.to(weight.device)
        return weight.detach()[index], None if bias is None else bias.detach()[index]

    def finish_logits(self, raw: Tensor) -> Tensor:
        """What the model does between its output head and its logits (scale, soft cap), any shape."""
        scale = getattr(self.config, "logit_scale", None)
        divisor = getattr(self.config, "logits_scaling", None)
        cap = getattr(self.config, "final_logit_softcapping", None)
        raw = raw * scale if scale else raw
        raw = raw / divisor if divisor else raw
        return cap * torch.tanh(raw / cap) if cap else raw

    def head(self, hidden: Tensor) -> Tensor:
        """Last hidden states `[..., D]` to the model's own logits `[..., V]`."""
        return self.finish_logits(self._output_head()(hidden))
