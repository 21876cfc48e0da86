"""EAGLE-1 heads, with static trees or EAGLE-2's: guess the target's next feature, then the next token from it.

Li et al. 2024, "EAGLE" (sections 3.1 and 3.2) and "EAGLE-2" (section 4); training on the head's own guesses as in
Zhang et al. 2024 (HASS) and Li et al. 2025 (EAGLE-3, section 3.2).

Letters: B rows, T places, D hidden size, P supervised places. See `autoregressive` for what a place is; here g at place
i approximates the feature of token i + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.draft import Needs, Verified
from selfspec.heads.autoregressive import AutoregressiveConfig, AutoregressiveHead, fill_from_target, layer_shape
from selfspec.heads.layers import DecoderLayer, RMSNorm, draw_weights
from selfspec.heads.losses import feature_distance
from selfspec.heads.rotary import Rotary
from selfspec.registry import register
from selfspec.target import Target


@dataclass(kw_only=True)
class EagleConfig(AutoregressiveConfig):
    """Configuration of an EAGLE head.

    Published EAGLE-1 heads have `input_norms`, `layer_norm` and `output_norm` false.

    Args:
        fc_bias: bias of the projection that joins embedding and feature.
        input_norms: norms on the embedding and on the feature before they are joined.
        layer_norm: a norm before attention in the first layer (later layers always have one).
        output_norm: a norm at the end, so that g has the scale of the target's normed feature.
        token_weight: weight of the loss on tokens.
        feature_weight: weight of the distance between features.
    """

    fc_bias: bool = False
    input_norms: bool = True
    layer_norm: bool = True
    output_norm: bool = True
    token_weight: float = 1.0
    feature_weight: float = 0.1


@register("eagle")
class Eagle(AutoregressiveHead):
    """`fc([embedding; feature])`, decoder layers, and the target's output head on the draft vocabulary."""

    config_class = EagleConfig
    config: EagleConfig

    def __init__(self, config: EagleConfig, target: Target) -> None:
        super().__init__(config, target)
        fill_from_target(config, target, config.hidden_size)
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embedding_norm = RMSNorm(size, eps) if config.input_norms else nn.Identity()
        self.feature_norm = RMSNorm(size, eps) if config.input_norms else nn.Identity()
        self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(layer_shape(config, size, input_norm=config.layer_norm or index > 0))
            for index in range(config.num_layers)
        )
        self.norm = RMSNorm(size, eps) if config.output_norm else nn.Identity()

    @property
    def needs(self) -> Needs:
        """The last hidden state."""
        return Needs(hidden=True)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Start near "the next feature is like this one", with every channel at the size it has in the target.

        Normal weights of deviation 0.02; the feature passes through `fc` unchanged, and what the layers add to it is
        small. The norms undo and restore the sizes of the target's channels.
        """
        draw_weights(self, generator, small=0.002)
        with torch.no_grad():
            self.fc.weight[:, self.config.hidden_size :].diagonal().add_(1)
            scale = self.target.hidden_scale(generator).to(self.fc.weight.device)
            scale = scale.clamp_min(1e-3 * float(scale.mean()))
            if isinstance(self.feature_norm, RMSNorm):
                self.feature_norm.weight.copy_(scale.pow(2).mean().sqrt() / scale)
            if isinstance(self.norm, RMSNorm):
                self.norm.weight.copy_(scale)

    def _join(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Features `[B, T, D]` and the tokens after them `[B, T]` to the layers' input `[B, T, D]`."""
        features = features.to(self.fc.weight)  # the last layer of a spread-out target may be on another device
        embedded = self.target.embed(tokens).detach().to(features)
        return self.fc(torch.cat([self.embedding_norm(embedded), self.feature_norm(features)], -1))

    def _run(
        self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, stores: Sequence[Any]
    ) -> Tensor:
        x = self._join(features, tokens)
        turn = self.rotary(positions)
        for layer, store in zip(self.layers, stores, strict=True):
            x = layer(x, turn, mask, store)
        return self.norm(x)

    def _features(self, verified: Verified) -> Tensor:
        assert verified.hidden is not None
        return verified.hidden.to(self.fc.weight.dtype)

    def _pass_loss(self, tokens: Tensor, guess: Tensor, taught: Tensor, real: Tensor) -> Tensor:
        tokens = self.config.token_weight * tokens
        if not self.config.feature_weight:
            return tokens
        return tokens + self.config.feature_weight * (real * feature_distance(guess, taught)).sum()
