"""``estimate_memory`` says what the engine really takes: its tensors' storages, summed."""

from typing import Any

import pytest
import torch
from torch import nn

import gptpar
from gptpar.offload.buckets import bytes_of
from tests.spawn import spawn

ADAM = {"optimizer": {"type": "AdamW"}, "train_micro_batch_size_per_gpu": 2}
BF16 = {"bf16": {"enabled": True}}
TWO = {"gradient_accumulation_steps": 2}


def zero(stage: int, ratio: float = 0.0, parameters: bool = False) -> dict[str, Any]:
    section: dict[str, Any] = {"stage": stage}
    if ratio:
        section["offload_optimizer"] = {"device": "cpu", "ratio": ratio}
    if parameters:
        section["offload_param"] = {"device": "cpu"}
    return {"zero_optimization": section}


ONE = {
    "fp32": {},
    "bf16": BF16,
    "bf16, two micro-batches": BF16 | TWO,
    "fp32, 0.6": zero(0, 0.6),
    "bf16, 0.6, two micro-batches": BF16 | TWO | zero(0, 0.6),
    "bf16, CPU": BF16 | zero(0, 1.0),
    "bf16, all on the CPU": BF16 | zero(3, 1.0, True),
}
SEVERAL = {
    **{f"ZeRO-{stage}": BF16 | TWO | zero(stage) for stage in range(4)},
    **{f"ZeRO-{stage}, 0.6": TWO | zero(stage, 0.6) for stage in range(4)},
    "ZeRO-3, all on the CPU": BF16 | zero(3, 1.0, True),
    "ZeRO-1, one micro-batch": BF16 | zero(1),
}


def make_model(frozen: bool = False) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(4)]
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), *blocks)
    model[1].requires_grad_(not frozen)
    return model


def taken(rank: int, config: dict[str, Any], frozen: bool = False) -> tuple[int, int, int]:
    """Bytes that an engine has on its device, beside its buffers; parameters, and optimizer state, in host memory."""
    engine, *_ = gptpar.initialize(model=make_model(frozen), config=ADAM | config)
    memory, optimizer = engine.engine.parameters, engine.engine.optimizer
    if engine.options.batch.accumulation_steps > 1:
        x = torch.randn(2, 64, dtype=engine.options.dtype)
        engine.backward(engine(x).float().pow(2).mean())
    parameters = [] if memory.transient else list(memory.full.values())
    shards = list(memory.shards.values())
    states = [*optimizer.vectors.values(), *engine.engine.gradients.memory.tensors]
    on_host = distinct(shards) if memory.on_host else 0
    on_device = distinct([*parameters, *states, *(() if memory.on_host else shards)])
    buckets = engine.host._buckets if engine.host is not None else []
    engine.close()
    return on_device, on_host, bytes_of(buckets)[0]


def distinct(tensors: list[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def estimated(config: dict[str, Any], world: int, frozen: bool = False) -> tuple[int, int, int]:
    found = gptpar.estimate_memory(make_model(frozen), ADAM | config, world, device_type="cpu")
    assert found.host_transfers == 0
    return found.parameters + found.gradients + found.optimizer, found.host_parameters, found.host_optimizer


@pytest.mark.parametrize("frozen", [False, True])
def test_one_process_takes_what_was_told(frozen: bool) -> None:
    for name, config in ONE.items():
        assert taken(0, config, frozen) == pytest.approx(estimated(config, 1, frozen), rel=0.01), name


def taken_by_all(rank: int) -> dict[str, tuple[int, int, int]]:
    return {name: taken(rank, config) for name, config in SEVERAL.items()}


def test_two_processes_take_what_was_told() -> None:
    for name, found in spawn(taken_by_all, 2)[0].items():
        assert found == pytest.approx(estimated(SEVERAL[name], 2), rel=0.01), name


def test_a_model_without_memory_takes_the_same() -> None:
    with gptpar.deferred_init(seed=0):
        model = make_model()
    config = ADAM | SEVERAL["ZeRO-3, 0.6"]
    assert gptpar.estimate_memory(model, config, 4) == gptpar.estimate_memory(make_model(), config, 4)
