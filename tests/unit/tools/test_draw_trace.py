"""tools/draw_trace.py: what it reads out of a trace."""

import json
from pathlib import Path
from typing import Any

import pytest

from gptpar.errors import GptparError
from tools import draw_trace as tool
from tools import trace_lanes as trace

START = 5_000_000.0  # microseconds: a trace's clock does not begin at 0


def event(name: str, start: float, stop: float, category: str, ph: str = "X") -> dict[str, Any]:
    """From and to in ms after the first kernel."""
    return {"ph": ph, "cat": category, "name": name, "ts": START + 1e3 * start, "dur": 1e3 * (stop - start)}


def hand_made() -> list[dict[str, Any]]:
    """Two steps, 0-10 and 10-20 ms; the GPU computes in 0-8, 10-16 and 18-20, twice at the same time in 12-14."""
    return [
        event("nvjet_a", 0, 8, "kernel"),
        event("triton_b", 10, 16, "kernel"),
        event("flash_c", 12, 14, "kernel"),
        event("Memset (Device)", 18, 20, "gpu_memset"),
        event("Memcpy DtoH (Device -> Pinned)", 11, 12, "gpu_memcpy"),
        event("Memcpy DtoH (Device -> Pinned)", 13, 14.5, "gpu_memcpy"),
        event("Memcpy HtoD (Pinned -> Device)", 17, 18, "gpu_memcpy"),
        event("CPU Adam: layers.1", 9, 13, "cpu_optimizer"),
        event("CPU Adam: layers.0", 13, 15, "cpu_optimizer"),
        event("CPU Adam: embedding", 15, 18, "cpu_optimizer"),
        event("wait for the CPU optimizer", 14, 18, "user_annotation"),
        event("ProfilerStep#4", -1, 6, "user_annotation"),
        event("ProfilerStep#4", 0, 10, "gpu_user_annotation"),
        event("ProfilerStep#5", 11, 14.5, "gpu_user_annotation"),  # on the stream of transfers
        event("ProfilerStep#5", 10, 20, "gpu_user_annotation"),
        event("aten::mm", 3, 4, "cpu_op"),
        {"ph": "M", "name": "process_name", "pid": 1},
    ]


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def test_a_step_is_divided_into_lanes(tmp_path: Path) -> None:
    timeline = trace.load_trace(write(tmp_path / "trace.json", hand_made()))
    assert timeline.steps == [(0, 10), (10, 20)]
    assert trace.NCCL not in timeline.lanes
    span = trace.window(timeline, None, None)
    assert span == (10, 20)
    part = timeline.cut(*span)
    assert [(e.name, e.start, e.stop) for e in part.lanes[trace.ADAM]] == [
        ("layers.1", 10, 13),
        ("layers.0", 13, 15),
        ("embedding", 15, 18),
    ]
    busy = {lane: part.busy(lane) for lane in part.lanes}
    assert busy == {trace.GPU: 8, trace.TO_HOST: 2.5, trace.TO_DEVICE: 1, trace.ADAM: 8, trace.WAITS: 4}
    assert part.both(trace.ADAM, trace.GPU) == 6
    lines = tool.table(part, span).splitlines()
    assert lines[0] == "from 10.0 to 20.0 ms: 10.0 ms"
    assert lines[1].split() == ["GPU", "computing", "8.0", "ms", "80.0", "%", "3", "events"]
    assert lines[-2].split() == ["GPU", "not", "computing", "2.0", "ms", "20.0", "%"]
    assert lines[-1].split() == ["CPU", "Adam", "under", "GPU", "work", "6.0", "ms"]
    for start, stop in ((5.0, 5.0), (30.0, 40.0), (-1.0, 4.0)):
        with pytest.raises(GptparError, match=f"from {start:g} to {stop:g} ms holds nothing of a trace of 20.0 ms"):
            trace.window(timeline, start, stop)
    communicating = [*hand_made(), event("ncclDevKernel_AllReduce", 16, 17, "kernel")]
    part = trace.load_trace(write(tmp_path / "trace.json", communicating)).cut(*span)
    assert part.busy(trace.NCCL) == 1 and part.busy(trace.GPU) == 8
    assert "GPU not computing              1.0 ms" in tool.table(part, span)
