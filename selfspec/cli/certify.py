"""`selfspec certify`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from selfspec.cli import options as opt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FILE = Path("certificate.json")


def certify(
    word: opt.TargetWord = None,
    second: Annotated[str | None, typer.Argument(metavar="DRAFT", help="The same as --draft.")] = None,
    target: opt.TargetOrWord = None,
    draft: Annotated[
        str | None, typer.Option("--draft", help="Heads (folder or Hub id), or a method without training.")
    ] = None,
    prompts: opt.Prompts = None,
    limit: opt.Limit = 4,
    max_new_tokens: Annotated[int | None, typer.Option(min=4, help="Tokens per greedy text.")] = None,
    samples: Annotated[int | None, typer.Option(min=50, help="Sampled rounds per prompt.")] = None,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of the sampled part.")] = 0.9,
    accept: Annotated[str, typer.Option(help="The accept rule in use: lossless or token-wise.")] = "lossless",
    dtype: opt.Dtype = "auto",
    device: opt.Device = None,
    threads: opt.Threads = None,
    seed: opt.Seed = 0,
    quick: Annotated[bool, typer.Option("--quick", help="The same checks with fewer samples.")] = False,
    allow_target_change: Annotated[
        bool,
        typer.Option("--allow-target-change", help="Certify a method that changes the target."),
    ] = False,
    check: Annotated[
        Path | None, typer.Option(help="Only see whether this certificate belongs to the target and the draft.")
    ] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Plant faults on tiny models; every one must be caught.")
    ] = False,
    json: Annotated[Path, typer.Option("--json", help="Where the certificate goes.")] = _FILE,
) -> None:
    """Check that the output with a draft is the target's own, greedy and sampled; writes a certificate."""
    if self_test:
        _self_test(threads)
        return
    target, draft = opt.with_words([word, second], target=target, draft=draft)
    if target is None or draft is None:
        raise typer.BadParameter("certify wants --target and --draft, or --self-test")
    if check is not None:
        _check(check, target, draft, dtype, device, threads)
        return
    from selfspec.accept import AcceptRule
    from selfspec.inference.certify import QUICK, CertifySettings
    from selfspec.outputs import check_file

    check_file(json)
    given: dict[str, Any] = dict(QUICK) if quick else {}
    given |= {"max_new_tokens": max_new_tokens} if max_new_tokens is not None else {}
    given |= {"samples": samples} if samples is not None else {}
    settings = CertifySettings(**given, temperature=temperature, seed=seed, rule=AcceptRule(accept))
    model, tokenizer = opt.load(target, dtype, device, threads)
    ids = opt.prompt_ids(tokenizer, prompts, min(limit, 3) if quick else limit, seed)
    _run(model, draft, ids, settings, json, allow_target_change)


def _run(
    model: PreTrainedModel, draft: str, ids: list[list[int]], settings: Any, json: Path, allow_change: bool
) -> None:
    from selfspec.checkpoint import write_json
    from selfspec.inference.certify import certify as make
    from selfspec.inference.certify import verdicts

    command = ["selfspec", *sys.argv[1:]]

    def tell(part: str) -> None:
        typer.echo(f"checking: {part}", err=True)

    record = make(model, draft, ids, settings, command, tell, allow_target_change=allow_change)
    write_json(json, record)
    for line, passed in verdicts(record["parts"]):
        typer.echo(f"{'pass' if passed else 'FAIL'}  {line}")
    if record["target"]["changed"]:
        typer.echo("note  this is about the target with the adapter of the draft, not about the base model")
    _show_differences(record["parts"]["greedy"])
    typer.echo(f"{'certified' if record['passed'] else 'NOT certified'} in {record['seconds']:.0f} s: {json}")
    if not record["passed"]:
        raise typer.Exit(1)


def _show_differences(greedy: list[dict[str, Any]]) -> None:
    for part in greedy:
        for text in part["texts"]:
            for against, found in text["differences"].items():
                if found is not None:
                    margin = "no margin" if found["margin"] is None else f"logits {found['margin']:.3g} apart"
                    typer.echo(
                        f"      {found['class']}: {part['dtype']}, prompt {text['prompt']} ({text['variant']}) parts "
                        f"from {against} at new token {found['place']}, {margin}; a tie is up to "
                        f"{part['tie_margin']:.3g}"
                    )


def _check(path: Path, target: str, draft: str, dtype: str, device: str | None, threads: int | None) -> None:
    from selfspec.inference.certify.record import mismatches, read_certificate
    from selfspec.resolve import resolve_draft
    from selfspec.target import Target

    record = read_certificate(path)
    model, _ = opt.load(target, dtype, device, threads)
    door = Target(model)
    found = mismatches(record, door, draft, resolve_draft(draft, door))
    for line in found:
        typer.echo(f"FAIL  {line}")
    if found:
        raise typer.Exit(1)
    typer.echo(f"pass  {path} belongs to {target} and {draft}")


def _self_test(threads: int | None) -> None:
    from selfspec.inference.certify.faults import self_test

    opt.quiet(threads)
    missed = 0
    for found in self_test():
        missed += not found.passed
        typer.echo(f"{'pass' if found.passed else 'FAIL'}  {found.name}: {found.outcome}")
    typer.echo("every planted fault was caught" if not missed else f"{missed} checks of the self-test failed")
    if missed:
        raise typer.Exit(1)
