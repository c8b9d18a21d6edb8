"""Programs with DeepSpeed's names on two processes have plain torch's numbers."""

import contextlib
import copy
import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import gptpar.deepspeed as deepspeed
from gptpar.adapter.guards import order_watch
from gptpar.errors import ConfigError, GptparError
from tests.spawn import spawn
from tests.unit.deepspeed.engines import test_monitor

OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}
SIZES = [(8, 32), (32, 32), (32, 4)]


def micro_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draws = torch.Generator().manual_seed(1)
    return [(torch.randn(2, 8, generator=draws), torch.randint(0, 4, (2,), generator=draws)) for _ in range(12)]


def make() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(*size) for size in SIZES))


def trained_plainly(model: nn.Module, per_step: int) -> list[float]:
    """The losses of three steps, each over ``per_step`` micro-batches."""
    optimizer, losses, batches = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0), [], micro_batches()
    for step in range(3):
        pairs = batches[per_step * step : per_step * (step + 1)]
        loss = torch.stack([nn.functional.cross_entropy(model(x), y) for x, y in pairs]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def a_stage_that_begins_in_place(rank: int) -> None:
    """As in torchvision's networks, whose activations overwrite what they get."""
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}
    made = [nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)]
    expected = copy.deepcopy(nn.Sequential(*made))
    model = deepspeed.pipe.PipelineModule(made, num_stages=2, loss_fn=nn.CrossEntropyLoss(), partition_method="uniform")
    assert len(list(model.parameters())) == (4, 2)[rank]
    engine, *_ = deepspeed.initialize(model=model, config=config | {"optimizer": OPTIMIZER})
    batches = micro_batches()
    found = [engine.train_batch(iter(batches[2 * step : 2 * step + 2])).item() for step in range(3)]
    assert found == pytest.approx(trained_plainly(expected, 2), rel=1e-6)


def evaluations_of_a_pipeline(rank: int) -> None:
    """Losses and outputs by each argument of ``eval_batch``; the last stage of two has them."""
    torch.manual_seed(42)
    specs = [deepspeed.pipe.LayerSpec(nn.Linear, *size) for size in SIZES]
    model = deepspeed.pipe.PipelineModule(specs, num_stages=2, loss_fn=nn.CrossEntropyLoss())
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "optimizer": OPTIMIZER}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    torch.manual_seed(42)
    expected, pairs = make(), micro_batches()
    with torch.no_grad():
        outputs = [expected(x) for x, _ in pairs]
        losses = [nn.functional.cross_entropy(out, y) for out, (_, y) in zip(outputs, pairs, strict=True)]

    def close(one: object, other: object) -> None:
        torch.testing.assert_close(one, other if engine.is_last_stage() else None, rtol=1e-6, atol=1e-7)

    torch.testing.assert_close(engine.eval_batch(iter(pairs)), torch.stack(losses[:4]).mean(), rtol=1e-6, atol=0)
    mean, last = engine.eval_batch(iter(pairs), return_logits=True, num_micro_batches=6)
    torch.testing.assert_close(mean, torch.stack(losses[:6]).mean(), rtol=1e-6, atol=0)
    close(last, outputs[5])
    close(engine.eval_batch(iter(pairs), bcast_loss=False), torch.stack(losses[:4]).mean())
    close(engine.eval_batch(iter(pairs), reduce_output=None), losses[:4])
    close(engine.eval_batch(iter(pairs), compute_loss=False, reduce_output=None), outputs[:4])
    close(engine.eval_batch(iter(pairs), compute_loss=False), torch.stack(outputs[:4]).mean(0))
    with pytest.raises(GptparError, match=r"reduce_output='sum'\): it is 'avg', or None"):
        engine.eval_batch(iter(pairs), reduce_output="sum")


def a_grid_and_its_groups(rank: int) -> None:
    """Sums over a grid's groups are those of its lines, and the engine of a pipeline has the grid."""
    topology = deepspeed.runtime.pipe.topology.PipeDataParallelTopology(2, 1)
    specs = [deepspeed.pipe.LayerSpec(nn.Linear, *size) for size in SIZES]
    model = deepspeed.pipe.PipelineModule(specs, topology=topology, loss_fn=nn.CrossEntropyLoss())
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "optimizer": OPTIMIZER}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    grid = engine.grid
    assert grid is model.mpu() is engine.mpu and grid.topology() is topology
    assert (grid.get_stage_id(), grid.get_data_parallel_id(), grid.is_last_stage) == (rank, 0, rank == 1)
    assert (grid.pp_group, grid.dp_group, grid.p2p_groups) == ([0, 1], [rank], [[0, 1], [1, 0]])
    assert (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()) == (rank, 2)
    assert grid.stage_to_global(1) == 1
    for group, wanted in (
        (grid.get_pipe_parallel_group(), 3),
        (grid.get_model_parallel_group(), 3),
        (grid.get_data_parallel_group(), rank + 1),
        (grid.get_slice_parallel_group(), rank + 1),
    ):
        torch.distributed.all_reduce(number := torch.tensor(rank + 1), group=group)
        assert number.item() == wanted
    columns = deepspeed.runtime.pipe.topology.ProcessTopology(["data", "pipe"], [1, 2])
    with pytest.raises(ConfigError, match="the topology has the axis data before pipe: name pipe"):
        deepspeed.pipe.PipelineModule(specs, topology=columns)


