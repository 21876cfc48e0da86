"""What launchers were asked for, as far as they say so."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import yaml


def number(name: str) -> int | None:
    """An environment variable as a number; None if it is not set or is none."""
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else None


def configured_processes() -> int:
    """How many processes the `accelerate launch` above this process was to start; 1 if there is none.

    Its launcher for one process tells its child nothing of it, so its own command line and configuration are read.
    """
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:  # every `accelerate launch` sets it
        return 1
    try:
        words = psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):
        return 1
    if not any("accelerate" in word for word in words[:3]) or "launch" not in words:
        return 1
    given = _option(words, "--num_processes", "--num-processes")
    if given is not None:
        return int(given)
    file = _option(words, "--config_file", "--config-file")
    return _in_file(Path(file) if file is not None else _default_file())


def _option(words: list[str], *names: str) -> str | None:
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else words[place + 1]
    return None


def _default_file() -> Path:
    from accelerate.commands.config.config_args import default_config_file

    return Path(default_config_file)


def _in_file(path: Path) -> int:
    if not path.is_file():
        return 1
    found = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("num_processes")
    return int(found) if found else 1
