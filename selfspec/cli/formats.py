"""`selfspec import` and `selfspec export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from selfspec.cli import options as opt

if TYPE_CHECKING:
    import torch

FormatName = Annotated[str | None, typer.Option("--format", help="Name of the format; looked for if left out.")]
Lossy = Annotated[bool, typer.Option("--lossy", help="Go on where drafts will differ; what is lost is printed.")]


def import_(
    source: Annotated[str, typer.Argument(help="Folder or Hub id of another project's draft heads.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    target: Annotated[
        str | None,
        typer.Option("--target", help="Base model: sizes and copies of its tensors are checked, it is fingerprinted."),
    ] = None,
    format: FormatName = None,
    lossy: Lossy = False,
    revision: Annotated[str | None, typer.Option("--revision", help="Of a Hub repository.")] = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = None,
    threads: opt.Threads = None,
) -> None:
    """Make heads of ours from another project's checkpoint."""
    from selfspec.heads.formats import import_folder
    from selfspec.outputs import check_folder
    from selfspec.target import Target

    check_folder(out)
    if target is None:
        report = import_folder(source, out, format=format, lossy=lossy, revision=revision)
    else:
        model, _ = opt.load(target, dtype, device, threads)
        door = Target(model)
        try:
            report = import_folder(source, out, door, format=format, lossy=lossy, base_model=target, revision=revision)
        finally:
            door.release()
    typer.echo(f"{out}: {report}")
    if target is None:
        typer.echo("  no --target: sizes and base model are checked when the heads are loaded")


def export(
    heads: Annotated[str, typer.Argument(help="Folder or Hub id of trained heads.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    format: Annotated[str, typer.Option("--format", help="Name of the format; `selfspec info` lists what fits.")],
    target: Annotated[
        str | None, typer.Option("--target", help="Base model; the one the heads name if left out.")
    ] = None,
    lossy: Lossy = False,
    save_dtype: Annotated[
        str | None, typer.Option("--save-dtype", help="Of the written weights; as they are if left out.")
    ] = None,
    device: opt.Device = None,
    threads: opt.Threads = None,
) -> None:
    """Write heads the way another project or a serving engine reads them."""
    from selfspec.checkpoint import heads_folder, load_head, read_config
    from selfspec.errors import ConfigError
    from selfspec.heads.formats import export_head, format_named
    from selfspec.models import as_dtype
    from selfspec.outputs import check_folder
    from selfspec.target import Target

    format_named(format)
    folder = heads_folder(heads)
    base = target or read_config(folder).get("base_model")
    if not base:
        raise ConfigError(f"{folder} names no base model; give it with --target")
    check_folder(out)
    model, _ = opt.load(base, "auto", device, threads)
    door = Target(model)
    try:
        head = load_head(folder, door, dtype=_stored_dtype(folder))
        report = export_head(head, out, format, lossy=lossy, dtype=as_dtype(save_dtype) if save_dtype else None)
    finally:
        door.release()
    typer.echo(f"{out}: {report}\n  loaded by: {format_named(format).served_by}")


def _stored_dtype(folder: Path) -> torch.dtype:
    """The widest dtype among the weights in the file, so that an export rounds nothing."""
    import torch
    from safetensors import SafetensorError, safe_open

    from selfspec.checkpoint import WEIGHTS
    from selfspec.errors import CheckpointError

    try:
        with safe_open(str(folder / WEIGHTS), framework="pt") as file:
            found = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} is damaged or missing ({error}); copy it again") from error
    halves = {"F16": torch.float16, "BF16": torch.bfloat16}
    floats = [name for name in found if name.startswith(("F", "BF"))]
    return halves.get(floats[0], torch.float32) if len(floats) == 1 else torch.float32
