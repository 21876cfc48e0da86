"""From what a user names as a draft to the draft itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from selfspec import registry
from selfspec.checkpoint import load_draft
from selfspec.draft import Draft
from selfspec.errors import ConfigError
from selfspec.head import DraftHead
from selfspec.light import can_be_light, gains
from selfspec.target import Target
from selfspec.values import check_types

DraftLike = str | Path | Draft | Mapping[str, Any] | Sequence[Any]
"""What `resolve_draft` understands."""


def resolve_draft(
    draft: DraftLike,
    target: Target,
    revision: str | None = None,
    token: str | None = None,
    check_base: bool = True,
    light: bool = True,
) -> Draft:
    """A draft for this target.

    Args:
        draft: a folder or Hub id of trained heads; the name of a method that needs no training, with what it works on
            after a colon where it wants something (`draft-model:FOLDER`); its configuration as a mapping with a `kind`;
            a Draft object; or a list of any of these, which draft together.
        target: the model to draft for.
        revision: Hub revision of the heads.
        token: Hub token.
        check_base: compare the heads' fingerprint of their base model with the target's.
        light: let heads that are loaded here draft in 8 bits a weight where that is faster, see `selfspec.light`.

    Raises:
        CheckpointError: the heads are damaged or of another base model.
        ConfigError: no such method or setting, one that needs training, or a draft made for another model.
    """
    if isinstance(draft, type):
        raise ConfigError(f"{draft.__name__} is a class, wanted a draft made from it")
    if isinstance(draft, (str, Path)):
        made = _by_name(str(draft), target)
        if made is not None:
            return made
        return _loaded(draft, target, light, revision=revision, token=token, check_base=check_base)
    if isinstance(draft, Mapping):
        return _by_config(draft, target)
    if isinstance(draft, (list, tuple)):
        parts = [resolve_draft(part, target, revision, token, check_base, light) for part in draft]
        joined: Draft = registry.joining().of(parts)
        return _fitting(joined, target)
    if not isinstance(draft, Draft):
        missing = [name for name in ("kind", "needs", "begin", "propose", "observe") if not hasattr(draft, name)]
        raise ConfigError(f"{type(draft).__name__} is not a Draft: it lacks {', '.join(missing)}")
    return _fitting(draft, target)


def _loaded(folder: str | Path, target: Target, light: bool, **options: Any) -> Draft:
    """Heads from a folder or the Hub, light where that is wanted and faster."""
    longer = light and gains(target.device, target.dtype)
    draft = load_draft(folder, target, dtype=torch.float32 if longer else None, **options)
    if light and isinstance(draft, DraftHead):
        if longer and (draft.changes_target or not can_be_light(draft)):
            draft.to(target.dtype)
        draft.lighten()
    return draft


def _fitting(draft: Draft, target: Target) -> Draft:
    """The draft, if it was made for this model; drafts that can tell have a `check_target`."""
    if isinstance(draft, DraftHead) and draft.target.model is not target.model:
        raise ConfigError(
            f"this {draft.kind} head was built on another model object; build it on this one, or save it and give its "
            "folder"
        )
    check = getattr(draft, "check_target", None)
    if check is not None:
        check(target)
    return draft


def _by_name(name: str, target: Target) -> Draft | None:
    """The draft of a method's name, None if it is no such name."""
    kind, colon, argument = name.partition(":")
    if kind not in registry.kinds() or Path(name).is_dir():
        return None
    cls = _untrained(kind)
    if not colon:
        return _made(cls, cls.config_class(), target)
    if not hasattr(cls.config_class, "from_argument"):
        raise ConfigError(f"{kind!r} takes nothing after a colon, got {name!r}; write {kind!r}")
    return _made(cls, cls.config_class.from_argument(argument), target)


def _by_config(values: Mapping[str, Any], target: Target) -> Draft:
    settings = dict(values)
    kind = settings.pop("kind", None)
    if not isinstance(kind, str):
        raise ConfigError(f"a draft's configuration wants a `kind`, got {sorted(values)}; known: {registry.kinds()}")
    cls = _untrained(kind)
    known = {f.name for f in fields(cls.config_class)}
    if unknown := sorted(set(settings) - known):
        raise ConfigError(f"{kind!r} has no settings {unknown}; known: {sorted(known)}")
    check_types(cls.config_class, settings)
    return _made(cls, cls.config_class(**settings), target)


def _untrained(kind: str) -> Any:
    cls = registry.method(kind)
    if issubclass(cls, DraftHead):
        raise ConfigError(f"{kind!r} heads must be trained first: run `selfspec train`, then give the folder it wrote")
    return cls


def _made(cls: Any, config: Any, target: Target) -> Draft:
    found: Draft = cls.from_target(config, target)
    return found
