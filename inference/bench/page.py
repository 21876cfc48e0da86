"""One page of plots of a `bench` result: speed-up by task, acceptance by depth, time of a round, bounds."""

from __future__ import annotations

import base64
import html
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selfspec.inference.bench.tables import title
from selfspec.outputs import whole_file

_log = logging.getLogger(__name__)
_STAGES = {"verify": "target", "propose": "draft", "observe": "draft", "accept": "engine", "emit": "engine"}
_COLOURS = {"target": "#2f6fab", "draft": "#e0a030", "engine": "#b3402e"}


def plot_page(results: dict[str, Any], path: str | Path) -> Path | None:
    """Draw the page, as PNG or as one HTML file that holds it, by the name's ending (written whole or not at all).

    Returns:
        The path, or None when matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        _log.warning("no plots: matplotlib is not installed; run: pip install matplotlib")
        return None
    figure = Figure(figsize=(13, 9), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels: list[tuple[str, Callable[[Any, dict[str, Any]], None]]] = [
        ("Speed-up over plain decoding, by task", _tasks),
        ("Share of rounds that accepted a guess at each depth", _depths),
        ("Time of a round", _rounds),
        ("Tokens per second: reached, and bounds", _bounds),
    ]
    for axes, (name, draw) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        axes.set_title(name, fontsize=10, loc="left")
        draw(axes, results)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(title(results), fontsize=11, x=0.01, ha="left")
    path, picture = Path(path), io.BytesIO()
    figure.savefig(picture, format="png")
    page = _as_html(picture.getvalue(), title(results)) if path.suffix.lower() in (".html", ".htm") else None
    with whole_file(path) as work:
        work.write_bytes(picture.getvalue() if page is None else page.encode("utf-8"))
    return path


def _as_html(png: bytes, name: str) -> str:
    name, data = html.escape(name), base64.b64encode(png).decode("ascii")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        f'<img alt="{name}" style="max-width:100%" src="data:image/png;base64,{data}"></html>\n'
    )


def _drafts(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for run in results["runs"] if run["accepted_by_depth"] and run["stage_seconds"] is not None]


def _tasks(axes: Any, results: dict[str, Any]) -> None:
    runs = results["runs"][1:]
    overall = {r["name"]: {k: r[k] for k in ("speedup", "speedup_interval")} for r in results["runs"]}
    groups = {**results.get("tasks", {}), "all": overall}
    width = 0.8 / max(len(runs), 1)
    for place, run in enumerate(runs):
        found = [group[run["name"]] for group in groups.values()]
        heights = [f["speedup"] or 0.0 for f in found]
        spread = [f["speedup_interval"] or [h, h] for f, h in zip(found, heights, strict=True)]
        down = [max(h - low, 0.0) for h, (low, _) in zip(heights, spread, strict=True)]
        up = [max(high - h, 0.0) for h, (_, high) in zip(heights, spread, strict=True)]
        at = [i + (place - (len(runs) - 1) / 2) * width for i in range(len(groups))]
        axes.bar(at, heights, width, label=run["name"], yerr=[down, up], error_kw={"elinewidth": 1, "capsize": 2})
    axes.axhline(1.0, color="#333333", linewidth=1)
    axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
    if runs:
        axes.legend(fontsize=7)


def _depths(axes: Any, results: dict[str, Any]) -> None:
    for run in _drafts(results):
        shares = run["accepted_by_depth"]
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=run["name"])
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("depth", fontsize=8)
    if _drafts(results):
        axes.legend(fontsize=7)


def _rounds(axes: Any, results: dict[str, Any]) -> None:
    runs = [run for run in results["runs"] if run["stage_seconds"] is not None and run["rounds"]]
    left = [0.0] * len(runs)
    for part in ("target", "draft", "engine"):
        widths = [1e3 * _share(run, part) / run["rounds"] for run in runs]
        axes.barh([run["name"] for run in runs], widths, left=left, color=_COLOURS[part], label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per round", fontsize=8)
    axes.legend(fontsize=7)


def _share(run: dict[str, Any], part: str) -> float:
    """Seconds of a part; the engine's hold everything that is not timed by name."""
    named = {"target": 0.0, "draft": 0.0}
    for stage, owner in _STAGES.items():
        if owner in named:
            named[owner] += run["stage_seconds"][stage]
    return named[part] if part in named else max(run["seconds"] - sum(named.values()), 0.0)


def _bounds(axes: Any, results: dict[str, Any]) -> None:
    runs = [run for run in results["runs"] if run.get("bound")]
    marks = {"engine_free_tokens_per_s": "|", "curve_tokens_per_s": "x", "free_draft_tokens_per_s": "d"}
    axes.barh([run["name"] for run in runs], [run["tokens_per_s"] for run in runs], color="#9aa5b1", label="reached")
    for name, mark in marks.items():
        known = [(run["bound"][name], place) for place, run in enumerate(runs) if name in run["bound"]]
        if known:
            label = name.removesuffix("_tokens_per_s").replace("_", " ")
            axes.scatter(*zip(*known, strict=True), marker=mark, color="#b3402e", zorder=3, label=f"bound: {label}")
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second without the prefill", fontsize=8)
    axes.legend(fontsize=7)
