"""Drafts that change the target: only when told to, and undone at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selfspec.errors import ConfigError


def changes_target(draft: Any) -> bool:
    """Whether the text will be that of another model than the target."""
    return bool(getattr(draft, "changes_target", False))


def refuse_change(draft: Any, allowed: bool) -> None:
    """Raise ConfigError for a draft that changes the target where that was not allowed, or is part of a joint one."""
    if any(changes_target(part) for part in getattr(draft, "parts", ())):
        raise ConfigError("a draft that changes the target cannot be joined with others; use it alone")
    if changes_target(draft) and not allowed:
        raise ConfigError(
            f"{draft.kind!r} trains the target along with its heads: with it the model writes other text than before. "
            "Say allow_target_change=True (--allow-target-change) if that is wanted, or use another method"
        )


def change(draft: Any) -> Callable[[], None] | None:
    """Change the target as the draft wants it; returns what undoes it, None where nothing was changed."""
    if not changes_target(draft):
        return None
    undo: Callable[[], None] = draft.change_target()
    return undo


@contextmanager
def changed(draft: Any, allowed: bool) -> Iterator[None]:
    """The target changed, where it is to be, for as long as a block runs. Errors are those of `refuse_change`."""
    refuse_change(draft, allowed)
    undo = change(draft)
    try:
        yield
    finally:
        if undo is not None:
            undo()
