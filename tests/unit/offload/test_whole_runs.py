"""The offloaded partition of the optimizer: which elements, the same numbers, in every order of events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from gptpar.checkpoint import load_checkpoint, save_checkpoint
from gptpar.engine.master_optimizer import MasterOptimizer
from gptpar.engine.ranges import Home, Place
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import Unit
from gptpar.errors import GptparError
from gptpar.offload import build, machine
from gptpar.offload.buckets import StateSize
from gptpar.offload.events import EventLog, What
from gptpar.offload.gpu_transfers import RING_BYTES
from gptpar.optim.adam_update import AdamHyperparameters
from gptpar.optim.adamw import ADAMW
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.group_ranges import GroupRange, OffloadedPartition, group_ranges_between
from gptpar.run.saved_state import checkpoint_tensors
from gptpar.topology.initial_values import Constant
from gptpar.topology.mesh import Mesh
from gptpar.topology.placement import ParameterInfo
from gptpar.topology.tensor_parts import TensorParts
from tests.helpers import make_trainer, tiny_config
from tests.offload_log import starts_of
from tests.unit.offload.host_optimizers import make_host, wait_until
from tests.unit.offload.tiny_runs import OFFLOAD, batches, config_words, train

STEPS = 12


def units(*shapes: Sequence[tuple[int, ...]], shards: int = 1) -> list[Unit]:
    made = []
    for number, layer in enumerate(shapes):
        infos = {f"{number}.{k}": ParameterInfo(torch.Size(s), Constant(0.0)) for k, s in enumerate(layer)}
        made.append(Unit.of(f"unit {number}", infos, shards))
    return made


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.3, 0.5, 0.731, 0.999, 1.0])
def test_the_ratio_is_exact_to_the_element(ratio: float, shards: int) -> None:
    """The device has the first elements of the forward order."""
    made = units([(3, 5), (7,)], [(13, 11), (65,), (4, 4)], [(100,), (9, 9)], shards=shards)
    for shard in range(shards):
        table = ParameterTable(made, Place(Mesh(data=shards), shard, 1), ratio=ratio)
        held = sum(one.length for one in table.ranges())
        assert (table.elements(), table.elements(Home.HOST)) == (held, round(ratio * held))
        kept = 0
        states = []
        for unit in made:
            on_device = table.on_device[unit.name]
            kept += sum(one.length for one in table.ranges(unit=unit.name) if one.stop <= on_device)
            if list(table.ranges(unit=unit.name)):
                states.append(on_device / unit.shard_length)
        assert kept == sum(one.length for one in table.ranges(home=Home.DEVICE)) == table.elements(Home.DEVICE)
        assert sorted(states, reverse=True) == states


def parts_equal(found: TensorParts, wanted: TensorParts, **tolerance: float) -> None:
    def whole(parts: TensorParts) -> torch.Tensor:
        full = torch.full(parts.shape, float("nan"), dtype=parts.dtype)
        for offsets, part in parts.parts:
            full[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
        return full

    torch.testing.assert_close(whole(found), whole(wanted), **tolerance)


@pytest.mark.parametrize("ratio", ["0.3", *(pytest.param(r, marks=pytest.mark.slow) for r in ("0", "0.731", "1"))])
@pytest.mark.parametrize("speculation", [pytest.param("off", marks=pytest.mark.slow), "on"])
def test_every_ratio_takes_the_same_steps(ratio: str, speculation: str) -> None:
    """Warm-up; clipping in some steps; two micro-batches. In fp64, where training does not amplify round-off."""
    words = config_words("--fp64 --clip-grad 0.9")
    plain = make_trainer(tiny_config(words))
    shared = make_trainer(tiny_config(f"{words} {OFFLOAD} {ratio} --offload-speculation {speculation}"))
    wanted, found = train(plain, 0, STEPS), train(shared, 0, STEPS)
    assert any(norm > 0.9 for _, norm, _ in wanted) and any(norm < 0.9 for _, norm, _ in wanted), wanted
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-10)
    for kind, views in plain.engine.optimizer.state_tensors().items():
        mine = shared.engine.optimizer.state_tensors()[kind]
        assert mine.keys() == views.keys()
        for name, view in views.items():
            parts_equal(mine[name], view, rtol=1e-10, atol=1e-11)
    assert shared.engine.table.ratio == pytest.approx(float(ratio), abs=1e-4)
    shared.close()


def bf16_distance(one: torch.Tensor, other: torch.Tensor) -> int:
    """Largest distance in units in the last place."""
    ordered = [t.contiguous().view(torch.int16).int() for t in (one, other)]
    ordered = [torch.where(t < 0, -(t & 0x7FFF), t) for t in ordered]
    return int((ordered[0] - ordered[1]).abs().max())


@pytest.mark.parametrize("ratio", [0.3, 1.0, *(pytest.param(one, marks=pytest.mark.slow) for one in (0.0, 0.731))])
@pytest.mark.parametrize("speculate", [False, True])
def test_bf16_weights_stay_within_two_units_in_the_last_place_after_fifty_steps(ratio: float, speculate: bool) -> None:
    """The same gradients for torch's AdamW on fp32 master weights: warm-up, every third step clipped, some overflow."""
    generator = torch.Generator().manual_seed(0)
    made = units([(40, 30), (30,)], [(50, 30), (7,)])
    total = sum(unit.length for unit in made)
    table = ParameterTable(made, ratio=ratio)
    pieces = table.offloaded()
    live = {unit.name: torch.zeros(unit.length, dtype=torch.bfloat16) for unit in made}
    log, host = EventLog(), None
    if pieces:
        offloaded = {piece.unit: live[piece.unit][table.on_device[piece.unit] :] for piece in pieces}
        count = total if speculate else 0
        host = make_host(CpuAdam(2), pieces=pieces, parameters=offloaded, speculated=count, log=log)
    grad = torch.zeros(table.length(Home.DEVICE))
    infos = {name: param.info for name, param in table.params.items()}
    optimizer = MasterOptimizer([ADAMW] * 4, table, grad, 1.0, host)
    start = {name: torch.randn(info.shape, generator=generator) for name, info in infos.items()}
    for name, parts in optimizer.parts("weights").items():
        parts.fill(start[name])
    reference = {name: torch.nn.Parameter(values.clone()) for name, values in start.items()}
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in reference.values() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in reference.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.999),
    )
    for step in range(50):
        lr, scale = 1e-2 * min(1.0, (step + 1) / 10), 4.0
        decays = AdamHyperparameters(lr, 0.9, 0.999, 1e-8, 0.1)
        hyperparameters = decays, decays._replace(weight_decay=0.0)
        whole = {name: torch.randn(p.shape, generator=generator).bfloat16() for name, p in reference.items()}
        norm = torch.stack([g.double().norm() for g in whole.values()]).norm() / scale
        wanted_norm = 3.0 if step % 3 == 0 else 0.5
        whole = {name: (g * (wanted_norm / norm)).bfloat16() for name, g in whole.items()}
        if step % 11 == 5:
            whole["0.0"][3, 4] = float("inf")
        norm = torch.stack([g.double().norm() for g in whole.values()]).norm() / scale
        if norm.isfinite():
            for group in plain.param_groups:
                group["lr"] = lr
            for name, p in reference.items():
                p.grad = whole[name].float() / (scale * max(1.0, (norm.item() + 1e-6) / 1.0))
            plain.step()
        if host is not None:
            host.finish()
            optimizer.expect_step(hyperparameters, scale)
        base = 0
        for unit in made:
            flat = torch.zeros(unit.length, dtype=torch.bfloat16)
            for name, view in unit.views(flat).items():
                view.copy_(whole[name])
            here = table.on_device[unit.name]
            grad[base : base + here] = flat[:here].float()
            base += here
            if host is not None and here < unit.length:
                host.submit_gradient(unit.name, flat[here:])
        if host is not None and speculate and not host.shared.backs_off:
            wait_until(lambda: bool(starts_of(log, What.SPECULATION_BEGUN)))
        optimizer.step(norm, hyperparameters, scale)
    if host is not None:
        host.finish()
    for unit in made:
        here = table.on_device[unit.name]
        live[unit.name][:here] = optimizer.master_weights[unit.name].bfloat16()
        for name, view in unit.views(live[unit.name]).items():
            assert bf16_distance(view, reference[name].detach().bfloat16()) <= 2, name
    assert optimizer.steps_taken == 45
    if host is not None:
        assert (host.num_redone > 0) == speculate == (host.num_ahead > 0)
        host.close()