def zero3_under_init(rank: int) -> None:
    torch.manual_seed(42)
    with deepspeed.zero.Init():
        model = make()
    assert model[0].weight.is_meta and model[0].weight.shape == model[0].weight.ds_shape == (32, 8)
    with deepspeed.zero.GatheredParameters([model[2].bias], modifier_rank=1):
        if rank == 1:
            nn.init.constant_(model[2].bias, 0.25)
    leaves = {"classes": ["Sequential"], "name_suffixes": ["2"]}
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}, "leaf_module": leaves}
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0}
    engine, *_ = deepspeed.initialize(model=model, config=config | {"optimizer": OPTIMIZER, "zero_optimization": zero})
    torch.manual_seed(42)
    expected = make()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        assert torch.equal(model[0].weight, expected[0].weight) and model[2].bias.tolist() == [0.25] * 4
    assert deepspeed.utils.get_z3_leaf_modules(model) == [model, model[2]]
    deepspeed.utils.safe_set_full_fp32_param(model[2].bias, expected[2].bias.detach())
    batches = micro_batches()
    for step in range(3):
        for x, y in batches[4 * step + 2 * rank : 4 * step + 2 * rank + 2]:
            engine.backward(nn.functional.cross_entropy(engine(x), y))
            engine.step()
    trained_plainly(expected, 4)
    kept = []
    for one in model.parameters():
        with deepspeed.zero.GatheredParameters(one):  # copies outlive it, on a CPU as on a GPU
            kept.append((one.detach().cpu(), one.data.to("cpu"), one.data))
    for one, other, copies in zip(model.parameters(), expected.parameters(), kept, strict=True):
        torch.testing.assert_close(deepspeed.utils.safe_get_full_fp32_param(one), other.data, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(copies[0], other.data, rtol=1e-5, atol=1e-6)
        assert torch.equal(copies[0], copies[1]) and not copies[2].untyped_storage().nbytes()
    with pytest.warns(UserWarning, match="this model has an engine already"):
        again, *_ = deepspeed.initialize(model=model, config=engine.config)
    assert engine.is_closed and model[0].weight.ds_numel == 8 * 32
    for one, copies in zip(model.parameters(), kept, strict=True):
        assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(one), copies[0])
    again.destroy()


def without_an_optimizer(rank: int) -> None:
    """Forward passes under ZeRO-3, plain backward passes, another engine's checkpoint; no steps."""
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "gradient_clipping": 0.0}
    torch.manual_seed(7)
    trained, optimizer, *_ = deepspeed.initialize(model=make(), config=config | {"optimizer": OPTIMIZER})
    assert optimizer is trained.optimizer
    batches = micro_batches()
    trained.backward(trained(batches[rank][0]).square().mean())
    trained.step()
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    with pytest.warns(UserWarning, match="'of rank 1' on rank 1. It is") if rank == 0 else contextlib.nullcontext():
        trained.save_checkpoint(folder[0], tag=f"of rank {rank}")  # DeepSpeed warns by default
    wanted = make()
    wanted.load_state_dict(trained.module_state_dict())
    config["checkpoint"] = {"tag_validation": "Fail"}
    engine, optimizer, _, scheduler = deepspeed.initialize(model=make(), config=config)
    assert optimizer is None and scheduler is None
    engine.load_checkpoint(folder[0], tag="of rank 0")
    with pytest.raises(GptparError, match="'of rank 1' on rank 1; give all the same"):
        engine.save_checkpoint(folder[0], tag=f"of rank {rank}")
    x, y = batches[rank]
    losses = [nn.functional.cross_entropy(one(x), y) for one in (engine, wanted)]
    assert torch.equal(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    for one, other in zip(engine.module.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for verb in (lambda: engine.backward(engine(x).mean()), engine.step):
        with pytest.raises(GptparError, match="has no optimizer, and takes no steps: pass optimizer="):
            verb()


def a_curve_of_the_mean_of_all_losses(rank: int, folder: Path) -> None:
    """Over micro-batches and processes, written by the first one."""
    engine = test_monitor.make(zero_optimization={"stage": 1}, **test_monitor.monitors(folder))
    losses = []
    for seed in (1, 2):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * seed + rank))
        for _ in range(2):
            loss = engine(x).square().mean()
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    engine.close()
    everyones = [losses, losses]
    torch.distributed.all_gather_object(everyones, losses)
    curve = test_monitor.csv_of(folder, test_monitor.LOSS)
    assert [samples for samples, _ in curve] == [12, 24]
    means = [sum(sum(of_process[at : at + 2]) for of_process in everyones) / 4 for at in (0, 2)]
    assert [loss for _, loss in curve] == pytest.approx(means, rel=1e-6)


