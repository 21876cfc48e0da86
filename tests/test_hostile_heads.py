"""Folders of heads made to do harm: refused by name, before memory is allocated, and nothing in them runs."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_draft_contract import ROWS, Row, make

from selfspec import registry
from selfspec.allocation import AllocationLimit, TooLarge
from selfspec.checkpoint import CONFIG, WEIGHTS, load_head, save_head
from selfspec.errors import CheckpointError
from selfspec.target import Target

HUGE = 10**9


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.selfspec_target("gemma3")


def saved(kind: str, target: Target, folder: Path) -> Path:
    method = registry.method(kind)
    head = method.from_target(method.config_class(draft_vocab_size=20), target, torch.Generator().manual_seed(0))
    return save_head(head, folder)


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | values))


SIZES = [
    ("medusa", {"num_heads": HUGE}),
    ("medusa", {"num_layers": HUGE}),
    ("medusa", {"hidden_size": HUGE}),
    ("medusa", {"draft_vocab_size": HUGE}),
    ("medusa", {"vocab_size": HUGE}),
    ("eagle", {"num_layers": HUGE}),
    ("eagle", {"intermediate_size": HUGE}),
    ("eagle3", {"intermediate_size": HUGE}),
    ("eagle3", {"num_attention_heads": HUGE}),
    ("hydra", {"num_heads": HUGE}),
    ("dflash", {"num_layers": HUGE}),
    ("dflash", {"intermediate_size": HUGE}),
    ("dspark", {"markov_rank": HUGE}),
]


@pytest.mark.parametrize(("kind", "sizes"), SIZES, ids=[f"{kind}-{next(iter(sizes))}" for kind, sizes in SIZES])
def test_a_config_cannot_ask_for_memory_that_its_weights_do_not_account_for(
    kind: str, sizes: dict[str, int], target: Target, tmp_path: Path
) -> None:
    folder = saved(kind, target, tmp_path / "heads")
    known = json.loads((folder / CONFIG).read_text())
    assert set(sizes) <= set(known), f"{kind} has no {sorted(set(sizes) - set(known))}"
    change(folder, **sizes)
    with little_memory(), pytest.raises(CheckpointError, match=r"config\.json|do not belong together|does not fit"):
        load_head(folder, target)


@contextmanager
def little_memory(more: int = 512 << 20) -> Iterator[None]:
    """The system refuses this process much further memory, so that a large allocation is an error of another kind."""
    resource = pytest.importorskip("resource", reason="this system has no limits on memory")
    if not Path("/proc/self/statm").is_file():
        pytest.skip("this system does not say how much memory a process has mapped")
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_little_memory_is_little() -> None:
    with little_memory(), pytest.raises(RuntimeError):
        torch.empty(1 << 30)


TRAINED = [row for row in ROWS if row.trainable]


@pytest.mark.parametrize("row", TRAINED, ids=[row.name for row in TRAINED])
def test_every_kind_of_heads_stays_within_the_limit_when_loaded(row: Row, target: Target, tmp_path: Path) -> None:
    head = make(row, target)
    loaded = load_head(save_head(head, tmp_path / "heads"), target)
    for name, value in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@pytest.mark.parametrize(
    "make_large",
    [
        lambda n: torch.empty(n, n),
        lambda n: torch.zeros((n, n)),
        lambda n: torch.ones(size=(n, n)),
        lambda n: torch.full((n, n), 1.0),
        lambda n: torch.arange(n * n),
        lambda n: torch.arange(0, n * n, 1),
        lambda n: torch.eye(n),
        lambda n: torch.randn(n, n),
        lambda n: torch.zeros(1).new_zeros(n, n),
        lambda n: torch.zeros(1).new_full((n, n), 1.0),
        lambda n: torch.zeros(1).expand(n * n).clone(),
        lambda n: torch.zeros(1).repeat(n, n),
        lambda n: torch.nn.Linear(n, n),
        lambda n: torch.nn.Embedding(n, n),
        lambda n: [torch.nn.Linear(100, 100) for _ in range(n)],
    ],
)
def test_the_limit_stops_an_allocation_before_it_is_made(make_large: Callable[[int], Any]) -> None:
    with AllocationLimit(1 << 20):
        make_large(1 << 5)
    with pytest.raises(TooLarge), AllocationLimit(1 << 20):
        make_large(1 << 24)
    torch.empty(1 << 21)


# The weights file


def header(names: dict[str, Any]) -> bytes:
    text = json.dumps(names).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        header({"w": {"dtype": "F32", "shape": [HUGE, HUGE], "data_offsets": [0, 16]}}) + b"\0" * 16,
        header({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4 * HUGE]}}) + b"\0" * 16,
        header({"w": {"dtype": "F32", "shape": [4], "data_offsets": [-8, 8]}}) + b"\0" * 16,
        header({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}) + b"\0" * 8,
        header({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}) + b"\0" * 64,
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        b"",
        pickle.dumps({"w": 1}),
    ],
    ids=["shape", "offset", "negative", "short", "trailing", "header", "list", "empty", "pickle"],
)
def test_weights_that_claim_what_the_file_does_not_hold_are_refused(
    content: bytes, target: Target, tmp_path: Path
) -> None:
    folder = saved("medusa", target, tmp_path / "heads")
    (folder / WEIGHTS).write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged or cut off"):
        load_head(folder, target)


class Bomb:
    """Unpickling it writes a file."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return (Path.touch, (self.place,))


def test_nothing_in_a_folder_of_heads_runs(target: Target, tmp_path: Path) -> None:
    folder, mark = saved("medusa", target, tmp_path / "heads"), tmp_path / "ran"
    for name in ("model.bin", "pytorch_model.bin", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate/generate.py").write_text(f"open({str(mark)!r}, 'w')")
    (folder / "modeling.py").write_text(f"open({str(mark)!r}, 'w')")
    load_head(folder, target)
    change(folder, auto_map={"AutoModel": "modeling.Model"})
    with pytest.raises(CheckpointError, match="unknown keys"):
        load_head(folder, target)
    plain = json.loads((folder / CONFIG).read_text())
    del plain["auto_map"]
    (folder / CONFIG).write_text(json.dumps(plain))
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="missing"):
        load_head(folder, target)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists(), "the bomb must be one"


@pytest.mark.parametrize("kind", ["../medusa", "os.system", "medusa;x", "", "selfspec.heads.medusa"])
def test_a_kind_is_a_name_and_nothing_else(kind: str, target: Target, tmp_path: Path) -> None:
    folder = saved("medusa", target, tmp_path / "heads")
    change(folder, kind=kind)
    with pytest.raises(CheckpointError, match="no draft method"):
        load_head(folder, target)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"kind": "medusa"', "[]", '{"kind": 3}', "\ud800".encode("utf-8", "ignore").decode()]
)
def test_configs_that_are_none_are_refused(text: str, target: Target, tmp_path: Path) -> None:
    folder = saved("medusa", target, tmp_path / "heads")
    (folder / CONFIG).write_text(text)
    with pytest.raises(CheckpointError):
        load_head(folder, target)


def test_an_endless_config_is_not_read(target: Target, tmp_path: Path) -> None:
    folder = saved("medusa", target, tmp_path / "heads")
    with (folder / CONFIG).open("ab") as file:
        file.truncate(1 << 30)
    with pytest.raises(CheckpointError, match="wanted at most"):
        load_head(folder, target)
    shutil.rmtree(folder)
