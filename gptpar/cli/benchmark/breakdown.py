"""Shows where a step's time goes on the device: kernels by kind, and the time in which none computes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import DeviceType

from gptpar.reporting.trace import COMMUNICATION, HOST_UPDATE, KINDS, OTHER, TRANSFERS, Interval, covered, kind_of
from gptpar.run.loop import StepListener

TRACED_STEPS = 2
UNTRACED_BEFORE = 1
"""Steps that the profiler skips, because the first one includes the profiler's own start."""

HOST_LANE = 1 << 22  # no thread of the system has this number


@dataclass(frozen=True)
class Breakdown:
    """Milliseconds of a step on one device.

    Attributes:
        kinds: summed kernel time by kind; kernels that run at the same time count twice.
        exposed: time of communication, or of transfers to and from the host, while no kernel computes.
        idle: time in which nothing runs.
        step: the whole step.
    """

    kinds: dict[str, float]
    exposed: float
    idle: float
    step: float

    @property
    def computing(self) -> float:
        """Time in which at least one kernel computes."""
        return self.step - self.exposed - self.idle

    def summary(self) -> dict[str, float]:
        """All times, by their names in the table."""
        return {
            "computing (union)": self.computing,
            "exposed communication and transfers": self.exposed,
            "nothing running": self.idle,
            "step": self.step,
            "not computing, share": 100 * (1 - self.computing / self.step) if self.step else 0.0,
        }


def break_down(kernels: Sequence[tuple[str, float, float]], steps: int) -> Breakdown:
    """Sum up the kernels (name, start and stop in ms) of a number of consecutive steps."""
    if not kernels:
        return Breakdown({}, 0.0, 0.0, 0.0)
    kinds: dict[str, float] = {}
    compute: list[Interval] = []
    for name, start, stop in kernels:
        kind = kind_of(name)
        kinds[kind] = kinds.get(kind, 0.0) + (stop - start) / steps
        if kind not in (COMMUNICATION, TRANSFERS):
            compute.append((start, stop))
    everything = [(start, stop) for _, start, stop in kernels]
    span = max(stop for _, stop in everything) - min(start for start, _ in everything)
    busy, computing = covered(everything), covered(compute)
    return Breakdown(kinds, (busy - computing) / steps, (span - busy) / steps, span / steps)


class Tracer(StepListener):
    """Profiles the last steps of a run; without a GPU, the host's operators.

    Args:
        first: number of steps before it begins.
    """

    def __init__(self, first: int):
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        schedule = torch.profiler.schedule(wait=first, warmup=UNTRACED_BEFORE, active=TRACED_STEPS, repeat=1)
        every_thread = _ExperimentalConfig(profile_all_threads=True)  # the CPU optimizer's
        self._profile = torch.profiler.profile(
            activities=activities, schedule=schedule, experimental_config=every_thread
        )

    def begin(self) -> None:
        """Note that the run begins."""
        self._profile.start()

    def step(self) -> None:
        """Note that a step was launched."""
        self._profile.step()

    def end(self) -> None:
        """End the profile, after the device has finished."""
        self._profile.stop()

    def save(self, path: Path, host_updates: Sequence[tuple[str, float, float]] = ()) -> None:
        """Write a trace for Perfetto or chrome://tracing.

        Args:
            host_updates: (unit, begin, end) of the CPU optimizer's updates, whose threads the profiler does not see;
                times of :func:`time.monotonic`.
        """
        self._profile.export_chrome_trace(str(path))
        if host_updates:
            path.write_text(json.dumps(with_host_updates(json.loads(path.read_text()), host_updates)))

    def breakdown(self) -> Breakdown:
        """The sum of the device's work."""
        events: list[Any] = list(self._profile.events() or [])
        kernels = [
            (event.name, event.time_range.start / 1e3, event.time_range.end / 1e3)
            for event in events
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        ]
        return break_down(kernels, TRACED_STEPS)


def with_host_updates(trace: dict[str, Any], updates: Sequence[tuple[str, float, float]]) -> dict[str, Any]:
    """The trace with an additional lane for the CPU optimizer's updates in its time."""
    shift = time.time() - time.monotonic() - trace["baseTimeNanoseconds"] / 1e9
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    first, last = min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events)
    lane = {"pid": os.getpid(), "tid": HOST_LANE}
    spans = [
        {
            "ph": "X", "cat": HOST_UPDATE, "name": f"CPU Adam: {unit}", **lane,
            "ts": 1e6 * (begin + shift), "dur": 1e6 * (end - begin),
        }
        for unit, begin, end in updates
    ]  # fmt: skip
    inside = [span for span in spans if first <= span["ts"] and span["ts"] + span["dur"] <= last]
    name = {"ph": "M", "name": "thread_name", "ts": first, **lane, "args": {"name": "CPU Adam"}}
    return {**trace, "traceEvents": [*trace["traceEvents"], name, *inside]}


def table(ranks: Sequence[Breakdown]) -> str:
    """One column for each rank, in ms of a step."""
    of_kinds = {name: [rank.kinds.get(name, 0.0) for rank in ranks] for name in (*KINDS, OTHER)}
    rows = {name: values for name, values in of_kinds.items() if any(values)}
    together = [rank.summary() for rank in ranks]
    rows |= {name: [summary[name] for summary in together] for name in together[0]}
    lines = [f"{'ms of a step':36}" + "".join(f"{f'rank {i}':>10}" for i in range(len(ranks)))]
    for name, values in rows.items():
        lines.append(f"{name:36}" + "".join(f"{value:9.1f}{'%' if 'share' in name else ' '}" for value in values))
    return "\n".join(lines)
