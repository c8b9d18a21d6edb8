"""Draws runs from their ``metrics.jsonl``: loss, learning rate, gradient norm and tokens/s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gptpar.errors import GptparError
from gptpar.reporting.banner import format_count
from gptpar.reporting.metrics_file import FILE_NAME, read_metrics
from gptpar.reporting.series import series
from gptpar.system.command_line import Parser

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Values = NDArray[np.float64]

_COLORS = ("#1f5fa8", "#d1495b", "#2a9d6f", "#e08e1b", "#7b4fa3", "#4aa8c0", "#8c6d4f", "#5c677d")
_HALF_WINDOW = 0.02  # of the run, to either side of a point of the strong line


@dataclass(frozen=True)
class Run:
    """The series of one run; nulls are NaN."""

    name: str
    iteration: Values
    tokens: Values
    series: dict[str, Values]
    validation_iteration: Values
    validation_loss: Values


def load_run(path: Path, name: str) -> Run:
    """Read a run's folder or its ``metrics.jsonl``.

    Raises:
        GptparError: the file is missing, has a malformed line, or holds no training iteration yet.
    """
    file = path / FILE_NAME if path.is_dir() else path
    objects = read_metrics(file)
    training = [o for o in objects if "lm_loss" in o]
    if not training:
        raise GptparError(f"{file} holds no training iteration ({len(objects)} lines): nothing to draw yet")
    evaluated = [o for o in objects if "validation_loss" in o]
    keys = ("lm_loss", "learning_rate", "grad_norm", "tokens_per_s")
    return Run(
        name=name,
        iteration=_column(file, training, "iteration"),
        tokens=_column(file, training, "consumed_tokens"),
        series={key: _column(file, training, key) for key in keys},
        validation_iteration=_column(file, evaluated, "iteration"),
        validation_loss=_column(file, evaluated, "validation_loss"),
    )


def _column(file: Path, objects: list[dict[str, Any]], key: str) -> Values:
    return np.array([np.nan if value is None else value for value in series(file, objects, key)], dtype=np.float64)


def smooth(x: Values, values: Values) -> tuple[Values, Values]:
    """Running median over a twenty-fifth of the series at up to 1,000 points; robust to spikes, blind to NaN.

    The window is centred, and shrinks towards the first point, where curves are steep: the line does not lag.
    """
    half = round(len(values) * _HALF_WINDOW)
    centres = np.unique(np.linspace(0, len(values) - 1, min(len(values), 1000)).round().astype(int))
    windows = (values[c - min(half, c) : c + min(half, c) + 1] for c in centres)
    finite = (window[np.isfinite(window)] for window in windows)
    return x[centres], np.array([np.median(w) if len(w) else np.nan for w in finite])


def draw(runs: list[Run], reference_loss: float | None = None, reference_label: str = "reference") -> Figure:
    """Four panels, one colour a run; ``reference_loss`` adds a dashed line to the loss panel."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(13, 8.6), dpi=130, layout="constrained", facecolor="white")
    loss, rate, norm, speed = figure.subplots(2, 2).flat
    for run, color in zip(runs, _colors(len(runs)), strict=True):
        _draw_series(loss, run, "lm_loss", color)
        rate.plot(run.iteration, run.series["learning_rate"], color=color, lw=2)
        _draw_series(norm, run, "grad_norm", color)
        _draw_series(speed, run, "tokens_per_s", color)
        marks = {"color": color, "ms": 6, "mec": "white", "mew": 1.0, "clip_on": False, "zorder": 3}
        loss.plot(run.validation_iteration, run.validation_loss, "o", **marks)
    if reference_loss is not None:
        label = f"{reference_label} {reference_loss:.3f}"
        loss.axhline(reference_loss, color="#555555", lw=1.4, ls="--", label=label)
    norm.set_yscale("log")
    norm.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    norm.yaxis.set_minor_formatter(lambda value, _: "")
    speed.set_ylim(bottom=0)
    _style(loss, "Loss", "nats per token", "{:g}".format)
    _style(rate, "Learning rate", "", lambda value: f"{value:.1e}" if value else "0")
    _style(norm, "Gradient norm", "before clipping, log scale", "{:g}".format)
    _style(speed, "Throughput", "tokens/s", _short_count)
    _set_iterations([loss, rate, norm, speed], runs)
    if len(runs) == 1:
        _add_tokens(loss, runs[0])
        _add_tokens(rate, runs[0])
    _legend(loss, runs)
    figure.suptitle(_headline(runs), fontsize=14, fontweight="bold")
    return figure


