"""`selfspec generate` and `selfspec info`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec.cli import options as opt
from selfspec.errors import ConfigError


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; `-` reads standard input.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="More arguments of `generate`, as repetition_penalty=1.2."),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Model; the base model named by the heads if left out.")
    ] = None,
    draft: opt.Draft = None,
    max_new_tokens: opt.MaxNewTokens = 128,
    temperature: opt.Temperature = 0.0,
    dtype: opt.Dtype = "auto",
    device: opt.Device = None,
    threads: opt.Threads = None,
    seed: opt.Seed = 0,
    report: opt.Report = False,
    json: opt.JsonFile = None,
) -> None:
    """Write on from a prompt, token by token as they are decided."""
    extra = opt.key_values(arguments or [])
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise ConfigError("the prompt is empty; give at least one character")
    opt.check_files(json)
    model, tokenizer = _model(target, draft, dtype, device, threads)
    sampling = {"do_sample": temperature > 0} | ({"temperature": temperature} if temperature else {})
    written = _stream(model, tokenizer, text, {"max_new_tokens": max_new_tokens, **sampling, **extra}, seed)
    speculation = getattr(model, "speculation", None)
    figures = speculation.report() if speculation is not None else None
    if report:
        typer.echo(str(figures) if figures is not None else "no draft: plain decoding", err=True)
    opt.write_results(json, {"prompt": text, "text": written, "report": figures})


def _model(target: str | None, draft: str | None, dtype: str, device: str | None, threads: int | None) -> Any:
    if target is None:
        if draft is None:
            raise ConfigError("nothing to run: give --target, or --draft with heads that name their base model")
        from selfspec.inference.loading import load

        opt.quiet(threads)
        return load(draft, dtype=dtype, device=opt.pick_device(device))
    model, tokenizer = opt.load(target, dtype, device, threads)
    if draft is not None:
        from selfspec.inference.patch import patch

        patch(model, draft)
    return model, tokenizer


def _stream(model: Any, tokenizer: Any, text: str, arguments: dict[str, Any], seed: int) -> str:
    import torch
    from transformers import TextStreamer

    from selfspec.hf import config_of, has_position_table
    from selfspec.prompting import Prompt

    ids = torch.tensor([Prompt(text).encode(tokenizer)], device=model.device)
    if has_position_table(model) and ids.shape[1] > (limit := config_of(model).max_position_embeddings):
        raise ConfigError(
            f"the prompt has {ids.shape[1]} tokens, the model has positions for {limit}; shorten the prompt"
        )
    streams = arguments.get("num_beams", 1) == 1
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if streams else None
    if "stop_strings" in arguments:
        arguments = {**arguments, "tokenizer": tokenizer}
    torch.manual_seed(seed)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), streamer=streamer, **arguments)
    written = str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    if not streams:
        typer.echo(written)
    return written


def info(
    heads: Annotated[str, typer.Argument(help="Folder or Hub id of draft heads.")],
    json: opt.JsonFile = None,
) -> None:
    """What draft heads are: kind, format, base model, vocabulary, parameters, and where they could be exported to."""
    opt.check_files(json)
    figures = _figures(heads)
    width = max(map(len, figures))
    for name, value in figures.items():
        number = isinstance(value, int) and not isinstance(value, bool)
        typer.echo(f"{name:<{width}}  {value:,}" if number else f"{name:<{width}}  {value}")
    opt.write_results(json, figures)


def _figures(heads: str) -> dict[str, Any]:
    """Figures of a heads folder of ours, or of another project's."""
    from selfspec.checkpoint import heads_folder, read_config
    from selfspec.heads.formats import FILES, config_of, describe, exports, is_foreign

    folder = heads_folder(heads, files=FILES)
    if is_foreign(folder):
        return describe(folder)
    figures = heads_info(folder)
    found = exports(config_of(read_config(folder)))
    told = [f"{name} (--lossy: {lost})" if lost else name for name, lost in found.items()]
    return figures | {"exports": ", ".join(told) or "none"}


def heads_info(folder: Path) -> dict[str, Any]:
    """Figures of a heads folder, read from its config and the header of its weights."""
    from safetensors import SafetensorError, safe_open

    from selfspec.checkpoint import WEIGHTS, read_config
    from selfspec.errors import CheckpointError

    config = read_config(folder)
    path = folder / WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; the heads' weights belong there")
    parameters, dtypes = 0, set()
    try:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                if part.get_dtype().startswith(("F", "BF")):
                    size = 1
                    for length in part.get_shape():
                        size *= length
                    parameters += size
                    dtypes.add(part.get_dtype())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or cut off ({error}); copy or download it again") from error
    figures = {
        "kind": config.get("kind"),
        "format": "selfspec",
        "base_model": config.get("base_model") or "not named",
        "parameters": parameters,
    }
    figures |= {"dtype": ", ".join(sorted(dtypes)), "bytes": path.stat().st_size}
    return figures | {key: value for key, value in config.items() if key not in figures}
