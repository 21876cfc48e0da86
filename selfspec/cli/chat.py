"""`selfspec chat`."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated, Any

import typer

from selfspec.cli import options as opt
from selfspec.errors import ConfigError

_COLOURS = (None, "green", "cyan", "blue", "magenta")
_HELP = "/reset begins anew, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer"


def chat(
    word: opt.TargetWord = None,
    target: opt.TargetOrWord = None,
    draft: opt.Draft = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_new_tokens: opt.MaxNewTokens = 512,
    temperature: opt.Temperature = 0.0,
    guard: opt.Guard = None,
    color: Annotated[bool, typer.Option(help="Colour tokens by how far ahead they were drafted.")] = False,
    dtype: opt.Dtype = "auto",
    device: opt.Device = None,
    threads: opt.Threads = None,
    seed: opt.Seed = 0,
    report: opt.Report = False,
) -> None:
    """Talk with a model in the terminal. What was read in earlier turns is kept."""
    target = opt.the_target(word, target)
    import torch

    from selfspec.inference.chat import Chat
    from selfspec.inference.patch import patch

    model, tokenizer = opt.load(target, dtype, device, threads)
    if draft is not None:
        patch(model, draft, guard=guard)
    sampling: dict[str, Any] = {"do_sample": temperature > 0} | ({"temperature": temperature} if temperature else {})
    talk = Chat(model, tokenizer, _writer(color), system, {"max_new_tokens": max_new_tokens, **sampling})
    if not talk.templated:
        typer.echo("selfspec: this model has no chat template; it goes on with your text as it stands", err=True)
    torch.manual_seed(seed)
    if sys.stdin.isatty():
        with suppress(ImportError):  # not on Windows; it gives `input` a history
            import readline  # noqa: F401
        typer.echo(_HELP, err=True)
    _converse(talk)
    if report:
        speculation = getattr(model, "speculation", None)
        typer.echo("no draft: plain decoding" if speculation is None else str(speculation.report()), err=True)


def _writer(color: bool) -> Any:
    def write(text: str, depth: int) -> None:
        shade = _COLOURS[min(depth, len(_COLOURS) - 1)] if color else None
        sys.stdout.write(text if shade is None else typer.style(text, fg=shade))
        sys.stdout.flush()

    return write


def _converse(talk: Any) -> None:
    from selfspec.inference.chat import stopped_by_ctrl_c

    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            text = input(prompt)
        except EOFError:
            return
        except KeyboardInterrupt:
            typer.echo(f"\n{_HELP}", err=True)
            continue
        command = text.strip()
        if command == "/exit":
            return
        if command == "/reset":
            talk.reset()
        elif command.startswith("/") and " " not in command:
            typer.echo(f"there is no command {command}; {_HELP}", err=True)
        elif command:
            try:
                with stopped_by_ctrl_c(talk):
                    talk.say(text)
            except ConfigError as error:
                typer.echo(f"selfspec: {error} (/reset)", err=True, nl=False)
            except KeyboardInterrupt:  # a second Ctrl-C: this turn is forgotten
                pass
            sys.stdout.write("\n")
