"""Layer skipping: the target drafts with some of its attention and MLP sub-layers left out.

Zhang et al. 2023, "Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding": the draft
pass skips a chosen set z of sub-layers (section 3.1), found by maximising tokens per second (section 3.2, equation 1;
here `selfspec tune`), and stops by its own confidence (section 3.3; here `SelfDraftConfig.threshold`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from selfspec.errors import ConfigError
from selfspec.heads.self_draft import SelfDraft, SelfDraftConfig
from selfspec.registry import register
from selfspec.switches import Plan
from selfspec.target import Target

_DEFAULT_SHARE = 0.45
_ATTENTION, _MLP, _WHOLE = "attention", "mlp", "layer"


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

    @classmethod
    def knobs(cls, target: Target) -> dict[str, tuple[Any, ...]]:
        """Each inner sub-layer in or out (whole layers where the model allows no more), and the depth."""
        parts = (_ATTENTION, _MLP) if target.passes.parts_apart() else (_WHOLE,)
        inner = range(1, target.num_layers - 1)
        return {**super().knobs(target), **{f"{part}.{k}": (False, True) for part in parts for k in inner}}

    @classmethod
    def start(cls, target: Target) -> dict[str, Any]:
        """The default set."""
        skipped = {str(layer) for layer in spread(target.num_layers)}
        sets = {name: name.partition(".")[2] in skipped for name in cls.knobs(target) if "." in name}
        return {**super().start(target), **sets}

    @classmethod
    def tuned(cls, base: Any, values: Mapping[str, Any]) -> LayerSkipConfig:
        """The configuration with these knobs set."""
        found: dict[str, list[int]] = {_ATTENTION: [], _MLP: [], _WHOLE: []}
        for name, skipped in values.items():
            part, _, layer = name.partition(".")
            if part in found and skipped:
                found[part].append(int(layer))
        attention, mlp = found[_ATTENTION] + found[_WHOLE], found[_MLP] + found[_WHOLE]
        return replace(super().tuned(base, values), skip_attention=attention, skip_mlp=mlp)

    @classmethod
    def shuffled(cls, values: Mapping[str, Any], chance: random.Random) -> dict[str, Any] | None:
        """As many attentions and as many MLPs left out, but others."""
        shuffled = dict(values)
        for part in (_ATTENTION, _MLP, _WHOLE):
            names = [name for name in values if name.startswith(f"{part}.")]
            flags = [values[name] for name in names]
            chance.shuffle(flags)
            shuffled.update(zip(names, flags, strict=True))
        return shuffled
