"""Memory of any module: by hand, DeepSpeed's print, the command line, and a sentence where it is full."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import gptpar
from gptpar.cli import main
from gptpar.errors import GptparError
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.run.assemble import _expand_segments, memory_explained
from tests.helpers import TINY, tiny_config

FILE = Path(__file__).parents[2] / "fixtures/user_modules.py"
CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


def blocks(count: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.GELU()) for _ in range(count)))


def test_everything_in_host_memory_by_hand():
    found = gptpar.estimate_memory(blocks(), CONFIG, 4)
    shard = 4 * 64 * 64 // 4
    assert (found.parameters, found.optimizer, found.gradients, found.buffers) == (0, 0, 0, 0)
    assert (found.host_parameters, found.host_optimizer, found.double_buffers) == (2 * shard, 12 * shard, 12 * shard)
    assert found.host == found.host_parameters + found.host_optimizer + found.host_transfers
    assert found.passing > 3 * 2 * 64 * 64


def test_zero3_prints_what_deepspeed_prints(capsys):
    gptpar.estimate_zero3_model_states_mem_needs_all_cold(2_851_000_000, 32_000_000, 8, 1)
    assert capsys.readouterr().out.splitlines() == [
        "Estimated memory needed for params, optim states and gradients for a:",
        "HW: Setup with 1 node, 8 GPUs per node.",
        "SW: Model with 2851M total params, 32M largest layer params.",
        "  per CPU  |  per GPU |   Options",
        "   71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1",
        "  127.45GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0",
        "   63.72GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=1",
        "  127.45GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=0",
        "    1.43GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=1",
        "  127.45GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=0",
    ]


def write(tmp_path: Path, config: dict) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_plan_of_a_module(tmp_path, capsys):
    words = ["plan", "--module", f"{FILE}:model_alone", "--config", write(tmp_path, CONFIG), "--nproc", "4"]
    assert main(words) == 0
    assert "master weights and moments" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_parameters"] == 87 and found["parameters"] == 0 and found["host"] > 12 * 87 / 4


@pytest.mark.slow
def test_benchmark_of_a_module(tmp_path, capsys):
    config = {**CONFIG, "train_batch_size": 4, "bf16": {"enabled": False}}
    words = ["benchmark", "--module", f"{FILE}:mlp", "--config", write(tmp_path, config)]
    assert main([*words, "--steps", "3", "--warmup-steps", "1", "--nproc", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["params"], found["steps"], found["global_batch_size"], found["zero_stage"]) == (87, 3, 4, 3)
    assert found["samples_per_s"] == pytest.approx(4e3 / found["ms_per_step"], rel=0.01)
    assert found["ms_min"] <= found["ms_per_step"] <= found["ms_max"] and found["cpu_optimizer_ratio"] == 1


# --- Memory that is full, wherever it shows, is one sentence that says what to change -------------------------------


FULL = "this machine's memory is full (a very long run's order of samples needs some): "
LOWER = (
    "lower --micro-batch-size 2, add --recompute-granularity full, shorten --seq-length 16, or choose a smaller model."
)
LESS_OFFLOAD = "set --offload-speculation off or a lower --cpu-optimizer-ratio, or "


def told_of_a_full_gpu(flags: str) -> str:
    with pytest.raises(GptparError) as caught, memory_explained(partial(tiny_config, flags)):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return str(caught.value)


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
    assert told_of_a_full_gpu(flags).startswith(f"the GPU's memory is full (0 B were in use): {told}{LOWER}")


ON_HOST = "--no-pipeline-parallel --cpu-optimizer --cpu-optimizer-ratio 1 --cpu-parameters"


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("flags", "settings", "expands"),
    [
        ("", "", False),
        ("", "expandable_segments:True", True),
        (ON_HOST, "", True),
        (ON_HOST, "garbage_collection_threshold:0.8", False),
        (ON_HOST, "expandable_segments:True", True),
    ],
)
def test_gaps_of_the_allocator_are_named_where_they_are_large(
    flags: str, settings: str, expands: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, settings)
    given = list[str]()
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", given.append)
    for device in ("cuda", "cpu"):
        _expand_segments(tiny_config(flags), torch.device(device))
    assert given == ["expandable_segments:True"] * (flags == ON_HOST and not settings)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 47 << 30)
    remedy = ", 30.00 GiB in gaps between them): set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the "
    for reserved, told in ((51, "):"), (77, "):" if expands else f"{remedy}environment,")):
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda reserved=reserved: reserved << 30)
        told = f"{told} set --offload-gradients on, or" if flags else told
        start = f"the GPU's memory is full (47.00 GiB were in use{told} {LOWER}"
        assert told_of_a_full_gpu(flags).startswith(start)


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
