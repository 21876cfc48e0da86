"""Results of `bench` as tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

COLUMNS = ("run", "tokens/s", "speed-up (95%)", "tokens\n/round", "accepted\n/round", "same\ntext")


def results_table(results: dict[str, Any], console: Console | None = None) -> None:
    """One line per run: speed, speed-up over plain decoding, acceptance, and whether the text is the same."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for place, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if place == 0 else "right", no_wrap=True)
    for run in results["runs"]:
        table.add_row(
            run["name"],
            f"{run['tokens_per_s']:.1f}",
            speedup_text(run),
            f"{run['tokens_per_round']:.2f}",
            f"{run['accepted_per_round']:.2f}",
            identical_text(run["identical"]),
        )
    console = console or Console()
    console.print(title(results), highlight=False, markup=False)
    console.print(table)
    shares = [f"{run['name']} {run['engine_share']:.1%}" for run in results["runs"] if run["engine_share"] is not None]
    console.print(f"share of a round outside target and draft: {', '.join(shares)}", highlight=False, markup=False)
    for run in results["runs"]:
        for difference in run["differences"]:
            console.print(difference_text(run["name"], difference), markup=False, highlight=False)


def batches_table(results: dict[str, Any], console: Console | None = None) -> None:
    """One line per run of a `throughput` result."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for place, name in enumerate(("run", "tokens/s", "over transformers (95%)", "tokens\n/round", "same rows")):
        table.add_column(name, justify="left" if place == 0 else "right", no_wrap=True)
    for run in results["runs"]:
        per_round = "-" if run["tokens_per_round"] is None else f"{run['tokens_per_round']:.2f}"
        table.add_row(
            run["name"], f"{run['tokens_per_s']:.1f}", speedup_text(run), per_round, run["identical_rows"] or "-"
        )
    console = console or Console()
    console.print(f"{results['batches']} batches of {results['batch']} rows, prefill counted", highlight=False)
    console.print(table)


def acceptance_table(results: dict[str, Any], console: Console | None = None) -> None:
    """One line per draft: tokens per round in both definitions, and acceptance at every depth."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("run", "tokens\n/round", "accepted\n/round", "accepted at depth 1, 2, ..."):
        table.add_column(name, justify="right" if "round" in name else "left", no_wrap="round" in name)
    for run in results["runs"]:
        if run["accepted_by_depth"]:
            rates = (f"{run['tokens_per_round']:.2f}", f"{run['accepted_per_round']:.2f}")
            table.add_row(run["name"], *rates, " ".join(f"{share:.2f}" for share in run["accepted_by_depth"]))
    console = console or Console()
    console.print(title(results), highlight=False, markup=False)
    console.print("accepted at depth d: share of all rounds in which the draft was right that deep", highlight=False)
    console.print(table)


def title(results: dict[str, Any]) -> str:
    """The circumstances in one line."""
    way = "greedy" if results["temperature"] == 0 else f"temperature {results['temperature']:g}"
    return (
        f"{results['target'] or 'model'}, {results['dtype']}, {results['machine']}, {results['threads']} threads, "
        f"{results['prompts']} prompts, {results['max_new_tokens']} new tokens, {way}"
    )


def speedup_text(run: dict[str, Any]) -> str:
    """`1.42x (1.30-1.55)`."""
    if run["speedup"] is None:
        return "-"
    interval = run["speedup_interval"]
    return f"{run['speedup']:.2f}x" + (f" ({interval[0]:.2f}-{interval[1]:.2f})" if interval else "")


def identical_text(identical: bool | str | None) -> str:
    """`yes`, `near-tie`, `NO`, or `-` for sampled text."""
    if identical is None:
        return "-"
    return identical if isinstance(identical, str) else "yes" if identical else "NO"


def difference_text(name: str, difference: dict[str, Any]) -> str:
    """One line on where a run's text parts from plain decoding's."""
    where = f"{name}, prompt {difference['prompt']}, new token {difference['place']}"
    if difference["margin"] is None:
        return f"{where}: one of the texts ends here, the other goes on"
    kind = "near-tie" if difference["verdict"] == "near-tie" else "NOT a near-tie"
    return f"{where}: {kind}, logits {difference['margin']:.3g} apart ({difference['ulps']:.1f} ulp)"
