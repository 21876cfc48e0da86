"""`selfspec bench --adversarial` and `selfspec tune` of trained heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from selfspec.errors import ConfigError

UNTRAINED = ("medusa", "eagle")
"""Heads with fresh weights that the adversarial set tries beside the drafts given."""


def adversarial(door: Any, drafts: dict[str, Any], prompts: list[list[int]], settings: Any) -> dict[str, Any]:
    """Run the set with a line per case on stderr, and print its table."""
    import torch

    from selfspec import registry
    from selfspec.inference.bench.guard import bench_guard

    for kind in UNTRAINED:
        method = registry.method(kind)
        fresh = method.from_target(method.config_class(), door, torch.Generator().manual_seed(0))
        drafts[f"untrained {kind}"] = fresh.to(door.dtype)
    cases = bench_guard(door, drafts, prompts, settings, lambda name: typer.echo(name, err=True))
    typer.echo("tokens per second against plain decoding, median of paired ratios (95% interval)")
    for case in cases:
        low, high = case["guarded_interval"] or (case["guarded"], case["guarded"])
        typer.echo(
            f"{case['draft']}, {case['text']}, temperature {case['temperature']:g}, batch {case['batch']}: "
            f"guarded {case['guarded']:.3f} ({low:.3f}-{high:.3f}), without the guard {case['raw']:.3f}, "
            f"off in {case['guard']['off']} of {case['guard']['rounds']} passes"
        )
    return {"cases": cases}


def tune_heads(door: Any, folder: Path, prompts: list[list[int]], max_new_tokens: int, rows: int) -> dict[str, Any]:
    """Measure heads, write statistics, profile and the fastest static tree into their folder; see docs/guard.md."""
    import json

    from tqdm import tqdm

    from selfspec.checkpoint import CONFIG, write_json
    from selfspec.heads.trees import expected_tokens, fastest_choices
    from selfspec.inference.tune_heads import acceptance, costs, save, seconds_of
    from selfspec.resolve import resolve_draft

    if not prompts:
        raise ConfigError("there are no prompts to tune on; give at least one")
    draft = resolve_draft(folder, door)
    with tqdm(total=len(prompts), desc="acceptance", unit="prompt") as bar:
        found = acceptance(door, draft, prompts, max_new_tokens, progress=bar.update)
    table = costs(door, draft, max(prompts, key=len), sorted({1, rows}))
    for path in save(folder, found, table):
        typer.echo(f"wrote {path}")
    results: dict[str, Any] = {"statistics": found, "profile": table.to_dict()}
    if getattr(draft, "choices", None):  # a static tree
        seconds = seconds_of(table, draft, sum(map(len, prompts)) // len(prompts))
        choices = fastest_choices(found["chances_by_rank"], seconds)
        results["choices"] = [list(path) for path in choices]
        if choices:
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            write_json(folder / CONFIG, {**config, "choices": results["choices"]})
        tokens = expected_tokens(choices, found["chances_by_rank"])
        typer.echo(
            f"static tree: {len(choices)} guesses, {tokens:.2f} tokens per round expected"
            if choices
            else "no static tree is faster than plain decoding here; the one in the folder is left as it is"
        )
    return results
