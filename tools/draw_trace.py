"""Draw a step of a trace as lanes: the GPU, transfers to and from the host, the CPU optimizer, the loop's waits.

    gptpar benchmark ... --cpu-optimizer --trace trace.json
    python tools/draw_trace.py trace.json step.png [--from-ms A --to-ms B] [--phase A B NAME ...] [--title TEXT]

Times are milliseconds after the first kernel of the trace. Without a window the last step is drawn, as the GPU ran it.
The picture's figures are printed, too.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gptpar.cli.benchmark.breakdown import COMMUNICATION, HOST_UPDATE, TRANSFERS, Span, covered, kind_of
from gptpar.errors import GptparError
from gptpar.system.command_line import Parser, run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GPU, TO_HOST, TO_DEVICE = "GPU computing", "gradients to the host", "parameters to the device"
ADAM, WAITS, NCCL = "CPU Adam", "training loop waits", "communication"
LANES = (GPU, NCCL, TO_HOST, TO_DEVICE, ADAM, WAITS)
COLORS = {GPU: "#2a9d6f", NCCL: "#e08e1b", TO_HOST: "#1f5fa8", TO_DEVICE: "#7b4fa3", WAITS: "#9aa1ab"}
NO_LAYER_COLOR = "#d1495b"
ADAM_EVENT, WAIT_EVENT, STEP_EVENT = "CPU Adam: ", "wait for the CPU optimizer", "ProfilerStep"  # in the trace
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
LABEL_SHARE = 0.007  # of the picture's width that one letter takes


@dataclass(frozen=True)
class Event:
    """Something that took time, in ms after the first kernel.

    Attributes:
        name: the unit of CPU Adam's, else as in the trace.
    """

    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """What a trace holds.

    Attributes:
        lanes: events of each lane by their start; `NCCL` only where there is communication.
        steps: each step on the device.
    """

    lanes: dict[str, list[Event]]
    steps: list[Span]

    def cut(self, start: float, stop: float) -> Timeline:
        """What lies in a window (ms); what only begins or ends in it is shortened."""
        lanes = {
            lane: [replace(e, start=max(e.start, start), stop=min(e.stop, stop)) for e in events]
            for lane, events in self.lanes.items()
        }
        return Timeline({lane: [e for e in events if e.start < e.stop] for lane, events in lanes.items()}, self.steps)

    def busy(self, *lanes: str) -> float:
        """Milliseconds in which something happens in at least one of the lanes."""
        return covered((e.start, e.stop) for lane in lanes for e in self.lanes[lane])

    def both(self, one: str, other: str) -> float:
        """Milliseconds in which something happens in both."""
        return self.busy(one) + self.busy(other) - self.busy(one, other)


def lane_of(event: dict[str, Any]) -> str | None:
    """Where an event of the trace is drawn, if at all."""
    name, category = event["name"], event.get("cat")
    if category in DEVICE_EVENTS:
        kind = kind_of(name)
        if kind == TRANSFERS:
            return TO_HOST if "DtoH" in name else TO_DEVICE
        return NCCL if kind == COMMUNICATION else GPU
    if category == HOST_UPDATE:
        return ADAM
    return WAITS if category == "user_annotation" and name == WAIT_EVENT else None


def load(path: Path) -> Timeline:
    """Read a trace.

    Raises:
        GptparError: the file is no such trace, or of a run without a GPU.
    """
    try:
        content = json.loads(path.read_text())
        found = [e for e in content["traceEvents"] if e.get("ph") == "X"]
        device = [e for e in found if e.get("cat") in DEVICE_EVENTS]
        origin = min((e["ts"] for e in device), default=0.0)
        lanes: dict[str, list[Event]] = {lane: [] for lane in LANES}
        steps: dict[str, Span] = {}
        for e in sorted(found, key=lambda e: e["ts"]):
            start, lane = (e["ts"] - origin) / 1e3, lane_of(e)
            stop = start + e["dur"] / 1e3
            if lane is not None:
                lanes[lane].append(Event(e["name"].removeprefix(ADAM_EVENT), start, stop))
            elif e.get("cat") == "gpu_user_annotation" and e["name"].startswith(STEP_EVENT):
                before = steps.get(e["name"], (start, stop))  # each stream has its own
                steps[e["name"]] = (min(before[0], start), max(before[1], stop))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GptparError(
            f"{path} is not a trace ({type(error).__name__}: {error}): give a file that gptpar benchmark --trace wrote."
        ) from error
    if not device:
        raise GptparError(f"{path} holds {len(found):,} events but no GPU's kernels: give the trace of a run on a GPU.")
    return Timeline({lane: events for lane, events in lanes.items() if events or lane != NCCL}, list(steps.values()))


def window(timeline: Timeline, start: float | None, stop: float | None) -> Span:
    """The part to draw (ms): what is asked for, else the last step.

    Raises:
        GptparError: there is nothing in it.
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


