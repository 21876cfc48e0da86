"""What all trainable draft heads share: configuration, borrowed parts, the loss's form, saving and loading.

Letters: B rows, T places, D hidden size, Q draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from selfspec.draft import Budget, DraftState, Needs, Sampling, Verified
from selfspec.draft_output import DraftOutput
from selfspec.errors import CheckpointError, ConfigError
from selfspec.light import lighten_layers
from selfspec.target import Target
from selfspec.tree import DraftTree
from selfspec.values import check_types

FORMAT_VERSION = 1

C = TypeVar("C", bound="DraftConfig")


@dataclass(kw_only=True)
class DraftConfig:
    """Fields of `config.json` that every draft made for one base model has, with weights of its own or without.

    Args:
        kind: registry name of the method.
        base_model: hub id (or name) of the base model.
        base_revision: commit of the base model, if known.
        base_fingerprint: see `selfspec.fingerprint`.
        base_quantization: how the base model's weights were packed, see `wrapped.quantisation`; None is not known.
        format_version: version of this layout.
    """

    kind: str = ""
    base_model: str = ""
    base_revision: str | None = None
    base_fingerprint: str = ""
    base_quantization: str | None = None
    format_version: int = FORMAT_VERSION

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls: type[C], values: dict[str, Any]) -> C:
        """From JSON values.

        Raises:
            ConfigError: a key this method does not know, a value of another type, or a newer format.
        """
        if values.get("format_version", FORMAT_VERSION) > FORMAT_VERSION:
            raise ConfigError(
                f"the head has format version {values['format_version']}, this selfspec reads up to {FORMAT_VERSION}; "
                "upgrade selfspec"
            )
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown keys {unknown} in the head's config; known: {sorted(known)}")
        check_types(cls, values)
        return cls(**values)


@dataclass(kw_only=True)
class HeadConfig(DraftConfig):
    """Fields of `config.json` that every head has.

    Args:
        hidden_size: D of the base model; 0 takes it from the target.
        vocab_size: V of the base model; 0 takes it from the target.
        draft_vocab_size: Q; 0 means the whole vocabulary.
        own_output: train an output head of its own instead of borrowing the target's rows.
    """

    hidden_size: int = 0
    vocab_size: int = 0
    draft_vocab_size: int = 0
    own_output: bool = False


@dataclass(frozen=True, eq=False)
class HeadLoss:
    """Training loss of one batch and how often the draft was right.

    Args:
        loss: scalar float32, the sum over places divided by `items` unless the caller gave another denominator.
        correct: `[K]` float32, per depth the number of places where the draft's first choice is the target's.
        seen: `[K]` float32, per depth the number of supervised places.
    """

    loss: Tensor
    correct: Tensor
    seen: Tensor


class DraftHead(nn.Module, ABC):
    """A draft with weights, trained on the features of a frozen target.

    Subclasses set `config_class`, build their own layers in `__init__` after `super().__init__`, and implement the
    Draft interface and `loss`. Borrowed parts hang on `self.target` and `self.output` and are never saved.
    """

    kind: ClassVar[str]
    config_class: ClassVar[type[HeadConfig]]
    changes_target: ClassVar[bool] = False
    """Whether the text is that of another model than the target (see `change_target`)."""

    def __init__(self, config: HeadConfig, target: Target) -> None:
        super().__init__()
        config.kind = self.kind
        config.hidden_size = config.hidden_size or target.hidden_size
        config.vocab_size = config.vocab_size or target.vocab_size
        config.draft_vocab_size = config.draft_vocab_size or target.vocab_size
        if (config.hidden_size, config.vocab_size) != (target.hidden_size, target.vocab_size):
            raise ConfigError(
                f"the head is made for hidden size {config.hidden_size} and vocabulary {config.vocab_size}, the target "
                f"has {target.hidden_size} and {target.vocab_size}; use the base model {config.base_model!r}"
            )
        self.config = config
        self.target = target
        self.light = False
        self.output = DraftOutput(target, config.draft_vocab_size, config.own_output)

    def lighten(self) -> None:
        """Draft in 8 bits a weight from now on, on CPUs (see `selfspec.light`); what is trained and saved stays."""
        self.light = True
        lighten_layers(self, self.target.model)
        self.output.lighten()

    @classmethod
    def from_target(cls, config: HeadConfig, target: Target, generator: torch.Generator | None = None) -> DraftHead:
        """A new head with fresh weights (float32, on the target's device).

        Weights are drawn on the CPU, where `generator` lives, so a seed gives the same ones on every device.
        """
        head = cls(config, target).to(torch.float32)
        head.reset_parameters(generator)
        return head.to(target.device)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        target: Target | PreTrainedModel,
        *,
        revision: str | None = None,
        token: str | None = None,
        dtype: torch.dtype | None = None,
        check_base: bool = True,
    ) -> Self:
        """Trained heads from a folder or the Hub; arguments and errors are those of `selfspec.checkpoint.load_head`.

        Args:
            name_or_path: folder or repository id.
            target: the base model they were made for.
            revision: commit, branch or tag.
            token: Hub token.
            dtype: of the weights; the target's by default.
            check_base: compare fingerprints of base models.

        Raises:
            CheckpointError: see `load_head`; also heads of another method than this class.
        """
        from selfspec.checkpoint import load_head

        door = target if isinstance(target, Target) else Target(target)
        head = load_head(name_or_path, door, revision=revision, token=token, dtype=dtype, check_base=check_base)
        if not isinstance(head, cls):
            raise CheckpointError(f"{name_or_path} holds {head.kind!r} heads, not those of {cls.__name__}")
        return head

    def save_pretrained(self, folder: str | Path, dtype: torch.dtype | None = None) -> Path:
        """Write the owned weights and the config; see `selfspec.checkpoint.save_head`."""
        from selfspec.checkpoint import save_head

        return save_head(self, folder, dtype)

    def push_to_hub(self, repo: str, **options: Any) -> str | None:
        """Publish these heads, without figures: those come with the folder that `selfspec push` takes.

        Args:
            repo: `owner/name`.
            **options: `private` (the default), `revision`, `token`, `message`, `facts`: see `selfspec.hub.push`.

        Returns:
            The address of the commit.
        """
        from selfspec.hub import push

        with tempfile.TemporaryDirectory(prefix="selfspec-heads-") as folder:
            self.save_pretrained(folder)
            return push(folder, repo, **options)

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """Which of the target's features this head reads."""

    @abstractmethod
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Set the owned weights to their starting values."""

    @abstractmethod
    def begin(self, verified: Verified) -> DraftState:
        """See `Draft.begin`."""

    @abstractmethod
    def propose(self, state: Any, budget: Budget, sampling: Sampling, generator: torch.Generator | None) -> DraftTree:
        """See `Draft.propose`."""

    @abstractmethod
    def observe(self, state: Any, verified: Verified) -> DraftState:
        """See `Draft.observe`."""

    @abstractmethod
    def loss(self, verified: Verified, mask: Tensor, items: Tensor | None = None) -> HeadLoss:
        """The training loss on whole sequences.

        Args:
            verified: as `begin` gets it, so training and decoding read features alike.
            mask: `[B, T]` bool; true where `next_tokens` is text to learn from.
            items: denominator of the loss over all processes; None means this batch's own count.
        """

    def owned_state(self) -> dict[str, Tensor]:
        """The tensors that are saved: owned parameters and persistent buffers, contiguous copies."""
        return {name: value.detach().cpu().contiguous().clone() for name, value in self.state_dict().items()}

    def peft_config(self) -> dict[str, Any] | None:
        """What PEFT's `adapter_config.json` holds, when the head has a PEFT adapter (the tensors under `peft.`).

        Raises:
            ConfigError: PEFT is not installed.
        """
        return None

    def change_target(self) -> Callable[[], None]:
        """Change the target as this head wants it, where `changes_target`; returns what undoes it."""
        raise ConfigError(f"{self.kind!r} heads do not change the target")

    def at(self, share: float) -> None:
        """Called before a training step, with the share of the training that has passed (0..1)."""

    def learning_rates(self) -> dict[str, float]:
        """By the beginning of parameters' names, the share of the learning rate that they are trained with."""
        return {}

    def after_load(self) -> None:
        """Take borrowed parts again, now that the draft vocabulary is the saved one."""
        self.output.refresh(rows=False)
