"""Counts what would make the host wait for an accelerator, on the CPU.

On an accelerator every value that Python reads (`.item()`, `.tolist()`, `bool(tensor)`, `int(tensor)`, a copy to the
host) and every operation whose result's shape depends on values (`nonzero`, boolean indexing, `unique`, ...) waits for
all work under way. Here the same calls are counted as they pass through torch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}
_WAITS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_dim",
    "_unique2",
    "unique_consecutive",
}


class Syncs(TorchFunctionMode):
    """`found` lists where in the code each wait was asked for, newest last."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._below = _Dispatched(self)

    def note(self) -> None:
        """A wait."""
        frames = [
            f for f in traceback.extract_stack() if "site-packages" not in f.filename and "syncs.py" not in f.name
        ]
        ours = [f for f in frames if not f.filename.endswith("syncs.py")]
        self.found.append(f"{ours[-1].filename.rpartition('/')[2]}:{ours[-1].lineno} {ours[-1].line}")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            self.note()
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Syncs:
        self._below.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._below.__exit__(*error)


class _Dispatched(TorchDispatchMode):
    def __init__(self, owner: Syncs) -> None:
        super().__init__()
        self.owner = owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in _WAITS or masked:
            self.owner.note()
        return func(*args, **(kwargs or {}))


def count(action: Callable[[], Any]) -> list[str]:
    """Where an action would wait for the device."""
    with Syncs() as syncs:
        action()
    return syncs.found
