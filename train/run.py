"""One training run: data, draft vocabulary, head, training, evaluation, and a folder of trained heads."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec import registry
from selfspec.changes import changed
from selfspec.checkpoint import save_head, write_json
from selfspec.errors import ConfigError, TrainingError
from selfspec.fingerprint import fingerprint
from selfspec.head import DraftHead
from selfspec.outputs import check_folder
from selfspec.selfcheck import checked_target
from selfspec.sharded import shape_of, spread_over_processes
from selfspec.target import Target
from selfspec.train.arguments import training_arguments
from selfspec.train.data import TrainingRows
from selfspec.train.decoding import Decoding, best_folder, figures
from selfspec.train.distill import distill, tokenizer_hash
from selfspec.train.distributed import Processes, connect, shared_disk
from selfspec.train.evaluate import evaluate, held_out_prompts
from selfspec.train.forecast import announce
from selfspec.train.loading import load
from selfspec.train.recipe import Recipe, Source
from selfspec.train.refresh import trained_head
from selfspec.train.resume import CHECKPOINTS, RESULT, newest_checkpoint, open_output
from selfspec.train.settings import DistillConfig
from selfspec.train.sharding import shard_target
from selfspec.train.shards import load_counts, load_shards, read_manifest
from selfspec.train.steps import steps_of_run
from selfspec.train.trainer import HeadTrainer
from selfspec.train.write import end_tokens
from selfspec.vocab import most_frequent

_log = logging.getLogger(__name__)


class Interrupted(TrainingError):
    """Training was interrupted by a signal; the same command goes on from the checkpoint it left."""


@dataclass(frozen=True)
class _Data:
    """Folders of training text with their weights, and of held-out text."""

    train: list[tuple[Path, float]]
    held_out: list[Path]


def train(
    recipe: Recipe,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = True,
) -> Path:
    """Train a draft head. What an earlier run with the same recipe finished, or left unfinished, is used.

    Args:
        recipe: what to do.
        model: the target; loaded by name if not given. Put into eval mode, without gradients; otherwise left as it is.
        tokenizer: the target's.
        progress: show progress bars.

    Returns:
        The folder of the trained head, `recipe.output`, with `training.json` beside the weights.

    Raises:
        ConfigError: impossible settings, a device that Trainer would not use, or the folder holds a run with others.
        DataError: bad or no input.
        TrainingError: a loss that is not finite, or processes that do not see each other.
        Interrupted: Ctrl-C or SIGTERM; a checkpoint was saved.
    """
    recipe.check()
    joined = connect(recipe.device if model is None else str(model.device), recipe.optimisation.strategy)
    state = joined.state
    check_folder(recipe.output)
    torch.manual_seed(recipe.optimisation.seed)
    begun = time.monotonic()
    if model is None or tokenizer is None:
        model, tokenizer = load(recipe, joined)
    # A target in pieces cannot be tried by one process.
    target = Target(model) if recipe.placement == "sharded" else checked_target(model)
    try:
        if recipe.placement == "sharded":
            shard_target(target, joined)
        _refuse_other_device(target.device, state)
        _train(recipe, target, tokenizer, joined, {"load": _minutes_since(begun)}, progress)
    finally:
        target.release()
    return Path(recipe.output)


def _train(
    recipe: Recipe,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    joined: Processes,
    minutes: dict[str, float],
    progress: bool,
) -> None:
    state = joined.state
    main = state.is_main_process
    for folder in dict.fromkeys([recipe.output, recipe.data_folder or recipe.output]):  # in one order on all processes
        shared_disk(check_folder(folder), state)
    settings = recipe.to_dict() | {"fingerprint": fingerprint(target)}
    with state.main_process_first():
        finished = open_output(Path(recipe.output), settings, recipe.restart and main)
    if finished:
        _log.info("%s holds the finished run of this recipe", recipe.output)
        return
    began = time.monotonic()
    head = new_head(recipe, target)
    data = make_data(recipe, target, tokenizer, head, progress and main)
    if not recipe.init:  # heads that go on keep their vocabulary
        head.output.set_vocab(draft_vocabulary(recipe, data, target, tokenizer))
    everywhere = recipe.placement == "sharded"
    prompts = held_out_prompts(recipe, tokenizer) if (main or everywhere) and recipe.evaluation.prompts else []

    def decode(head: DraftHead, show: bool = False) -> dict[str, Any]:
        with changed(head, allowed=True):
            return evaluate(target, tokenizer, head, prompts, recipe.evaluation.max_new_tokens, show)

    minutes["data"] = _minutes_since(began)
    trainer = _trainer(recipe, head, data, progress, joined)
    watched = recipe.evaluation
    trainer.add_callback(Decoding(trainer, decode, watched.decode_every, watched.patience, everywhere))
    _fit(trainer)
    minutes["train"] = trainer.progress.seconds / 60
    began = time.monotonic()
    results: dict[str, Any] = trainer.measure()
    with trainer.whole_head():
        if prompts:
            results["decoding"] = decode(head, progress and main)
        if main:
            minutes["evaluate"] = _minutes_since(began)
            _finish(recipe, head, data, trainer, minutes, results, joined)
        state.wait_for_everyone()


def _refuse_other_device(device: torch.device, state: PartialState) -> None:
    """Trainer itself decides on the device of a process: the first one, or that of its rank."""
    own = (state.device.index or 0) if state.num_processes > 1 else 0
    if device.type != "cpu" and (device.index or 0) != own:
        raise ConfigError(
            f"the target is on {device}, training would run on {device.type}:{own}; choose the device with "
            "CUDA_VISIBLE_DEVICES, and leave `device` at auto"
        )


def make_data(
    recipe: Recipe, target: Target, tokenizer: PreTrainedTokenizerBase, head: DraftHead, progress: bool
) -> _Data:
    """Make the training and held-out text that is not there yet."""
    folder = Path(recipe.data_folder or Path(recipe.output) / "data")
    needs = head.needs
    made = _Data([], [])
    share = max(recipe.evaluation.tokens // len(recipe.data), 1)
    configs = [_as_distill(source) for source in recipe.data]
    _demand_taught(configs, head)
    if recipe.store_features:
        configs = [replace(config, hidden=needs.hidden, layers=list(needs.layers)) for config in configs]
    for config in configs:  # held-out text first: it is little, and tells early if a source has none
        if config.split == "train" and recipe.evaluation.tokens:
            held_out = replace(config, split="held-out", max_tokens=share)
            made.held_out.append(_make(folder, target, tokenizer, held_out, progress))
    for config, source in zip(configs, recipe.data, strict=True):
        made.train.append((_make(folder, target, tokenizer, config, progress), source.weight))
    return made


def _demand_taught(configs: Sequence[DistillConfig], head: DraftHead) -> None:
    """Refuse before any text is made what no loss could learn from; see `selfspec.heads.losses.stored_teacher`."""
    stored = [config.top_logits for config in configs]
    if len(set(stored)) > 1:
        raise ConfigError(f"the sources have top_logits {stored}; set one for all")
    vocab = head.output.vocab
    if any(stored) and vocab.size < vocab.target_size:
        raise ConfigError(
            f"data.0.top_logits is {stored[0]}, which does not say how likely tokens are among the {vocab.size} of a "
            "draft vocabulary; set vocabulary.size=0, or leave top_logits out and set store_features=true"
        )
    if any(stored) and head.changes_target:
        raise ConfigError(f"{head.kind} changes the target, of which data.0.top_logits would speak; leave it out")


def _as_distill(source: Source) -> DistillConfig:
    return DistillConfig(**{f.name: getattr(source, f.name) for f in fields(DistillConfig)})


def _make(
    folder: Path, target: Target, tokenizer: PreTrainedTokenizerBase, config: DistillConfig, progress: bool
) -> Path:
    """The folder's name comes from the settings, so other settings never meet old data."""
    content = [config.content(), fingerprint(target), str(target.dtype), tokenizer_hash(tokenizer)]
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]
    path = folder / f"{config.mode}-{config.split}-{key}"
    if not _complete(path) and spread_over_processes(*target.model.parameters()) and _needs_passes(config):
        raise ConfigError(
            f"the target is spread over processes, and {path} is not there yet: each makes its share of training text "
            "alone. Make it first: this recipe with placement=whole or split, max_steps=1, another output and the same "
            "data_folder"
        )
    distill(target, tokenizer, config, path, progress and not _complete(path))  # processes share the work
    return path


