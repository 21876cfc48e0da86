"""`selfspec bench` and `selfspec eval`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.cli import options as opt
from selfspec.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def bench(
    target: opt.Target,
    draft: opt.Drafts = None,
    prompts: opt.Prompts = None,
    limit: opt.Limit = 20,
    max_new_tokens: opt.MaxNewTokens = 128,
    temperature: opt.Temperature = 0.0,
    dtype: opt.Dtype = "auto",
    device: opt.Device = None,
    threads: opt.Threads = None,
    seed: opt.Seed = 0,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="The most nodes of a tree; the draft's choice if left out.")
    ] = None,
    baselines: Annotated[bool, typer.Option(help="Also run transformers' own generate and its prompt lookup.")] = True,
    plot: Annotated[str | None, typer.Option(help="Draw a bar chart into this PNG file.")] = None,
    json: opt.JsonFile = None,
) -> None:
    """Plain decoding, transformers and drafts side by side on the same prompts, interleaved."""
    _check_outputs(json, plot)
    from selfspec.inference.bench import BenchSettings
    from selfspec.inference.tables import results_table

    settings = BenchSettings(max_new_tokens, temperature, seed, baselines=baselines, nodes=nodes)
    results = _measure(target, draft or [], prompts, limit, dtype, device, threads, settings)
    results_table(results)
    if plot is not None:
        from selfspec.inference.plots import plot_speed

        plot_speed(results, plot)
    _write(json, results)


def evaluate(
    target: opt.Target,
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
    _check_outputs(json, None)
    if not draft:
        raise ConfigError("nothing to evaluate: give at least one --draft")
    from selfspec.inference.bench import BenchSettings
    from selfspec.inference.tables import acceptance_table

    settings = BenchSettings(max_new_tokens, temperature, seed, baselines=False)
    results = _measure(target, draft, prompts, limit, dtype, device, threads, settings)
    acceptance_table(results)
    _write(json, results)


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
    from selfspec.target import Target

    model, tokenizer = opt.load(target, dtype, device, threads)
    door = Target(model)
    try:
        ids = opt.prompt_ids(tokenizer, prompts, limit, settings.seed)
        return bench_with_progress(door, resolve_drafts(drafts, door), ids, settings)
    finally:
        door.release()


def _check_outputs(json: Path | None, plot: str | None) -> None:
    from selfspec.outputs import check_file

    for path in (json, plot):
        if path is not None:
            check_file(path)


def _write(json: Path | None, results: dict[str, Any]) -> None:
    if json is not None:
        from selfspec.checkpoint import write_json

        write_json(json, results)
        typer.echo(f"results: {json}")
