"""`selfspec bench` and `selfspec eval`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.cli import options as opt
from selfspec.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def bench(
    word: opt.TargetWord = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Model: a folder, a Hub id, or `demo`; not needed with --gpu-shape.")
    ] = None,
    draft: opt.Drafts = None,
    prompts: opt.Prompts = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", help="Built-in prompts of a task or `all`; categories with --prompts. May be repeated."),
    ] = None,
    limit: opt.Limit = 20,
    max_new_tokens: opt.MaxNewTokens = 128,
    temperature: Annotated[
        list[float] | None, typer.Option("--temperature", min=0.0, help="0, the default, is greedy. May be repeated.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option("--context", min=1, help="Lengthen prompts to so many tokens. May be repeated.")
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", min=1, help="Rows at once; above 1 against transformers' batches. May be repeated."),
    ] = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = None,
    threads: opt.Threads = None,
    seed: opt.Seed = 0,
    nodes: opt.Nodes = None,
    guard: Annotated[
        bool, typer.Option("--guard/--no-guard", help="Run drafts as a patched model does, as DRAFT+guard.")
    ] = False,
    both: Annotated[bool, typer.Option("--both", help="Run each draft with the guard and without it.")] = False,
    baselines: Annotated[bool, typer.Option(help="Also run transformers' own generate and its prompt lookup.")] = True,
    assistant: Annotated[
        str | None, typer.Option(help="Also run transformers' assisted generation with this model.")
    ] = None,
    early_exit: Annotated[
        int | None, typer.Option(min=1, help="Also run transformers' early exit after so many layers.")
    ] = None,
    bound: Annotated[bool, typer.Option(help="Measure what passes cost, and the speed that would allow.")] = True,
    gpu_shape: Annotated[
        str | None, typer.Option(help="A random model of this shape (1B, 8B, 70B, tiny) with a scripted draft.")
    ] = None,
    script: Annotated[float, typer.Option(help="Tokens per round of the scripted draft.")] = 3.0,
    plot: Annotated[str | None, typer.Option(help="Draw a bar chart into this PNG file.")] = None,
    page: Annotated[str | None, typer.Option(help="Draw a page of plots into this PNG or HTML file.")] = None,
    adversarial: Annotated[
        bool, typer.Option(help="Instead: does the guard stay as fast as plain decoding where drafts do not pay?")
    ] = False,
    json: opt.JsonFile = None,
) -> None:
    """Plain decoding, transformers and drafts side by side on the same prompts, interleaved."""
    (target,) = opt.with_words([word], target=target)
    opt.check_files(json, plot, page)
    if adversarial:
        results = _adversarial(target, draft or [], prompts, limit, dtype, device, threads, max_new_tokens, seed)
        return opt.write_results(json, results)
    from selfspec.inference.bench import BenchSettings
    from selfspec.inference.bench.suite import Conditions

    if (target is None) == (gpu_shape is None):
        raise typer.BadParameter("give either --target or --gpu-shape")
    helper = None if assistant is None else opt.load(assistant, dtype, device, threads)[0]
    settings = BenchSettings(max_new_tokens, 0.0, seed, baselines=baselines, nodes=nodes, assistant=helper)
    how: Any = "both" if both else "guard" if guard else "raw"
    settings = replace(settings, early_exit=early_exit, bound=bound, guard=how)
    conditions = Conditions(tuple(temperature or (0.0,)), tuple(context or (None,)), tuple(batch or (1,)))
    if gpu_shape is not None:
        results = _measure_shape(gpu_shape, script, limit, dtype, device, threads, settings, conditions)
    else:
        assert target is not None
        chosen = opt.bench_prompts(prompts, task, limit, seed)
        results = _measure_suite(target, draft or [], chosen, dtype, device, threads, settings, conditions)
    _show(results, plot, page)
    opt.write_results(json, results)


def _show(results: dict[str, Any], plot: str | None, page: str | None) -> None:
    from selfspec.inference.bench.page import plot_page
    from selfspec.inference.bench.plots import plot_speed
    from selfspec.inference.bench.tables import batches_table, results_table

    for condition in results["conditions"]:
        (results_table if condition["batch"] == 1 else batches_table)(condition)
    if "target" in results:  # some condition has one row at a time
        if plot is not None:
            plot_speed(results, plot)
        if page is not None:
            plot_page(results, page)


def evaluate(
    word: opt.TargetWord = None,
    target: opt.TargetOrWord = None,
    draft: opt.Drafts = None,
    prompts: opt.Prompts = None,
    limit: opt.Limit = 20,
    max_new_tokens: opt.MaxNewTokens = 128,
    temperature: opt.Temperature = 0.0,
    dtype: opt.Dtype = "auto",
    device: opt.Device = None,
    threads: opt.Threads = None,
    seed: opt.Seed = 0,
    json: opt.JsonFile = None,
) -> None:
    """Acceptance per depth, measured by real speculative decoding on text the heads have not seen."""
    target = opt.the_target(word, target)
    opt.check_files(json)
    if not draft:
        raise ConfigError("nothing to evaluate: give at least one --draft")
    from selfspec.inference.bench import BenchSettings
    from selfspec.inference.bench.tables import acceptance_table

    settings = BenchSettings(max_new_tokens, temperature, seed, baselines=False)
    results = _measure(target, draft, prompts, limit, dtype, device, threads, settings)
    acceptance_table(results)
    opt.write_results(json, results)


def _adversarial(
    target: str | None,
    drafts: list[str],
    prompts: Path | None,
    limit: int,
    dtype: str,
    device: str | None,
    threads: int | None,
    max_new_tokens: int,
    seed: int,
) -> dict[str, Any]:
    from selfspec.cli.guard import adversarial
    from selfspec.inference.bench import resolve_drafts
    from selfspec.inference.bench.guard import GuardBenchSettings
    from selfspec.target import Target

    if target is None:
        raise typer.BadParameter("--adversarial wants a --target")
    model, tokenizer = opt.load(target, dtype, device, threads)
    door = Target(model)
    try:
        ids = opt.prompt_ids(tokenizer, prompts, 8 * limit, seed)
        settings = GuardBenchSettings(max_new_tokens, groups=limit, seed=seed)
        return adversarial(door, resolve_drafts(drafts, door), ids, settings)
    finally:
        door.release()


def _measure(
    target: str,
    drafts: list[str],
    prompts: Path | None,
    limit: int,
    dtype: str,
    device: str | None,
    threads: int | None,
    settings: Any,
) -> dict[str, Any]:
    from selfspec.inference.bench import bench_with_progress, resolve_drafts
    from selfspec.selfcheck import checked_target

    model, tokenizer = opt.load(target, dtype, device, threads)
    door = checked_target(model)
    try:
        ids = opt.prompt_ids(tokenizer, prompts, limit, settings.seed)
        return bench_with_progress(door, resolve_drafts(drafts, door), ids, settings)
    finally:
        door.release()


def _measure_suite(
    target: str,
    drafts: list[str],
    chosen: Any,
    dtype: str,
    device: str | None,
    threads: int | None,
    settings: Any,
    conditions: Any,
) -> dict[str, Any]:
    from selfspec.inference.bench import resolve_drafts
    from selfspec.inference.bench.suite import run_suite
    from selfspec.inference.guard.setup import known_chances
    from selfspec.target import Target

    model, tokenizer = opt.load(target, dtype, device, threads)
    door, found = Target(model), chosen(tokenizer)
    try:
        ids, tasks = [prompt.encode(tokenizer) for prompt in found], [prompt.category for prompt in found]
        made = resolve_drafts(drafts, door)
        if settings.guard != "raw":
            known = {name: known_chances(given) for name, given in zip(made, drafts, strict=False)}
            settings = replace(settings, known=known)
        return run_suite(door, made, ids, settings, conditions, tasks if any(tasks) else ())
    finally:
        door.release()


def _measure_shape(
    shape: str,
    tokens_per_round: float,
    limit: int,
    dtype: str,
    device: str | None,
    threads: int | None,
    settings: Any,
    conditions: Any,
) -> dict[str, Any]:
    import torch

    from selfspec.inference.bench.shapes import ScriptedDraft, random_model, rate_for, scripted_texts
    from selfspec.inference.bench.suite import lengthened, run_suite
    from selfspec.models import as_device, as_dtype
    from selfspec.target import Target

    opt.quiet(threads)
    if set(conditions.temperatures) != {0.0}:
        raise ConfigError("the scripted draft knows greedy text only; leave --temperature out with --gpu-shape")
    depth = (settings.nodes or 8) - 1
    rate, where = rate_for(tokens_per_round, depth), as_device(opt.pick_device(device))
    door = Target(random_model(shape, as_dtype(dtype, where), where, settings.seed))
    try:
        generator = torch.Generator().manual_seed(settings.seed)
        ids = torch.randint(2, door.vocab_size, (limit, 64), generator=generator).tolist()
        asked = [prompt for context in conditions.contexts for prompt in lengthened(ids, context)]
        texts = scripted_texts(door, asked, settings.max_new_tokens)
        draft = ScriptedDraft(texts, depth, rate, door.vocab_size, settings.seed)
        results = run_suite(door, {"scripted": draft}, ids, settings, conditions)
        return {**results, "script": {"tokens_per_round": tokens_per_round, "depth": depth, "rate": rate}}
    finally:
        door.release()
