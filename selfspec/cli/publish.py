"""`selfspec push` and `selfspec card`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.errors import ConfigError

if TYPE_CHECKING:
    from selfspec.card_sources import Facts
    from selfspec.hub import Plan

Folder = Annotated[Path, typer.Argument(help="Folder of heads, with bench.json and certificate.json beside them.")]
License = Annotated[str | None, typer.Option("--license", help="Of the heads, as the Hub spells it: apache-2.0.")]
DataLicense = Annotated[str | None, typer.Option(help="Of the training text, in words.")]
Datasets = Annotated[list[str] | None, typer.Option("--dataset", help="Hub id of training data. May be repeated.")]
Languages = Annotated[list[str] | None, typer.Option("--language", help="Code, as en. May be repeated.")]
RunName = Annotated[str | None, typer.Option("--run", help="Run of these heads, where a bench file holds several.")]


def push(
    folder: Folder,
    repo: Annotated[str, typer.Argument(help="Repository: OWNER/NAME.")],
    private: Annotated[bool, typer.Option("--private/--public", help="Of a new repository.")] = True,
    revision: Annotated[str, typer.Option(help="Branch; made if it is not there.")] = "main",
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    license: License = None,
    data_license: DataLicense = None,
    dataset: Datasets = None,
    language: Languages = None,
    run: RunName = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go up.")] = False,
) -> None:
    """Publish heads as one commit, with a card; the token comes from HF_TOKEN or `hf auth login`."""
    from selfspec.hub import push as send

    facts = _facts(folder, license, data_license, dataset, language, run)
    sent = send(
        folder,
        repo,
        private=private,
        revision=revision,
        message=message,
        facts=facts,
        dry_run=dry_run,
        confirm=lambda plan: agreed(plan, yes or dry_run),
    )
    typer.echo(sent if sent is not None else "nothing was sent")


def agreed(plan: Plan, already: bool) -> bool:
    """Show the plan, and ask unless that was done."""
    typer.echo(str(plan))
    return already or typer.confirm("Send this?")


def card(
    folder: Folder,
    check: Annotated[bool, typer.Option("--check", help="Only compare the card with its files.")] = False,
    repo: Annotated[str | None, typer.Option(help="Repository that the card is for: OWNER/NAME.")] = None,
    license: License = None,
    data_license: DataLicense = None,
    dataset: Datasets = None,
    language: Languages = None,
    run: RunName = None,
) -> None:
    """Write the card of heads from their JSON files, or check that a card says what they say."""
    from selfspec.card import check_card, write_card

    if not check:
        facts = _facts(folder, license, data_license, dataset, language, run)
        facts.repo = repo or facts.repo
        typer.echo(f"card: {write_card(folder, facts)}")
        return
    if any((repo, license, data_license, dataset, language, run)):
        raise ConfigError("--check changes nothing; leave the other options out")
    wrong = check_card(folder)
    for line in wrong:
        typer.echo(f"FAIL  {line}")
    if wrong:
        raise typer.Exit(1)
    typer.echo(f"pass  {folder}: the card says what its files say")


def _facts(
    folder: Path,
    license: str | None,
    data_license: str | None,
    datasets: list[str] | None,
    languages: list[str] | None,
    run: str | None,
) -> Facts:
    """The folder's facts with what was given on the command line."""
    from selfspec.card_sources import read_facts

    facts = read_facts(folder)
    facts.license = license or facts.license
    facts.data_license = data_license or facts.data_license
    facts.datasets = datasets or facts.datasets
    facts.language = languages or facts.language
    facts.run = run or facts.run
    return facts
