"""Draws a step of a trace as lanes: the GPU, transfers to and from the host, the CPU optimizer, the loop's waits.

    gptpar benchmark ... --cpu-optimizer --trace trace.json
    python tools/draw_trace.py trace.json step.png [--from-ms A --to-ms B] [--phase A B NAME ...] [--title TEXT]

Times are milliseconds after the first kernel of the trace. Without a window, the last step on the GPU is drawn. The
picture's figures are printed, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gptpar.reporting.trace import Interval
from gptpar.system.command_line import Parser, run
from tools.trace_lanes import ADAM, GPU, NCCL, Timeline, load_trace, window
from tools.trace_picture import draw_trace


def table(part: Timeline, span: Interval) -> str:
    """Each lane's time in the window, and how much of the CPU's work runs under the GPU's."""
    width = span[1] - span[0]
    lines = [f"from {span[0]:.1f} to {span[1]:.1f} ms: {width:.1f} ms"]
    for lane, events in part.lanes.items():
        busy = part.busy(lane)
        lines.append(f"{lane:26}{busy:8.1f} ms {100 * busy / width:5.1f} %  {len(events):6,} events")
    idle = width - part.busy(*({GPU, NCCL} & set(part.lanes)))
    lines.append(f"{'GPU not computing':26}{idle:8.1f} ms {100 * idle / width:5.1f} %")
    return "\n".join([*lines, f"{'CPU Adam under GPU work':26}{part.both(ADAM, GPU):8.1f} ms"])


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
    timeline = load_trace(options.trace)
    span = window(timeline, options.from_ms, options.to_ms)
    part = timeline.cut(*span)
    print(table(part, span))
    draw_trace(part, span, options.picture, options.title, phases)
    return 0


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
