"""`selfspec demo`."""

from __future__ import annotations


def demo() -> None:
    """On a real small model: train heads, check that the text stays the same, compare speeds."""
