"""The CPU optimizer's times in a step's report: what was updated between two reports, and how much of it early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from gptpar.reporting.records import CpuOptimizerTimes
from gptpar.run.loop import Run
from gptpar.run.reporter import averaged_times


def test_two_steps_that_end_between_two_reports_count_twice_on_both_sides() -> None:
    """Reports do not wait for the CPU optimizer: no step of it ended before the first, two before the second."""
    moments = iter([(0, 0), (512, 384), (768, 384)])
    host = SimpleNamespace(waited_s=0.25, busy_s=0.5, num_redone=0, updates=lambda: next(moments))
    run = cast(Any, SimpleNamespace(trainer=SimpleNamespace(host=host), cpu_optimizer_before=(0.0, 0.0, 0, 0, 0)))
    first = Run._cpu_optimizer_times(run)
    host.waited_s, host.busy_s, host.num_redone = 0.375, 0.75, 1
    second, third = Run._cpu_optimizer_times(run), Run._cpu_optimizer_times(run)
    assert [first, second, third] == [
        CpuOptimizerTimes(250.0, 500.0, redone=0, num_updated=0, num_ahead=0),
        CpuOptimizerTimes(125.0, 250.0, redone=1, num_updated=512, num_ahead=384),
        CpuOptimizerTimes(0.0, 0.0, redone=0, num_updated=256, num_ahead=0),
    ]
    assert first is not None and second is not None and third is not None
    assert [first.ahead, second.ahead, third.ahead] == [None, 0.75, 0.0]
    window = averaged_times([first, None, second, third])
    assert window == CpuOptimizerTimes(125.0, 250.0, redone=1, num_updated=768, num_ahead=384)
    assert window.ahead == 0.5


def test_nothing_is_averaged_where_no_step_has_times() -> None:
    assert averaged_times([None, None]) is None