def test_fp16_overflows_are_skipped_on_both_sides() -> None:
    words = config_words("--fp16 --initial-loss-scale 1e7 --hysteresis 1")
    plain = make_trainer(tiny_config(words))
    wanted = train(plain, 0, STEPS)
    assert any(skipped for *_, skipped in wanted) and not all(skipped for *_, skipped in wanted)
    for speculation in ("on", "off"):
        shared = make_trainer(tiny_config(f"{words} {OFFLOAD} 0.7 --offload-speculation {speculation}"))
        found = train(shared, 0, STEPS)
        assert [skipped for *_, skipped in found] == [skipped for *_, skipped in wanted]
        assert shared.engine.optimizer.steps_taken == plain.engine.optimizer.steps_taken
        assert shared.host is not None and shared.host.steps_taken == plain.engine.optimizer.steps_taken
        assert [loss for loss, *_ in found] == pytest.approx([loss for loss, *_ in wanted], rel=2e-3)
        shared.close()


def test_speculation_changes_no_bit() -> None:
    """Clipping in some steps makes it redo; the results are those of waiting, bit for bit."""
    states, redone = [], []
    for speculation in ("off", "on"):
        words = config_words(f"--bf16 --clip-grad 0.9 {OFFLOAD} 1 --offload-speculation {speculation}")
        trainer = make_trainer(tiny_config(words))
        losses = train(trainer, 0, 20)
        assert trainer.host is not None
        redone.append(trainer.host.num_redone)
        states.append((losses, trainer.engine.optimizer.state_tensors()))
        trainer.close()
    assert redone[0] == 0 and 0 < redone[1] < 20
    assert states[0][0] == states[1][0]
    for kind, views in states[0][1].items():
        for name, view in views.items():
            parts_equal(states[1][1][kind][name], view, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("ratios", [("0", "1"), ("1", "0.3"), ("0.3", "0.731"), ("0.731", "0")])
def test_a_run_saved_at_one_ratio_goes_on_at_another(ratios: tuple[str, str], tmp_path: Path) -> None:
    words = config_words("--fp64")
    straight = make_trainer(tiny_config(words))
    wanted = train(straight, 0, 8)[4:]
    saving, resuming = (make_trainer(tiny_config(f"{words} {OFFLOAD} {ratio}")) for ratio in ratios)
    train(saving, 0, 4)
    tensors = checkpoint_tensors(saving)
    save_checkpoint(tmp_path, 4, tensors, {"steps": saving.engine.optimizer.steps_taken})
    loaded = load_checkpoint(tmp_path, checkpoint_tensors(resuming))
    resuming.engine.optimizer.steps_taken = loaded.meta["steps"]
    resuming.engine.publish()
    for one, other in zip(train(resuming, 4, 8), wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-12)
    for trainer in (saving, resuming):
        trainer.close()


def test_spans_and_counted_elements_are_numbered_from_where_they_are_cut() -> None:
    group_ranges = (GroupRange(0, 10, 0), GroupRange(10, 30, 1))
    whole = OffloadedPartition("unit", 30, group_ranges, ((0, 10),))
    assert whole.between(5, 12) == OffloadedPartition("unit", 7, (GroupRange(0, 5, 0), GroupRange(5, 7, 1)), ((0, 5),))
    assert whole.between(10, 30) == OffloadedPartition("unit", 20, (GroupRange(0, 20, 1),), ())
    assert group_ranges_between(group_ranges, 5, 12) == (GroupRange(0, 5, 0), GroupRange(5, 7, 1))
    assert group_ranges_between(group_ranges, 30, 40) == ()


def test_zeros_and_norms_count_both_shares() -> None:
    words = config_words("--log-num-zeros-in-grad --fp64 --max-position-embeddings 24")  # 8 rows get no gradient
    plain, shared = make_trainer(tiny_config(words)), make_trainer(tiny_config(f"{words} {OFFLOAD} 0.6"))
    for trainer in (plain, shared):
        trainer.forward_backward(batches(0, 2), 0)
    assert shared.engine.own_zeros().item() == plain.engine.own_zeros().item() >= 8 * 32
    assert shared.engine.square_of_grad().item() == pytest.approx(plain.engine.square_of_grad().item(), rel=1e-12)
    assert shared.engine.square_of_weights().item() == pytest.approx(plain.engine.square_of_weights().item(), rel=1e-12)
    shared.close()


def test_host_memory_that_does_not_suffice_is_told_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: RING_BYTES + (1 << 20))
    config = tiny_config(f"{OFFLOAD} 1")
    with pytest.raises(GptparError, match=r"needs .* of host memory in each of 1 process.*lower --cpu-optimizer-ratio"):
        build._speculated_elements(config, StateSize(10**9, ADAMW.state_bytes(4)))


