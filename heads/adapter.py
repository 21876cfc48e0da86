"""An adapter that is active only while the target drafts for itself: a LoRA on layer skipping or early exit.

The target's own passes are those of the target alone, so its text and its hidden states do not change in a bit; the
draft pass learns to say what the full model says (Hu et al. 2021, LoRA; trained by distillation as in Zhou et al. 2024,
DistillSpec). Adapters of the user's own on the same model count in both passes.

Training repeats decoding: rounds of `train_depth` places see the text before them through the keys of full passes, and
their own places through the keys of the adapted pass (`selfspec.replay`).

Letters: B rows, T places, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from selfspec.draft import Budget, Needs, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.head import DraftConfig, DraftHead, HeadLoss
from selfspec.heads.early_exit import EarlyExit
from selfspec.heads.layer_skip import LayerSkip
from selfspec.heads.lora import LoraUpdates, choose_linear
from selfspec.heads.losses import TaughtConfig, denominator, learn, taught_places, teach_at
from selfspec.heads.self_draft import SelfDraft, SelfState
from selfspec.heads.trunk import HeadOutput, WholeOutput
from selfspec.registry import register
from selfspec.replay import replay, replayable, rounds_of
from selfspec.target import Target
from selfspec.tree import DraftTree

_BASES: dict[str, type[SelfDraft]] = {cls.kind: cls for cls in (EarlyExit, LayerSkip)}
_SET_BY_THE_HEAD = {f.name for f in fields(DraftConfig)} | {"draft_vocab_size", "vocab_ids"}


@dataclass(kw_only=True)
class AdapterConfig(TaughtConfig):
    """Configuration of an adapter of draft passes.

    Args:
        base_draft: `layer-skip` or `early-exit`.
        settings: of that draft, by the names it has there (`exit_layer`, `skip_mlp`, `depth`, `threshold`, ...).
        rank: r.
        alpha: the update is scaled by alpha / r.
        target_modules: last parts of the names of the linear modules it is for; empty takes all that the pass runs.
        train_depth: places of a training round.
    """

    base_draft: str = "layer-skip"
    settings: dict[str, Any] = field(default_factory=dict)
    rank: int = 16
    alpha: int = 32
    target_modules: list[str] = field(default_factory=list)
    train_depth: int = 4

    def __post_init__(self) -> None:
        """Refuse what makes no adapter."""
        super().__post_init__()
        if self.base_draft not in _BASES:
            raise ConfigError(f"base_draft is {self.base_draft!r}, wanted one of {sorted(_BASES)}")
        if min(self.rank, self.alpha, self.train_depth) < 1:
            raise ConfigError(
                f"rank {self.rank}, alpha {self.alpha} and train_depth {self.train_depth} must be at least 1"
            )
        known = {f.name for f in fields(_BASES[self.base_draft].config_class)} - _SET_BY_THE_HEAD
        if unknown := sorted(set(self.settings) - known):
            raise ConfigError(f"{self.base_draft!r} has no settings {unknown} here; known: {sorted(known)}")


@register("adapter")
class Adapter(DraftHead):
    """A self-draft whose pass carries low-rank updates.

    Raises:
        UnsupportedModel: the target cannot draft for itself, or layers of it read the keys of others.
    """

    config_class = AdapterConfig
    config: AdapterConfig

    def __init__(self, config: AdapterConfig, target: Target) -> None:
        super().__init__(config, target)
        replayable(target)
        cls = _BASES[config.base_draft]
        inner = cls.config_class(**config.settings)
        self.draft = cls(inner, target)
        config.settings = {k: v for k, v in inner.to_dict().items() if k not in _SET_BY_THE_HEAD}
        modules = choose_linear(target, self.draft.plan(), config.target_modules)
        self.peft = LoraUpdates(modules, config.rank, config.alpha)
        whole = config.draft_vocab_size == target.vocab_size and not config.own_output
        self.draft.adapt(self.peft.updates, WholeOutput(target) if whole else HeadOutput(target, self.output))

    @property
    def needs(self) -> Needs:
        """The target's cache; in training the target is asked by the loss itself."""
        return self.draft.needs

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """At first the draft is the one without an adapter."""
        self.peft.reset_parameters(generator)

    def peft_config(self) -> dict[str, Any]:
        """See `DraftHead.peft_config`."""
        return self.peft.peft_config(self.config.base_model)

    def begin(self, verified: Verified) -> SelfState:
        """See `SelfDraft.begin`."""
        return self.draft.begin(verified)

    def observe(self, state: SelfState, verified: Verified) -> SelfState:
        """See `SelfDraft.observe`."""
        return self.draft.observe(state, verified)

    def propose(
        self, state: SelfState, budget: Budget, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """See `SelfDraft.propose`."""
        return self.draft.propose(state, budget, sampling, generator)

    def loss(self, verified: Verified, mask: Tensor, items: Tensor | None = None) -> HeadLoss:
        """The configured loss of the draft pass against the full pass at the same place.

        Depth d counts the places that are number d of their round, the first of which stands for a round's root.
        """
        tokens, depth = verified.tokens, self.config.train_depth
        starts = rounds_of(tokens, verified.counts, depth)
        plan = self.target.passes.check(self.draft.adapted_plan())
        full, drafted = replay(self.target, tokens, starts, plan)
        row, column = taught_places(verified, mask)
        dtype = self.output.rows.dtype
        teacher = teach_at(self.output, replace(verified, hidden=full), row, column, self.config.teacher_top_k)
        guess = drafted[row, column].to(dtype)
        level = column - starts[row, column]
        correct, seen, loss = [], [], guess.new_zeros((), dtype=torch.float32)
        for d in range(depth):
            places = (level == d).nonzero().squeeze(1)
            real = torch.ones(places.shape, device=places.device)
            score = learn(self.output, guess[places], teacher.pick(places), real, self.config)
            loss = loss + score.loss
            correct.append(score.correct)
            seen.append(real.sum())
        counts = torch.stack(seen)
        return HeadLoss(loss / denominator(counts[0], items), torch.stack(correct), counts)
