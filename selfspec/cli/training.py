"""`selfspec distill` and `selfspec train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec.cli import options as opt
from selfspec.errors import ConfigError


def distill(
    target: opt.Target,
    out: Annotated[Path, typer.Option(help="Folder of the dataset; a run that was cut off goes on from there.")],
    mode: Annotated[
        str,
        typer.Option(help="`label`: the target reads text at hand; `write`: it continues prompts, or writes freely."),
    ] = "label",
    source: Annotated[
        str,
        typer.Option(
            "--source",
            "--prompts",
            help="`stdlib`, a file, a folder, a glob, dataset:ID, or nothing; see docs/data.md.",
        ),
    ] = "stdlib",
    max_tokens: Annotated[int, typer.Option(min=1, help="Stop after this many tokens.")] = 100_000,
    max_new_tokens: opt.MaxNewTokens = 128,
    temperature: opt.Temperature = 0.0,
    dtype: opt.Dtype = "auto",
    device: opt.Device = None,
    threads: opt.Threads = None,
    seed: opt.Seed = 0,
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="More settings, as length=256 top_k=50.")
    ] = None,
    json: opt.JsonFile = None,
) -> None:
    """Make training text with the target."""
    from selfspec.outputs import check_folder

    check_folder(out)
    opt.check_files(json)
    given = {"mode": mode, "source": source, "max_tokens": max_tokens, "max_new_tokens": max_new_tokens}
    config = _distill_config({**given, "temperature": temperature, "seed": seed, **opt.key_values(settings or [])})
    from selfspec.selfcheck import checked_target
    from selfspec.train.distill import distill as make

    opt.quiet_datasets()
    model, tokenizer = opt.load(target, dtype, device, threads)
    door = checked_target(model)
    try:
        manifest = make(door, tokenizer, config, out)
    finally:
        door.release()
    typer.echo(
        f"{out}: {manifest['rows']} rows, {manifest['tokens']} tokens, {manifest['learned']} of them to learn from"
    )
    opt.write_results(json, manifest)


def _distill_config(values: dict[str, Any]) -> Any:
    from dataclasses import fields

    from selfspec.train.distill import DistillConfig

    known = [f.name for f in fields(DistillConfig)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(f"unknown setting {', '.join(unknown)}; known: {', '.join(known)}")
    config = DistillConfig(**values)
    config.check()
    return config


def train(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or the name of a recipe that ships with the package.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes, as output=heads optimisation.lr=3e-4."),
    ] = None,
    from_traffic: Annotated[
        Path | None,
        typer.Option(help="Go on training the recipe's heads on text that `patch(.., record=FOLDER)` wrote down here."),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Train nothing: tokens/s and memory here, beside the target's pass alone."),
    ] = False,
    threads: opt.Threads = None,
    json: opt.JsonFile = None,
) -> None:
    """Train draft heads. The same command goes on with a run that was interrupted."""
    opt.check_files(json)
    from selfspec.train.distributed import disconnect
    from selfspec.train.recipe import load_recipe
    from selfspec.train.run import Interrupted
    from selfspec.train.run import train as run

    loaded = load_recipe(recipe, settings or [])
    if from_traffic is not None:
        from selfspec.train.refresh import refreshed

        loaded = refreshed(loaded, from_traffic)
    opt.quiet(threads)
    opt.quiet_datasets()
    opt.log_to_terminal()
    if measure:
        _measure(loaded, json)
        return
    try:
        folder = run(loaded)
        disconnect()
    except Interrupted as stopped:
        typer.echo(str(stopped), err=True)
        raise typer.Exit(130) from stopped
    typer.echo(f"heads: {folder}")
    if json is not None:
        from json import loads

        opt.write_results(json, loads((folder / "training.json").read_text(encoding="utf-8")))


def _measure(recipe: Any, json: Path | None) -> None:
    from selfspec.train.distributed import connect
    from selfspec.train.loading import load
    from selfspec.train.measure import measure

    found = measure(recipe, *load(recipe, connect(recipe.device, recipe.optimisation.strategy)))
    threads = f"{found['threads']} thread{'s' * (found['threads'] > 1)}"
    typer.echo(
        f"{found['kind']} head in {found['precision']} on a {found['dtype']} target; {found['device']}, {threads}; "
        f"batches of {found['batch_tokens']} tokens; median of {found['repeats']} x {found['steps']} steps (range)"
    )
    typer.echo(f"{'loop':8} {'tokens/s':>10} {'spread':>17} {'of floor':>9} {'peak MiB':>9}")
    for name, run in found["runs"].items():
        share, peak = f"{run['share_of_floor']:.0%}", f"{run['peak_bytes'] / 2**20:.0f}"
        spread = f"{run['slowest']:.1f}-{run['fastest']:.1f}"
        typer.echo(f"{name:8} {run['tokens_per_s']:10.1f} {spread:>17} {share:>9} {peak:>9}")
    opt.write_results(json, found)
