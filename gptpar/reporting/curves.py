"""Reads a run's curves from its ``metrics.jsonl``, and smooths them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gptpar.config.sections.mlp import LOAD
from gptpar.errors import GptparError
from gptpar.reporting.metrics_file import FILE_NAME, read_metrics
from gptpar.reporting.series import series

Values = NDArray[np.float64]

_HALF_WINDOW = 0.02  # fraction of the run on either side of a point of the smoothed curve


@dataclass(frozen=True)
class RunCurves:
    """The curves of one run; nulls are NaN."""

    name: str
    iteration: Values
    tokens: Values
    series: dict[str, Values]
    validation_iteration: Values
    validation_loss: Values


def load_run(path: Path, name: str) -> RunCurves:
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
    return RunCurves(
        name=name,
        iteration=_column(file, training, "iteration"),
        tokens=_column(file, training, "consumed_tokens"),
        series={key: _column(file, training, key) for key in keys}
        | {LOAD: _column(file, [{LOAD: None, **one} for one in training], LOAD)},
        validation_iteration=_column(file, evaluated, "iteration"),
        validation_loss=_column(file, evaluated, "validation_loss"),
    )


def _column(file: Path, objects: list[dict[str, Any]], key: str) -> Values:
    return np.array([np.nan if value is None else value for value in series(file, objects, key)], dtype=np.float64)


def smooth(x: Values, values: Values) -> tuple[Values, Values]:
    """(x, running median) at up to 1,000 points; robust against spikes, and NaN is ignored.

    The window covers a twenty-fifth of the series and is centred. It shrinks towards the first point, where curves are
    steep, so that the smoothed curve does not lag.
    """
    half = round(len(values) * _HALF_WINDOW)
    centres = np.unique(np.linspace(0, len(values) - 1, min(len(values), 1000)).round().astype(int))
    windows = (values[c - min(half, c) : c + min(half, c) + 1] for c in centres)
    finite = (window[np.isfinite(window)] for window in windows)
    return x[centres], np.array([np.median(w) if len(w) else np.nan for w in finite])
