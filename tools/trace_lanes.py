"""Reads traces of training steps: a lane of events for each part of the machine.

``gptpar benchmark --trace`` writes them in the format of chrome://tracing. Times here are milliseconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gptpar.errors import GptparError
from gptpar.reporting.trace import COMMUNICATION, HOST_UPDATE, TRANSFERS, Interval, covered, kind_of
from gptpar.system.files import read_regular

GPU, TO_HOST, TO_DEVICE = "GPU computing", "gradients to the host", "parameters to the device"
ADAM, WAITS, NCCL = "CPU Adam", "training loop waits", COMMUNICATION
LANES = (GPU, NCCL, TO_HOST, TO_DEVICE, ADAM, WAITS)
ADAM_EVENT, WAIT_EVENT, STEP_EVENT = "CPU Adam: ", "wait for the CPU optimizer", "ProfilerStep"  # in the trace
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class TraceEvent:
    """An event of a trace; times are ms after the first kernel.

    Attributes:
        name: the unit's name, for an update by CPU Adam; otherwise the event's name in the trace.
    """

    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """The contents of a trace.

    Attributes:
        lanes: lane -> its events, ordered by their start; there is an ``NCCL`` lane only if there is communication.
        steps: (begin, end) of each step on the device.
    """

    lanes: dict[str, list[TraceEvent]]
    steps: list[Interval]

    def cut(self, start: float, stop: float) -> Timeline:
        """The events in a window (ms); an event that is partly outside is shortened."""
        lanes = {
            lane: [replace(e, start=max(e.start, start), stop=min(e.stop, stop)) for e in events]
            for lane, events in self.lanes.items()
        }
        return Timeline({lane: [e for e in events if e.start < e.stop] for lane, events in lanes.items()}, self.steps)

    def busy(self, *lanes: str) -> float:
        """Milliseconds in which there is an event in at least one of the lanes."""
        return covered((e.start, e.stop) for lane in lanes for e in self.lanes[lane])

    def both(self, one: str, other: str) -> float:
        """Milliseconds in which there is an event in both lanes."""
        return self.busy(one) + self.busy(other) - self.busy(one, other)


def lane_of(event: dict[str, Any]) -> str | None:
    """The lane of an event; ``None`` if it is in none."""
    name, category = event["name"], event.get("cat")
    if category in DEVICE_EVENTS:
        kind = kind_of(name)
        if kind == TRANSFERS:
            return TO_HOST if "DtoH" in name else TO_DEVICE
        return NCCL if kind == COMMUNICATION else GPU
    if category == HOST_UPDATE:
        return ADAM
    return WAITS if category == "user_annotation" and name == WAIT_EVENT else None


def load_trace(path: Path) -> Timeline:
    """Read a trace.

    Raises:
        GptparError: the file is no such trace, or it is of a run without a GPU.
    """
    try:
        content = json.loads(read_regular(path))
        found = [e for e in content["traceEvents"] if e.get("ph") == "X"]
        device = [e for e in found if e.get("cat") in DEVICE_EVENTS]
        timeline = _timeline(found, origin=min((e["ts"] for e in device), default=0.0))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GptparError(
            f"{path} is not a trace ({type(error).__name__}: {error}): give a file that gptpar benchmark --trace wrote."
        ) from error
    if not device:
        raise GptparError(f"{path} holds {len(found):,} events but no GPU's kernels: give the trace of a run on a GPU.")
    return timeline


def _timeline(found: list[dict[str, Any]], origin: float) -> Timeline:
    """The events of a trace, counted from ``origin`` (microseconds, as in the trace)."""
    lanes: dict[str, list[TraceEvent]] = {lane: [] for lane in LANES}
    steps: dict[str, Interval] = {}
    for e in sorted(found, key=lambda e: e["ts"]):
        start, lane = (e["ts"] - origin) / 1e3, lane_of(e)
        stop = start + e["dur"] / 1e3
        if lane is not None:
            lanes[lane].append(TraceEvent(e["name"].removeprefix(ADAM_EVENT), start, stop))
        elif e.get("cat") == "gpu_user_annotation" and e["name"].startswith(STEP_EVENT):
            before = steps.get(e["name"], (start, stop))  # each stream has its own
            steps[e["name"]] = (min(before[0], start), max(before[1], stop))
    return Timeline({lane: events for lane, events in lanes.items() if events or lane != NCCL}, list(steps.values()))


def window(timeline: Timeline, start: float | None, stop: float | None) -> Interval:
    """The window to draw (ms): as given, by default the last step.

    Raises:
        GptparError: the window has no events.
    """
    end = max(e.stop for events in timeline.lanes.values() for e in events)
    last = timeline.steps[-1] if timeline.steps else (0.0, end)
    first, last_ms = (last[0] if start is None else start), (last[1] if stop is None else stop)
    if not 0 <= first < last_ms or first >= end:
        raise GptparError(
            f"the window from {first:g} to {last_ms:g} ms holds nothing of a trace of {end:.1f} ms: "
            "choose --from-ms below --to-ms, both within the trace."
        )
    return first, min(last_ms, end)
