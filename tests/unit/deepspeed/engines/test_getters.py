"""What an engine tells of itself, by DeepSpeed's names, and the batch size that changes between two steps."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import gptpar
from gptpar.deepspeed.engines.engine import ModuleEngine
from gptpar.deepspeed.engines.pipeline_engine import PipelineEngine
from gptpar.errors import GptparError

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1000, "hysteresis": 1}}


def config(accumulation: int = 2, **more: Any) -> dict[str, Any]:
    sizes = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": accumulation}
    optimizer = {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.8, 0.9], "weight_decay": 0.0}}
    return {**sizes, "gradient_clipping": 0.25, "steps_per_print": 50, "optimizer": optimizer, **more}


def make_engine(accumulation: int = 2, **more: Any) -> ModuleEngine:
    torch.manual_seed(0)
    return gptpar.initialize(model=nn.Linear(4, 1), config=config(accumulation, **more))[0]


def make_pipeline() -> PipelineEngine:
    torch.manual_seed(0)
    return gptpar.initialize(model=[nn.Linear(4, 1), lambda x: x.mean()], config=config())[0]


def micro_batch(engine: ModuleEngine, seed: int = 0, factor: float = 1.0) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(next(engine.module.parameters()).dtype)
    engine.backward((engine(x).float() * factor).square().mean())
    engine.step()


@pytest.mark.parametrize("make", [make_engine, make_pipeline])
def test_what_was_configured(make: Any) -> None:
    engine = make()
    assert engine.train_batch_size() == 6
    assert engine.train_micro_batch_size_per_gpu() == 3
    assert engine.gradient_accumulation_steps() == 2
    assert (engine.zero_optimization(), engine.zero_optimization_stage()) == (False, 0)
    assert (engine.fp16_enabled(), engine.bfloat16_enabled()) == (False, False)
    assert (engine._config.gradient_clipping, engine.prescale_gradients()) == (0.25, False)
    assert [len(group) for group in engine.optimizer.bit16_groups] == [2]
    assert not engine.optimizer.dynamic_loss_scale
    assert (engine.gradient_clipping(), engine.steps_per_print()) == (0.25, 50)
    assert (engine.get_lr(), engine.get_mom()) == ([0.1], [(0.8, 0.9)])
    assert (engine.global_rank, engine.local_rank, engine.world_size, engine.dp_world_size) == (0, 0, 1, 1)
    assert engine.device == torch.device("cpu")
    assert (engine.loss_scale(), engine.dynamic_loss_scale(), engine.cur_scale) == (1.0, False, 1.0)
    assert not engine.was_step_applied()
    if make is make_pipeline:
        engine.train_batch(iter([(torch.ones(3, 4), None)] * 2))
        assert engine.was_step_applied() and engine.global_samples == 6
    engine.destroy()
    with pytest.raises(GptparError, match="closed"):
        engine.train_batch(iter([]))


def test_stage_precision_and_the_rates_of_the_next_steps() -> None:
    more = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "steps_per_print": math.inf}
    engine = make_engine(1, **more)
    assert (engine.zero_optimization(), engine.zero_optimization_stage()) == (True, 2)
    assert (engine.fp16_enabled(), engine.bfloat16_enabled(), engine.steps_per_print()) == (False, True, 0)
    engine.optimizer.param_groups[0].update(lr=0.5, betas=(0.1, 0.2))
    assert (engine.get_lr(), engine.get_mom()) == ([0.5], [(0.1, 0.2)])
    engine.set_gradient_accumulation_steps(2)
    engine.set_lr(0.25)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps(), engine.get_lr()) == (6, 2, [0.25])
    assert engine.engine.gradients.memory.shard.dtype == torch.float32  # sums of bf16 gradients
    engine.set_lr([0.5])
    for number in range(2):
        micro_batch(engine, number)
    assert (engine.global_steps, engine.get_lr()) == (1, [0.5])
    with pytest.raises(GptparError, match=r"2 learning rates for 1 parameter group"):
        engine.set_lr([0.5, 0.25])


def test_counts_of_steps_and_samples_go_on_after_a_resume_with_another_batch(tmp_path: Path) -> None:
    engine, found = make_engine(), []
    for number in range(4):
        found.append(engine.is_gradient_accumulation_boundary())
        micro_batch(engine, number)
        found.append(engine.was_step_applied())
    assert found == [False, False, True, True] * 2
    assert (engine.micro_steps, engine.global_steps, engine.skipped_steps, engine.global_samples) == (4, 2, 0, 12)
    engine.save_checkpoint(tmp_path)
    other = make_engine(4)
    other.load_checkpoint(tmp_path)
    assert other.global_samples == 12
    for number in range(4):
        micro_batch(other, number)
    assert (other.global_steps, other.global_samples) == (3, 24)


def test_a_skipped_step_is_not_applied() -> None:
    engine = make_engine(1, **FP16)
    assert engine.fp16_enabled() and engine.dynamic_loss_scale() and engine.loss_scale() == 0
    assert engine.optimizer.needs_scaler() and not make_engine(1).optimizer.needs_scaler()
    assert (engine.cur_scale, engine.optimizer.cur_scale, engine.optimizer.loss_scale) == (16.0, 16.0, 16.0)
    scaler = engine.optimizer.loss_scaler
    assert (scaler.loss_scale, scaler.dynamic, scaler.cur_iter) == (16.0, True, engine.global_steps)
    micro_batch(engine, factor=float("inf"))
    assert not engine.was_step_applied() and engine.skipped_steps == 1 and engine.optimizer.overflow
    assert (engine.cur_scale, engine.optimizer.cur_scale) == (8.0, 8.0)
    micro_batch(engine)
    assert engine.was_step_applied() and engine.global_samples == 6 and not engine.optimizer.overflow
    assert (scaler.cur_scale, scaler.cur_iter) == (8.0, 2)
    scaler.cur_scale = 4  # programs set the least one of several engines
    micro_batch(engine)
    assert engine.was_step_applied() and (engine.cur_scale, scaler.cur_iter) == (4.0, 3)


def test_another_batch_size() -> None:
    """More micro-batches, all of the size they had: the step is the one of an engine that began so."""
    changed, begun = make_engine(2), make_engine(3)
    changed.set_train_batch_size(9)
    assert (changed.train_batch_size(), changed.gradient_accumulation_steps()) == (9, 3)
    for number in range(3):
        micro_batch(changed, number)
        micro_batch(begun, number)
    assert (changed.global_steps, changed.global_samples) == (1, 9)
    assert torch.equal(changed.module.weight, begun.module.weight)
    changed.set_train_batch_size(12)
    changed._work._loss_fn = lambda output, batch: output.mean()
    changed.train_batch(iter([torch.randn(3, 4) for _ in range(4)]))
    assert (changed.global_steps, changed.global_samples) == (2, 21)
    for size in (0, 4):
        with pytest.raises(GptparError, match=f"{size} .*multiple.* 3 x 1"):
            changed.set_train_batch_size(size)
    micro_batch(changed)
    with pytest.raises(GptparError, match="within a step"):
        changed.set_train_batch_size(9)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


def test_loaders_of_other_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each epoch of training has another order, whatever the loader is asked for; others have the data's.

    One process evaluates a stream whole, with the samples that fill no micro-batch. Batches are pinned for a GPU.
    """
    engine, data = make_engine(), list(range(12))
    for more in ({}, {"batch_size": 2}, {"num_local_io_workers": 1}):
        orders = [torch.cat(list(loader)).tolist() for loader in [engine.deepspeed_io(data, **more)] * 3]  # type: ignore[arg-type]
        assert len(set(map(tuple, orders))) == 3 and all(sorted(order) == data for order in orders)
        assert torch.cat(list(engine.deepspeed_io(data, route="eval", **more))).tolist() == data  # type: ignore[arg-type]
    for route in ("eval", "predict"):
        batches = [batch.tolist() for batch in engine.deepspeed_io(Stream(), route=route)]
        assert batches == [[0, 1, 2], [3, 4, 5], [6]]
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        for more in ({}, {"route": "eval"}, {"data_sampler": range(6)}):
            assert engine.deepspeed_io(data, **more).pin_memory == there  # type: ignore[arg-type]


def test_an_outlier_is_not_applied_and_no_overflow(tmp_path: Path) -> None:
    skip_step = {"gptpar": {"skip_step_sigma": 4, "skip_step_window": 4}}
    engine = make_engine(1, **FP16, **skip_step)
    for number in range(4):
        micro_batch(engine, number)
    engine.save_checkpoint(tmp_path)
    resumed = make_engine(1, **FP16, **skip_step)
    resumed.load_checkpoint(tmp_path)
    for one in (engine, resumed):
        before = one.module.weight.clone()
        micro_batch(one, factor=50.0)
        assert not one.was_step_applied() and torch.equal(one.module.weight, before)
        assert (one.skipped_steps, one.cur_scale, one.skip_step.num_outliers) == (0, 16.0, 1)
        micro_batch(one)
        assert one.was_step_applied() and one.global_steps == 6
    assert torch.equal(engine.module.weight, resumed.module.weight)
    for wrong in ({"skip_step_sigma": 4, "skip_step_window": 1}, {"skip_step_sigma": 0}):
        with pytest.raises(GptparError, match=f"gptpar.{list(wrong)[-1]}"):
            make_engine(gptpar=wrong)
