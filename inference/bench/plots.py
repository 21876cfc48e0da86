"""Results of `bench` as a bar chart. matplotlib is optional: without it a notice says how to get it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from selfspec.inference.bench.tables import title
from selfspec.outputs import whole_file

_log = logging.getLogger(__name__)
_COLOURS = {"baseline": "#9aa5b1", "draft": "#2f6fab"}


def plot_speed(results: dict[str, Any], path: str | Path) -> Path | None:
    """Tokens per second by run, with speed-up and spread over prompts, as PNG (written whole or not at all).

    Returns:
        The path, or None when matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        _log.warning("no chart: matplotlib is not installed; run: pip install matplotlib")
        return None
    runs = results["runs"]
    figure = Figure(figsize=(8.5, 1.4 + 0.55 * len(runs)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    _draw(figure.add_subplot(), runs)
    figure.suptitle(_wrapped(title(results)), fontsize=10, x=0.01, ha="left")
    path = Path(path)
    with whole_file(path) as work:
        figure.savefig(work, format="png")
    return path


def _draw(axes: Any, runs: list[dict[str, Any]]) -> None:
    rates = [run["tokens_per_s"] for run in runs]
    drafts = [run["accepted_by_depth"] != [] for run in runs]
    axes.barh(
        [run["name"] for run in runs],
        rates,
        color=[_COLOURS["draft" if is_draft else "baseline"] for is_draft in drafts],
        xerr=_spread(runs),
        error_kw={"ecolor": "#333333", "capsize": 3, "elinewidth": 1},
    )
    top = max([*rates, *((run["tokens_per_s_quartiles"] or [0, 0])[1] for run in runs)])
    for place, run in enumerate(runs):
        end = max(run["tokens_per_s"], (run["tokens_per_s_quartiles"] or [0, 0])[1])
        speedup = "" if run["speedup"] is None else f", {run['speedup']:.2f}x"
        axes.text(end + 0.015 * top, place, f"{run['tokens_per_s']:.1f}{speedup}", va="center", fontsize=9)
    axes.set_xlim(0, (top or 1) * 1.22)
    axes.invert_yaxis()
    axes.set_xlabel(
        "tokens per second without the prefill; whiskers: quartiles over prompts; x: median ratio to plain", fontsize=8
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _spread(runs: list[dict[str, Any]]) -> list[list[float]]:
    """Distances from each bar's end down to the lower and up to the upper quartile."""
    down, up = [], []
    for run in runs:
        low, high = run["tokens_per_s_quartiles"] or [run["tokens_per_s"]] * 2
        down.append(max(run["tokens_per_s"] - low, 0.0))
        up.append(max(high - run["tokens_per_s"], 0.0))
    return [down, up]


def _wrapped(text: str) -> str:
    """The title on two lines."""
    parts = text.split(", ")
    return ", ".join(parts[:4]) + "\n" + ", ".join(parts[4:])
