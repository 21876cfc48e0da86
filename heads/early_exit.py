"""Early exit: the target's first E layers, its final norm and its output head draft for the whole.

Elhoushi et al. 2024, "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", section 4: any layer can
be the exit, and drafting and verifying share the lower layers' keys and values and their work. Checkpoints published
with that paper are ordinary weights of the model family; other models work too, but are rarely right so early.

Sharing. The trunk's nodes went through the E layers while drafting, so verification starts from their hidden states at
layer E. Only the nodes after the trunk's last pass (its last token and the side branches) go through the E layers once,
together, before that. The keys and values below E are those of the drafting passes: the same arithmetic in passes of
another size, as any pass over n tokens differs from n passes over one. With `beam` above 1 nodes stand in the cache in
another order than in the tree, so verification is done in full; so it is for drafts joined with others, and where
another reader wants hidden states of layers below E.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from selfspec.heads.self_draft import SelfDraft, SelfDraftConfig
from selfspec.registry import register
from selfspec.switches import Plan
from selfspec.target import Target


@dataclass(kw_only=True)
class EarlyExitConfig(SelfDraftConfig):
    """Configuration of early exit.

    Args:
        exit_layer: E, how many layers a draft pass runs; 0 takes a third of them.
        share: verification does not repeat the E layers for drafted tokens.
    """

    exit_layer: int = 0
    share: bool = True


def _default_exit(target: Target) -> int:
    return max(1, target.num_layers // 3)


@register("early-exit")
class EarlyExit(SelfDraft):
    """The target cut off after E layers."""

    config_class = EarlyExitConfig
    config: EarlyExitConfig

    def __init__(self, config: EarlyExitConfig, target: Target) -> None:
        super().__init__(config, target)
        config.exit_layer = config.exit_layer or _default_exit(target)
        self.shares = config.share
        self._plan = target.passes.check(Plan(stop=config.exit_layer))

    def plan(self) -> Plan:
        """Nothing above the exit."""
        return self._plan

    @classmethod
    def knobs(cls, target: Target) -> dict[str, tuple[Any, ...]]:
        """The exit, and the depth."""
        return {**super().knobs(target), "exit_layer": tuple(range(1, target.num_layers))}

    @classmethod
    def start(cls, target: Target) -> dict[str, Any]:
        """The default exit."""
        return {**super().start(target), "exit_layer": _default_exit(target)}

    @classmethod
    def tuned(cls, base: Any, values: Mapping[str, Any]) -> EarlyExitConfig:
        """The configuration with these knobs set."""
        return replace(super().tuned(base, values), exit_layer=values.get("exit_layer", base.exit_layer))
