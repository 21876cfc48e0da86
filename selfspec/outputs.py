"""Where results go: looked at before long work starts, and written whole or not at all."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selfspec.errors import ConfigError


def check_folder(path: str | Path) -> Path:
    """Create a folder if needed and see that files can be written into it.

    Raises:
        ConfigError: they cannot.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(f"nothing can be written to {folder} ({reason}); choose another output") from error


def check_file(path: str | Path) -> Path:
    """See that a file of this name can be written; its folder is created if needed.

    Raises:
        ConfigError: it cannot.
    """
    file = Path(path)
    if file.is_dir():
        raise ConfigError(f"{file} is a folder; give the name of a file to write")
    check_folder(file.parent)
    return file


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` to write to; renamed to `path` when the block succeeds, removed otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{uuid.uuid4().hex}-{path.name}")
    try:
        yield work
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)
