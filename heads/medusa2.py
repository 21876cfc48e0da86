"""Medusa-2: Medusa heads and the backbone trained together. **The one method that changes the target.**

Cai et al. 2024, "Medusa", sections 2.2.2 and 2.3.2. The backbone's change is a LoRA, kept beside the heads as a PEFT
adapter. With p the target's distribution, p' that of the target with the adapter, and heads as in `medusa`:

    L = sum KL(p || p') + lambda_0 * sum_j head_decay^j * loss(head_j, p')

The first term is the paper's self-distillation (section 2.3.2): the backbone is held to what it was, which needs no
text from its own training. Two stages (section 2.2.2): in the first `warmup` of the training only the heads learn, on
the unchanged target; then both do, lambda_0 growing as a sine from 0 to `head_weight` over `joint_warmup` of it, and
the backbone at a lower learning rate.

`patch` puts the adapter into the model, when told that it may. From then on the text is, exactly, that of the target
with the adapter (or with the adapter merged into it): it is *that* model a certificate is about.

Letters: B rows, T places, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from selfspec.draft import Verified
from selfspec.errors import ConfigError
from selfspec.head import HeadLoss
from selfspec.heads.lora import LoraUpdates, choose_linear
from selfspec.heads.losses import denominator, forward_kl, taught_places, teacher_of
from selfspec.heads.medusa import Medusa, MedusaConfig
from selfspec.heads.peft_model import put_in
from selfspec.registry import register
from selfspec.switches import Plan
from selfspec.target import Target


@dataclass(kw_only=True)
class Medusa2Config(MedusaConfig):
    """Configuration of Medusa-2.

    Args:
        rank: of the backbone's LoRA.
        alpha: its updates are scaled by alpha / rank.
        target_modules: last parts of the names of the linear modules it is for; empty takes all.
        head_weight: lambda_0, at its highest (the paper has 0.2).
        warmup: share of the training in which the heads learn alone.
        joint_warmup: share of the training after that in which lambda_0 grows.
        backbone_lr: the backbone's learning rate as a share of the heads' (the paper has a quarter).
    """

    rank: int = 32
    alpha: int = 16
    target_modules: list[str] = field(default_factory=list)
    head_weight: float = 0.2
    warmup: float = 0.3
    joint_warmup: float = 0.2
    backbone_lr: float = 0.25

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        super().__post_init__()
        shares = (self.warmup, self.joint_warmup, self.backbone_lr)
        if min(self.rank, self.alpha) < 1 or not all(0 <= share <= 1 for share in shares) or self.head_weight <= 0:
            raise ConfigError(
                f"rank {self.rank} and alpha {self.alpha} must be at least 1, head_weight {self.head_weight} above 0, "
                f"warmup, joint_warmup and backbone_lr in 0..1, got {shares}"
            )


@register("medusa-2")
class Medusa2(Medusa):
    """Medusa heads and a LoRA on the target."""

    config_class = Medusa2Config
    config: Medusa2Config
    changes_target = True

    def __init__(self, config: Medusa2Config, target: Target) -> None:
        super().__init__(config, target)
        self.peft = LoraUpdates(choose_linear(target, Plan(), config.target_modules), config.rank, config.alpha)
        self.trained_share = 1.0
        """How much of the training has passed; see `DraftHead.at`."""

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Heads as Medusa's; a backbone that is the target."""
        super().reset_parameters(generator)
        self.peft.reset_parameters(generator)

    def peft_config(self) -> dict[str, Any]:
        """See `DraftHead.peft_config`."""
        return self.peft.peft_config(self.config.base_model)

    def change_target(self) -> Callable[[], None]:
        """See `DraftHead.change_target`."""
        return put_in(self.target.model, self.peft_config(), self.peft.state_dict())

    # Training

    def at(self, share: float) -> None:
        """See `DraftHead.at`."""
        self.trained_share = share

    def learning_rates(self) -> dict[str, float]:
        """See `DraftHead.learning_rates`."""
        return {"peft.": self.config.backbone_lr}

    def loss(self, verified: Verified, mask: Tensor, items: Tensor | None = None) -> HeadLoss:
        """The first stage is Medusa's loss, the second L of the module's head. `correct` and `seen` are the heads'."""
        assert verified.hidden is not None
        if verified.top is not None:
            raise ConfigError(
                "medusa-2 changes the target while it trains, so the logits that the data store (top_logits) are soon "
                "wrong; make the data without them"
            )
        if self.trained_share < self.config.warmup:
            alone = super().loss(verified, mask, items)
            idle = sum(p.sum() for p in self.peft.parameters()) * 0.0
            return replace(alone, loss=alone.loss + idle)
        adapted = self._adapted(verified)
        heads = super().loss(replace(verified, hidden=adapted), mask, items)
        row, column = taught_places(verified, mask)
        held = self._backbone(verified.hidden[row, column], adapted[row, column])
        return replace(heads, loss=held / denominator(heads.seen[0], items) + self._head_weight() * heads.loss)

    def _head_weight(self) -> float:
        passed = self.trained_share - self.config.warmup
        grown = min(passed / self.config.joint_warmup, 1.0) if self.config.joint_warmup else 1.0
        return self.config.head_weight * math.sin(grown * math.pi / 2)

    def _adapted(self, verified: Verified) -> Tensor:
        """The last hidden state of the target with the adapter, `[B, T, D]`, with gradient."""
        tokens, counts = verified.tokens, verified.counts
        line = torch.arange(tokens.shape[1], device=tokens.device)
        real = line < counts.unsqueeze(1)
        plan = self.target.passes.check(Plan(added=self.peft.updates))
        mask = None if bool(real.all()) else real.long()
        return self.target.passes.learn(tokens, mask, line.expand_as(tokens), None, plan)

    def _backbone(self, before: Tensor, now: Tensor) -> Tensor:
        """`sum KL(p || p')` over all tokens of the target's vocabulary, a few places at a time."""
        total = now.new_zeros((), dtype=torch.float32)
        rows = max((1 << 26) // self.target.vocab_size, 1)
        for old, new in zip(before.split(rows), now.split(rows), strict=True):
            with torch.no_grad():
                teacher = teacher_of(self.target.head(old.to(self.target.dtype)))
            total = total + forward_kl(self.target.head(new.to(self.target.dtype)), teacher).sum()
        return total
