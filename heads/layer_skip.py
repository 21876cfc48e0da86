"""Layer skipping: the target drafts with some of its attention and MLP sub-layers left out.

Zhang et al. 2023, "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding": the draft
pass skips a chosen set z of sub-layers (section 3.1), found by maximising tokens per second (section 3.2, equation 1;
here `selfspec tune`), and stops by its own confidence (section 3.3; here `SelfDraftConfig.threshold`).
"""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.draft_pass import Plan
from selfspec.errors import ConfigError
from selfspec.heads.self_draft import SelfDraft, SelfDraftConfig
from selfspec.registry import register
from selfspec.target import Target

_DEFAULT_SHARE = 0.45


@dataclass(kw_only=True)
class LayerSkipConfig(SelfDraftConfig):
    """Configuration of layer skipping.

    Args:
        skip_attention: layers whose attention is left out; None spreads the default share over the inner layers.
        skip_mlp: layers whose MLP is left out; likewise.
    """

    skip_attention: list[int] | None = None
    skip_mlp: list[int] | None = None


def spread(layers: int, share: float = _DEFAULT_SHARE) -> list[int]:
    """`share` of all layers, evenly spread; the first and the last are never among them.

    Both are left in because drafts without them are rarely right (Xia et al. 2024, SWIFT, section 3).
    """
    inner = list(range(1, layers - 1))
    count = min(len(inner), round(share * layers))
    return [inner[(2 * i + 1) * len(inner) // (2 * count)] for i in range(count)] if count else []


@register("layer-skip")
class LayerSkip(SelfDraft):
    """The target without the sub-layers of a fixed set."""

    config_class = LayerSkipConfig
    config: LayerSkipConfig

    def __init__(self, config: LayerSkipConfig, target: Target) -> None:
        super().__init__(config, target)
        default = spread(target.num_layers)
        config.skip_attention = default if config.skip_attention is None else sorted(set(config.skip_attention))
        config.skip_mlp = default if config.skip_mlp is None else sorted(set(config.skip_mlp))
        if min(len(config.skip_attention), len(config.skip_mlp)) == target.num_layers:
            raise ConfigError("all layers are to be left out, so nothing is left to draft with; leave some in")
        self._plan = target.passes.check(Plan(frozenset(config.skip_attention), frozenset(config.skip_mlp)))

    def plan(self) -> Plan:
        """The fixed set."""
        return self._plan
