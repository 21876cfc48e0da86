"""Recipes: everything one training run depends on, in one YAML file, with `key=value` overrides."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from selfspec import recipes, registry
from selfspec.errors import ConfigError
from selfspec.head import HeadConfig
from selfspec.train.settings import DistillConfig

SCHEDULES = ("cosine", "linear", "constant")
PLACEMENTS = ("whole", "split", "sharded")
QUANTIZATIONS = ("", "bitsandbytes-8bit", "bitsandbytes-4bit", "torchao-int8")
STRATEGIES = ("auto", "ddp", "fsdp", "zero1", "zero2", "zero3")
PRECISIONS = ("auto", "float32", "bfloat16")
_LOWEST = [
    ("", "log_every", 1),
    ("", "save_every", 1),
    ("vocabulary", "size", 0),
    *(
        ("optimisation", name, 0)
        for name in ("lr", "micro_tokens", "warmup", "min_lr", "epochs", "max_minutes", "divergence")
    ),
    *(("optimisation", name, 1) for name in ("batch_tokens", "max_steps")),
    *(("evaluation", name, 0) for name in ("every", "tokens", "prompts", "decode_every", "patience")),
    *(("evaluation", name, 1) for name in ("prompt_tokens", "max_new_tokens")),
]


@dataclass(kw_only=True)
class Source(DistillConfig):
    """One source of training text.

    Args:
        weight: how often each row is used per epoch; fractions use that share of the rows.
    """

    weight: float = 1.0


@dataclass(kw_only=True)
class Vocabulary:
    """The draft vocabulary.

    Args:
        size: the most frequent tokens of the training text; 0 takes the target's whole vocabulary.
        always: token ids that must be in; the end tokens always are.
    """

    size: int = 8192
    always: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class Optimisation:
    """How the head is trained. Training ends at the first limit reached.

    Args:
        lr: the highest learning rate.
        schedule: `cosine`, `linear` or `constant` after the warm-up.
        warmup: share of the training.
        min_lr: the last learning rate as a share of `lr`.
        batch_tokens: tokens per optimiser step, over all processes.
        micro_tokens: tokens per forward pass and process; 0 is all of a step at once.
        epochs: passes over the data; None is no limit.
        max_steps: optimiser steps; None is no limit.
        max_minutes: wall time of the training loop, evaluations included; None is no limit. The schedule then follows
            the clock.
        weight_decay: of AdamW.
        betas: of AdamW.
        grad_clip: largest gradient norm; 0 does not clip.
        precision: `float32`, `bfloat16` (autocast; weights and losses stay float32), or `auto`: bfloat16 on an
            accelerator that has it and on CPUs with AMX; other CPUs are faster in float32.
        offload_activations: keep what the backward pass needs in main memory, which makes room on the accelerator;
            `micro_tokens` is the cheaper way where a row fits.
        strategy: how several processes share the work: `ddp` (each has the whole head), `fsdp` (weights, gradients and
            optimizer state in pieces), `zero1`, `zero2`, `zero3` (DeepSpeed), or `auto`: what accelerate's
            configuration says, else `ddp`.
        divergence: end the run when the logged loss is so many times its best, three times in a row; 0 never does.
        seed: of the first weights and the order of the data.
    """

    lr: float = 1e-3
    schedule: str = "cosine"
    warmup: float = 0.05
    min_lr: float = 0.05
    batch_tokens: int = 4096
    micro_tokens: int = 0
    epochs: float | None = 1.0
    max_steps: int | None = None
    max_minutes: float | None = None
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    precision: str = "auto"
    offload_activations: bool = False
    strategy: str = "auto"
    divergence: float = 3.0
    seed: int = 0


@dataclass(kw_only=True)
class Evaluation:
    """What is measured on held-out text.

    Args:
        every: optimiser steps between measurements of loss and accuracy; 0 measures at the end only.
        tokens: held-out tokens for them, taken from the recipe's sources.
        prompts: held-out prompts decoded speculatively at the end; 0 leaves it out.
        decode_every: optimiser steps between measurements by real speculative decoding of these prompts, which also
            keep the best head; 0 decodes at the end only.
        patience: end training after so many of these in a row without more tokens per round; 0 never does.
        prompt_tokens: the most tokens of a prompt.
        max_new_tokens: tokens to write per prompt.
    """

    every: int = 50
    tokens: int = 8192
    prompts: int = 8
    decode_every: int = 0
    patience: int = 0
    prompt_tokens: int = 128
    max_new_tokens: int = 64


@dataclass(kw_only=True)
class Recipe:
    """One training run.

    Args:
        target: folder, Hub id, or `demo`.
        dtype: of the target; `auto` takes what the device is fast at.
        device: of target and head; `auto` takes an accelerator if there is one.
        placement: of the target: `whole` on every process, `split` over the accelerators of one process (device_map),
            or `sharded` over all processes (by ZeRO-3 where the strategy is DeepSpeed's, else by FSDP).
        quantization: of the target: `bitsandbytes-8bit`, `bitsandbytes-4bit`, `torchao-int8`, or empty.
        draft: `kind` and the fields of that method's configuration.
        init: folder or Hub id of trained heads of that kind to go on with; empty begins anew.
        data: sources of training text.
        data_folder: where it is kept, and found again by later runs; empty is `<output>/data`.
        store_features: keep the target's features with the text, so that every epoch after the first is cheap.
        vocabulary: of the draft.
        optimisation: of the head.
        evaluation: on held-out text.
        log_every: optimiser steps between log lines.
        save_every: optimiser steps between checkpoints to resume from.
        report_to: trackers to log to, by transformers' names: `tensorboard`, `wandb`, `trackio`, ...
        output: folder of the trained head.
        restart: throw away what an earlier run left in `output`.
    """

    target: str = "demo"
    dtype: str = "auto"
    device: str = "auto"
    placement: str = "whole"
    quantization: str = ""
    draft: dict[str, Any] = field(default_factory=dict)
    init: str = ""
    data: list[Source] = field(default_factory=lambda: [Source()])
    data_folder: str = ""
    store_features: bool = False
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    optimisation: Optimisation = field(default_factory=Optimisation)
    evaluation: Evaluation = field(default_factory=Evaluation)
    log_every: int = 10
    save_every: int = 100
    report_to: list[str] = field(default_factory=list)
    output: str = "heads"
    restart: bool = False

    def check(self) -> None:
        """Raise ConfigError for values that make no sense, before anything is loaded."""
        for source in self.data:
            source.check()
            if source.weight <= 0:
                raise ConfigError(f"a source's weight is {source.weight}, wanted more than 0")
        if self.init and Path(self.init).resolve() == Path(self.output).resolve():
            raise ConfigError(
                f"init and output are both {self.output!r}; give another output, so that the old heads stay"
            )
        self.head_config()
        optimisation = self.optimisation
        _one_of("optimisation.schedule", optimisation.schedule, SCHEDULES)
        _one_of("optimisation.precision", optimisation.precision, PRECISIONS)
        _one_of("placement", self.placement, PLACEMENTS)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("optimisation.strategy", optimisation.strategy, STRATEGIES)
        if optimisation.epochs is None and optimisation.max_steps is None and optimisation.max_minutes is None:
            raise ConfigError("training has no end; set optimisation.epochs, .max_steps or .max_minutes")
        if not self.data:
            raise ConfigError("the recipe has no data; list at least one source")
        evaluation = self.evaluation
        if evaluation.patience and not evaluation.decode_every:
            raise ConfigError("evaluation.patience counts decodings while training; set evaluation.decode_every too")
        if evaluation.decode_every and not evaluation.prompts:
            raise ConfigError("evaluation.decode_every needs held-out prompts; set evaluation.prompts")
        for section, name, low in _LOWEST:
            value = getattr(getattr(self, section) if section else self, name)
            if value is not None and value < low:
                raise ConfigError(f"{section}{'.' if section else ''}{name} is {value}, wanted at least {low}")

    def head_config(self) -> HeadConfig:
        """The draft method's own configuration.

        Raises:
            ConfigError: no such method, it has no weights to train, or it does not know a key.
        """
        values = dict(self.draft)
        kind = values.pop("kind", None)
        if not isinstance(kind, str):
            raise ConfigError(f"draft.kind is {kind!r}; name a draft method: {', '.join(registry.kinds())}")
        config_class = getattr(registry.method(kind), "config_class", None)
        if config_class is None or not issubclass(config_class, HeadConfig):
            raise ConfigError(f"draft method {kind!r} has no weights to train; it can be used as it is")
        known = [f.name for f in fields(config_class)]
        _refuse_unknown("draft", sorted(set(values) - set(known)), known)
        if "draft_vocab_size" in values:
            raise ConfigError("draft.draft_vocab_size is set by vocabulary.size; leave it out of `draft`")
        config: HeadConfig = config_class.from_dict({**values, "draft_vocab_size": self.vocabulary.size})
        return config

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        values = OmegaConf.to_container(OmegaConf.structured(self), resolve=True)
        assert isinstance(values, dict)
        return {str(key): value for key, value in values.items()}


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        name_or_path: a YAML file, or the name of a recipe that ships with the package.
        overrides: `key=value`, with dots into sections and numbers into lists: `data.0.max_tokens=1000`.

    Raises:
        ConfigError: no such recipe, bad YAML, an unknown key (the nearest known one is named), or a wrong value.
    """
    path = _find(name_or_path)
    try:
        raw = OmegaConf.load(path)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} is not a readable YAML file: {error}") from error
    if not isinstance(raw, DictConfig):
        raise ConfigError(f"{path} must hold keys and values, got {type(raw).__name__}")
    if overrides and "data" not in raw:
        raw.data = [{}]  # the default source, so that overrides can reach into it
    for override in overrides:
        _apply(raw, override)
    return make_recipe(raw, str(path))


