"""Low rank: the draft pass runs all layers with the big matrices replaced by two thin ones.

A weight `W` `[out, in]` becomes `U_r S_r V_r^T`, the best approximation of rank r (Eckart and Young 1936), computed
once and kept on disk. A product then reads r (in + out) numbers in place of in * out. Only linear layers are replaced;
experts that a model keeps in one stacked tensor, embeddings and the output head stay whole.

Letters: r rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from selfspec import hf
from selfspec.errors import ConfigError, UnsupportedModel
from selfspec.fingerprint import fingerprint, sample
from selfspec.heads.self_draft import SelfDraft, SelfDraftConfig
from selfspec.models import cache_folder
from selfspec.outputs import whole_file
from selfspec.registry import register
from selfspec.switches import Factors, Plan
from selfspec.target import Target

_MANY = 16
_RANKS = (0.2, 0.35, 0.5, 0.75, 1.0)


@dataclass(kw_only=True)
class LowRankConfig(SelfDraftConfig):
    """Configuration of low-rank drafts.

    Args:
        rank: of matrices not named in `ranks`, as a share of the rank at which two factors are as large as the matrix.
        ranks: by kind of matrix (the last part of its module's name, for instance `down_proj`) the same; 1 leaves
            matrices of that kind as they are.
        folder: where factors are kept; None is `$SELFSPEC_CACHE` or `~/.cache/selfspec`.
    """

    rank: float = 0.4
    ranks: dict[str, float] = field(default_factory=dict)
    folder: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = {name: share for name, share in {"rank": self.rank, **self.ranks}.items() if not 0 < share <= 1}
        if wrong:
            raise ConfigError(f"ranks are shares in (0, 1], got {wrong}")


@register("low-rank")
class LowRank(SelfDraft):
    """The target with truncated singular value decompositions of its matrices.

    Raises:
        UnsupportedModel: quantised or offloaded weights, or no linear layers.
        ConfigError: a kind of matrix that the target does not have.
    """

    config_class = LowRankConfig
    config: LowRankConfig

    def __init__(self, config: LowRankConfig, target: Target) -> None:
        super().__init__(config, target)
        weights = matrices(target)
        kinds = {_kind(name) for name in weights}
        if unknown := sorted(set(config.ranks) - kinds):
            raise ConfigError(f"the target has no matrices called {unknown}; it has {sorted(kinds)}")
        shares = {name: config.ranks.get(_kind(name), config.rank) for name in weights}
        ranks = {name: max(1, int(share * _break_even(weights[name]))) for name, share in shares.items() if share < 1}
        folder = cache_folder() if config.folder is None else Path(config.folder)
        self._plan = target.passes.check(Plan(factors=factorised(target, weights, ranks, folder)))
        self._home = target.device, target.dtype

    def plan(self) -> Plan:
        """The factors, which follow a target that has moved or changed its dtype."""
        home = self.target.device, self.target.dtype
        if home != self._home:
            weights = matrices(self.target)
            moved = {k: (down.to(weights[k]), up.to(weights[k])) for k, (down, up) in self._plan.factors.items()}
            self._plan, self._home = Plan(factors=moved), home
        return self._plan

    @classmethod
    def knobs(cls, target: Target) -> dict[str, tuple[Any, ...]]:
        """The rank of each kind of matrix, and the depth."""
        kinds = sorted({_kind(name) for name in matrices(target)})
        return {**super().knobs(target), **{f"rank.{kind}": _RANKS for kind in kinds}}

    @classmethod
    def start(cls, target: Target) -> dict[str, Any]:
        """A rank near the default for all."""
        near = min(_RANKS, key=lambda share: abs(share - cls.config_class().rank))
        return {**super().start(target), **{name: near for name in cls.knobs(target) if name.startswith("rank.")}}

    @classmethod
    def tuned(cls, base: Any, values: Mapping[str, Any]) -> LowRankConfig:
        """The configuration with these knobs set."""
        ranks = {name.removeprefix("rank."): value for name, value in values.items() if name.startswith("rank.")}
        return replace(super().tuned(base, values), ranks=ranks)


def matrices(target: Target) -> dict[str, Tensor]:
    """The weights `[out, in]` of all linear layers in the decoder's blocks, by module name (by reference).

    Raises:
        UnsupportedModel: there are none that are plain numbers in memory.
    """
    decoder = hf.decoder_of(target.model)
    blocks = {id(module) for block in hf.blocks_of(target.model) for module in block.modules()}
    found = {}
    for name, module in decoder.named_modules():
        weight = hf.matrix_of(module) if id(module) in blocks else None
        if weight is not None:
            found[name] = weight
    if not found:
        raise UnsupportedModel(
            f"{target.model_type!r} holds no linear layers with plain weights in memory (quantised, offloaded, or "
            "experts in one tensor), so there is nothing to factorise; use another draft"
        )
    return found


def _kind(name: str) -> str:
    return name.rpartition(".")[2]


def _break_even(weight: Tensor) -> int:
    """The rank at which two factors are as large as the matrix."""
    rows, columns = weight.shape
    return max(1, rows * columns // (rows + columns))


def factorised(
    target: Target, weights: Mapping[str, Tensor], ranks: Mapping[str, int], folder: Path
) -> dict[str, Factors]:
    """The factors of some weights, from the file where those of this model are kept, or made and kept.

    The file holds every matrix at its break-even rank; the factors of a lower rank are its first columns and rows, so
    trying other ranks costs no decomposition. Two processes that want it at once wait for one another. A damaged file
    is made anew.

    Args:
        target: whose weights they are.
        weights: of all matrices, by module name, `[out, in]`.
        ranks: by module name, of the wanted ones; at most the break-even rank.
        folder: of the cache.
    """
    path = folder / "low-rank" / f"{_key(target, weights)}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        found = _read(path, weights, ranks)
        if found is None:
            with whole_file(path) as work:
                save_file(_decompose(weights), str(work), metadata={"format": "pt"})
            found = _read(path, weights, ranks)
    assert found is not None
    return found


def _key(target: Target, weights: Mapping[str, Tensor]) -> str:
    """Of the model. Samples of every matrix are in it: models may differ in some of them alone."""
    digest = hashlib.sha256(f"{fingerprint(target)} {target.dtype}".encode())
    for name, weight in weights.items():
        digest.update(name.encode() + sample(weight))
    return digest.hexdigest()[:32]


def _read(path: Path, weights: Mapping[str, Tensor], ranks: Mapping[str, int]) -> dict[str, Factors] | None:
    """The first rows and columns of the kept factors; None if there is no whole file of them."""
    if not path.is_file():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            if set(file.keys()) != {f"{name}.{part}" for name in weights for part in ("down", "up")}:
                return None
            found = {}
            for name, rank in ranks.items():
                down, up = file.get_slice(f"{name}.down")[:rank], file.get_slice(f"{name}.up")[:, :rank]
                found[name] = (down.to(weights[name]).contiguous(), up.to(weights[name]).contiguous())
            return found
    except (SafetensorError, OSError):
        return None


@torch.no_grad()
def _decompose(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`down` `[r, in]` and `up` `[out, r]` of each weight, in its own dtype, on the CPU."""
    tensors = {}
    bar = None if len(weights) >= _MANY else True  # None: only on a terminal
    for name, weight in tqdm(weights.items(), desc="low-rank factors", unit="matrix", disable=bar, leave=False):
        left, values, right = torch.linalg.svd(weight.float(), full_matrices=False)
        rank = _break_even(weight)
        root = values[:rank].sqrt()
        tensors[f"{name}.down"] = (root.unsqueeze(1) * right[:rank]).to(weight.dtype).cpu().contiguous()
        tensors[f"{name}.up"] = (left[:, :rank] * root).to(weight.dtype).cpu().contiguous()
    return tensors
