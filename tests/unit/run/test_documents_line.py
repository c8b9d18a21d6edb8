"""What a run says at its start of how it keeps documents apart."""

from __future__ import annotations

import pytest

from gptpar.data.documents import Documents
from gptpar.run.data import documents_line
from tests.helpers import tiny_config


@pytest.mark.parametrize(
    ("flags", "device_type", "kernel"),
    [
        ("--bf16", "cuda", "flash attention of variable length"),
        ("--bf16 --attention-dropout 0.1", "cuda", "flash attention of variable length"),
        ("--bf16 --kv-channels 248 --position-embedding-type alibi", "cuda", "flash attention of variable length"),
        ("--bf16 --kv-channels 256 --position-embedding-type alibi", "cuda", "masks in memory"),
        ("--fp16", "cuda", "masks in memory"),
        ("--fp64", "cuda", "masks in memory"),
        ("--fp64", "cpu", "a call for each document"),
        ("--bf16 --attention-dropout 0.1", "cpu", "masks in memory"),
    ],
)
def test_the_kernel_is_named(flags: str, device_type: str, kernel: str) -> None:
    config = tiny_config(flags)
    known = "8 tokens each within their samples, room for 12 in a micro-batch"
    line = documents_line(config, device_type, Documents((10, 6, 8), 12))
    assert line == f"documents: attention inside them by {kernel}; {known}"
    assert documents_line(config, device_type, Documents((16, 16), 0)).endswith(f"with such an end take {kernel}")
