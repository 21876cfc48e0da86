"""EAGLE-3 heads: no feature to imitate, several of the target's layers to read, trained on their own guesses.

Li et al. 2025, "EAGLE-3" (section 3). The switches of EAGLE 3.1 and of the vllm-project/speculators and SpecForge
formats: norms before the features are fused, the normed feature as residual, the normed output fed back.

Letters: B rows, T places, D hidden size of the target, W width of the head, L tapped layers, V vocabulary.
See `autoregressive` for what a place is. With E the embedding and F the features:

    z = fc(norms([F_1; ..; F_L]))           once per pair; guesses fed back take the place of z
    h = z + attention([norm(E); norm(z)])   first layer; later ones are ordinary
    g = h + mlp(norm(h)),   logits = output(norm(g)),   fed back: g, or norm(g)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfspec.draft import Needs, Verified
from selfspec.draft_output import DraftOutput
from selfspec.errors import ConfigError
from selfspec.heads.autoregressive import AutoregressiveConfig, AutoregressiveHead, fill_from_target, layer_shape
from selfspec.heads.layers import Attention, DecoderLayer, GatedMLP, LayerShape, RMSNorm, draw_weights
from selfspec.heads.rotary import Rotary
from selfspec.registry import register
from selfspec.target import Target

_PROBE = (8, 64)


@dataclass(kw_only=True)
class Eagle3Config(AutoregressiveConfig):
    """Configuration of an EAGLE-3 head.

    Published heads have `own_output` true and `fc_norm` false; the paper trains `steps` 7 with `step_decay` 0.8.

    Args:
        target_layers: which of transformers' `hidden_states` are read, low to high; k is the input of block k. None
            takes (2, L // 2, L - 3) of a target with L >= 7 layers, and others spread alike where there are fewer.
        draft_hidden_size: W; 0 takes the target's hidden size. Another one needs `own_embedding` and `own_output`.
        own_embedding: train an embedding of its own (`[V, W]`) instead of borrowing the target's.
        fc_bias: bias of the projection that fuses the layers.
        fc_norm: a norm on each layer's features before they are fused.
        norm_before_fc: one norm on all of them together, instead.
        norm_before_residual: the normed z is the residual, not z itself.
        norm_output: feed back the normed output, not the raw one.
    """

    target_layers: Sequence[int] | None = None
    draft_hidden_size: int = 0
    own_embedding: bool = False
    fc_bias: bool = False
    fc_norm: bool = True
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    steps: int = 3


class FusedLayer(nn.Module):
    """The first layer: attention reads the token's embedding beside the feature, the residual is the feature's."""

    def __init__(self, shape: LayerShape, norm_before_residual: bool) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, shape.intermediate_size)

    def forward(
        self, embedded: Tensor, z: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None, store: Any
    ) -> Tensor:
        """`[B, T, W]` twice to `[B, T, W]`; the rest as in `DecoderLayer.forward`."""
        normed = self.hidden_norm(z)
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        x = (normed if self.norm_before_residual else z) + self.self_attn(both, turn, mask, store)
        return x + self.mlp(self.post_attention_layernorm(x))


@register("eagle3")
class Eagle3(AutoregressiveHead):
    """Fused layers of the target, decoder layers, and an output head on the draft vocabulary."""

    config_class = Eagle3Config
    config: Eagle3Config

    def __init__(self, config: Eagle3Config, target: Target) -> None:
        super().__init__(config, target)
        config.target_layers = _layers(config.target_layers, target.num_layers)
        config.draft_hidden_size = config.draft_hidden_size or config.hidden_size
        width, eps, taps = config.draft_hidden_size, config.rms_norm_eps, len(config.target_layers)
        fill_from_target(config, target, width)
        _check(config)
        self.rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling)
        if width != config.hidden_size:
            self.output = DraftOutput(target, config.draft_vocab_size, own=True, width=width)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        self.fc_norm = nn.ModuleList(RMSNorm(config.hidden_size, eps) for _ in range(taps if config.fc_norm else 0))
        self.input_norm = RMSNorm(taps * config.hidden_size, eps) if config.norm_before_fc else nn.Identity()
        self.fc = nn.Linear(taps * config.hidden_size, width, bias=config.fc_bias)
        first = layer_shape(config, width, attention_size=2 * width)
        self.layers = nn.ModuleList([FusedLayer(first, config.norm_before_residual)])
        self.layers.extend(DecoderLayer(layer_shape(config, width)) for _ in range(config.num_layers - 1))
        self.norm = RMSNorm(width, eps)

    @property
    def needs(self) -> Needs:
        """The tapped layers to read, the last hidden state for the teacher."""
        assert self.config.target_layers is not None
        return Needs(hidden=True, layers=tuple(self.config.target_layers))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Start near "what the highest tapped layer says", with every channel at the size the output head expects.

        Normal weights of deviation 0.02; the highest layer's features pass through `fc` unchanged where the widths
        allow it, and what the layers add is small.
        """
        draw_weights(self, generator, small=0.002, keep=("output.", "embed_tokens."))
        if self.config.draft_hidden_size != self.config.hidden_size:
            assert self.embed_tokens is not None
            nn.init.normal_(self.embed_tokens.weight, std=0.02, generator=generator)
            nn.init.normal_(self.output.rows, std=0.02, generator=generator)
            return
        with torch.no_grad():
            self.fc.weight[:, -self.config.hidden_size :].diagonal().add_(1)
            self.norm.weight.copy_(self._output_scale(generator))
            if self.embed_tokens is not None:
                ids = torch.arange(self.config.vocab_size, device=self.target.device)
                self.embed_tokens.weight.copy_(self.target.embed(ids))

    def _output_scale(self, generator: torch.Generator | None) -> Tensor:
        """What turns the normed features of the highest layer into the size of the last hidden state, by channel."""
        tokens = torch.randint(self.config.vocab_size, _PROBE, generator=generator).to(self.target.device)
        seen = self.target.features(tokens, None, self.needs)
        assert seen.hidden is not None
        sizes = []
        for states in (seen.hidden.float(), self.norm(seen.layers[-1].to(self.norm.weight))):
            sizes.append(states[:, 1:].flatten(0, 1).pow(2).mean(0).sqrt().to(self.norm.weight.device))
        scale, size = (channel.clamp_min(1e-2 * float(channel.mean())) for channel in sizes)
        return scale / size

    def _features(self, verified: Verified) -> Tensor:
        layers = [layer.to(self.fc.weight) for layer in verified.layers]
        if self.config.fc_norm:
            layers = [norm(layer) for norm, layer in zip(self.fc_norm, layers, strict=True)]
        return self.fc(self.input_norm(torch.cat(layers, -1)))

    def _embed(self, tokens: Tensor, like: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            return self.embed_tokens(tokens)
        return self.target.embed(tokens).detach().to(like)

    def _run(
        self, features: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, stores: Sequence[Any]
    ) -> Tensor:
        turn = self.rotary(positions)
        x = self.layers[0](self._embed(tokens, features), features, turn, mask, stores[0])
        for layer, store in zip(self.layers[1:], stores[1:], strict=True):
            x = layer(x, turn, mask, store)
        return x

    def _readout(self, guess: Tensor) -> Tensor:
        return self.norm(guess)

    def _feedback(self, guess: Tensor) -> Tensor:
        return self.norm(guess) if self.config.norm_output else guess


def _layers(chosen: Sequence[int] | None, count: int) -> list[int]:
    """The layers to read; a default needs three different ones, which small targets may not have."""
    if chosen is None:
        spread = (2, count // 2, count - 3) if count >= 7 else (min(1, count - 1), count // 2, count - 1)
        return sorted(set(spread))
    layers = [int(layer) for layer in chosen]
    if not layers or layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= count:
        raise ConfigError(f"target_layers are {layers}, wanted different ones from 0 to {count - 1}, low to high")
    return layers


def _check(config: Eagle3Config) -> None:
    if config.fc_norm and config.norm_before_fc:
        raise ConfigError("fc_norm and norm_before_fc exclude each other; choose one norm before the layers are fused")
    if config.draft_hidden_size != config.hidden_size and not (config.own_embedding and config.own_output):
        raise ConfigError(
            f"a head of width {config.draft_hidden_size} cannot borrow from a target of width {config.hidden_size}; "
            "set own_embedding and own_output"
        )
