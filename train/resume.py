"""What an earlier run left in an output folder: nothing, something to go on with, or a finished head."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from selfspec.checkpoint import WEIGHTS, write_json
from selfspec.errors import ConfigError
from selfspec.train.shards import differences

RUN, RESULT, CHECKPOINTS = "run.json", "training.json", "checkpoints"
# Settings that may change between a run and its continuation.
_FREE = ("output", "restart", "data_folder", "log_every", "save_every", "report_to")


def open_output(folder: Path, settings: Mapping[str, Any], restart: bool) -> bool:
    """Prepare an output folder; true if a finished run with these settings is already there.

    Args:
        folder: exists.
        settings: the resolved recipe and what else identifies the run.
        restart: throw away what is there.

    Raises:
        ConfigError: the folder holds a run with other settings; the message lists the differences.
    """
    mine = _fixed(settings)
    if restart:
        for name in (RUN, RESULT):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    begun = (folder / RESULT).is_file() or newest_checkpoint(folder / CHECKPOINTS) is not None
    if begun and (folder / RUN).is_file():
        found = list(differences(json.loads((folder / RUN).read_text()), mine))
        if found:
            listed = "; ".join(found)
            raise ConfigError(
                f"{folder} holds a run with other settings: {listed}. Set another output, or restart=true"
            )
    else:
        write_json(folder / RUN, mine)
    return (folder / RESULT).is_file()


def holds_other_run(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether a folder holds a run with other values of these settings."""
    if not (folder / RUN).is_file():
        return False
    found = json.loads((folder / RUN).read_text(encoding="utf-8"))
    mine = _fixed(settings)
    return any(found.get(name) != value for name, value in mine.items())


def _fixed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that may not change, as JSON gives them back."""
    fixed: dict[str, Any] = json.loads(json.dumps({k: v for k, v in settings.items() if k not in _FREE}))
    return fixed


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that was written to its end; older broken ones are passed over."""
    numbered = {int(p.name.split("-")[1]): p for p in folder.glob("checkpoint-*") if p.name.split("-")[1].isdigit()}
    for _, path in sorted(numbered.items(), reverse=True):
        try:
            json.loads((path / "trainer_state.json").read_text())  # written last
        except (OSError, ValueError):
            continue
        if (path / WEIGHTS).is_file():
            return path
    return None
