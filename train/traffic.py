"""Text of real use, as `patch(model, draft, record=FOLDER)` wrote it down, for training on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from selfspec.errors import DataError
from selfspec.train.corpus import in_split

TRAFFIC = "traffic:"


def traffic_rows(folder: str | Path, split: str = "all", split_seed: int = 0) -> Iterator[tuple[list[int], int]]:
    """Token ids of each recorded text and how many of them are its prompt; texts that are there twice come once.

    A last line that was cut off when its process died is left out. Splits go by the prompt.

    Raises:
        DataError: no records, or a line that is none.
    """
    files = sorted(Path(folder).glob("traffic-*.jsonl"))
    if not files:
        raise DataError(
            f"{folder} holds no traffic-*.jsonl; record some with patch(model, draft, record={str(folder)!r})"
        )
    seen: set[bytes] = set()
    for path in files:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    continue
                ids, prompt = _record(line, f"{path}:{number}")
                key = hashlib.sha256(line).digest()
                if key not in seen and in_split(
                    hashlib.sha256(str(ids[:prompt]).encode()).hexdigest(), split, split_seed
                ):
                    yield ids, prompt
                seen.add(key)


def _record(line: bytes, where: str) -> tuple[list[int], int]:
    try:
        values: Any = json.loads(line)
        ids, prompt = values["ids"], values["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where}: not a record of traffic ({error})") from error
    plain = isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids)
    if not plain or type(prompt) is not int or not 0 < prompt <= len(ids):
        raise DataError(f"{where}: wanted `ids` as a list of token ids and `prompt` within its length")
    return ids, prompt