def _needs_passes(config: DistillConfig) -> bool:
    return config.mode == "write" or config.predictions or config.hidden or bool(config.layers) or config.top_logits > 0


def _complete(path: Path) -> bool:
    return (path / "manifest.json").is_file() and bool(read_manifest(path)["complete"])


def draft_vocabulary(recipe: Recipe, data: _Data, target: Target, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The ids of the draft vocabulary, `[Q]`: the most frequent tokens of all sources, by their weights."""
    counts = torch.zeros(target.vocab_size, dtype=torch.float64)
    for path, weight in data.train:
        for part in load_counts(path).values():
            counts += weight * part
    always = {*recipe.vocabulary.always, *end_tokens(target, tokenizer)}
    return most_frequent(counts, recipe.vocabulary.size or target.vocab_size, tuple(sorted(always)))


def new_head(recipe: Recipe, target: Target) -> DraftHead:
    """A head of the recipe's method, seeded; or the one that the recipe goes on with."""
    if recipe.init:
        return trained_head(recipe, target)
    config = recipe.head_config()
    generator = torch.Generator().manual_seed(recipe.optimisation.seed)
    head: DraftHead = registry.method(recipe.draft["kind"]).from_target(config, target, generator)
    head.config.base_fingerprint = fingerprint(target)  # before one process saves alone: all may be needed for it
    return head


def _trainer(recipe: Recipe, head: DraftHead, data: _Data, progress: bool, joined: Processes) -> HeadTrainer:
    folder = Path(recipe.output) / CHECKPOINTS
    if joined.state.is_main_process:
        _try_saving(head, Path(recipe.output))
    steps = steps_of_run(newest_checkpoint(folder), recipe.optimisation, joined.state.num_processes, joined.strategy)
    args = training_arguments(
        recipe.optimisation,
        folder,
        head.target.device,
        recipe.log_every,
        recipe.save_every,
        recipe.evaluation.every,
        joined.zero_stage,
        recipe.report_to,
        steps,
    )
    size = head.target.hidden_size
    rows = TrainingRows([(load_shards(p), w) for p, w in data.train], head.needs, size)
    held_out = TrainingRows([(load_shards(p), 1.0) for p in data.held_out], head.needs, size) if data.held_out else None
    trainer = HeadTrainer(head, rows, held_out, recipe.optimisation, args, progress, joined.strategy, steps)
    trainer.forecast = announce(trainer)
    return trainer


def _fit(trainer: HeadTrainer) -> None:
    """Train, from the newest checkpoint if there is one, and take the best head if that was kept."""
    folder = Path(str(trainer.args.output_dir))
    found = newest_checkpoint(folder)
    trainer.train(resume_from_checkpoint=None if found is None else str(found))
    if trainer.stopping.interrupted:
        raise Interrupted(
            f"interrupted at step {trainer.state.global_step}; the same command goes on from the checkpoint in {folder}"
        )
    if figures(trainer.state):
        trainer.take(best_folder(trainer.args))
    trainer.head.eval()


def _try_saving(head: DraftHead, folder: Path) -> None:
    """Save once before training: better a failure now than after hours."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".dry-run-") as work:
        save_head(head, work)


def _finish(
    recipe: Recipe,
    head: DraftHead,
    data: _Data,
    trainer: HeadTrainer,
    minutes: dict[str, float],
    results: dict[str, Any],
    joined: Processes,
) -> None:
    output = Path(recipe.output)
    save_head(head, output, head.target.dtype)
    packages = ("torch", "transformers", "accelerate", "datasets", "selfspec")
    record = {
        "argv": sys.argv,
        "recipe": recipe.to_dict(),
        "versions": {name: _version(name) for name in packages} | {"python": platform.python_version()},
        "processes": joined.state.num_processes,
        "strategy": joined.strategy,
        "threads": torch.get_num_threads(),
        "device": str(head.target.device),
        "trained_parameters": sum(shape_of(p).numel() for p in head.parameters() if p.requires_grad),
        "steps": trainer.state.global_step,
        "minutes": {name: round(value, 2) for name, value in minutes.items()},
        "data": {str(path.name): _sizes(path) for path in [*(p for p, _ in data.train), *data.held_out]},
        "forecast": trainer.forecast,
        "results": results,
        "history": trainer.state.log_history,
    }
    write_json(output / RESULT, record)
    shutil.rmtree(output / CHECKPOINTS, ignore_errors=True)


def _sizes(path: Path) -> dict[str, Any]:
    manifest = read_manifest(path)
    return {key: manifest[key] for key in ("rows", "tokens", "learned")} | {"input": manifest["identity"]["input"]}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _minutes_since(begun: float) -> float:
    return (time.monotonic() - begun) / 60
