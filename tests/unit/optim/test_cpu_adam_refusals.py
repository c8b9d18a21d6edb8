"""What the update on the CPU does not take: all problems at once, and nothing is changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from gptpar.optim.cpu_adam import CpuAdam
from tests.unit.optim.cpu_adam_runs import HOW, make


def test_ranges_that_are_none_are_refused(library):
    for only, words in (
        (np.array([[0, 4], [3, 5]]), "the ranges of only are not in ascending order"),
        (np.array([[4, 3]]), "the ranges of only are not in ascending order"),
        (np.array([[0, 11]]), "the ranges of only, 0 to 11, do not lie within 10 elements"),
        (np.array([[-1, 3]]), "the ranges of only, -1 to 3, do not lie within 10 elements"),
        (np.array([0, 5]), "only is int64 .2,., not int64 .number of ranges, 2. in one piece"),
        (np.array([[0, 1, 0], [2, 3, 0]])[:, :2], "only is int64 .2, 2., not int64 .number of ranges, 2. in one piece"),
    ):
        for call in (CpuAdam(1).steps, CpuAdam(1).order):
            with pytest.raises(ValueError, match=words):
                call(make(10)[:3], torch.zeros(10), [(0, 10, HOW)], only=only)


def test_all_problems_are_told_at_once():
    p, m, v, grad = make(10)
    how = replace(HOW, lr=float("nan"), step=0, beta1=1.5, beta2=-0.5, divisor=0.0)
    with pytest.raises(ValueError) as caught:
        CpuAdam(1).step(
            p,
            m.double(),
            torch.zeros(20)[::2],
            torch.zeros(9, dtype=torch.int32),
            how,
            into=(p.clone(), m.clone(), torch.zeros(10, device="meta")),
            low=torch.zeros(2, 5, dtype=torch.float64),
        )
    assert str(caught.value).split("; ") == [
        "m is float64, not float32 or bfloat16",
        "v is not contiguous: its strides are (2,)",
        "into[2] is on meta, not on the CPU",
        "grad is int32, not float32 or bfloat16 or float16",
        "grad has the shape (9,), not (10,)",
        "low is float64, not bfloat16 or float16 or float32",
        "low has the shape (2, 5), not (10,)",
        "beta1 is 1.5, not in [0, 1]",
        "beta2 is -0.5, not in [0, 1]",
        "step is 0 and not at least 1",
        "lr is nan, not finite and at least 0",
        "divisor is 0.0, not at least 1e-37, as fp32 needs it",
    ]


def test_outputs_must_not_overlap_anything_else():
    p, m, v, grad = make(10)
    both = torch.zeros(15)
    with pytest.raises(ValueError, match=r"into\[0\] overlaps into\[1\] by 20 bytes; into\[1\] overlaps into\[0\]"):
        CpuAdam(1).step(p, m, v, grad, HOW, into=(both[:10], both[5:], torch.zeros(10)))
    with pytest.raises(ValueError, match=r"into\[0\] overlaps m by 40 bytes"):
        CpuAdam(1).step(p, m, v, grad, HOW, into=(m, p, v))
    with pytest.raises(ValueError, match=r"p overlaps grad by 40 bytes"):
        CpuAdam(1).step(p, m, v, p, HOW)
