"""TwinFlowAdamW where parameters or batches are divided over processes, against torch's AdamW on one."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gptpar import TwinFlowAdamW
from gptpar.offload.events import What
from tests.offload_log import logged, this_step
from tests.spawn import spawn

RANKS, STEPS, ROWS = 2, 8, 6
MAX_NORM = 0.5


def make_model() -> nn.Sequential:
    """Odd sizes: shards are uneven."""
    torch.manual_seed(3)
    layers = [nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 1)]
    return nn.Sequential(*layers).double()


def loss_of(model: nn.Module, step: int, rank: int | None) -> torch.Tensor:
    """Of one rank's rows, or of all; step 4 overflows on one rank."""
    x = torch.randn(RANKS * ROWS, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    rows = x if rank is None else x[rank * ROWS : (rank + 1) * ROWS]
    loss = (3.0 * model(rows)).square().mean()
    return loss * float("inf") if step == 4 and rank != 0 else loss


def alone() -> list[torch.Tensor]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, None).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        if norm.isfinite():
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def fsdp(rank: int, ratio: float, attached: bool, device: str = "cpu") -> list[torch.Tensor]:
    mesh = init_device_mesh(device, (RANKS,))
    model = make_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with (
        logged() as log,
        TwinFlowAdamW(model.parameters(), lr=1e-2, offload_ratio=ratio, max_norm=MAX_NORM) as optimizer,
    ):
        assert optimizer.elements == sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
        assert optimizer.offloaded == round(ratio * optimizer.elements)
        if attached:
            optimizer.attach(model)
        for step in range(STEPS):
            if step == 5:
                state = get_optimizer_state_dict(model, optimizer)
                assert all(s["exp_avg"].shape == model.get_parameter(n).shape for n, s in state["state"].items())
                optimizer.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())  # nothing
                set_optimizer_state_dict(model, optimizer, state)
                goes_on_in_torch(model, optimizer, rank)
            optimizer.zero_grad()
            loss = loss_of(model, step, rank)
            if attached:
                with optimizer.last_backward():
                    loss.backward()
                told = {event.unit for event in this_step(log) if event.what == What.SUBMITTED}
                assert len(told) == sum(on_host > 0 for _, on_host in optimizer.homes)  # FSDP2 tells of each gradient
            else:
                loss.backward()
            optimizer.step()
            assert bool(optimizer.skipped) == (step == 4)
    return [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]


def goes_on_in_torch(model: nn.Module, optimizer: TwinFlowAdamW, rank: int) -> None:
    """torch's AdamW takes the state of shards, and makes the same step of it."""
    reference = torch.optim.AdamW(model.parameters())
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = copy.deepcopy(model.state_dict())
    found = []
    for one in (reference, optimizer):
        state = copy.deepcopy(optimizer.state_dict())
        model.load_state_dict(before)
        one.zero_grad()
        loss_of(model, 0, rank).backward()
        for p in model.parameters():
            assert p.grad is not None
            p.grad *= 1e-3  # nothing to clip
        one.step()
        optimizer.finish()
        found.append([p.to_local().clone() for p in model.parameters()])  # type: ignore[attr-defined]
    optimizer.load_state_dict(state)
    model.load_state_dict(before)
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def averaged(rank: int, ratio: float, how: str) -> list[torch.Tensor]:
    model = make_model()
    optimizer = TwinFlowAdamW(model.parameters(), lr=1e-2, offload_ratio=ratio, max_norm=MAX_NORM)
    outer: nn.Module = model
    if how == "ddp":
        outer = DistributedDataParallel(model)
        optimizer.attach(outer)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(outer, step, rank)
        if how == "ddp":
            with optimizer.last_backward():
                loss.backward()
        else:
            loss.backward()
            for p in model.parameters():
                assert p.grad is not None
                dist.all_reduce(p.grad)
                p.grad /= RANKS
        optimizer.step()
    optimizer.close()
    return [p.detach() for p in model.parameters()]


def divided_differently(rank: int) -> str:
    mesh = init_device_mesh("cpu", (RANKS,))
    model = make_model()
    fully_shard(model[0], mesh=mesh)
    with pytest.raises(ValueError, match="pass norm_fn") as told:
        TwinFlowAdamW(model.parameters())
    TwinFlowAdamW(model.parameters(), norm_fn=lambda square: square).close()
    return str(told.value)


CASES = {
    "fsdp, 0.4": partial(fsdp, ratio=0.4, attached=False),
    "fsdp, 0.4, attached": partial(fsdp, ratio=0.4, attached=True),
    "fsdp, 1, attached": partial(fsdp, ratio=1.0, attached=True),
    "averaged by hand": partial(averaged, ratio=0.6, how="by hand"),
    "averaged by DDP, attached": partial(averaged, ratio=0.6, how="ddp"),
}


def every_case(rank: int) -> tuple[dict[str, list[torch.Tensor]], str]:
    return {name: case(rank) for name, case in CASES.items()}, divided_differently(rank)


def test_processes_together_do_what_one_would() -> None:
    """In one go, since processes take long to start. The norm, and whether it is finite, is that of all shards."""
    wanted = alone()
    for found, told in spawn(every_case, RANKS):
        assert "in 2 ways" in told
        for name, parameters in found.items():
            torch.testing.assert_close(parameters, wanted, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
