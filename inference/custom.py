"""What the `custom_generate` folder of a repository of heads calls: `generate(custom_generate="owner/name")`.

The model's own `generate` stays what it is. Heads are loaded once and kept with the model until `selfspec.unpatch`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from selfspec.inference.patch import KEPT, prepared

_COMMIT = re.compile(r"[0-9a-f]{40}")


def generate_with(
    model: PreTrainedModel,
    repository: str,
    file: str,
    *,
    heads: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    nodes: int | None = None,
    **arguments: Any,
) -> Any:
    """`model.generate(**arguments)`, drafted by heads.

    Args:
        model: the base model of the heads.
        repository: Hub id of the repository that the calling code comes from.
        file: of the calling code; heads come from the commit that it was loaded from, if its path names one.
        heads: folder or Hub id of other heads to use, for instance the folder that the code was loaded from.
        revision: of the heads, where the path of `file` names none.
        token: Hub token.
        nodes: see `patch`.
        **arguments: of `generate`.

    Raises:
        CheckpointError: the heads are damaged or of another base model.
        UnsupportedModel: the model cannot be served exactly.
    """
    commit = Path(file).resolve().parents[1].name
    if heads is None and _COMMIT.fullmatch(commit):
        revision = commit
    kept = model.__dict__.setdefault(KEPT, {})
    key = (heads or repository, revision, nodes)
    if key not in kept:
        kept[key] = prepared(model, key[0], nodes=nodes, revision=revision, token=token)
    return kept[key](**arguments)
