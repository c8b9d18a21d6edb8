"""The rule for outliers: a step whose loss or gradient norm is far above those of the last steps changes nothing.

The rule is that of OLMo-core's ``SkipStepOptimizer``. With the losses ``l`` and gradient norms ``n`` of the W steps
before it (128 by default), a step is an *outlier* if::

    loss - mean(l) > k * std(l)    or    norm - mean(n) > k * std(n)

``k`` is sigma (6 in OLMo's runs), ``std`` the sample's standard deviation (one less than the number of steps in the
denominator), and ``norm`` the gradient norm before clipping. No step is an outlier before the window has
``max(2, W // 2)`` steps. An outlier enters the window like any other step. So a level that stays high becomes the usual
one, and the run goes on. A step whose loss or norm is not finite is no outlier and does not enter the window: it is
skipped anyway.

A skipped outlier leaves weights, moments, and the optimizer's count of steps for its bias corrections as they are.
Data, learning rate and weight decay go on, as in OLMo-core. (A non-finite step does not count for the schedules, as in
Megatron-LM.) An outlier is no overflow: the loss scale does not change.

The device decides, from numbers that are the same on all processes (fp64 sums over all of them). So training does not
wait, and all processes decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

NOT_FINITE, OUTLIER = 1.0, 2.0
"""Why a step was skipped: its gradient was not finite (optimizers say that), or it was an outlier. 0: not skipped."""

MIN_JUDGED = 2
"""Fewest steps that have a standard deviation."""


class SkipStep:
    """The window of the last steps, on the device.

    Args:
        sigma: k of the rule.
        window: W of the rule, at least 2.
    """

    def __init__(self, sigma: float, window: int, device: torch.device):
        self._sigma, self._window = sigma, window
        self._least = max(MIN_JUDGED, window // 2)
        # Rows: losses, norms. The newest are last, and NaN is where there was no step yet. One more column than the
        # window: it keeps the last step's own window until the host learns whether that step was an outlier.
        self._values = torch.full((2, window + 1), float("nan"), dtype=torch.float64, device=device)
        self._is_outlier = torch.zeros((), dtype=torch.bool, device=device)
        self._num_outliers = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def num_outliers(self) -> int:
        """Outliers so far; reading it waits for the device."""
        return int(self._num_outliers.item())

    @torch.no_grad()
    def judge(self, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Record a step's loss and norm. Returns the norm, or NaN for an outlier, so that the optimizer skips it.

        Args:
            loss: the mean loss of the global batch (fp64 scalar on the device).
            norm: of the whole gradient, before clipping and without the loss scale (likewise).
        """
        latest = torch.stack([loss, norm])
        last = self._values[:, 1:]
        filled = ~last.isnan()
        count = filled.sum(1)
        mean = last.nansum(1) / count
        squares = torch.where(filled, (last - mean[:, None]).square(), 0.0).sum(1)
        std = (squares / (count - 1)).sqrt()
        is_finite = latest.isfinite().all()
        is_far = (latest - mean > self._sigma * std).any()
        self._is_outlier = is_finite & is_far & (count[0] >= self._least)
        self._num_outliers += self._is_outlier
        moved = torch.cat([self._values[:, 1:], latest[:, None]], dim=1)
        self._values = torch.where(is_finite, moved, self._values)
        return torch.where(self._is_outlier, float("nan"), norm)

    def reason(self, skipped: torch.Tensor) -> torch.Tensor:
        """``skipped`` (0 or 1) of the step judged last; :data:`OUTLIER` if that is the reason."""
        return torch.where(self._is_outlier, OUTLIER, skipped)

    def window(self, *, of_last: bool = False) -> dict[str, list[float]]:
        """Losses and norms of the window, the oldest first; waits for the device.

        Args:
            of_last: the window with which the last step was compared, not the one for the next step.
        """
        values = self._values[:, :-1] if of_last else self._values[:, 1:]
        losses, norms = values[:, ~values[0].isnan()].tolist()
        return {"losses": losses, "norms": norms}

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, exact in JSON."""
        return {**self.window(), "num_outliers": self.num_outliers}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint's window (``None``: it has none); a shorter window takes the newest steps."""
        if state is None:
            return
        found = torch.tensor([state["losses"], state["norms"]], dtype=torch.float64)[:, -self._window :]
        self._values.fill_(float("nan"))
        if found.numel():
            self._values[:, -found.shape[1] :] = found.to(self._values.device)
        self._num_outliers.fill_(state["num_outliers"])


def step_unless_outlier(
    rule: SkipStep | None, loss: torch.Tensor, norm: torch.Tensor, take: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Judge a step by the rule, if there is one, and take it.

    Args:
        take: takes a step with a gradient norm; returns 1 if the norm is not finite and the step was skipped, else 0.

    Returns:
        What ``take`` returned, or :data:`OUTLIER`.
    """
    return take(norm) if rule is None else rule.reason(take(rule.judge(loss, norm)))


def is_window(state: Any) -> bool:
    """Whether a JSON value may be a result of :meth:`SkipStep.state`."""
    if not isinstance(state, dict) or state.keys() != {"losses", "norms", "num_outliers"}:
        return False
    lists, count = (state["losses"], state["norms"]), state["num_outliers"]
    if any(type(one) is not list for one in lists) or type(count) is not int or count < 0:
        return False
    are_finite = all(type(value) in (int, float) and math.isfinite(value) for one in lists for value in one)
    return are_finite and len(lists[0]) == len(lists[1])


def make_skip_step(sigma: float | None, window: int, device: torch.device) -> SkipStep | None:
    """The window of a run; ``None`` without a sigma."""
    return None if sigma is None else SkipStep(sigma, window, device)
