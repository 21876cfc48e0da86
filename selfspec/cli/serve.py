"""`selfspec serve`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from selfspec.cli import options as opt
from selfspec.errors import ConfigError


def serve(
    word: opt.TargetWord = None,
    target: opt.TargetOrWord = None,
    draft: opt.Draft = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all of this machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name for clients; --target if left out.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="SELFSPEC_API_KEY", help="Clients must send it; no key if left out.")
    ] = None,
    nodes: opt.Nodes = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="The most tokens of prompt and answer together; the model's if left out.")
    ] = None,
    max_rows: Annotated[int, typer.Option(min=1, help="Answers written at once.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=128, help="Places in the target's cache over all answers.")] = 65536,
    max_queue: Annotated[int, typer.Option(min=0, help="Requests that wait; more are refused.")] = 256,
    max_body: Annotated[int, typer.Option(min=1024, help="The most bytes of a request.")] = 4 << 20,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one answer, waiting included.")] = 600.0,
    guard: opt.Guard = None,
    grace: Annotated[float, typer.Option(min=0.0, help="Seconds for running answers after SIGTERM.")] = 30.0,
    dtype: opt.Dtype = "auto",
    device: opt.Device = None,
    threads: opt.Threads = None,
) -> None:
    """Serve a model over HTTP as OpenAI's API does, with a page to chat at `/`."""
    target = opt.the_target(word, target)
    try:
        from selfspec.inference.serve.app import Front
        from selfspec.inference.serve.scheduler import Limits
        from selfspec.inference.serve.server import Settings, address, listen, make_server, run
    except ImportError as error:
        raise ConfigError(f"the server is not installed ({error}); run: pip install 'selfspec[serve]'") from error
    from selfspec.inference.guard.setup import guard_by_default, known_chances
    from selfspec.resolve import resolve_draft
    from selfspec.selfcheck import checked_target

    opt.log_to_terminal()
    sock = listen(host, port)
    model, tokenizer = opt.load(target, dtype, device, threads)
    door = checked_target(model)
    made: Any = resolve_draft(draft, door) if draft is not None else None
    limits = Limits(max_rows, max_tokens, max(max_queue, 1), timeout)
    front = Front(name or target, api_key or None, max_body)
    guarded = made is not None and (guard_by_default() if guard is None else guard)
    if guarded:
        typer.echo("selfspec: measuring what a round costs here, unless it is known from earlier")
    settings = Settings(front, limits, nodes, max_length, grace, guarded, known_chances(draft) if guarded else ())
    server = make_server(door, tokenizer, made, settings)
    how = server.scheduler.draft.kind + (", guarded" if server.scheduler.steering is not None else "")
    typer.echo(f"selfspec: {front.name} at {address(sock)} (draft: {how}); stop with Ctrl-C")
    run(server, sock)
