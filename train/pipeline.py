"""The whole job by one recipe: text, training, tuning, speeds, certificate, card, push; what is finished is kept.

Each stage has a key, the hash of everything it depends on, which `pipeline.json` keeps beside the hashes of the files
that it made. A stage whose key and files are still the same is left out; all that depend on a changed one run again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from selfspec import registry
from selfspec.card import check_card, write_card
from selfspec.card_sources import BENCH, CARD, CERTIFICATE, FACTS, TRAINING, Facts
from selfspec.checkpoint import CONFIG, WEIGHTS, load_head, write_json
from selfspec.errors import CheckpointError, ConfigError, TrainingError
from selfspec.fingerprint import fingerprint
from selfspec.hub import CODE, Plan, push, write_code
from selfspec.inference.bench import BenchSettings, bench_with_progress
from selfspec.inference.certify import QUICK, CertifySettings, certify
from selfspec.inference.runs import Job, prepare
from selfspec.inference.sizes import fastest_nodes
from selfspec.models import load_target
from selfspec.outputs import check_folder
from selfspec.prompting import Prompt, read_prompts
from selfspec.provenance import PROVENANCE, file_hash, provenance, seeds_of
from selfspec.target import Target
from selfspec.train.corpus import stdlib_snippets
from selfspec.train.evaluate import held_out_prompts
from selfspec.train.recipe import Recipe
from selfspec.train.resume import holds_other_run
from selfspec.train.run import make_data, train

STATE, TUNED, WORK = "pipeline.json", "tune.json", "work"
_TUNE_PROMPTS, _TUNE_TOKENS = 4, 48
_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RunSettings:
    """What the recipe does not say.

    Args:
        out: the one folder of everything; texts, checkpoints and raw heads lie in its `work`.
        prompts: JSONL files by the name of their domain; held-out code of the standard library if there are none.
        limit: the most prompts per domain.
        max_new_tokens: per prompt.
        temperature: of the comparison of speeds; 0 is greedy.
        quick: certify with fewer samples.
        seed: of everything drawn after the training.
        base_model: Hub id of the base model, where the recipe names a folder.
        facts: for the card; `facts.repo` is where the push goes.
        command: what was typed.
        restart: use nothing that is there.
    """

    out: Path
    prompts: dict[str, Path] = field(default_factory=dict)
    limit: int = 20
    max_new_tokens: int = 128
    temperature: float = 0.0
    quick: bool = False
    seed: int = 0
    base_model: str = ""
    facts: Facts = field(default_factory=Facts)
    command: Sequence[str] = ()
    restart: bool = False


@dataclass(frozen=True)
class Stage:
    """One stage.

    Args:
        name: shown, and its name in the state file.
        depends: plain values that its result depends on, beside the files of the stages before it.
        make: does the work and returns the files it made.
    """

    name: str
    depends: Any
    make: Callable[[], list[Path]]


class Pipeline:
    """One run. `model` and `tokenizer` are loaded when a stage first needs them, unless they are given."""

    def __init__(
        self,
        recipe: Recipe,
        settings: RunSettings,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        say: Callable[[str], None] = _log.info,
    ) -> None:
        self.out = check_folder(settings.out)
        self.settings = settings
        work = self.out / WORK
        self.recipe = replace(recipe, output=str(work / "heads"), data_folder=str(work / "data"))
        self.say = say
        self._model, self._tokenizer = model, tokenizer
        if settings.restart:
            (self.out / STATE).unlink(missing_ok=True)

    def run(self) -> Path:
        """Do what is left to do.

        Returns:
            The folder, ready to be pushed.

        Raises:
            TrainingError: a certificate that says no, and whatever the stages raise.
        """
        before = ""
        for stage in self.stages():
            key = _digest([stage.name, stage.depends, before])
            files = self._kept(stage.name, key)
            if files is None:
                self.say(f"{stage.name} ...")
                begun = time.monotonic()
                files = {self._relative(path): file_hash(path) for path in stage.make()}
                self._note(stage.name, {"key": key, "files": files, "seconds": round(time.monotonic() - begun, 1)})
            else:
                self.say(f"{stage.name}: as it was")
            before = _digest([before, files])
        return self.out

    def push(self, confirm: Callable[[Plan], bool], private: bool = True, dry_run: bool = True) -> str | None:
        """The last stage: send the folder, or only show what would be sent.

        Raises:
            CheckpointError, ConfigError, HubError: see `selfspec.hub.push`.
        """
        repo = self.settings.facts.repo or f"OWNER/{self._name}"
        return push(self.out, repo, private=private, dry_run=dry_run, confirm=confirm)

    def stages(self) -> list[Stage]:
        """In their order; each depends on all before it."""
        recipe, settings = self.recipe.to_dict(), self.settings
        free = ("output", "data_folder", "restart", "log_every", "save_every")
        recipe = {name: value for name, value in recipe.items() if name not in free}
        text = {name: value for name, value in recipe.items() if name not in ("optimisation", "vocabulary")}
        measured = [{name: file_hash(path) for name, path in settings.prompts.items()}, settings.limit, settings.seed]
        speeds = [measured, settings.max_new_tokens, settings.temperature]
        return [
            Stage("distil", [text, self._target_key()], self._distil),
            Stage("train", recipe, self._train),
            Stage("tune", [settings.base_model, measured], self._tune),
            Stage("bench", [speeds, self._name], self._bench),
            Stage("certify", [measured, settings.quick], self._certify),
            Stage("card", asdict(settings.facts), self._card),
        ]

    # Stages

    def _distil(self) -> list[Path]:
        folder = Path(self.recipe.data_folder)
        with self._door() as target:
            kind = registry.method(self.recipe.draft["kind"])
            head = kind.from_target(self.recipe.head_config(), target, torch.Generator().manual_seed(0))
            made = make_data(self.recipe, target, self.tokenizer, head, progress=True)
        used = {path.relative_to(folder) for path in [*(path for path, _ in made.train), *made.held_out]}
        return [folder / path / "manifest.json" for path in sorted(used)]

    def _train(self) -> list[Path]:
        folder = Path(self.recipe.output)
        with self._door() as target:
            settings = self.recipe.to_dict() | {"fingerprint": fingerprint(target)}
        other = self.settings.restart or holds_other_run(folder, settings)
        train(replace(self.recipe, restart=other), self.model, self.tokenizer)
        record = json.loads((folder / TRAINING).read_text(encoding="utf-8"))
        seeds = seeds_of(record["recipe"]) | {"measuring": self.settings.seed}
        made = provenance(self.settings.command, seeds, record["data"], self.model.device)
        write_json(self.out / PROVENANCE, made)
        return [folder / CONFIG, folder / WEIGHTS, folder / TRAINING, self.out / PROVENANCE]

    def _tune(self) -> list[Path]:
        """The size of trees that is fastest here, on prompts that are not compared later."""
        folder = Path(self.recipe.output)
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        found: dict[str, Any] = {"tree_nodes": None, "reason": "this kind of heads has no size of trees to set"}
        if "tree_nodes" in config:
            with self._door() as target:
                jobs = [self._job(target, ids) for ids in self._calibration()]
                nodes, rates = fastest_nodes(load_head(folder, target), jobs)
            nodes = min(nodes, config["tree_nodes"])
            found = {"tree_nodes": nodes, "before": config["tree_nodes"], "tokens_per_s": rates, "prompts": len(jobs)}
            config["tree_nodes"] = nodes
        config["base_model"] = self.settings.base_model or config["base_model"]
        for name in (WEIGHTS, TRAINING):
            shutil.copyfile(folder / name, self.out / name)
        write_json(self.out / CONFIG, config)
        write_json(self.out / TUNED, found)
        return [self.out / name for name in (CONFIG, WEIGHTS, TRAINING, TUNED)]

    def _bench(self) -> list[Path]:
        settings = self.settings
        plan = BenchSettings(settings.max_new_tokens, settings.temperature, settings.seed)
        for old in self.out.glob("bench*.json"):
            old.unlink()
        domains: dict[str, Path | None] = {**settings.prompts} or {"": None}
        made = []
        with self._door() as target:
            head = load_head(self.out, target)
            for domain, path in domains.items():
                results = bench_with_progress(target, {self._name: head}, self._prompts(path), plan)
                made.append(self.out / (f"bench-{domain}.json" if domain else BENCH))
                if path is not None:
                    shutil.copyfile(path, self.out / f"prompts-{domain}.jsonl")
                    results["prompts_file"] = f"prompts-{domain}.jsonl"
                write_json(made[-1], results)
        return made

    def _certify(self) -> list[Path]:
        settings = self.settings
        plan = CertifySettings(**(QUICK if settings.quick else {}), seed=settings.seed)  # type: ignore[arg-type]
        path = next(iter(settings.prompts.values()), None)
        record = certify(self.model, self.out, self._prompts(path)[:4], plan, list(settings.command))
        write_json(self.out / CERTIFICATE, record)
        if not record["passed"]:
            raise TrainingError(
                f"the heads are NOT certified; {self.out / CERTIFICATE} says what differs, and nothing is published"
            )
        return [self.out / CERTIFICATE]

    def _card(self) -> list[Path]:
        facts = replace(self.settings.facts, run=self._name)
        write_card(self.out, facts)
        write_code(self.out, facts.repo or f"OWNER/{self._name}")
        if wrong := check_card(self.out):
            raise CheckpointError(f"{self.out / CARD} does not agree with its files: {'; '.join(wrong)}")
        return [self.out / name for name in (CARD, FACTS, CODE)]

    # What stages need

    @property
    def model(self) -> PreTrainedModel:
        """The target."""
        self._load()
        assert self._model is not None
        return self._model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's."""
        self._load()
        assert self._tokenizer is not None
        return self._tokenizer

    def _load(self) -> None:
        if self._model is None or self._tokenizer is None:
            found = torch.accelerator.current_accelerator(check_available=True)
            device = self.recipe.device if self.recipe.device != "auto" else str(found or "cpu")
            self._model, self._tokenizer = load_target(self.recipe.target, self.recipe.dtype, device)

    @contextmanager
    def _door(self) -> Iterator[Target]:
        target = Target(self.model)
        try:
            yield target
        finally:
            target.release()

    @property
    def _name(self) -> str:
        return self.settings.facts.repo.split("/")[-1] or self.out.resolve().name

    def _prompts(self, path: Path | None) -> list[list[int]]:
        settings = self.settings
        if path is not None:
            found = read_prompts(path, settings.limit)
        else:
            snippets = stdlib_snippets("held-out", settings.limit, settings.seed, self.tokenizer)
            found = [Prompt(snippet.text) for snippet in snippets]
        return [prompt.encode(self.tokenizer) for prompt in found]

    def _calibration(self) -> list[list[int]]:
        if self.settings.prompts:
            recipe = replace(self.recipe, evaluation=replace(self.recipe.evaluation, prompts=_TUNE_PROMPTS))
            return held_out_prompts(recipe, self.tokenizer)
        snippets = stdlib_snippets("train", _TUNE_PROMPTS, self.settings.seed, self.tokenizer)
        return [Prompt(snippet.text).encode(self.tokenizer) for snippet in snippets]

    def _job(self, target: Target, ids: list[int]) -> Job:
        arguments = BenchSettings(_TUNE_TOKENS, self.settings.temperature).generate_arguments(_TUNE_TOKENS)
        return Job(target, ids, prepare(target, ids, arguments), arguments, self.settings.seed)

    def _target_key(self) -> Any:
        """What identifies the target without loading it: names, sizes and times of its files, or its Hub id."""
        folder = Path(self.recipe.target)
        if not folder.is_dir():
            return self.recipe.target
        files = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
        return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]

    # State

    def _state(self) -> dict[str, Any]:
        try:
            state: dict[str, Any] = json.loads((self.out / STATE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ConfigError(f"{self.out / STATE} is not valid JSON ({error}); remove it, or use --restart") from error
        return state

    def _kept(self, name: str, key: str) -> dict[str, str] | None:
        """The files of a stage that was finished with this key and whose files are as it left them."""
        found = self._state().get(name)
        if found is None or found["key"] != key:
            return None
        files: dict[str, str] = found["files"]
        same = all((self.out / f).is_file() and file_hash(self.out / f) == value for f, value in files.items())
        return files if same else None

    def _note(self, name: str, entry: dict[str, Any]) -> None:
        write_json(self.out / STATE, self._state() | {name: entry})

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.out).as_posix()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
