"""What a card is made from: the JSON files beside the weights, and facts that no measurement can tell."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from selfspec.checkpoint import json_object, read_config
from selfspec.errors import CheckpointError, ConfigError
from selfspec.provenance import PROVENANCE

CARD, FACTS, BENCH, CERTIFICATE, TRAINING = "README.md", "card.json", "bench.json", "certificate.json", "training.json"
BENCHES = re.compile(r"bench(?:-([\w-]+))?\.json")


@dataclass(kw_only=True)
class Facts:
    """What no measurement can tell (`card.json`).

    Args:
        repo: id of the repository.
        license: of the heads, as the Hub spells it (`apache-2.0`).
        datasets: Hub ids of training data.
        data_license: of the training text, in words.
        language: codes as `en`.
        run: name of these heads' run in the bench files, where those hold several drafts.
    """

    repo: str = ""
    license: str = ""
    datasets: list[str] = field(default_factory=list)
    data_license: str = ""
    language: list[str] = field(default_factory=list)
    run: str = ""


@dataclass(frozen=True)
class Sources:
    """The files a card is made from; None where one is not there."""

    folder: Path
    config: dict[str, Any]
    facts: Facts
    benches: dict[str, dict[str, Any]]
    certificate: dict[str, Any] | None
    training: dict[str, Any] | None
    provenance: dict[str, Any] | None

    @property
    def name(self) -> str:
        """What the heads are called in commands."""
        return self.facts.repo or self.folder.resolve().name

    def own_run(self, bench: dict[str, Any]) -> dict[str, Any]:
        """The run of these heads in a bench file."""
        drafts = {run["name"]: run for run in bench["runs"] if run.get("accepted_by_depth")}
        for wanted in (self.facts.run, self.name.split("/")[-1]):
            if wanted in drafts:
                return dict(drafts[wanted])
        if len(drafts) != 1 or self.facts.run:
            raise ConfigError(
                f"the bench results of {self.folder} hold the drafts {sorted(drafts)}; say which run is that of these "
                "heads with --run NAME"
            )
        return dict(next(iter(drafts.values())))


def read_sources(folder: str | Path) -> Sources:
    """Read everything a card is made from.

    Raises:
        CheckpointError: no heads there, or a file that is not what its name says.
    """
    folder = Path(folder)
    found = {name: read_json(folder / name) for name in (CERTIFICATE, TRAINING, PROVENANCE)}
    benches = {}
    for path in sorted(folder.glob("bench*.json")):
        if match := BENCHES.fullmatch(path.name):
            benches[match[1] or "default"] = _bench(path)
    return Sources(
        folder, read_config(folder), read_facts(folder), benches, found[CERTIFICATE], found[TRAINING], found[PROVENANCE]
    )


def read_facts(folder: Path) -> Facts:
    """The facts of a folder, empty where there is no `card.json`."""
    values = read_json(folder / FACTS) or {}
    known = {f.name for f in fields(Facts)}
    if unknown := sorted(set(values) - known):
        raise CheckpointError(f"{folder / FACTS} has unknown keys {unknown}; known: {sorted(known)}")
    return Facts(**values)


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, None where there is no file. Raises CheckpointError for anything else."""
    return json_object(path, "make it again") if path.is_file() else None


def _bench(path: Path) -> dict[str, Any]:
    values = read_json(path) or {}
    needed = {"runs", "prompts", "max_new_tokens", "temperature", "seed", "dtype", "device", "threads"}
    if missing := sorted(needed - values.keys()):
        raise CheckpointError(f"{path} lacks {missing}; it is not what `selfspec bench --json` writes")
    return values
