"""YAML recipes and prompts that ship with the package."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selfspec.recipes.forecast import Work

_FOLDER = Path(__file__).resolve().parent


def names() -> list[str]:
    """Names of all recipes, sorted."""
    return sorted(p.stem for p in _FOLDER.glob("*.yaml"))


def path(name: str) -> Path:
    """The file of a recipe by name; see `names`."""
    return _FOLDER / f"{name}.yaml"


def configuration(name: str) -> Path:
    """A configuration for `accelerate launch --config_file`: `ddp`, `fsdp`, `zero2` or `zero3`."""
    return _FOLDER / "accelerate" / f"{name}.yaml"


def prompts() -> Path:
    """The prompts of `bench`: JSONL, ten of each task, with a `category`."""
    return _FOLDER / "prompts.jsonl"


def work_of(name: str) -> tuple[int, Work]:
    """The draft vocabulary of a recipe and the work it asks for, as the forecast counts it."""
    import yaml

    from selfspec.recipes.forecast import Work

    recipe = yaml.safe_load(path(name).read_text(encoding="utf-8"))
    shares = [(source["max_tokens"], source) for source in recipe["data"]]
    written = sum(
        tokens * source["max_new_tokens"] / (source["prompt_tokens"] + source["max_new_tokens"])
        for tokens, source in shares
        if source["mode"] == "write"
    )
    work = Work(
        tokens=sum(tokens for tokens, _ in shares),
        written=written,
        epochs=recipe["optimisation"]["epochs"],
        steps=recipe["draft"]["steps"],
        rows=min(source["batch_rows"] for _, source in shares),
    )
    return recipe["vocabulary"]["size"], work
