"""YAML recipes and prompts that ship with the package."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).resolve().parent


def names() -> list[str]:
    """Names of all recipes, sorted."""
    return sorted(p.stem for p in _FOLDER.glob("*.yaml"))


def path(name: str) -> Path:
    """The file of a recipe by name; see `names`."""
    return _FOLDER / f"{name}.yaml"


def prompts() -> Path:
    """The prompts of `bench`: JSONL, ten of each task, with a `category`."""
    return _FOLDER / "prompts.jsonl"
