"""Rotary positions of heads: plain, or scaled as transformers' `rope_parameters` describe it.

Letters: B rows, T places, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from selfspec import hf
from selfspec.errors import ConfigError
from selfspec.heads.layers import rotary

_NEEDED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "original_max_position_embeddings", "short_factor", "long_factor"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("attention_factor",),
}
_LISTS = ("short_factor", "long_factor")


def check_scaling(scaling: dict[str, Any] | None, size: int) -> None:
    """Raise ConfigError, naming the key, unless rotary positions of a head size `d` can be scaled so."""
    if scaling is None:
        return
    if not isinstance(scaling, dict) or scaling.get("rope_type") not in _NEEDED:
        raise ConfigError(
            f"rope_scaling is {scaling!r}, wanted nothing or a dict whose rope_type is one of {', '.join(_NEEDED)}"
        )
    kind = scaling["rope_type"]
    needed, optional = _NEEDED[kind], _OPTIONAL.get(kind, ())
    if missing := [key for key in needed if scaling.get(key) is None]:
        raise ConfigError(f"rope_scaling of type {kind} lacks {', '.join(missing)}")
    if unknown := sorted(set(scaling) - {"rope_type", *needed, *optional}):
        raise ConfigError(
            f"rope_scaling of type {kind} has {', '.join(unknown)}; known: {', '.join(needed + optional)} "
            "(the base is the field rope_theta)"
        )
    for key, value in scaling.items():
        if key not in ("rope_type", "truncate"):
            _check_value(kind, key, value, size)


def _check_value(kind: str, key: str, value: Any, size: int) -> None:
    listed = isinstance(value, list)
    numbers = value if listed else [value]
    real = all(isinstance(number, int | float) and not isinstance(number, bool) and number > 0 for number in numbers)
    if listed != (key in _LISTS) or not real or (listed and len(numbers) != size // 2):
        wanted = f"{size // 2} positive numbers" if key in _LISTS else "a positive number"
        raise ConfigError(f"rope_scaling of type {kind}: {key} is {value!r}, wanted {wanted}")


class Rotary:
    """Cosine and sine of places, from transformers' own frequencies where they are scaled.

    `longrope` changes its frequencies at `original_max_position_embeddings`. transformers takes those of the longest
    place of a pass for all of it; here each place has those of its own side, so that what a head remembers of a place
    depends neither on what came later nor on the rest of the batch. Texts that stay on the near side see no difference.

    Args:
        size: d.
        theta: base of the frequencies.
        scaling: as transformers' `rope_parameters`, without the base; None for plain rotary positions.

    Raises:
        ConfigError: `scaling` is of another kind, or incomplete; the message names the key.
    """

    def __init__(self, size: int, theta: float, scaling: dict[str, Any] | None) -> None:
        check_scaling(scaling, size)
        self.size = size
        self.theta = theta
        self.scaling = scaling
        self._tables: dict[torch.device, tuple[Tensor, float]] = {}

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions `[B or 1, T]` int64 to cosine and sine, float32, `[B or 1, 1, T, d]` each."""
        if self.scaling is None:
            return rotary(positions, self.size, self.theta)
        table, size = self._table(positions.device)
        frequencies = table[0]
        if table.shape[0] > 1:
            far = positions >= self.scaling["original_max_position_embeddings"]
            frequencies = torch.where(far.unsqueeze(-1), table[1], table[0])
        angle = (positions.unsqueeze(-1) * frequencies).unsqueeze(1)
        angle = torch.cat([angle, angle], -1)
        return angle.cos() * size, angle.sin() * size

    def _table(self, device: torch.device) -> tuple[Tensor, float]:
        """Frequencies `[1 or 2, d / 2]` (near, far), and what cosine and sine are multiplied with."""
        if device not in self._tables:
            assert self.scaling is not None
            frequencies, size = hf.rope_frequencies(self.size, self.theta, self.scaling)
            self._tables[device] = frequencies.to(device), size
        return self._tables[device]
