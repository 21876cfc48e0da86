"""Self-speculative decoding for Hugging Face models: cheap drafts, tree verification, unchanged output."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from selfspec._version import __version__

if TYPE_CHECKING:
    from selfspec.draft import Draft
    from selfspec.inference.loading import load
    from selfspec.inference.patch import patch, unpatch
    from selfspec.tree import DraftTree

_LAZY = {
    "Draft": "selfspec.draft",
    "DraftTree": "selfspec.tree",
    "load": "selfspec.inference.loading",
    "patch": "selfspec.inference.patch",
    "unpatch": "selfspec.inference.patch",
}

__all__ = ["Draft", "DraftTree", "__version__", "load", "patch", "unpatch"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'selfspec' has no attribute {name!r}")
