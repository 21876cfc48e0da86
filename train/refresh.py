"""Going on with trained heads: on text that was recorded from real use, or on any other."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import torch

from selfspec.checkpoint import load_head
from selfspec.errors import ConfigError
from selfspec.head import DraftHead
from selfspec.target import Target
from selfspec.train.recipe import Recipe, Source
from selfspec.train.traffic import TRAFFIC

_ALL = 1 << 40


def refreshed(recipe: Recipe, folder: str | Path) -> Recipe:
    """A recipe that trains its own heads further on recorded text and leaves the old ones where they are.

    Args:
        recipe: whose run is finished, or one with `init`.
        folder: what `patch(model, draft, record=FOLDER)` wrote.

    Returns:
        The recipe with `init` (its `output`, unless it has one), that text as its data, and `<output>-refreshed` as
        output. Rows longer than its first source's `length` are cut.
    """
    changed = copy.deepcopy(recipe)
    first = recipe.data[0]
    text = Source(mode="label", source=f"{TRAFFIC}{folder}", length=first.length, max_tokens=_ALL)
    changed.data = [replace(text, seed=first.seed, split_seed=first.split_seed, pack=first.pack)]
    if not recipe.init:
        changed.init, changed.output = recipe.output, f"{recipe.output.rstrip('/')}-refreshed"
    changed.check()
    return changed


def trained_head(recipe: Recipe, target: Target) -> DraftHead:
    """The heads that a recipe goes on with, in float32.

    Raises:
        CheckpointError: there are none, or they are of another base model.
        ConfigError: they are of another kind.
    """
    head = load_head(recipe.init, target, dtype=torch.float32)
    if head.kind != recipe.draft.get("kind"):
        raise ConfigError(f"{recipe.init} holds {head.kind!r} heads, the recipe trains {recipe.draft.get('kind')!r}")
    head.config.draft_vocab_size = head.output.vocab.size
    return head.train()