def test_speculation_gets_the_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    elements = 10**8
    free = math.ceil((RING_BYTES + 18 * elements) / 0.9) + 100
    monkeypatch.setattr(machine, "available_memory", lambda: free)
    automatic = build._speculated_elements(tiny_config(f"{OFFLOAD} 1"), StateSize(elements, ADAMW.state_bytes(4)))
    assert automatic == pytest.approx(elements / 2, rel=1e-6)
    off = tiny_config(f"{OFFLOAD} 1 --offload-speculation off")
    assert build._speculated_elements(off, StateSize(elements, ADAMW.state_bytes(4))) == 0
    with pytest.raises(GptparError, match="twice for --offload-speculation on"):
        build._speculated_elements(
            tiny_config(f"{OFFLOAD} 1 --offload-speculation on"), StateSize(elements, ADAMW.state_bytes(4))
        )


def test_a_save_finds_the_state_of_one_home_at_a_time() -> None:
    """The device's at its begin, and the host's later, where the views that it has taken show it."""
    trainer = make_trainer(tiny_config(config_words(f"{OFFLOAD} 0.3")))
    train(trainer, 0, 2)
    optimizer = trainer.engine.optimizer
    shown = {
        kind: [(unit, at, torch.full_like(values, 7)) for unit, at, values in views]
        for kind, views in optimizer.host_views().items()
    }
    both, device, host = map(optimizer.state_tensors, (None, Home.DEVICE, shown))
    for kind in optimizer.vectors:
        held = [sum(one.num_held for one in found[kind].values()) for found in (both, device, host)]
        assert held == [28032, 19622, 8410]  # 8410 = 0.3 x 28032
        assert both[kind].keys() == device[kind].keys() | host[kind].keys()
        assert {part.max().item() for one in host[kind].values() for _, part in one.parts} == {7}
        assert max(part.max().item() for one in device[kind].values() for _, part in one.parts) < 7
    trainer.close()
