"""JetSpec: a block drafter whose slots see earlier slots only, distilled by forward KL.

Hu et al. 2026, "JetSpec" (arXiv 2606.18394): DFlash's block and context, causal attention inside the block (section
2.2), forward KL to the target's distribution with all places counting alike (section 2.3). The tree comes from one
pass, by summed log-probability. Slots hold mask tokens, so slot j's distribution still does not know which branch it
is on; causality makes it the same however long the block is, and lets short trees run short blocks.
The temperature of the paper's distillation is 1 here.
"""

from __future__ import annotations

from dataclasses import dataclass

from selfspec.errors import ConfigError
from selfspec.heads.dflash import DFlash
from selfspec.heads.dflash_config import DFlashConfig
from selfspec.registry import register


@dataclass(kw_only=True)
class JetSpecConfig(DFlashConfig):
    """As DFlash's, with other defaults; `causal` stays true."""

    causal: bool = True
    loss: str = "forward_kl"
    position_decay: float = 0.0
    tree_nodes: int = 16

    def __post_init__(self) -> None:
        """Refuse a block whose slots see later ones."""
        super().__post_init__()
        if not self.causal:
            raise ConfigError("jetspec is causal inside the block; use kind: dflash for causal: false")


@register("jetspec")
class JetSpec(DFlash):
    """DFlash with causal blocks."""

    config_class = JetSpecConfig
    config: JetSpecConfig
