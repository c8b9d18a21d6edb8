"""A hung process is noticed after the time that was asked for, on every axis."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from gptpar.topology.groups import _new_group


def test_the_groups_of_axes_wait_as_long_as_the_world() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    try:
        group = _new_group([0])
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
    finally:
        dist.destroy_process_group()
