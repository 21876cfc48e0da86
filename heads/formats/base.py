"""What a checkpoint format is, and the list of known ones. Nothing outside this package names another project.

A format maps a foreign folder to the config and tensors of a head of ours, and back. It does no reading of files and no
writing: `Source` and `convert` do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from selfspec.errors import CheckpointError
from selfspec.head import DraftHead, HeadConfig
from selfspec.heads.formats.source import Note, Source
from selfspec.registry import method
from selfspec.target import Target

SETTINGS = "selfspec"
"""Key of foreign configs under which fields live that the format has no name for; other readers pass over it."""

_FORMATS: dict[str, Format] = {}


@dataclass(frozen=True)
class Converted:
    """A head as our own files hold it.

    Args:
        config: of the head's method; fields the checkpoint does not fix are at their defaults.
        tensors: by the names of the head's state dict.
    """

    config: HeadConfig
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Written:
    """A head as a foreign folder holds it.

    Args:
        config: `config.json`.
        tensors: by the format's names.
        file: name of the file of weights; `.safetensors`, or a pickled state dict.
        beside: further files, each a pickled list of numbers, by name.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    file: str = "model.safetensors"
    beside: dict[str, list[int]] = field(default_factory=dict)


class Format(ABC):
    """One layout of one project.

    Class attributes:
        name: what users type.
        kinds: draft methods it can hold.
        served_by: who loads what is written; empty if nothing is.
        reads: whether folders of it can be imported.
        writes: whether heads can be exported to it.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]
    served_by: ClassVar[str] = ""
    reads: ClassVar[bool] = True
    writes: ClassVar[bool] = True

    def detects(self, source: Source) -> bool:
        """Whether a folder is of this format, by its tensors' names first and its config second."""
        return False

    def read(self, source: Source, target: Target | None) -> Converted:
        """Take everything out of a folder; what is left out is noted on the source.

        Raises:
            CheckpointError: it cannot be a head of ours.
        """
        raise CheckpointError(f"{self.name} is written only")

    def obstacles(self, config: HeadConfig) -> list[Note]:
        """What of a head the format has no place for. Notes that are `fatal` forbid the export."""
        return []

    @abstractmethod
    def write(self, head: DraftHead) -> Written:
        """The folder's content for a head that `obstacles` found nothing fatal in."""


def add(*found: Format) -> None:
    """Make formats known. No folder may be detected by two of them."""
    for one in found:
        _FORMATS[one.name] = one


def formats() -> dict[str, Format]:
    """All known formats by name."""
    return dict(_FORMATS)


def format_named(name: str) -> Format:
    """A format.

    Raises:
        CheckpointError: no such format; the message lists the known ones.
    """
    if name not in _FORMATS:
        raise CheckpointError(f"no format is called {name!r}; known formats: {', '.join(sorted(_FORMATS))}")
    return _FORMATS[name]


def detect(source: Source) -> Format:
    """The format of a folder.

    Raises:
        CheckpointError: none of the known ones.
    """
    for one in _FORMATS.values():
        if one.reads and one.detects(source):
            return one
    shown = ", ".join(sorted(source.entries)[:6])
    known = ", ".join(name for name, one in _FORMATS.items() if one.reads)
    raise CheckpointError(
        f"{source.folder} is of no known format (its tensors begin with {shown}); known: {known}; name one with "
        "--format"
    )


# Helpers that formats share


def build_config(source: Source, kind: str, fixed: dict[str, Any]) -> HeadConfig:
    """A config from the fields a checkpoint fixes, and from settings of ours that were stored beside them."""
    cls = method(kind).config_class
    known = {f.name for f in fields(cls)}
    stored = source.config.take(SETTINGS, dict, {})
    rest = {key: value for key, value in stored.items() if key in known - set(fixed)}
    config: HeadConfig = cls.from_dict({**rest, **fixed, "kind": kind})
    return config


