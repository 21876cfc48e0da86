"""`selfspec tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from selfspec.cli import options as opt
from selfspec.errors import ConfigError

_JOURNAL = ".tune.log"


def tune(
    target: opt.Target,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the settings found; used like a folder of heads.")
    ] = None,
    draft: Annotated[
        str, typer.Option("--draft", help="Method to tune, for instance layer-skip; or a folder of trained heads.")
    ] = "layer-skip",
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings that stay fixed, as draft_vocab_size=8192."),
    ] = None,
    prompts: opt.Prompts = None,
    limit: opt.Limit = 10,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per prompt and trial.")] = 32,
    max_seconds: Annotated[float, typer.Option(min=0.0, help="Start no trial after this time.")] = 600.0,
    max_trials: Annotated[int, typer.Option(min=1, help="Nor after this many, earlier calls included.")] = 1000,
    random_sets: Annotated[
        int, typer.Option(min=0, help="Random settings of the same cost to compare with at the end.")
    ] = 20,
    dtype: opt.Dtype = "auto",
    device: opt.Device = None,
    threads: opt.Threads = None,
    rows: Annotated[int, typer.Option(min=1, help="Heads: also measure costs for batches of this size.")] = 1,
    seed: opt.Seed = 0,
    json: opt.JsonFile = None,
) -> None:
    """Search a draft's settings for the most tokens per second here; called again, it goes on where it stopped.

    Of trained heads, acceptance and costs are measured and written into their folder, with the static tree that is
    fastest by them.
    """
    from selfspec import registry
    from selfspec.checkpoint import save_draft
    from selfspec.inference.tune import TuneSettings
    from selfspec.inference.tune import tune as search
    from selfspec.outputs import check_folder
    from selfspec.selfcheck import checked_target

    opt.check_files(json)
    if Path(draft).is_dir():
        _heads(target, Path(draft), prompts, limit, max_new_tokens, rows, (dtype, device, threads), seed, json)
        return
    if out is None:
        raise ConfigError("the settings found want a folder; give --out")
    method: Any = registry.method(draft)
    if not hasattr(method, "knobs"):
        known = [kind for kind in registry.kinds() if hasattr(registry.method(kind), "knobs")]
        raise ConfigError(f"{draft!r} has no settings to tune; these have: {', '.join(known)}")
    base = method.config_class.from_dict({**opt.key_values(settings or []), "kind": draft})
    check_folder(out)
    model, tokenizer = opt.load(target, dtype, device, threads)
    door = checked_target(model)
    try:
        ids = opt.prompt_ids(tokenizer, prompts, limit, seed)
        plan = TuneSettings(max_new_tokens, max_seconds, max_trials, random_sets, seed)
        with _Bar(max_seconds) as bar:
            found = search(method, base, door, ids, out / _JOURNAL, plan, bar.show)
        save_draft(found.draft, out)
    finally:
        door.release()
    results = found.to_dict()
    _report(results, out)
    opt.write_results(json, results)


def _heads(
    target: str,
    folder: Path,
    prompts: Path | None,
    limit: int,
    max_new_tokens: int,
    rows: int,
    machine: tuple[str, str | None, int | None],
    seed: int,
    json: Path | None,
) -> None:
    from selfspec.cli.guard import tune_heads
    from selfspec.outputs import check_folder
    from selfspec.target import Target

    check_folder(folder)
    model, tokenizer = opt.load(target, *machine)
    door = Target(model)
    try:
        results = tune_heads(door, folder, opt.prompt_ids(tokenizer, prompts, limit, seed), max_new_tokens, rows)
    finally:
        door.release()
    opt.write_results(json, results)


class _Bar:
    """A progress bar over the time allowed."""

    def __init__(self, seconds: float) -> None:
        import time

        from tqdm import tqdm

        self._now = time.monotonic
        self._begun = self._now()
        form = "{desc}: {percentage:3.0f}%|{bar}| {postfix}"
        self._bar = tqdm(total=max(1, round(seconds)), desc="tune", bar_format=form)

    def __enter__(self) -> _Bar:
        return self

    def show(self, trials: int, best: float) -> None:
        """Note a finished trial."""
        self._bar.n = min(self._bar.total, round(self._now() - self._begun))
        self._bar.set_postfix_str(f"{trials} trials, best {best:.1f} tokens/s")

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _report(results: dict[str, object], out: Path) -> None:
    typer.echo(
        f"{results['draft']}: {results['tokens_per_s']:.1f} tokens/s after {results['trials']} trials, "
        f"plain {results['plain_tokens_per_s']:.1f} ({results['speedup']:.2f}x)"
    )
    random = results["random_same_cost"]
    assert isinstance(random, dict)
    if random["sets"]:
        typer.echo(
            f"the same cost at random: mean of {random['sets']} {random['mean_tokens_per_s']:.1f} tokens/s, found "
            f"settings beside them {random['found_tokens_per_s']:.1f}"
        )
    typer.echo(f"settings: {out} (selfspec.patch(model, {str(out)!r}))")
