"""`selfspec demo`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from selfspec.cli import options as opt


def demo(
    target: Annotated[str, typer.Option("--target", help="Any causal model: a folder, a Hub id, or `demo`.")] = "demo",
    out: Annotated[Path, typer.Option("--out", help="Folder for heads, results.json and speed.png.")] = Path(
        "demo-output"
    ),
    draft: Annotated[
        list[str] | None,
        typer.Option("--draft", help="Method to train; all with a demo recipe if left out. May be repeated."),
    ] = None,
    small: Annotated[
        bool, typer.Option("--small", help="A few minutes: little text, few prompts, for trying it out.")
    ] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Train and measure again, whatever is there.")] = False,
    dtype: opt.Dtype = "auto",
    device: opt.Device = None,
    threads: opt.Threads = None,
    seed: opt.Seed = 0,
    json: opt.JsonFile = None,
) -> None:
    """Train heads on a real small model, check that the text stays the same, compare speeds; a quarter of an hour."""
    from selfspec.outputs import check_folder

    check_folder(out)
    opt.check_files(json)
    opt.quiet(threads)
    opt.quiet_datasets()
    from selfspec.train.demo import run_demo
    from selfspec.train.demo_settings import FULL, SMALL, DemoSettings
    from selfspec.train.run import Interrupted

    scale = SMALL if small else FULL
    settings = DemoSettings(target, out, tuple(draft or ()), scale, seed, dtype, opt.pick_device(device), restart)
    try:
        results = run_demo(settings)
    except (KeyboardInterrupt, Interrupted):
        typer.echo(f"interrupted; what is finished stays in {out}. To go on: {_again()}", err=True)
        raise typer.Exit(130) from None
    opt.write_results(json, results)


def _again() -> str:
    return "selfspec " + shlex.join(argument for argument in sys.argv[1:] if argument != "--restart")
