"""Several draft models propose together (SpecInfer, Miao et al. 2024).

Each model's guesses are merged into one token tree (section 3, merge-based construction) and judged by multi-step
speculative sampling (section 4.3, algorithm 2): a token that one model drew and the target refused takes that model's
q off the residual before the next model's draw is judged by its own q. Siblings are judged in turns, one of each model
after the other. Greedy decoding accepts what any of the models has right.

The paper draws the order of the models at random; any order that does not look at the draws gives the same
distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from selfspec.draft import Draft
from selfspec.errors import ConfigError
from selfspec.heads.draft_model import DraftModel, DraftModelConfig
from selfspec.heads.joint import Joint
from selfspec.registry import register
from selfspec.resolve import resolve_draft
from selfspec.target import Target


@dataclass(kw_only=True)
class SpecInferConfig:
    """Configuration of joint drafting.

    Args:
        drafts: what proposes; a text is the folder or Hub id of a small model, all else is as `patch` takes it.
        nodes: nodes of a tree, the root included, unless the budget says otherwise; None lets every draft choose.
    """

    drafts: list[Any] = field(default_factory=list)
    nodes: int | None = None

    def __post_init__(self) -> None:
        if self.nodes is not None and self.nodes < 1:
            raise ConfigError(f"nodes={self.nodes} leaves no room for the root; give at least 1")

    @classmethod
    def from_argument(cls, argument: str) -> SpecInferConfig:
        """From what stands after `spec-infer:`, folders or Hub ids with commas between them."""
        return cls(drafts=[part for part in argument.split(",") if part])


@register("spec-infer")
class SpecInfer(Joint):
    """Several drafts, each with an equal share of the tree.

    Args:
        drafts: any Draft objects, `DraftModel` as a rule.
        nodes: see `SpecInferConfig`.

    Raises:
        ConfigError: no drafts.
    """

    config_class = SpecInferConfig

    def __init__(self, drafts: Sequence[Draft], nodes: int | None = None) -> None:
        super().__init__(drafts, [1.0] * len(drafts), by_turns=True)
        self.nodes = nodes

    @classmethod
    def from_target(
        cls, config: SpecInferConfig, target: Target, generator: torch.Generator | None = None
    ) -> SpecInfer:
        """Load the drafts.

        Raises:
            ConfigError: a draft that cannot be made for this target.
        """
        if not config.drafts:
            raise ConfigError("spec-infer wants small models: write spec-infer:FOLDER,FOLDER")
        made = cls([_draft(given, target) for given in config.drafts], config.nodes)
        made.check_target(target)
        return made


def _draft(given: Any, target: Target) -> Draft:
    if isinstance(given, str):
        return DraftModel.from_target(DraftModelConfig(model=given), target)
    return resolve_draft(given, target)
