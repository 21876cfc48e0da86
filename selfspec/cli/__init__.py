"""The command line. Heavy imports happen inside the commands, so that `--help` is quick and needs no extras."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from selfspec._version import __version__
from selfspec.cli import certify, chat, demo, formats, measure, pipeline, publish, serve, training, tune, use
from selfspec.errors import SelfspecError

DEBUG = "--debug"

app = typer.Typer(
    help="Self-speculative decoding for Hugging Face models: train draft heads, decode faster, check the output.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    demo.demo,
    training.distill,
    training.train,
    measure.evaluate,
    measure.bench,
    certify.certify,
    tune.tune,
    use.generate,
    chat.chat,
    serve.serve,
    formats.import_,
    formats.export,
    pipeline.run,
    publish.card,
    publish.push,
    use.info,
):
    app.command(name={"evaluate": "eval", "import_": "import"}.get(command.__name__, command.__name__))(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"selfspec {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Show tracebacks; may stand anywhere.")] = False,
) -> None:
    """Options of all commands."""


def main() -> None:
    """Run a command. Errors that a user can meet become one line on stderr and exit status 1; wrong usage is 2."""
    debug = DEBUG in sys.argv
    try:
        app(args=[argument for argument in sys.argv[1:] if argument != DEBUG], prog_name="selfspec")
    except (SelfspecError, OSError, ValueError, ImportError) as error:
        if debug:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        typer.echo(f"selfspec: error: {message}", err=True)
        sys.exit(1)
