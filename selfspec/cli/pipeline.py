"""`selfspec run`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli import options as opt
from selfspec.cli import publish
from selfspec.errors import ConfigError

if TYPE_CHECKING:
    from selfspec.hub import Plan
    from selfspec.train.pipeline import Pipeline


def run(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or the name of a recipe that ships with the package.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes, as optimisation.lr=3e-4.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The one folder of everything; the recipe's `output` if left out.")
    ] = None,
    push: Annotated[
        str | None, typer.Option("--push", help="Publish as OWNER/NAME; only what would go up is shown if left out.")
    ] = None,
    private: Annotated[bool, typer.Option("--private/--public", help="Of a new repository.")] = True,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before the push.")] = False,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompts", help="DOMAIN=FILE.jsonl; code of the standard library if left out. May be repeated."),
    ] = None,
    limit: opt.Limit = 20,
    max_new_tokens: opt.MaxNewTokens = 128,
    temperature: opt.Temperature = 0.0,
    quick: Annotated[bool, typer.Option("--quick", help="Certify with fewer samples.")] = False,
    base_model: Annotated[
        str | None, typer.Option(help="Hub id of the base model, where the recipe names a folder.")
    ] = None,
    license: publish.License = None,
    data_license: publish.DataLicense = None,
    dataset: publish.Datasets = None,
    language: publish.Languages = None,
    threads: opt.Threads = None,
    seed: opt.Seed = 0,
    restart: Annotated[bool, typer.Option("--restart", help="Use nothing that is there.")] = False,
) -> None:
    """Text, training, tuning, speeds, certificate and card in one go; the same command goes on where it stopped."""
    from selfspec.card_sources import Facts
    from selfspec.train.pipeline import Pipeline, RunSettings
    from selfspec.train.recipe import load_recipe
    from selfspec.train.run import Interrupted

    domains = _domains(prompts or [])
    loaded = load_recipe(recipe, settings or [])
    facts = Facts(
        repo=push or "",
        license=license or "",
        data_license=data_license or "",
        datasets=dataset or [],
        language=language or [],
    )
    opt.quiet(threads)
    opt.quiet_datasets()
    opt.log_to_terminal()
    plan = RunSettings(
        out=out or Path(loaded.output),
        prompts=domains,
        limit=limit,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        quick=quick,
        seed=seed,
        base_model=base_model or "",
        facts=facts,
        command=["selfspec", *sys.argv[1:]],
        restart=restart,
    )
    pipeline = Pipeline(loaded, plan, say=lambda line: typer.echo(line, err=True))
    try:
        typer.echo(f"heads: {pipeline.run()}")
    except (KeyboardInterrupt, Interrupted):
        typer.echo(f"interrupted; what is finished stays in {plan.out}, the same command goes on", err=True)
        raise typer.Exit(130) from None
    _publish(pipeline, push is not None, private, yes)


def _publish(pipeline: Pipeline, wanted: bool, private: bool, yes: bool) -> None:
    from selfspec.errors import CheckpointError

    def confirm(plan: Plan) -> bool:
        return publish.agreed(plan, yes or not wanted)

    if wanted:
        sent = pipeline.push(confirm, private, dry_run=False)
        typer.echo(sent if sent is not None else "nothing was sent")
        return
    try:
        pipeline.push(confirm, private)
        typer.echo("nothing was sent; to publish: --push OWNER/NAME")
    except CheckpointError as error:
        typer.echo(f"not ready to be published: {error}")


def _domains(given: list[str]) -> dict[str, Path]:
    """`code=FILE.jsonl` to a name and a path."""
    import re

    domains = {}
    for word in given:
        name, _, path = word.partition("=")
        if not re.fullmatch(r"\w[\w-]*", name) or not path:
            raise ConfigError(f"--prompts wants DOMAIN=FILE.jsonl, got {word!r}")
        if not Path(path).is_file():
            raise ConfigError(f"the prompts {path!r} are no file")
        domains[name] = Path(path)
    return domains
