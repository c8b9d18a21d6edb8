"""The picture of runs: loss, learning rate, gradient norm, tokens/s and the loads of experts over the iterations."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gptpar.config.sections.mlp import LOAD
from gptpar.reporting.banner import format_count
from gptpar.reporting.curves import RunCurves, Values, smooth
from gptpar.reporting.figures import style
from gptpar.reporting.series import last_tenth

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw_runs(runs: list[RunCurves], reference_loss: float | None = None, reference_label: str = "reference") -> Figure:
    """Four panels with one colour for each run, and a fifth one if a run has experts.

    Args:
        reference_loss: adds a dashed line to the loss panel.
    """
    from matplotlib.ticker import LogLocator

    with_experts = any(np.isfinite(run.series[LOAD]).any() for run in runs)
    figure = style.new_figure(13, 12.9 if with_experts else 8.6)
    loss, rate, norm, speed, *more = figure.subplots(3 if with_experts else 2, 2).flat
    loads = more[:1]
    for axes in more[1:]:
        axes.remove()
    for run, color in zip(runs, _colors(len(runs)), strict=True):
        _draw_series(loss, run, "lm_loss", color)
        rate.plot(run.iteration, run.series["learning_rate"], color=color, lw=2)
        _draw_series(norm, run, "grad_norm", color)
        _draw_series(speed, run, "tokens_per_s", color)
        for axes in loads:
            _draw_series(axes, run, LOAD, color)
        marks = {"color": color, "ms": 6, "mec": "white", "mew": 1.0, "clip_on": False, "zorder": 3}
        loss.plot(run.validation_iteration, run.validation_loss, "o", **marks)
    if reference_loss is not None:
        label = f"{reference_label} {reference_loss:.3f}"
        loss.axhline(reference_loss, color=style.LINES, lw=1.4, ls="--", label=label)
    norm.set_yscale("log")
    norm.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    norm.yaxis.set_minor_formatter(lambda value, _: "")
    speed.set_ylim(bottom=0)
    _describe(loss, "Loss", "nats per token", "{:g}".format)
    _describe(rate, "Learning rate", "", lambda value: f"{value:.1e}" if value else "0")
    _describe(norm, "Gradient norm", "before clipping, log scale", "{:g}".format)
    _describe(speed, "Throughput", "tokens/s", _short_count)
    for axes in loads:
        _describe(axes, "Fullest expert", "its tokens over those of an expert on average", "{:g}".format)
    _set_iterations([loss, rate, norm, speed, *loads], runs)
    if len(runs) == 1:
        _add_tokens(loss, runs[0])
        _add_tokens(rate, runs[0])
    _legend(loss, runs)
    figure.suptitle(_headline(runs), fontsize=14, fontweight="bold")
    return figure


def _colors(count: int) -> list[str]:
    return [style.DIFFERENT[i % len(style.DIFFERENT)] for i in range(count)]


def _short_count(value: float) -> str:
    return format_count(value).replace(".00", "")


def _draw_series(axes: Axes, run: RunCurves, key: str, color: str) -> None:
    axes.plot(run.iteration, run.series[key], color=color, lw=0.8, alpha=0.28)
    axes.plot(*smooth(run.iteration, run.series[key]), color=color, lw=2)


def _legend(loss: Axes, runs: list[RunCurves]) -> None:
    """The loss panel's legend: the runs by colour, then the kinds of marks."""
    for run, color in zip(runs, _colors(len(runs)), strict=True):
        label = run.name if len(runs) > 1 else "training, smoothed"
        loss.plot([], [], color=color, lw=2, label=label)
    if any(len(run.validation_iteration) for run in runs):
        loss.plot([], [], "o", color=style.DIFFERENT[0] if len(runs) == 1 else style.LINES, ms=6, label="validation")
    loss.legend(frameon=False, fontsize=10)


def _describe(axes: Axes, title: str, unit: str, tick: Callable[[float], str]) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel("iteration", fontsize=10)
    axes.set_ylabel(unit, fontsize=10)
    axes.yaxis.set_major_formatter(lambda value, _: tick(value))
    axes.grid(True, color=style.GRID, lw=0.8)
    axes.set_axisbelow(True)
    style.open_frame(axes)


def _set_iterations(panels: list[Axes], runs: list[RunCurves]) -> None:
    low, high = min(run.iteration[0] for run in runs), max(run.iteration[-1] for run in runs)
    for axes in panels:
        axes.set_xlim(low - 1, high)
        style.with_separators(axes.xaxis)


def _add_tokens(axes: Axes, run: RunCurves) -> None:
    """An axis of consumed tokens along the top; it is exact for growing batches, too, and linear beyond the run."""
    if len(run.tokens) < 2 or not np.all(np.diff(run.tokens) > 0):
        return
    iteration, tokens = _extended(run.iteration), _extended(run.tokens)

    there, back = (partial(np.interp, xp=xp, fp=fp) for xp, fp in ((iteration, tokens), (tokens, iteration)))
    top = axes.secondary_xaxis("top", functions=(there, back))
    top.xaxis.set_major_formatter(lambda value, _: _short_count(value))
    top.set_xlabel("tokens", fontsize=10)
    top.tick_params(labelsize=9)


def _extended(values: Values) -> Values:
    before, after = values[0] - values[1], values[-1] - values[-2]
    return np.concatenate([[values[0] + before], values, [values[-1] + 1000 * after]])


def _headline(runs: list[RunCurves]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs" if len(runs) > 3 else " and ".join(run.name for run in runs)
    run = runs[0]
    losses = run.series["lm_loss"]
    finite = losses[np.isfinite(losses)].tolist()
    last = last_tenth(finite) if finite else math.nan
    extent = f"{run.iteration[-1]:,.0f} iterations, {format_count(run.tokens[-1])} tokens"
    return f"{run.name}: {extent}, loss {last:.3f} over the last tenth"
