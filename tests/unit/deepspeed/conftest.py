"""What the tests of ``gptpar.deepspeed`` leave behind: no group of processes."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def leave_the_group() -> Iterator[None]:
    """``initialize`` of the namespace joins a group of one process, which other tests make themselves."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
