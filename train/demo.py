"""The demo: train heads on a real small model, prove the text unchanged, show the speeds side by side.

Which methods are trained is read from the shipped recipes called `demo-*`; methods without weights come from the
registry. Every stage keeps what it made under the output folder, and a second run with the same settings uses it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from selfspec import recipes, registry
from selfspec.checkpoint import WEIGHTS, write_json
from selfspec.draft import Draft
from selfspec.errors import ConfigError
from selfspec.inference.bench import BenchSettings, bench_with_progress, resolve_drafts
from selfspec.inference.bench.figures import PLAIN, TRANSFORMERS, recommended
from selfspec.inference.bench.plots import plot_speed
from selfspec.inference.bench.tables import difference_text, identical_text, results_table
from selfspec.inference.patch import patch, unpatch
from selfspec.inference.runs import Job, prepare, run_plain, run_transformers
from selfspec.inference.sizes import fastest_nodes
from selfspec.inference.verdict import Difference, compare, overall
from selfspec.models import DEMO, load_target
from selfspec.outputs import check_folder
from selfspec.prompting import Prompt
from selfspec.target import Target
from selfspec.train.corpus import stdlib_snippets
from selfspec.train.demo_settings import DemoSettings
from selfspec.train.recipe import Recipe, Source, load_recipe
from selfspec.train.resume import RESULT, holds_other_run
from selfspec.train.run import make_data, train

PREFIX = "demo-"
RESULTS, CHART = "results.json", "speed.png"
_MEASURED = "bench.json"


def demo_recipes() -> dict[str, str]:
    """Methods that have a demo recipe, and its name."""
    names = [name for name in recipes.names() if name.startswith(PREFIX)]
    return {load_recipe(name).draft["kind"]: name for name in names}


def untrained_kinds() -> list[str]:
    """Methods that a bare name makes and that run no part of the target: on a model this small these cost too much."""
    return [kind for kind in registry.ready() if not registry.method(kind).needs.cache]


def run_demo(settings: DemoSettings, console: Console | None = None) -> dict[str, Any]:
    """Run all stages; returns what `results.json` holds.

    Raises:
        ConfigError: no such method, or an output folder that cannot be written.
        Interrupted: Ctrl-C during training; a checkpoint was saved.
    """
    return Demo(settings, console or Console()).run()


class Demo:
    """The stages, in order; each leaves its results to the next ones on disk or on this object."""

    def __init__(self, settings: DemoSettings, console: Console) -> None:
        check_folder(settings.out)
        known = demo_recipes()
        unknown = [kind for kind in settings.drafts if kind not in known]
        if unknown:
            raise ConfigError(
                f"no demo recipe trains {', '.join(unknown)}; choose from {', '.join(sorted(known)) or 'none'}"
            )
        self.settings = settings
        self.scale = settings.scale
        self.console = console
        self.names = {kind: name for kind, name in known.items() if not settings.drafts or kind in settings.drafts}
        self.minutes: dict[str, float] = {}
        self.model: Any = None
        self.tokenizer: Any = None
        self.target: Target

    def run(self) -> dict[str, Any]:
        """All stages."""
        with self._stage(1, "target"):
            self._load()
        try:
            plans = {kind: self._recipe(kind) for kind in self.names}
            with self._stage(2, "training text"):
                self._distil(plans.values())
            with self._stage(3, "training"):
                heads = {kind: self._train(kind, recipe) for kind, recipe in plans.items()}
            drafts = resolve_drafts([*untrained_kinds(), *map(str, heads.values())], self.target)
            with self._stage(4, "is the text the same?"):
                check = self._check(drafts)
            with self._stage(5, "speed"):
                results = self._bench(drafts, heads)
            with self._stage(6, "result"):
                return self._report(drafts, heads, check, results)
        finally:
            unpatch(self.model)
            self.target.release()

    @contextmanager
    def _stage(self, number: int, name: str) -> Iterator[None]:
        self.console.rule(f"{number}/6 {name}", align="left")
        start = time.monotonic()
        yield
        self.minutes[name] = round((time.monotonic() - start) / 60, 2)

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    # 1

    def _load(self) -> None:
        settings = self.settings
        hint = " (converted from its package on first use, which takes a minute)" if settings.target == DEMO else ""
        self._say(f"loading {settings.target}{hint}")
        self.model, self.tokenizer = load_target(settings.target, settings.dtype, settings.device)
        self.target = Target(self.model)
        size = sum(p.numel() for p in self.model.parameters()) / 1e6
        self._say(
            f"{type(self.model).__name__}, {size:.1f}M parameters, {self.model.dtype}, vocabulary "
            f"{self.target.vocab_size:,}, {torch.get_num_threads()} threads"
        )

    # 2

    def _recipe(self, kind: str) -> Recipe:
        """The shipped recipe with the demo's target, folders, text and minutes."""
        recipe, scale, settings = load_recipe(self.names[kind]), self.scale, self.settings
        recipe.target, recipe.dtype, recipe.device = settings.target, str(self.model.dtype).split(".")[1], "auto"
        recipe.output, recipe.data_folder = str(settings.out / "heads" / kind), str(settings.out / "data")
        recipe.data = [self._source(source) for source in recipe.data]
        if scale.write_tokens and all(source.mode != "write" for source in recipe.data):
            recipe.data.append(self._source(Source(mode="write", max_tokens=scale.write_tokens)))
        recipe.optimisation.seed = settings.seed
        if recipe.vocabulary.size >= self.target.vocab_size:
            recipe.vocabulary.size = 0
        minutes = scale.minutes / len(self.names)
        recipe.optimisation.max_minutes = min(recipe.optimisation.max_minutes or minutes, minutes)
        recipe.evaluation.tokens = min(recipe.evaluation.tokens, scale.held_out_tokens)
        recipe.evaluation.prompts = min(recipe.evaluation.prompts, scale.evaluation_prompts)
        recipe.evaluation.max_new_tokens = min(recipe.evaluation.max_new_tokens, scale.max_new_tokens)
        return recipe

    def _source(self, source: Source) -> Source:
        limit = self.target.max_positions or source.length
        most = self.scale.write_tokens if source.mode == "write" else self.scale.label_tokens
        source.length = min(source.length, limit)
        source.max_tokens = min(source.max_tokens, most)
        source.prompt_tokens = min(source.prompt_tokens, self.scale.prompt_tokens)
        source.max_new_tokens = min(source.max_new_tokens, self.scale.max_new_tokens)
        source.seed += self.settings.seed
        return source

    def _distil(self, plans: Iterable[Recipe]) -> None:
        self._say("the target reads code of this Python's standard library, and writes some")
        for recipe in plans:
            head = registry.method(recipe.draft["kind"]).from_target(recipe.head_config(), self.target)
            data = make_data(recipe, self.target, self.tokenizer, head, progress=True)
            for folder in [*(path for path, _ in data.train), *data.held_out]:
                self._say(f"{recipe.draft['kind']}: {folder}")

    # 3

    def _train(self, kind: str, recipe: Recipe) -> Path:
        folder = Path(recipe.output)
        recipe.restart = self.settings.restart or holds_other_run(folder, recipe.to_dict())
        if (folder / RESULT).is_file() and not recipe.restart:
            self._say(f"{kind}: {folder} is there already")
        else:
            self._say(f"{kind}: at most {recipe.optimisation.max_minutes:.1f} minutes")
        train(recipe, self.model, self.tokenizer, progress=True)
        results = json.loads((folder / RESULT).read_text(encoding="utf-8"))["results"]
        decoding = results.get("decoding")
        if decoding:
            self._say(
                f"{kind}: {decoding['tokens_per_round']:.2f} tokens per round on held-out prompts, "
                f"{decoding['accepted_per_round']:.2f} of them drafted"
            )
        return folder

    # 4

    def _prompts(self, split: str = "held-out", wanted: int = 0) -> list[list[int]]:
        """Held-out prompts, those to compare speeds on first; or some of another split."""
        scale = self.scale
        wanted = wanted or scale.bench_prompts + scale.check_prompts
        low = min(60, scale.prompt_tokens // 2)
        snippets = stdlib_snippets(split, wanted, self.settings.seed, self.tokenizer, low, scale.prompt_tokens)
        return [Prompt(snippet.text).encode(self.tokenizer) for snippet in snippets]

    def _check(self, drafts: dict[str, Draft]) -> list[dict[str, Any]]:
        """Greedy text of the patched `generate` against plain decoding."""
        found = []
        for index, prompt in enumerate(self._prompts()[self.scale.bench_prompts :]):
            job = self._job(prompt)
            plain = run_plain(job).tokens
            for name, draft in drafts.items():
                difference = self._compare(job, plain, self._patched(job, draft))
                verdict = overall([difference])
                self._say(f"prompt {index}, {name}: {len(plain)} tokens, same text: {identical_text(verdict)}")
                found.append(_entry(name, index, difference))
                if difference is not None:
                    self._say(difference_text(name, found[-1]))
        return found

    def _job(self, prompt: list[int], max_new_tokens: int = 0) -> Job:
        arguments = BenchSettings().generate_arguments(max_new_tokens or self.scale.max_new_tokens)
        return Job(self.target, prompt, prepare(self.target, prompt, arguments), arguments, self.settings.seed)

    def _patched(self, job: Job, draft: Draft, nodes: int | None = None) -> list[int]:
        """New tokens by the patched `generate`."""
        patch(self.model, draft, nodes=nodes)
        ids = torch.tensor([job.prompt], device=self.target.device)
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **job.arguments)
        unpatch(self.model)
        written: list[int] = out[0, len(job.prompt) :].tolist()
        return written

    def _compare(self, job: Job, plain: list[int], other: list[int]) -> Difference | None:
        return compare(self.target, job.prompt, plain, other, job.request.processors)

    # 5

    def _bench(self, drafts: dict[str, Draft], heads: dict[str, Path]) -> dict[str, Any]:
        path, key = self.settings.out / _MEASURED, self._key(heads)
        if path.is_file() and not self.settings.restart:
            saved: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if saved.get("key") == key:
                self._say(f"{path} holds the measurement of these heads; --restart measures again")
                return dict(saved["results"])
        prompts = self._prompts()[: self.scale.bench_prompts]
        bench = BenchSettings(
            self.scale.max_new_tokens,
            seed=self.settings.seed,
            max_seconds=60 * self.scale.bench_minutes,
            nodes=self._sizes(drafts),
        )
        results = bench_with_progress(self.target, drafts, prompts, bench)
        write_json(path, {"key": key, "results": results})
        return results

    def _sizes(self, drafts: dict[str, Draft]) -> dict[str, int]:
        """The size of each draft's trees that is fastest here, found on prompts of the training text."""
        scale, chosen = self.scale, {}
        if not scale.size_prompts:
            return {}
        prompts = self._prompts("train", scale.size_prompts)
        jobs = [self._job(prompt, min(scale.size_tokens, scale.max_new_tokens)) for prompt in prompts]
        for name, draft in drafts.items():
            chosen[name], rates = fastest_nodes(draft, jobs)
            found = ", ".join(f"{size} nodes {rate:.1f}" for size, rate in rates.items())
            self._say(f"{name}: trees of {chosen[name]} nodes are fastest (tokens/s: {found})")
        return chosen

    def _key(self, heads: dict[str, Path]) -> str:
        """Changes with the settings, the heads' weights, the dtype and the number of threads."""
        settings = asdict(self.settings) | {"out": "", "restart": False}
        digest = hashlib.sha256(
            json.dumps([settings, str(self.model.dtype), torch.get_num_threads()], default=str).encode()
        )
        for kind, folder in sorted(heads.items()):
            digest.update(kind.encode() + (folder / WEIGHTS).read_bytes())
        return digest.hexdigest()

    # 6

    def _report(
        self, drafts: dict[str, Draft], heads: dict[str, Path], check: list[dict[str, Any]], results: dict[str, Any]
    ) -> dict[str, Any]:
        best = recommended(results)
        nodes = {run["name"]: run["nodes"] for run in results["runs"]}
        text = self._side_by_side(best, drafts, nodes)
        self._verdict(check, results)
        results_table(results, self.console)
        size = f", with nodes={nodes[best]} (patch and bench take it)" if nodes.get(best) else ""
        self._say(f"recommended on this machine: {best}{size}")
        chart = plot_speed(results, self.settings.out / CHART)
        results = {
            **results,
            "recommended": best,
            "check": check,
            "text": text,
            "heads": {kind: str(folder) for kind, folder in heads.items()},
            "minutes": dict(self.minutes),
        }
        write_json(self.settings.out / RESULTS, results)
        for path in [chart, self.settings.out / RESULTS, *heads.values()]:
            if path is not None:
                self._say(str(path))
        self._say("minutes: " + ", ".join(f"{name} {value:.1f}" for name, value in self.minutes.items()))
        return results

    def _side_by_side(self, best: str, drafts: dict[str, Draft], nodes: dict[str, int | None]) -> dict[str, Any]:
        """One text by plain decoding, by transformers and by the patched model; shown once where all agree."""
        job = self._job(self._prompts()[0])
        name = best if best in drafts else next(iter(drafts))
        texts = {PLAIN: run_plain(job).tokens, TRANSFORMERS: run_transformers(job).tokens}
        texts[f"patched with {name}"] = self._patched(job, drafts[name], nodes.get(name))
        differences = {way: self._compare(job, texts[PLAIN], tokens) for way, tokens in texts.items()}
        self._say("prompt:\n" + _indented(self.tokenizer.decode(job.prompt, skip_special_tokens=True)))
        if all(difference is None for difference in differences.values()):
            self._say(f"written alike by {', '.join(texts)}:\n" + _indented(self.tokenizer.decode(texts[PLAIN])))
        else:
            for way, tokens in texts.items():
                self._say(f"{way}:\n" + _indented(self.tokenizer.decode(tokens)))
        for way, difference in differences.items():
            if difference is not None:
                self._say(f"{way} parts from plain at {difference}")
        return {
            "prompt": self.tokenizer.decode(job.prompt, skip_special_tokens=True),
            "written": {way: self.tokenizer.decode(tokens) for way, tokens in texts.items()},
            "differences": {way: d.to_dict() for way, d in differences.items() if d is not None},
        }

    def _verdict(self, check: list[dict[str, Any]], results: dict[str, Any]) -> None:
        """One line on exactness over the check and the comparison of speeds."""
        drafts = [run for run in results["runs"] if run["accepted_by_depth"]]
        wrong = [d for d in check if d["verdict"] is False]
        wrong += [d for run in drafts for d in run["differences"] if d["verdict"] is False]
        ties = [d for d in check if d["verdict"] == "near-tie"]
        ties += [d for run in drafts for d in run["differences"] if d["verdict"] == "near-tie"]
        texts = len(check) + len(drafts) * results["prompts"]
        if wrong:
            self._say(f"NOT EXACT: {len(wrong)} of {texts} texts differ from plain decoding by more than a near-tie")
        elif ties:
            most = max(d["ulps"] for d in ties)
            self._say(
                f"exact up to near-ties: {texts - len(ties)} of {texts} texts equal plain decoding; {len(ties)} part "
                f"from it where two tokens are within {most:.1f} units in the last place of {results['dtype']}"
            )
        else:
            self._say(f"exact: all {texts} texts equal plain decoding, token by token")


def _entry(name: str, index: int, difference: Difference | None) -> dict[str, Any]:
    if difference is None:
        return {"name": name, "prompt": index, "verdict": True}
    return {"name": name, "prompt": index, **difference.to_dict()}


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines())
