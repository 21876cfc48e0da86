"""Writing down what a patched model read and wrote, for training on it. Off unless asked for; local files only.

Privacy: a record holds the whole prompt and the whole answer as token ids, which anyone with the tokenizer can read.
Ask those who talk to the model, keep the folder as you keep their text, and delete it when it has served.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from selfspec.errors import ConfigError
from selfspec.outputs import check_folder

LARGEST = 1 << 30


class Recorder:
    """Appends token ids to a file of this process, `traffic-<id>.jsonl`: a line `{"ids": [..], "prompt": P}` per text.

    A line is written in one piece to a file that only its owner may read; threads may record at once. At the limit
    recording stops, with one warning.

    Args:
        folder: created if needed.
        most: bytes, over all files of the folder as it is found.

    Raises:
        ConfigError: nothing can be written there.
    """

    def __init__(self, folder: str | Path, most: int = LARGEST) -> None:
        self.folder, self.most = check_folder(folder), most
        self._lock = threading.Lock()
        self._owner = 0
        self._file = -1
        self._size = 0
        self._full = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy writes to a file of its own."""
        return {"folder": self.folder, "most": self.most}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def add(self, sequences: Tensor, prompt: int, real: Tensor | None, written: Sequence[int]) -> None:
        """Write down the rows of a batch.

        Args:
            sequences: `[B, S]`, prompt and answer.
            prompt: columns of the prompt.
            real: `[B, P]`, 0 for padding of the prompt; None without any.
            written: new tokens of each row; what follows them is padding.
        """
        for row, (ids, count) in enumerate(zip(sequences.tolist(), written, strict=True)):
            asked = ids[:prompt]
            if real is not None:
                asked = [token for token, there in zip(asked, real[row].tolist(), strict=True) if there]
            if asked and count:
                self._append({"ids": asked + ids[prompt : prompt + count], "prompt": len(asked)})

    def _append(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            if self._full:
                return
            if self._owner != os.getpid():  # the first record, or the first after a fork
                self._open()
            if self._size + len(line) > self.most:
                self._full = True
                warnings.warn(f"selfspec: {self.folder} holds {self._size} bytes; recording has stopped", stacklevel=2)
                return
            try:
                done = os.write(self._file, line)
            except OSError as error:
                self._full = True
                warnings.warn(f"selfspec: recording to {self.folder} has stopped ({error.strerror})", stacklevel=2)
                return
            self._full = done < len(line)  # a full disk cuts the line; readers pass over it
            self._size += done

    def _open(self) -> None:
        self._size = sum(path.stat().st_size for path in self.folder.glob("traffic-*.jsonl"))
        path = self.folder / f"traffic-{uuid.uuid4().hex[:12]}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._owner = os.getpid()


def recorder(folder: str | Path | Recorder | None) -> Recorder | None:
    """What `patch(record=..)` means.

    Raises:
        ConfigError: neither a folder nor a Recorder.
    """
    if folder is None or isinstance(folder, Recorder):
        return folder
    if not isinstance(folder, (str, Path)):
        raise ConfigError(f"record is {folder!r}, wanted a folder for token ids, or None (the default)")
    return Recorder(folder)
