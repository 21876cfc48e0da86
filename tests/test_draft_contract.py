"""What every draft method promises, one row per registry name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_folder
import torch
from safetensors.torch import load_file, save_file
from tiny import chunk
from torch import Tensor

from selfspec import registry
from selfspec.checkpoint import ADAPTER_WEIGHTS, CONFIG, WEIGHTS, load_head, replacing, save_head
from selfspec.draft import Budget, Draft, Needs, Sampling, TopTokens, Verified
from selfspec.errors import CheckpointError, ConfigError, UnsupportedGeneration
from selfspec.head import DraftHead
from selfspec.heads import losses
from selfspec.heads.adapter import AdapterConfig
from selfspec.heads.blockwise import BlockwiseConfig
from selfspec.heads.compose import ComposeConfig
from selfspec.heads.dflash_config import DFlashConfig
from selfspec.heads.draft_model import DraftModelConfig
from selfspec.heads.dspark import DSparkConfig
from selfspec.heads.eagle import EagleConfig
from selfspec.heads.eagle3 import Eagle3Config
from selfspec.heads.early_exit import EarlyExitConfig
from selfspec.heads.hydra import HydraConfig, HydraCrossConfig
from selfspec.heads.jetspec import JetSpecConfig
from selfspec.heads.kangaroo import KangarooConfig
from selfspec.heads.layer_skip import LayerSkipConfig
from selfspec.heads.lookup import LookupConfig
from selfspec.heads.losses import Teacher
from selfspec.heads.low_rank import LowRankConfig
from selfspec.heads.medusa import MedusaConfig
from selfspec.heads.medusa2 import Medusa2Config
from selfspec.heads.spec_infer import SpecInferConfig
from selfspec.heads.swift import SwiftConfig
from selfspec.target import Target
from selfspec.train.data import collate, to_verified
from selfspec.tree import DraftTree
from selfspec.vocab import most_frequent

torch.set_num_threads(1)
GREEDY = Sampling()


@dataclass(frozen=True)
class Row:
    """How the contract is tried on one method."""

    kind: str
    config: Callable[..., Any]
    trainable: bool = True
    form: str = ""

    @property
    def name(self) -> str:
        """The kind, and which form of it where it has several rows."""
        return self.kind + self.form


SELF = {"threshold": 0.0, "adaptive": False, "depth": 3, "top_k": 3}
"""Self-drafts whose trees depend on the text alone; the adaptive exit has tests of its own."""

LIKE_IT = {"kind": "draft-model", "model": tiny_folder.small(), "draws": False, "dtype": "float32"}
OTHER = {**LIKE_IT, "model": tiny_folder.small("gemma3"), "top_k": 1}


def _blockwise(num_layers: int = 1, **kw: Any) -> BlockwiseConfig:
    return BlockwiseConfig(**{"draft_vocab_size": 50, "num_heads": 3, **kw})  # one layer is all there is


def _adapter(num_layers: int = 1, **kw: Any) -> AdapterConfig:
    settings = {**SELF, "exit_layer": 2}  # the layers are the target's
    return AdapterConfig(
        **{"base_draft": "early-exit", "settings": settings, "draft_vocab_size": 50, "rank": 2, "train_depth": 3, **kw}
    )


def _kangaroo(num_layers: int = 1, **kw: Any) -> KangarooConfig:
    return KangarooConfig(**{"draft_vocab_size": 50, "threshold": 0.0, "depth": 3, "top_k": 3, **kw})


ROWS = [
    Row("adapter", _adapter),
    Row("blockwise", _blockwise),
    Row("compose", lambda **kw: ComposeConfig(parts=["lookup", LIKE_IT]), trainable=False),
    Row("dflash", lambda **kw: DFlashConfig(**{"draft_vocab_size": 50, "block_size": 4, **kw})),
    Row(
        "draft-model",
        lambda **kw: DraftModelConfig(model=LIKE_IT["model"], draws=False, dtype="float32"),
        trainable=False,
    ),
    Row("dspark", lambda **kw: DSparkConfig(**{"draft_vocab_size": 50, "block_size": 4, "stop_below": 0.0, **kw})),
    Row("eagle", lambda **kw: EagleConfig(**{"draft_vocab_size": 50, **kw})),
    Row("eagle3", lambda **kw: Eagle3Config(**{"draft_vocab_size": 50, **kw})),
    Row("early-exit", lambda **kw: EarlyExitConfig(**{**SELF, "exit_layer": 2, **kw}), False),
    Row("jetspec", lambda **kw: JetSpecConfig(**{"draft_vocab_size": 50, "block_size": 4, **kw})),
    Row("hydra", lambda **kw: HydraConfig(**{"draft_vocab_size": 50, **kw})),
    Row("hydra-cross", lambda **kw: HydraCrossConfig(**{"draft_vocab_size": 50, **kw, "num_layers": 1})),
    Row("kangaroo", _kangaroo),
    Row("layer-skip", lambda **kw: LayerSkipConfig(**{**SELF, "skip_attention": [1], "skip_mlp": [1, 2], **kw}), False),
    Row("lookup", lambda **kw: LookupConfig(), trainable=False),
    Row("low-rank", lambda **kw: LowRankConfig(**{**SELF, "rank": 0.5, **kw}), False),
    Row("medusa", lambda **kw: MedusaConfig(**{"draft_vocab_size": 50, "num_heads": 3, **kw})),
    Row(
        "medusa",
        lambda **kw: MedusaConfig(**{"draft_vocab_size": 50, "num_heads": 3, "tree": "best-first", **kw}),
        form="-best-first",
    ),
    Row("medusa-2", lambda **kw: Medusa2Config(**{"draft_vocab_size": 50, "num_heads": 3, "rank": 2, **kw})),
    Row("spec-infer", lambda **kw: SpecInferConfig(drafts=[LIKE_IT, OTHER]), trainable=False),
    Row("swift", lambda **kw: SwiftConfig(**{**SELF, "trials": 0, "remember": False, **kw}), False),
]
TRAINABLE = [row for row in ROWS if row.trainable]
each = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
each_trainable = pytest.mark.parametrize("row", TRAINABLE, ids=lambda row: row.name)


@pytest.fixture(autouse=True, scope="module")
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Factors of low-rank drafts are kept here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SELFSPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def target(request: pytest.FixtureRequest) -> Target:
    return tiny.selfspec_target(request.param)


def make(row: Row, target: Target, **options: Any) -> Any:
    """A draft with random weights, so that every part of it matters."""
    draft = registry.method(row.kind).from_target(row.config(**options), target, torch.Generator().manual_seed(0))
    if row.trainable:
        draft.output.set_vocab(
            torch.arange(3, 3 + draft.output.vocab.size) if draft.output.vocab.size < 97 else torch.arange(97)
        )
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return draft


def read(target: Target, draft: Draft, tokens: Tensor, counts: Tensor | None = None) -> Verified:
    """What a prefill of `tokens` but the last of each row gives."""
    output = target.features(tokens[:, :-1], None, draft.needs)
    if counts is None:
        counts = torch.full((tokens.shape[0],), tokens.shape[1] - 1)
    cache = None
    if draft.needs.cache:
        cache = target.new_cache(tokens.shape[0], 64)
        target.prefill(tokens[:, :-1], counts.tolist(), cache, Needs())
    return Verified(tokens[:, :-1], tokens[:, 1:], counts, output.hidden, output.layers, cache=cache)


def propose(draft: Draft, state: Any, budget: Budget | None = None, sampling: Sampling = GREEDY) -> DraftTree:
    return draft.propose(state, budget or Budget(), sampling, torch.Generator().manual_seed(0))


def repeating(batch: int, length: int) -> Tensor:
    """Text with repeats, so that lookup finds something."""
    return tiny.text(batch, 7).repeat(1, length // 7 + 1)[:, :length]


def tensors_of(state: Any) -> list[Tensor]:
    """Every tensor of a state, caches cut to their committed slots."""
    found = []
    for value in vars(state).values():
        if isinstance(value, Tensor):
            found.append(value)
        elif hasattr(value, "layers"):
            for layer in value.layers:
                for row, length in enumerate(value.lengths):
                    found += [layer.stored_keys[row, :, :length], layer.stored_values[row, :, :length]]
    return found


def assert_same_tree(one: DraftTree, other: DraftTree) -> None:
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.parents, other.parents)
    assert torch.equal(one.real(), other.real())


def test_every_method_has_a_row() -> None:
    elsewhere = ["mtp"]  # on targets that have such layers: test_heads_mtp.py
    assert sorted({row.kind for row in ROWS} | set(elsewhere)) == registry.kinds()


@each
def test_drafts_keep_the_interface(row: Row, target: Target) -> None:
    assert isinstance(make(row, target), Draft)


@each
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "budget", [Budget(), Budget(nodes=4), Budget(nodes=1), Budget(depth=2), Budget(depth=0)], ids=str
)
def test_trees_are_well_formed_and_within_budget(row: Row, target: Target, batch: int, budget: Budget) -> None:
    draft, text = make(row, target), repeating(batch, 20)
    tree = propose(draft, draft.begin(read(target, draft, text)), budget)
    tree.check(text[:, -1], target.vocab_size)
    assert tree.tokens.shape[0] == batch
    assert tree.shape.max_depth <= budget.depth
    assert budget.nodes is None or tree.nodes <= budget.nodes
    assert tree.nodes > 1 or budget.nodes == 1 or budget.depth == 0


@each
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(do_sample=True, temperature=0.7)], ids=["greedy", "sampling"])
def test_nodes_are_chosen_without_chance(row: Row, target: Target, sampling: Sampling) -> None:
    draft, text = make(row, target), repeating(2, 20)
    state = draft.begin(read(target, draft, text))
    tree = propose(draft, state, sampling=sampling)
    assert tree.drawn is None
    assert_same_tree(tree, propose(draft, state))


@each
def test_siblings_differ(row: Row, target: Target) -> None:
    draft, text = make(row, target), repeating(2, 20)
    tree = propose(draft, draft.begin(read(target, draft, text)))
    for tokens, parents, real in zip(tree.tokens, tree.parents.expand_as(tree.tokens), tree.real(), strict=True):
        pairs = [(int(p), int(t)) for p, t, r in zip(parents, tokens, real, strict=True) if r]
        assert len(set(pairs)) == len(pairs)


@each
def test_propose_leaves_the_targets_cache_alone(row: Row, target: Target) -> None:
    draft, text = make(row, target), repeating(1, 20)
    cache = target.new_cache(1, 64)
    output = target.prefill(text[:, :-1], [19], cache, draft.needs)
    before = [(layer.stored_keys.clone(), layer.stored_values.clone()) for layer in cache.layers]
    shown = cache if draft.needs.cache else None
    verified = Verified(text[:, :-1], text[:, 1:], torch.tensor([19]), output.hidden, output.layers, cache=shown)
    propose(draft, draft.begin(verified))
    assert cache.lengths == [19] and cache.slots.behind == 0
    seen = 19 if draft.needs.cache else None
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.stored_keys[:, :, :seen], keys[:, :, :seen])
        assert torch.equal(layer.stored_values[:, :, :seen], values[:, :, :seen])


@each
@pytest.mark.parametrize("batch", [1, 2])
def test_observe_after_propose_is_begin_on_the_longer_prompt(row: Row, target: Target, batch: int) -> None:
    draft = make(row, target)
    whole = read(target, draft, repeating(batch, 25))
    state = draft.begin(chunk(whole, 0, 17))
    for start, stop in [(17, 18), (18, 21), (21, 24)]:
        propose(draft, state)
        state = draft.observe(state, chunk(whole, start, stop))
    fresh = draft.begin(whole)
    assert_same_tree(propose(draft, state), propose(draft, fresh))
    for rolled, begun in zip(tensors_of(state), tensors_of(fresh), strict=True):
        torch.testing.assert_close(rolled, begun, atol=1e-5, rtol=1e-5)


def ragged(verified: Verified, counts: list[int]) -> Verified:
    """The same with only `counts[b]` real places per row; the rest is rubbish."""
    keep = torch.arange(verified.tokens.shape[1]) < torch.tensor(counts).unsqueeze(1)
    hidden = None if verified.hidden is None else verified.hidden.where(keep.unsqueeze(-1), 1e3)
    layers = tuple(layer.where(keep.unsqueeze(-1), 1e3) for layer in verified.layers)
    tokens, following = verified.tokens.where(keep, 0), verified.next_tokens.where(keep, 0)
    cache = None if verified.cache is None else tiny.cut_cache(verified.cache, counts)
    return Verified(tokens, following, torch.tensor(counts), hidden, layers, cache=cache)


@each
def test_ragged_rows_are_as_rows_alone(row: Row, target: Target) -> None:
    draft = make(row, target)
    first, then = [19, 12, 7], [2, 5, 1]
    whole = read(target, draft, repeating(3, 25))
    state = draft.begin(ragged(chunk(whole, 0, 19), first))
    propose(draft, state)
    rows = [chunk(pick(whole, [b]), first[b], first[b] + 5) for b in range(3)]
    later = Verified(
        torch.cat([r.tokens for r in rows]),
        torch.cat([r.next_tokens for r in rows]),
        torch.tensor(then),
        None if whole.hidden is None else torch.cat([r.hidden for r in rows]),
        tuple(torch.cat(parts) for parts in zip(*(r.layers for r in rows), strict=True)),
    )
    held = (
        None if whole.cache is None else tiny.cut_cache(whole.cache, [f + t for f, t in zip(first, then, strict=True)])
    )
    state = draft.observe(state, replace(ragged(later, then), cache=held))
    tree = propose(draft, state)
    for b in range(3):
        alone = propose(draft, draft.begin(chunk(pick(whole, [b]), 0, first[b] + then[b])))
        real = tree.real()[b]
        assert torch.equal(tree.tokens[b][real], alone.tokens[0])
        assert torch.equal(tree.parents.expand_as(tree.tokens)[b][real], alone.parents[0])


def pick(verified: Verified, rows: list[int]) -> Verified:
    hidden = None if verified.hidden is None else verified.hidden[rows]
    layers = tuple(layer[rows] for layer in verified.layers)
    held = verified.cache
    cache = None if held is None else tiny.cut_cache(held, [held.lengths[row] for row in rows], rows)
    return Verified(
        verified.tokens[rows], verified.next_tokens[rows], verified.counts[rows], hidden, layers, cache=cache
    )


@each
def test_select_goes_on_with_some_rows(row: Row, target: Target) -> None:
    draft = make(row, target)
    whole = read(target, draft, repeating(3, 25))
    state = draft.begin(chunk(whole, 0, 17)).select(torch.tensor([2, 0]))
    rest = pick(whole, [2, 0])
    state = draft.observe(state, chunk(rest, 17, 20))
    assert_same_tree(propose(draft, state), propose(draft, draft.begin(chunk(rest, 0, 20))))


@each
def test_a_state_that_joins_goes_on_as_its_parts_would_alone(row: Row, target: Target) -> None:
    draft = make(row, target)
    whole = read(target, draft, repeating(3, 25))
    first, second = draft.begin(pick(chunk(whole, 0, 17), [0, 2])), draft.begin(pick(chunk(whole, 0, 9), [1]))
    if not (first.joins and second.joins):
        with pytest.raises(UnsupportedGeneration):
            first.join(second)
        return
    propose(draft, first)
    rest = [chunk(pick(whole, [b]), start, start + 3) for b, start in ((0, 17), (2, 17), (1, 9))]
    later = Verified(
        torch.cat([r.tokens for r in rest]),
        torch.cat([r.next_tokens for r in rest]),
        torch.tensor([3, 3, 3]),
        None if whole.hidden is None else torch.cat([r.hidden for r in rest]),
        tuple(torch.cat(parts) for parts in zip(*(r.layers for r in rest), strict=True)),
    )
    tree = propose(draft, draft.observe(first.join(second), later))
    for place, (b, end) in enumerate(((0, 20), (2, 20), (1, 12))):
        alone = propose(draft, draft.begin(chunk(pick(whole, [b]), 0, end)))
        real = tree.real()[place]
        assert torch.equal(tree.tokens[place][real], alone.tokens[0])
        assert torch.equal(tree.parents.expand_as(tree.tokens)[place][real], alone.parents[0])


@each
def test_generations_do_not_share_state(row: Row, target: Target) -> None:
    draft = make(row, target)
    one, two = read(target, draft, repeating(1, 20)), read(target, draft, tiny.text(1, 30))
    alone = propose(draft, draft.begin(one))
    first = draft.begin(one)
    propose(draft, draft.begin(two), Budget(nodes=3))
    assert_same_tree(alone, propose(draft, first))


@each_trainable
def test_gradients_reach_owned_and_no_borrowed_parameters(row: Row, target: Target) -> None:
    head: DraftHead = make(row, target)
    verified = read(target, head, tiny.text(2, 20))
    head.loss(verified, torch.ones(2, 19, dtype=torch.bool)).loss.backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and bool((parameter.grad != 0).any()), name
    assert all(parameter.grad is None for parameter in target.model.parameters())
    assert not {id(p) for p in head.parameters()} & {id(p) for p in target.model.parameters()}


@each_trainable
@pytest.mark.parametrize("own", [False, True], ids=["borrowed", "own"])
def test_saved_and_loaded_heads_draft_the_same_tree(row: Row, target: Target, tmp_path: Path, own: bool) -> None:
    head = make(row, target, own_output=own)
    loaded = load_head(save_head(head, tmp_path / "head"), target)
    assert type(loaded) is type(head) and loaded.config == head.config
    verified = read(target, head, repeating(1, 20))
    assert_same_tree(propose(head, head.begin(verified)), propose(loaded, loaded.begin(verified)))
    mask = torch.ones(1, 19, dtype=torch.bool)
    assert torch.equal(head.loss(verified, mask).loss, loaded.loss(verified, mask).loss)


@each_trainable
def test_only_owned_tensors_are_saved(row: Row, target: Target, tmp_path: Path) -> None:
    head: DraftHead = make(row, target)
    folder = save_head(head, tmp_path / "head")
    saved = set(load_file(folder / WEIGHTS))
    if (folder / ADAPTER_WEIGHTS).exists():
        saved |= {f"peft.{name}" for name in load_file(folder / ADAPTER_WEIGHTS)}
    assert saved == {name for name, _ in head.named_parameters()} | {"output.vocab.ids"}


def _drop(tensors: dict[str, Tensor], name: str) -> None:
    del tensors[name]


def _add(tensors: dict[str, Tensor], name: str) -> None:
    tensors["stranger"] = torch.zeros(2)


def _reshape(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name][..., :-1].contiguous()


@each_trainable
@pytest.mark.parametrize("harm", [_drop, _add, _reshape])
def test_weights_that_do_not_fit_are_refused_by_name(
    row: Row, target: Target, tmp_path: Path, harm: Callable[[dict[str, Tensor], str], None]
) -> None:
    folder = save_head(make(row, target), tmp_path / "head")
    path = next(folder / name for name in (ADAPTER_WEIGHTS, WEIGHTS) if (folder / name).exists())
    tensors = load_file(path)
    name = sorted(set(tensors) - {"output.vocab.ids"})[0]
    harm(tensors, name)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="stranger" if harm is _add else name):
        load_head(folder, target)


@each_trainable
def test_truncated_missing_and_foreign_files_are_refused(row: Row, target: Target, tmp_path: Path) -> None:
    folder = save_head(make(row, target), tmp_path / "head")
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="damaged or cut off"):
        load_head(folder, target)
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="missing"):
        load_head(folder, target)
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError):
        load_head(folder, target)


@each_trainable
@pytest.mark.parametrize("harm", [-1, 10**6, 1], ids=["negative", "beyond the vocabulary", "twice"])
def test_a_draft_vocabulary_that_is_none_is_refused(row: Row, target: Target, tmp_path: Path, harm: int) -> None:
    folder = save_head(make(row, target), tmp_path / "head")
    tensors = load_file(folder / WEIGHTS)
    tensors["output.vocab.ids"][0] = harm
    tensors["output.vocab.ids"][1] = 1
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match="distinct ids"):
        load_head(folder, target)


def test_tokens_that_must_be_in_a_draft_vocabulary_are_tokens_of_the_target() -> None:
    with pytest.raises(ConfigError, match=r"\[7, -1\] cannot always be in"):
        most_frequent(torch.ones(5), 3, (2, 7, -1))


@each_trainable
def test_unknown_config_keys_are_refused_by_name(row: Row, target: Target, tmp_path: Path) -> None:
    folder = save_head(make(row, target), tmp_path / "head")
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**values, "stranger": 1}))
    with pytest.raises(CheckpointError, match="stranger"):
        load_head(folder, target)
    (folder / CONFIG).write_text(json.dumps({**values, "stranger": 1, "format_version": 99}))
    with pytest.raises(CheckpointError, match="upgrade selfspec"):
        load_head(folder, target)
    (folder / CONFIG).write_text(json.dumps({"kind": "lookup"}))
    with pytest.raises(CheckpointError, match="no weights"):
        load_head(folder, target)


@each_trainable
def test_saved_heads_name_the_commit_of_their_base_model(
    row: Row, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target.model.config, "_commit_hash", "abc123", raising=False)
    values = json.loads((save_head(make(row, target), tmp_path / "head") / CONFIG).read_text())
    assert values["base_revision"] == "abc123"


@each_trainable
@pytest.mark.parametrize("size", [1, 2, tiny.VOCAB])
def test_draft_vocabularies_of_any_size(row: Row, target: Target, size: int) -> None:
    head = make(row, target, draft_vocab_size=size)
    verified = read(target, head, tiny.text(2, 20))
    tree = propose(head, head.begin(verified))
    tree.check(verified.root, target.vocab_size)
    assert bool(torch.isin(tree.tokens[:, 1:], head.output.vocab.ids).all())
    assert torch.isfinite(head.loss(verified, torch.ones(2, 19, dtype=torch.bool)).loss)


@each_trainable
@pytest.mark.parametrize("size", [-1, tiny.VOCAB + 1])
def test_impossible_draft_vocabularies_are_refused(row: Row, target: Target, size: int) -> None:
    with pytest.raises(ConfigError):
        make(row, target, draft_vocab_size=size)


@each_trainable
def test_an_empty_mask_gives_loss_zero_and_finite_gradients(row: Row, target: Target) -> None:
    head = make(row, target)
    verified = read(target, head, tiny.text(2, 20))
    result = head.loss(verified, torch.zeros(2, 19, dtype=torch.bool))
    result.loss.backward()
    assert result.loss.item() == 0 and not result.seen.any()
    assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in head.parameters())


@each_trainable
def test_loss_does_not_read_padding(row: Row, target: Target) -> None:
    head = make(row, target)
    whole = read(target, head, tiny.text(2, 20))
    counts = [19, 11]
    mask = torch.arange(19) < torch.tensor(counts).unsqueeze(1)
    padded = head.loss(ragged(whole, counts), mask)
    cut = pick(whole, [0]), chunk(pick(whole, [1]), 0, 11)
    apart = [head.loss(v, torch.ones(1, int(v.counts[0]), dtype=torch.bool), torch.tensor(1)) for v in cut]
    torch.testing.assert_close(padded.loss * padded.seen[0], sum(a.loss for a in apart))
    torch.testing.assert_close(padded.seen, sum(a.seen for a in apart))


@each_trainable
def test_loss_over_given_items_is_the_sum_over_them(row: Row, target: Target) -> None:
    head = make(row, target)
    verified = read(target, head, tiny.text(2, 20))
    mask = torch.ones(2, 19, dtype=torch.bool)
    own = head.loss(verified, mask)
    torch.testing.assert_close(own.loss * own.seen[0], head.loss(verified, mask, torch.tensor(10)).loss * 10)


@each_trainable
def test_the_teacher_is_the_target_though_the_output_is_owned(row: Row, target: Target) -> None:
    borrowed, own = make(row, target), make(row, target, own_output=True)
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(own.output(hidden), borrowed.output(hidden))
    assert torch.equal(own.output.teach(hidden), borrowed.output(hidden))


@each_trainable
def test_documents_read_in_one_row_teach_as_they_do_alone(row: Row, target: Target) -> None:
    """The target reads them one after another, past its window, with positions and attention of their own."""
    head, one = make(row, target), torch.tensor(1)
    documents = []
    for place, length in enumerate((9, 23, 2, 14)):
        learn = torch.arange(length) >= place  # the first tokens of some are a prompt
        documents.append({"input_ids": tiny.text(1, length, seed=length)[0], "learn": learn})
    batch = collate(documents)
    packed = to_verified(batch, head.needs, target, pack=True)
    together = head.loss(packed, batch["labels"] >= 0, one)
    alone = []
    for document in documents:
        batch = collate([document])
        alone.append(head.loss(to_verified(batch, head.needs, target), batch["labels"] >= 0, one))
    torch.testing.assert_close(together.loss, torch.stack([a.loss for a in alone]).sum(), rtol=1e-4, atol=1e-4)
    assert torch.equal(together.seen, torch.stack([a.seen for a in alone]).sum(0))
    assert together.seen.sum() > 30
    assert torch.equal(together.correct, torch.stack([a.correct for a in alone]).sum(0))


def top_tokens(target: Target, tokens: Tensor, known: int) -> TopTokens:
    """What the model itself says after each token, `[B, T]`, as data hold it."""
    with torch.no_grad():
        probs, ids = target.model(tokens).logits.double().softmax(-1).sort(-1, descending=True)
    rest = probs[..., known:].sum(-1).log()
    return TopTokens(ids[..., :known], probs[..., :known].log().float(), rest.float())


@each_trainable
@pytest.mark.parametrize(
    "loss",
    ["forward_kl", *(pytest.param(name, marks=pytest.mark.nightly) for name in losses.LOSSES if name != "forward_kl")],
)
def test_stored_likeliest_tokens_teach_what_the_output_head_does(row: Row, target: Target, loss: str) -> None:
    """All of them like the whole distribution, four like `teacher_top_k: 4`; wrong ones are believed too."""
    whole = make(row, target, draft_vocab_size=tiny.VOCAB, loss=loss)
    few = make(row, target, draft_vocab_size=tiny.VOCAB, loss=loss, teacher_top_k=4)
    verified = read(target, whole, tiny.text(2, 20))
    mask = torch.ones(2, 19, dtype=torch.bool)
    every, four = (replace(verified, top=top_tokens(target, verified.tokens, known)) for known in (tiny.VOCAB, 4))
    if whole.changes_target:
        with pytest.raises(ConfigError, match="changes the target"):
            whole.loss(every, mask)
        return
    torch.testing.assert_close(whole.loss(every, mask).loss, whole.loss(verified, mask).loss, rtol=1e-5, atol=1e-5)
    for head in (whole, few):
        torch.testing.assert_close(head.loss(four, mask).loss, few.loss(verified, mask).loss, rtol=1e-5, atol=1e-5)
    wrong = replace(verified, top=replace(every.top, ids=every.top.ids.roll(1, -1)))
    assert abs(whole.loss(wrong, mask).loss.item() - whole.loss(verified, mask).loss.item()) > 1e-4


@each_trainable
def test_fresh_heads_are_finite_and_repeatable(row: Row, target: Target) -> None:
    heads = [
        registry.method(row.kind).from_target(row.config(num_layers=2), target, torch.Generator().manual_seed(5))
        for _ in range(2)
    ]
    for (name, one), (_, two) in zip(heads[0].named_parameters(), heads[1].named_parameters(), strict=True):
        assert bool(torch.isfinite(one).all()) and torch.equal(one, two), name


@each_trainable
def test_low_precision_and_large_features_stay_finite(row: Row, target: Target) -> None:
    head = make(row, target).to(torch.bfloat16)
    verified = read(target, head, tiny.text(2, 20))
    hidden = None if verified.hidden is None else verified.hidden * 1000
    layers = tuple(layer * 1000 for layer in verified.layers)
    large = replace(verified, hidden=hidden, layers=layers)
    result = head.loss(large, torch.ones(2, 19, dtype=torch.bool))
    assert result.loss.dtype == torch.float32 and bool(torch.isfinite(result.loss))
    propose(head, head.begin(large)).check(verified.root, target.vocab_size)


@each_trainable
def test_losses_stay_float32_where_products_are_bfloat16(
    row: Row, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each loss under autocast is that of float64 arithmetic on the same logits."""
    head = make(row, target)
    verified = read(target, head, tiny.text(2, 20))
    mask = torch.ones(2, 19, dtype=torch.bool)
    plain = head.loss(verified, mask)
    seen: list[torch.dtype] = []

    def watched(loss: Callable[[Tensor, Teacher], Tensor]) -> Callable[[Tensor, Teacher], Tensor]:
        def watch(logits: Tensor, teacher: Teacher) -> Tensor:
            value = loss(logits, teacher)
            exact = replace(teacher, log_p=teacher.log_p.double())
            with torch.autocast("cpu", enabled=False):
                torch.testing.assert_close(value.double(), loss(logits.double(), exact), rtol=1e-5, atol=1e-5)
            seen.append(value.dtype)
            return value

        return watch

    watching = {name: tuple(map(watched, parts)) for name, parts in losses.LOSSES.items()}
    monkeypatch.setattr(losses, "LOSSES", watching)
    with torch.autocast("cpu", torch.bfloat16):
        result = head.loss(verified, mask)
    result.loss.backward()
    assert result.loss.dtype == torch.float32 and {torch.float32} == set(seen)
    assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in head.parameters())
    assert result.loss.item() == pytest.approx(plain.loss.item(), rel=0.05)


@each_trainable
def test_fresh_weights_are_drawn_where_the_generator_lives(
    row: Row, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator of the CPU cannot fill weights on an accelerator (`meta` stands for one here)."""
    cls, places = registry.method(row.kind), []
    monkeypatch.setattr(Target, "device", torch.device("meta"))
    monkeypatch.setattr(cls, "reset_parameters", lambda self, _: places.extend(p.device for p in self.parameters()))
    head = cls.from_target(row.config(), target, torch.Generator())
    assert {place.type for place in places} == {"cpu"}
    assert {p.device.type for p in head.parameters()} == {"meta"}


def test_files_are_written_inside_their_folder_and_whole_or_not_at_all(tmp_path: Path) -> None:
    """A folder may be a mount: nothing can be renamed into it from beside it."""
    folder = tmp_path / "heads"
    with replacing(folder) as work:
        (work / CONFIG).write_text("first")
        assert [path.name for path in tmp_path.iterdir()] == ["heads"]
    with pytest.raises(KeyboardInterrupt), replacing(folder) as work:
        (work / CONFIG).write_text("second")
        raise KeyboardInterrupt
    assert {path.name: path.read_text() for path in folder.iterdir()} == {CONFIG: "first"}