def make_recipe(values: DictConfig | dict[str, Any], where: str = "recipe") -> Recipe:
    """From plain values. Raises ConfigError as `load_recipe` does."""
    try:
        plain = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
        assert isinstance(plain, dict)
        for prefix, unknown, known in _unknown(Recipe, plain):
            _refuse_unknown(prefix, unknown, known)
        merged = OmegaConf.merge(OmegaConf.structured(Recipe), plain)
        recipe = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{where}: {getattr(error, 'full_key', None) or 'recipe'}: {reason}") from error
    assert isinstance(recipe, Recipe)
    recipe.optimisation.betas = (recipe.optimisation.betas[0], recipe.optimisation.betas[1])
    recipe.check()
    return recipe


def _find(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    if path.is_file():
        return path
    if str(name_or_path) in recipes.names():
        return recipes.path(str(name_or_path))
    near = difflib.get_close_matches(str(name_or_path), recipes.names(), 1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise ConfigError(f"no recipe {str(name_or_path)!r}{hint}; give a YAML file or one of {', '.join(recipes.names())}")


def _apply(raw: DictConfig, override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} must have the form key=value, for instance optimisation.lr=3e-4")
    try:
        OmegaConf.update(raw, key, OmegaConf.create({"value": _parsed(value)})["value"], force_add=True)
    except (OmegaConfBaseException, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"override {override!r}: {str(error).splitlines()[0]}") from error


def _parsed(value: str) -> Any:
    return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))["value"]  # type: ignore[call-overload,index]


def _unknown(cls: type[Any], values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, list[str], list[str]]]:
    """Keys that `cls` and the dataclasses in it do not have, section by section, with the known ones."""
    hints = typing.get_type_hints(cls)
    known = [f.name for f in fields(cls)]
    yield prefix.rstrip("."), sorted(str(key) for key in values if key not in known), known
    for name in known:
        inner = hints[name]
        if isinstance(inner, types.GenericAlias) and inner.__origin__ is list:
            inner = inner.__args__[0]
        parts = values.get(name)
        for place, part in enumerate(parts if isinstance(parts, list) else [parts]):
            if is_dataclass(inner) and isinstance(inner, type) and isinstance(part, dict):
                index = f".{place}" if isinstance(parts, list) else ""
                yield from _unknown(inner, part, f"{prefix}{name}{index}.")


def _refuse_unknown(section: str, unknown: Sequence[str], known: Sequence[str]) -> None:
    if not unknown:
        return
    near = difflib.get_close_matches(unknown[0], known, 1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    names = ", ".join(f"{section}.{name}" if section else name for name in unknown)
    raise ConfigError(f"unknown key {names}; {hint}known: {', '.join(sorted(known))}")


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{name} is {value!r}, wanted one of {', '.join(known)}")
