"""Drafts combined in one tree: for instance n-grams of the text beside trained heads.

Each guesses what the other cannot: lookup knows the text, heads know the language. Tokens that both propose are one
node, so agreement costs nothing. How merging keeps sampling exact is told in `selfspec.heads.merging`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from selfspec.draft import Draft
from selfspec.errors import ConfigError
from selfspec.heads.joint import Joint
from selfspec.registry import register
from selfspec.resolve import resolve_draft
from selfspec.target import Target


@dataclass(kw_only=True)
class ComposeConfig:
    """Configuration of a combination.

    Args:
        parts: what to combine, each as `patch` takes it. Those that often have nothing to say come first: what they
            leave of their share goes to those after them.
        weights: how the nodes of a tree are shared out, one weight per part; None gives all the same.
        nodes: nodes of a tree, the root included, unless the budget says otherwise; None lets every part choose.
    """

    parts: list[Any] = field(default_factory=list)
    weights: list[float] | None = None
    nodes: int | None = None

    def __post_init__(self) -> None:
        if self.nodes is not None and self.nodes < 1:
            raise ConfigError(f"nodes={self.nodes} leaves no room for the root; give at least 1")

    @classmethod
    def from_argument(cls, argument: str) -> ComposeConfig:
        """From what stands after `compose:`, names or folders with commas between them."""
        return cls(parts=[part for part in argument.split(",") if part])


@register("compose", joins=True)
class Compose(Joint):
    """Several drafts side by side.

    Args:
        parts: the drafts.
        weights: see `ComposeConfig`.
        nodes: see `ComposeConfig`.

    Raises:
        ConfigError: no parts, or weights that do not fit them.
    """

    config_class = ComposeConfig

    def __init__(
        self, parts: Sequence[Draft], weights: Sequence[float] | None = None, nodes: int | None = None
    ) -> None:
        super().__init__(parts, [1.0] * len(parts) if weights is None else weights, by_turns=False)
        self.nodes = nodes

    @classmethod
    def of(cls, parts: Sequence[Draft]) -> Compose:
        """What a list of drafts means."""
        return cls(parts)

    @classmethod
    def from_target(cls, config: ComposeConfig, target: Target, generator: torch.Generator | None = None) -> Compose:
        """Make the parts.

        Raises:
            ConfigError: a part that cannot be made for this target.
        """
        if not config.parts:
            raise ConfigError("compose wants drafts to combine: write compose:lookup,FOLDER or give patch a list")
        made = cls([resolve_draft(part, target) for part in config.parts], config.weights, config.nodes)
        made.check_target(target)
        return made