def _colors(count: int) -> list[str]:
    return [_COLORS[i % len(_COLORS)] for i in range(count)]


def _short_count(value: float) -> str:
    return format_count(value).replace(".00", "")


def _draw_series(axes: Axes, run: Run, key: str, color: str) -> None:
    axes.plot(run.iteration, run.series[key], color=color, lw=0.8, alpha=0.28)
    axes.plot(*smooth(run.iteration, run.series[key]), color=color, lw=2)


def _legend(loss: Axes, runs: list[Run]) -> None:
    """Name what the loss panel shows: the runs by colour, then the kinds of mark they share."""
    for run, color in zip(runs, _colors(len(runs)), strict=True):
        label = run.name if len(runs) > 1 else "training, smoothed"
        loss.plot([], [], color=color, lw=2, label=label)
    if any(len(run.validation_iteration) for run in runs):
        loss.plot([], [], "o", color=_COLORS[0] if len(runs) == 1 else "#555555", ms=6, label="validation")
    loss.legend(frameon=False, fontsize=10)


def _style(axes: Axes, title: str, unit: str, tick: Callable[[float], str]) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel("iteration", fontsize=10)
    axes.set_ylabel(unit, fontsize=10)
    axes.yaxis.set_major_formatter(lambda value, _: tick(value))
    axes.grid(True, color="#e6e6e6", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _set_iterations(panels: list[Axes], runs: list[Run]) -> None:
    low, high = min(run.iteration[0] for run in runs), max(run.iteration[-1] for run in runs)
    for axes in panels:
        axes.set_xlim(low - 1, high)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _add_tokens(axes: Axes, run: Run) -> None:
    """Consumed tokens along the top, exact under a growing batch too; straight on beyond the run's ends."""
    if len(run.tokens) < 2 or not np.all(np.diff(run.tokens) > 0):
        return
    iteration, tokens = _extended(run.iteration), _extended(run.tokens)

    def to_tokens(x: Any) -> Any:
        return np.interp(x, iteration, tokens)

    def to_iterations(x: Any) -> Any:
        return np.interp(x, tokens, iteration)

    top = axes.secondary_xaxis("top", functions=(to_tokens, to_iterations))
    top.xaxis.set_major_formatter(lambda value, _: _short_count(value))
    top.set_xlabel("tokens", fontsize=10)
    top.tick_params(labelsize=9)


def _extended(values: Values) -> Values:
    before, after = values[0] - values[1], values[-1] - values[-2]
    return np.concatenate([[values[0] + before], values, [values[-1] + 1000 * after]])


def _headline(runs: list[Run]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs" if len(runs) > 3 else " and ".join(run.name for run in runs)
    run = runs[0]
    loss = run.series["lm_loss"]
    last = np.median(recent) if len(recent := loss[np.isfinite(loss)][-20:]) else np.nan
    extent = f"{run.iteration[-1]:,.0f} iterations, {format_count(run.tokens[-1])} tokens"
    return f"{run.name}: {extent}, loss {last:.3f}"


def run_names(paths: list[Path]) -> list[str]:
    """The folders' names, or the whole paths where two names are the same."""
    names = [(path.parent if path.suffix == ".jsonl" else path).resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def main(argv: list[str]) -> int:
    """``gptpar plot RUN [RUN ...]``; 0 once the picture is written."""
    parser = Parser(prog="gptpar plot", description="Draw runs into one picture.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=f"a run folder or its {FILE_NAME}")
    parser.add_argument("--output", type=Path, help="the PNG (default: run.png in the first run's folder)")
    parser.add_argument("--reference-loss", type=float, help="draw a dashed line at this loss")
    parser.add_argument("--reference-label", default="reference", help='its label, such as "unigram entropy"')
    args = parser.parse_args(argv)
    first: Path = args.runs[0]
    output: Path = args.output or (first if first.is_dir() else first.parent) / "run.png"
    if output.suffix != ".png":
        raise GptparError(f"--output {output}: the picture is a PNG; let the name end in .png")
    runs = [load_run(path, name) for path, name in zip(args.runs, run_names(args.runs), strict=True)]
    output.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, args.reference_loss, args.reference_label).savefig(output)
    print(f"wrote {output}")
    return 0