def take_ids(source: Source, draft_size: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """The draft vocabulary as offsets `d2t` `[Q]` (and the mask `t2d` `[V]`) hold it.

    Returns:
        Target ids `[Q]`, ascending, and the places `[Q]` of their columns in the checkpoint.
    """
    if "d2t" not in source:
        if draft_size != vocab_size:
            raise CheckpointError(
                f"{source.folder} has {draft_size} draft tokens of {vocab_size} and no map `d2t` from one to the other"
            )
        source.drop("t2d", "all tokens are draft tokens")
        return torch.arange(vocab_size), torch.arange(vocab_size)
    offsets = source.take("d2t", draft_size)
    if offsets.is_floating_point():
        raise CheckpointError(f"{source.folder}: d2t was cast to {offsets.dtype}, which no longer holds exact offsets")
    ids = offsets.long() + torch.arange(draft_size)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or ids.unique().numel() != draft_size:
        raise CheckpointError(
            f"{source.folder}: d2t does not name {draft_size} distinct ids below {vocab_size}; it holds offsets, so "
            "column c is token c + d2t[c]"
        )
    if "t2d" in source:
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[ids] = True
        if not torch.equal(source.take("t2d", vocab_size).bool(), mask):
            raise CheckpointError(f"{source.folder}: t2d and d2t choose different tokens")
    ids, order = ids.sort()
    return ids, order


def id_maps(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`d2t` (int64 offsets) and `t2d` (bool) for ascending target ids `[Q]`; nothing for the whole vocabulary."""
    if ids.numel() == vocab_size:
        return {}
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(ids.numel()), "t2d": mask}


def is_copy(tensor: Tensor, original: Tensor) -> bool:
    """Whether `[R, D]` holds the rows of `original`, in whatever dtypes, and perhaps padding after them."""
    rows = original.shape[0]
    if tensor.shape[0] < rows or tensor.shape[1:] != original.shape[1:]:
        return False
    found, wanted = tensor[:rows].float(), original.detach().cpu().float()
    return bool(torch.isclose(found, wanted, rtol=2**-7, atol=2**-14).float().mean() > 0.999)


def drop_copy(source: Source, name: str, original: Tensor | None, what: str) -> None:
    """Leave out a copy of a tensor of the target; a trained one differs, which is said as a loss."""
    if name not in source:
        return
    if original is None:
        source.drop(name, f"taken to be a copy of {what}; give the target to have it compared")
    elif is_copy(source.take(name, *source.shape(name)), original):
        source.note(name, f"a copy of {what}, which is used instead")
    else:
        source.note(name, f"differs from {what}, which is used instead", "lossy")


def embedding_scale(target: Target | None) -> float:
    """What the model multiplies its embeddings with; engines hand heads the bare rows."""
    weight = None if target is None else target.input_weight()
    if target is None or weight is None or weight.numel() == 0 or weight.is_meta:
        return 1.0
    row = int(weight.float().abs().amax(1).argmax())
    bare = weight[row].detach().float()
    seen = target.embed(torch.tensor([row], device=target.device))[0].detach().float()
    if seen.shape != bare.shape:
        raise CheckpointError(f"{type(target.model).__name__} projects its embeddings; heads of engines cannot follow")
    place = int(bare.abs().argmax())
    return round(float(seen[place] / bare[place]), 6)


def settings_of(config: HeadConfig) -> dict[str, Any]:
    """The fields of ours to store beside the format's own."""
    return {SETTINGS: config.to_dict()}


def wanted_as(config: HeadConfig, **wanted: Any) -> list[Note]:
    """A fatal note for each field of a head that is not what the format has built in."""
    found = {name: getattr(config, name) for name in wanted}
    return [
        Note(f"{name}={value}", f"the format has {wanted[name]} built in", "fatal")
        for name, value in found.items()
        if value != wanted[name]
    ]


def rows_of(head: DraftHead) -> Tensor:
    """The output matrix `[Q, D]` (or `[M, Q, D]`) of a head, owned or borrowed.

    Raises:
        CheckpointError: the target's output head has a bias, for which no format has a place.
    """
    if head.output.teacher_bias is not None:
        raise CheckpointError(
            f"{type(head.target.model).__name__} has a bias in its output head; no format of other engines holds one"
        )
    return head.output.rows.detach()


def reduced(config: HeadConfig) -> bool:
    """Whether the draft vocabulary is a part of the target's."""
    return 0 < config.draft_vocab_size < config.vocab_size
