"""Memory that is full, wherever it shows, is one sentence that says what to change."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gptpar.cli import main
from gptpar.errors import GptparError
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.run.assemble import memory_explained
from tests.helpers import TINY, tiny_config

FULL = "this machine's memory is full (a very long run's order of samples needs some): "
LOWER = (
    "lower --micro-batch-size 2, add --recompute-granularity full, shorten --seq-length 16, or choose a smaller model."
)
LESS_OFFLOAD = "set --offload-speculation off or a lower --cpu-optimizer-ratio, or "


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("", ""),
        ("--cpu-optimizer", "set --offload-gradients on, or "),
        ("--cpu-optimizer --global-batch-size 4 --log-num-zeros-in-grad", ""),
        ("--cpu-optimizer --cpu-optimizer-ratio auto", "set --offload-gradients on, or "),
    ],
)
def test_a_full_gpu_may_give_its_gradients_away(flags: str, told: str) -> None:
    with pytest.raises(GptparError) as caught, memory_explained(partial(tiny_config, flags)):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert str(caught.value).startswith(f"the GPU's memory is full (0 B were in use): {told}{LOWER}")


def test_a_failing_updating_thread_ends_the_run_with_the_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError("the CPU optimizer could not allocate its sums")

    monkeypatch.setattr(CpuAdam, "order", full)
    assert main(["pretrain", *TINY.split(), "--cpu-optimizer"]) == 1
    error = capsys.readouterr().err
    what = " What failed: the CPU optimizer could not allocate its sums\n"
    assert error == "error: " + FULL + LESS_OFFLOAD + LOWER + what
