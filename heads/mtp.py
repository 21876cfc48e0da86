"""MTP: the target's own multi-token-prediction layer as a draft head, and its fine-tuning.

DeepSeek-AI 2024, "DeepSeek-V3" (arXiv 2412.19437, section 2.2): `g_i = norm(block(W [enorm(E(t_{i+1})); hnorm(f_i)]))`
with f the target's feature after its final norm and a block of the target's own kind; the target's output head reads
g_i for token i + 2. Deeper guesses reuse the first layer with g in the place of f, as serving engines do.

transformers ignores these tensors when it loads a model; here they are read from the same checkpoint by its own classes
and key conversions. The layer is a copy that belongs to the head: the target never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfspec import hf
from selfspec.draft import Needs, Verified
from selfspec.errors import ConfigError
from selfspec.heads.autoregressive import AutoregressiveConfig, AutoregressiveHead
from selfspec.masks import as_attention_mask
from selfspec.registry import register
from selfspec.target import Target


@dataclass(kw_only=True)
class MtpConfig(AutoregressiveConfig):
    """Configuration of an MTP head; the layer's dimensions are the target's own and not repeated here."""


class _Stores:
    """The head's key stores, as the `cache` argument of a transformers layer."""

    def __init__(self, stores: Sequence[Any]) -> None:
        self.stores = stores

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        pair: tuple[Tensor, Tensor] = self.stores[layer].update(keys, values)
        return pair


@register("mtp")
class Mtp(AutoregressiveHead):
    """The first MTP layer, used again for every depth."""

    config_class = MtpConfig
    config: MtpConfig

    def __init__(self, config: MtpConfig, target: Target) -> None:
        super().__init__(config, target)
        if config.num_layers != 1 or config.steps < 1 or config.tree_nodes < 1 or config.tree_top_k < 1:
            raise ConfigError(
                f"an MTP head has 1 layer and at least 1 step, node and beam, got {config.num_layers}, "
                f"{config.steps}, {config.tree_nodes} and {config.tree_top_k}"
            )
        self.layer = hf.mtp_layer(target.model, load=False)

    @property
    def needs(self) -> Needs:
        """The last hidden state."""
        return Needs(hidden=True)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """The weights of the target's checkpoint.

        Raises:
            UnsupportedModel: the checkpoint holds none, or not all of them.
        """
        self.layer.load_state_dict(hf.mtp_layer(self.target.model, load=True).state_dict())

    def _features(self, verified: Verified) -> Tensor:
        assert verified.hidden is not None
        return verified.hidden

    def _run(
        self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, stores: Sequence[Any]
    ) -> Tensor:
        join = self.layer.eh_proj
        assert isinstance(join, nn.Linear)
        weight = join.weight
        embedded = self.target.embed(tokens).detach().to(weight)
        if mask is None:
            places = tokens.shape[1]
            mask = torch.ones(1, 1, places, places, dtype=torch.bool, device=weight.device).tril()
        g: Tensor = self.layer(
            embedded,
            features.to(weight),
            position_embeddings=hf.rotary_of(self.target.model, embedded, positions),
            attention_mask=as_attention_mask(mask.squeeze(1), self.target.attention, weight.dtype),
            position_ids=positions,
            cache=_Stores(stores),
        )
        return g