def steps_that_the_program_ends(rank: int) -> None:
    """Gradients that are summed over processes, in steps that are counted, end with ``step()``, or are one context."""
    batches = micro_batches()
    for stage, ratio, way in itertools.product((0, 1, 2, 3), (0.0, 0.6), ("counted", "by step()", "in a context")):
        if stage == 0 and (ratio or way == "in a context"):
            continue
        torch.manual_seed(7)
        model = make()
        expected, zero = copy.deepcopy(model), {"stage": stage}
        optimizer = torch.optim.SGD(expected.parameters(), 0.1)
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "gradient_clipping": 0.0}
        config |= {"gradient_allreduce_op": "sum", "managed_gradient_accumulation": way != "by step()"}
        config |= {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        offload = {"offload_optimizer": {"device": "cpu", "ratio": ratio}} if ratio else {}
        engine, *_ = deepspeed.initialize(model=model, config=config | {"zero_optimization": zero | offload})
        for step in range(2):
            of_step = batches[6 * step : 6 * step + 6]
            with engine.coalesce_grad_reduction() if way == "in a context" else contextlib.nullcontext():
                for x, y in of_step[rank::2]:
                    engine.backward(nn.functional.cross_entropy(engine(x), y))
                    if way == "counted":
                        engine.step()
            if way != "counted":
                engine.step()
            optimizer.zero_grad()
            torch.stack([nn.functional.cross_entropy(expected(x), y) / 3 for x, y in of_step]).sum().backward()
            optimizer.step()
        assert (engine.global_steps, engine.global_samples) == (2, 24)
        for got, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            whole = deepspeed.utils.safe_get_full_fp32_param(got)
            torch.testing.assert_close(whole, wanted.detach(), rtol=1e-5, atol=1e-6)
        engine.destroy()


def parameters_between_steps(rank: int) -> None:
    """All processes read and clamp them, as they may below ZeRO-3; one alone gets an error, and goes on."""
    order_watch.MEET_SECONDS = 0.5
    for stage, ratio in ((1, 1.0), (2, 0.6), (1, 0.0)):
        torch.manual_seed(7)
        model, batches = make(), micro_batches()
        expected = copy.deepcopy(model)
        averages = [[one.detach().clone() for one in each.parameters()] for each in (model, expected)]
        optimizer = torch.optim.SGD(expected.parameters(), 0.1)
        config = {"train_batch_size": 4, "gradient_clipping": 0.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        zero = {"stage": stage, **({"offload_optimizer": {"device": "cpu", "ratio": ratio}} if ratio else {})}
        engine, *_ = deepspeed.initialize(model=model, config=config | {"zero_optimization": zero})
        for step in range(4):
            engine.backward(
                nn.functional.cross_entropy(engine(batches[2 * step + rank][0]), batches[2 * step + rank][1])
            )
            engine.step()
            losses = [nn.functional.cross_entropy(expected(x), y) for x, y in batches[2 * step : 2 * step + 2]]
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
            if step == 1 and ratio:
                if rank == 0:
                    with pytest.raises(GptparError, match="0.weight was read outside of the model's forward"):
                        model[0].weight.norm()
                continue
            for each, average in zip((model, expected), averages, strict=True):
                with torch.no_grad():
                    for one, mean in zip(each.parameters(), average, strict=True):
                        one.clamp_(-0.3, 0.3)
                        mean.lerp_(one, 0.1)
        for got, wanted in zip(*averages, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
        engine.destroy()


def a_sum_in_grad(rank: int) -> None:
    """At stage 0 each process has the whole sum, also of a module that ran elsewhere: torch clips alike on all."""
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(0.5)
    config = {"train_batch_size": 2, "gradient_clipping": 0.0, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}}
    model.forward = lambda x: sum(one(x).sum() for one in model[: 1 + rank])
    engine, *_ = deepspeed.initialize(model=model, config=config | {"gradient_allreduce_op": "sum"})
    engine.backward(engine(torch.ones(1, 3)))
    assert [one.grad.unique().tolist() for one in model.parameters()] == [[2.0], [2.0], [1.0], [1.0]]
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() == pytest.approx(40**0.5)
    engine.step()
    for one, grad in zip(model.parameters(), (2.0, 2.0, 1.0, 1.0), strict=True):
        torch.testing.assert_close(one.detach(), torch.full_like(one, 0.5 - grad / 40**0.5), rtol=1e-5, atol=0)
    engine.destroy()


def every_program(rank: int, folder: Path) -> None:
    a_sum_in_grad(rank)
    parameters_between_steps(rank)
    steps_that_the_program_ends(rank)
    a_stage_that_begins_in_place(rank)
    evaluations_of_a_pipeline(rank)
    a_grid_and_its_groups(rank)
    zero3_under_init(rank)
    without_an_optimizer(rank)
    a_curve_of_the_mean_of_all_losses(rank, folder)


def test_programs_with_deepspeeds_names_have_plain_numbers(tmp_path: Path) -> None:
    spawn(every_program, 2, tmp_path)