def table(part: Timeline, span: Span) -> str:
    """Each lane's time in the window, and what of the CPU's work the GPU's hides."""
    width = span[1] - span[0]
    lines = [f"from {span[0]:.1f} to {span[1]:.1f} ms: {width:.1f} ms"]
    for lane, events in part.lanes.items():
        busy = part.busy(lane)
        lines.append(f"{lane:26}{busy:8.1f} ms {100 * busy / width:5.1f} %  {len(events):6,} events")
    idle = width - part.busy(*({GPU, NCCL} & set(part.lanes)))
    lines.append(f"{'GPU not computing':26}{idle:8.1f} ms {100 * idle / width:5.1f} %")
    return "\n".join([*lines, f"{'CPU Adam under GPU work':26}{part.both(ADAM, GPU):8.1f} ms"])


def depth_of(unit: str) -> int | None:
    """A layer's number; ``None`` for embeddings and the final norm."""
    number = re.fullmatch(r"layers\.(\d+)", unit)
    return int(number[1]) if number else None


def draw(part: Timeline, span: Span, path: Path, title: str, phases: Sequence[tuple[float, float, str]]) -> None:
    """Write the PNG.

    Args:
        part: what lies in the window `span` (ms).
        phases: from, to and name of what is written above the lanes.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6), dpi=110, layout="constrained", facecolor="white")
    axes = figure.subplots()
    width = span[1] - span[0]
    for row, (lane, events) in enumerate(part.lanes.items()):
        bars = [(e.start, e.stop - e.start) for e in events]
        place = (row - 0.38, 0.76)
        colors = _adam_colors(events) if lane == ADAM else COLORS[lane]
        # Thousands of kernels side by side: an edge would hide them.
        edge = 0.5 if lane == ADAM else 0.0
        axes.broken_barh(bars, place, facecolors=colors, edgecolors="white", linewidth=edge)
        axes.annotate(
            f"{part.busy(lane):.1f} ms", (1.005, row), xycoords=("axes fraction", "data"), va="center", fontsize=9
        )
        if lane == ADAM:
            _write_units(axes, events, row, width)
    for start, stop, name in phases:
        for edge_ms in (start, stop):
            axes.axvline(edge_ms, color="#555555", lw=0.8, ls=":")
        axes.text((start + stop) / 2, -0.62, name, ha="center", va="center", fontsize=10)
    axes.set_yticks(range(len(part.lanes)), list(part.lanes))
    axes.set(xlim=span, ylim=(len(part.lanes) - 0.5, -0.9 if phases else -0.5), xlabel="ms after the first kernel")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    if title:
        axes.set_title(title, fontweight="bold", loc="left")
    figure.savefig(path, format="png")


def _adam_colors(events: Sequence[Event]) -> list[Any]:
    """Shallow layers light, deep ones dark; what is no layer red."""
    from matplotlib import colormaps

    depths = [depth_of(e.name) for e in events]
    deepest = max((d for d in depths if d is not None), default=0) or 1
    return [NO_LAYER_COLOR if d is None else colormaps["YlGnBu"](0.25 + 0.7 * d / deepest) for d in depths]


def _write_units(axes: Axes, events: Sequence[Event], row: int, width: float) -> None:
    """The names of CPU Adam's units where there is room; the number is enough for a layer."""
    deepest = max((depth_of(e.name) or 0 for e in events), default=0)
    for unit, pieces in groupby(events, key=lambda e: e.name):
        together = list(pieces)
        depth = depth_of(unit)
        text = unit if depth is None else str(depth)
        start, stop = together[0].start, together[-1].stop
        if stop - start >= LABEL_SHARE * width * len(text):
            color = "black" if depth is not None and depth < 0.6 * deepest else "white"
            over_gaps = {"facecolor": NO_LAYER_COLOR, "edgecolor": "none", "pad": 1.0} if depth is None else None
            axes.text((start + stop) / 2, row, text, ha="center", va="center", fontsize=8, color=color, bbox=over_gaps)


def main(argv: list[str]) -> int:
    """Draw and print."""
    parser = Parser(prog="draw_trace.py", description=__doc__)
    parser.add_argument("trace", type=Path, metavar="TRACE.json", help="written by gptpar benchmark --trace")
    parser.add_argument("picture", type=Path, metavar="OUT.png", help="the picture to write")
    parser.add_argument("--from-ms", type=float, metavar="A", help="begin here (default: with the last step)")
    parser.add_argument("--to-ms", type=float, metavar="B", help="end here (default: with the last step)")
    parser.add_argument(
        "--phase",
        nargs=3,
        action="append",
        metavar=("A", "B", "NAME"),
        help="name this part above the lanes",
    )
    parser.add_argument("--title", default="", metavar="TEXT", help="above the picture")
    options = parser.parse_args(argv)
    try:
        phases = [(float(start), float(stop), name) for start, stop, name in options.phase or ()]
    except ValueError as error:
        parser.error(f"--phase takes two times in ms and a name: {error}")
    timeline = load(options.trace)
    span = window(timeline, options.from_ms, options.to_ms)
    part = timeline.cut(*span)
    print(table(part, span))
    draw(part, span, options.picture, options.title, phases)
    return 0


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
