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
from selfspec.sharded import gathered, shape_of, whole
from selfspec.wrapped import execution_device, holds_numbers

_UNITS = 64
_ROUNDING = 0.05
_NO_ROWS = "a draft cannot borrow rows of the target's output head"


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
        if weight is not None and shape_of(weight).numel() > 0:
            return shape_of(weight)[0]
        return int(getattr(self._output_head(), "out_features", self.config.vocab_size))

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return execution_device(self.model.get_input_embeddings())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states."""
        return self.model.dtype

    @property
    def max_positions(self) -> int | None:
        """The longest sequence the model is made for, None if it does not say."""
        return getattr(self.config, "max_position_embeddings", None)

    def too_long(self, length: int) -> str | None:
        """What to say of reading a text of `length` tokens, when the model is made for fewer; else None.

        A model with a table of positions cannot read it at all; others can, as in plain decoding.
        """
        limit = self.max_positions
        if limit is None or length <= limit:
            return None
        if self.has_position_table:
            return f"a text of {length} tokens, where the model has positions for {limit}"
        return f"a text of {length} tokens, where the model is made for {limit}; it may lose its thread"

    @property
    def drafting_limit(self) -> int | None:
        """The length beyond which a pass over several tokens is not exact or not possible; None without one."""
        return self.max_positions if self.has_position_table else hf.dynamic_rope_from(self.config)

    def input_weight(self) -> Tensor | None:
        """`[V, D]` input embedding, None if the model has none or packs it."""
        weight = getattr(self.model.get_input_embeddings(), "weight", None)
        return weight if holds_numbers(weight) else None

    def _output_head(self) -> nn.Module:
        head = self.model.get_output_embeddings()
        if head is None:
            raise UnsupportedModel(f"{type(self.model).__name__} exposes no output embeddings")
        return head

    def output_weight(self) -> Tensor | None:
        """`[V, D]` output head, by reference; None if it is packed, quantised or sharded."""
        weight = getattr(self._output_head(), "weight", None)
        return weight if holds_numbers(weight) and weight.ndim == 2 else None

    def norm_weights(self) -> list[Tensor]:
        """A few vectors of the norms, for fingerprints."""
        vectors = [p for p in hf.decoder_of(self.model).parameters() if shape_of(p) == (self.hidden_size,)]
        return [*vectors[:2], *vectors[-2:]]

    # Parts that drafts borrow

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings `[..., D]` of token ids `[...]`, scaled as the model scales them."""
        return self.model.get_input_embeddings()(tokens)

    def output_rows(self, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows of the output head for `[Q]` token ids: weight `[Q, D]` and bias `[Q]` or None (copies).

        Of a head that is offloaded or packs its weight they are read off its outputs. All processes must take part when
        the model is sharded (DeepSpeed ZeRO-3, FSDP).

        Raises:
            UnsupportedModel: the head's weight is spread over ranks, or the head is no linear map.
        """
        head = self._output_head()
        held, bias = getattr(head, "weight", None), getattr(head, "bias", None)
        with gathered(held if isinstance(held, Tensor) else None, bias):
            weight = self.output_weight()  # ZeRO-3 leaves a vector of nothing where nobody gathers
            if isinstance(held, Tensor) and held.numel() == 0:
                raise UnsupportedModel(f"{_NO_ROWS}: it is spread over ranks; keep it whole in memory")
            if weight is None or weight.is_meta:
                return self._rows_from_outputs(head, token_ids)
            index = token_ids.to(weight.device)
            rows = whole(weight.detach())[index]
            return rows, None if bias is None else whole(bias.detach())[index]

    @torch.no_grad()
    def _rows_from_outputs(self, head: nn.Module, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """W and b of a head that computes W x + b: b is what it makes of nothing, W what it makes of unit vectors."""
        width = int(getattr(head, "in_features", self.hidden_size))
        units = torch.eye(width, dtype=self.dtype, device=self.device)

        def columns(hidden: Tensor) -> Tensor:
            made = head(hidden)
            return made[:, token_ids.to(made.device)]

        try:
            bias = columns(units[:1] * 0)[0]
            rows = (torch.cat([columns(part) for part in units.split(_UNITS)]) - bias).t().contiguous()
            probe = torch.randn(_UNITS, width, generator=torch.Generator().manual_seed(0)).to(units)
            wanted, found = columns(probe), nn.functional.linear(probe.to(rows.device), rows, bias)
        except (RuntimeError, NotImplementedError) as error:
            raise UnsupportedModel(f"{_NO_ROWS} ({type(head).__name__}: {str(error).splitlines()[0]})") from error
        if not torch.allclose(found, wanted, atol=_ROUNDING * float(wanted.abs().max()), rtol=0):
            raise UnsupportedModel(f"{_NO_ROWS} ({type(head).__name__} is no linear map)")
        return rows, bias if bool(bias.any()) else None

    @property
    def keeps_order(self) -> bool:
        """Whether `finish_logits` leaves the largest value the largest, and alone with it (a soft cap may not)."""
        scale = getattr(self.config, "logit_scale", None) or 1
        divisor = getattr(self.config, "logits_scaling", None) or 1
        return scale > 0 and divisor > 0 and not getattr(self.config, "final_logit_softcapping", None)

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
