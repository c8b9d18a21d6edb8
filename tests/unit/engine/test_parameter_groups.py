"""Parameter groups that share nothing: torch's AdamW, wherever and by however many launches they are updated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from gptpar.engine.flat_optimizer import FlatOptimizer, FlatState
from gptpar.engine.master_optimizer import MasterOptimizer
from gptpar.engine.ranges import Home, Place
from gptpar.engine.table import ParameterTable
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.transfers import SameMemory
from gptpar.optim.adam_update import AdamHyperparameters
from gptpar.optim.adamw import ADAMW
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.group_ranges import Family, GroupRange
from gptpar.topology.initial_values import Constant
from gptpar.topology.mesh import Mesh
from gptpar.topology.placement import ParameterInfo
from tests.unit.engine.four_groups import CLIP, JOINED, SCALE, SEPARATE, SKIPPED, STEPS, flat_after, groups_at, norm_at

SHAPES = {
    "first": {"a": (13, 11), "b": (7,), "c": (5, 5), "d": (65,)},
    "second": {"e": (10, 20), "f": (3, 3), "g": (100,), "j": (4, 3, 5, 2)},
    "third": {"h": (4, 4), "i": (2, 90), "k": (), "l": (0, 4)},
}
STRIDES = {"j": (30, 1, 6, 3)}  # channels last
GROUP_OF = dict(zip("abcdefghijkl", (3, 1, 0, 2, 0, 1, 2, 3, 0, 0, 1, 2), strict=True))
MIXED = {"second": torch.bfloat16, "third": torch.float32}


def table_of(ratio: float, place: Place) -> ParameterTable:
    layers = {
        unit: {
            name: ParameterInfo(torch.Size(s), Constant(0.0), strides=STRIDES.get(name)) for name, s in shapes.items()
        }
        for unit, shapes in SHAPES.items()
    }
    return ParameterTable.of(layers, place, ratio=ratio, group_of=lambda name, info: GROUP_OF[name], dtypes=MIXED)


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: shape for unit in SHAPES.values() for name, shape in unit.items()}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


@dataclass
class Process:
    """One shard of the model and its optimizer, partly on the device and partly on the host.

    Attributes:
        dtype: of the parameters of units that have none of their own.
    """

    ratio: float
    place: Place
    families: Sequence[Family]
    dtype: torch.dtype
    state: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    live: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        table, wide = table_of(self.ratio, self.place), torch.promote_types(self.dtype, torch.float32)
        for unit in table.units:
            self.live[unit.name] = torch.zeros(unit.shard_length, dtype=unit.dtype or self.dtype)
        host = None
        if pieces := table.offloaded():
            parameters = {unit: self.live[unit][table.on_device[unit] :] for unit in table.on_device}
            host = HostOptimizer(
                pieces,
                parameters,
                dtype=wide,
                clip_grad=CLIP,
                kernels=[CpuAdam(1)] * 4,
                transfers=SameMemory(),
                speculated_elements=table.length(Home.HOST),
            )
        live = {unit: self.live[unit][:length] for unit, length in table.on_device.items()}
        grad = torch.zeros(table.length(Home.DEVICE), dtype=wide)
        adam = MasterOptimizer([ADAMW] * 4, table, grad, CLIP, host, families=self.families, parameters=live)
        start = values(0)
        for name, parts in adam.parts("weights").items():
            parts.fill(start[name])
        for step in range(STEPS):
            adam.expect_step(groups_at(step), SCALE)
            self._give(table, grad, host, values(1 + step))
            norm = torch.tensor(norm_at(step), dtype=torch.float64)
            assert adam.step(norm, groups_at(step), SCALE).item() == (step == SKIPPED)
            if host is not None:
                host.finish()
        assert adam.steps_taken == STEPS - 1 and (host is None or host.steps_taken == STEPS - 1)
        for kind, found in adam.state_tensors().items():
            full = self.state[kind] = {name: torch.zeros_like(value, dtype=wide) for name, value in start.items()}
            for name, parts in found.items():
                for offsets, part in parts.parts:
                    full[name][tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
        if host is not None:
            host.close()

    def _give(
        self, table: ParameterTable, grad: torch.Tensor, host: HostOptimizer | None, grads: dict[str, torch.Tensor]
    ) -> None:
        device = table.split(grad)
        for unit in table.units:
            whole, here = torch.zeros(unit.length, dtype=grad.dtype), table.on_device[unit.name]
            for name, view in unit.views(whole).items():
                view.copy_(grads[name] * SCALE)
            shard = whole.split(unit.shard_length)[self.place.shard(unit)]
            device[unit.name].copy_(shard[:here])
            if host is not None and here < unit.shard_length:
                host.submit_gradient(unit.name, shard[here:].clone())


def torchs_adamw() -> dict[str, dict[str, torch.Tensor]]:
    leaves = {name: torch.nn.Parameter(value) for name, value in values(0).items()}
    groups = [{"params": [p for name, p in leaves.items() if GROUP_OF[name] == number]} for number in range(4)]
    reference = torch.optim.AdamW(groups)
    for step in range(STEPS):
        if step == SKIPPED:
            continue
        for group, how in zip(reference.param_groups, groups_at(step), strict=True):
            group |= {"lr": how.lr, "betas": (how.beta1, how.beta2), "eps": how.eps, "weight_decay": how.weight_decay}
        for name, grad in values(1 + step).items():
            leaves[name].grad = grad / max(1.0, (norm_at(step) + 1e-6) / CLIP)
        reference.step()
    found = {kind: {n: reference.state[p][kind] for n, p in leaves.items()} for kind in ("exp_avg", "exp_avg_sq")}
    return {"weights": {name: p.detach() for name, p in leaves.items()}, **found}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("families", [SEPARATE, JOINED, pytest.param(JOINED[::-1], marks=pytest.mark.slow)], ids=str)
def test_groups_are_those_of_torchs_adamw_at_every_ratio(families: tuple[Family, ...], shards: int) -> None:
    wanted = torchs_adamw()
    for ratio in (0.0, 0.3, 1.0):
        made = [Process(ratio, Place(Mesh(data=shards), shard, 1), families, torch.float64) for shard in range(shards)]
        for kind, tensors in wanted.items():
            for name, tensor in tensors.items():
                found = sum(one.state[kind][name] for one in made)
                torch.testing.assert_close(found, tensor, rtol=1e-12, atol=1e-12)


def test_torchs_operators_have_the_same_bits() -> None:
    wanted = flat_after("cpu", SEPARATE)
    for families in (SEPARATE, JOINED):
        found = flat_after("cpu", families, replace(ADAMW, device_kernel=None))
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def flat(
    group_ranges: Sequence[GroupRange], families: Sequence[Family], dtype: torch.dtype = torch.float32
) -> FlatOptimizer:
    state = {name: torch.ones(group_ranges[-1].stop, dtype=dtype) for name in ADAMW.vectors}
    grad = torch.ones(group_ranges[-1].stop, dtype=dtype)
    steps = torch.zeros((), dtype=torch.float64)
    return FlatOptimizer([ADAMW] * 4, FlatState(state, grad, steps), group_ranges, families)


def launches(adam: FlatOptimizer) -> list[list[tuple[int, int]]]:
    """(start, stop) of each, by family."""
    return [[(p.vectors[0].storage_offset(), p.vectors[0].storage_offset() + len(p.vectors[0])) for p in pieces]
            for pieces in adam._calls]  # fmt: skip


def test_what_lies_together_is_one_launch() -> None:
    """Over units and over padding, unless another family or other memory is between."""
    alternating = [GroupRange(128 * k, 128 * k + 100, k % 2) for k in range(6)]
    for families in (((0, 1),), ((1, 0),)):
        whole = flat(alternating, families)
        whole.lay_out([(0, 256, None), (256, 740, None)])
        assert launches(whole) == [[(0, 740)]]
    apart = flat(alternating, ((1,), (0,)))
    apart.lay_out([(0, 256, None), (256, 740, None)])
    every = [(128 * k, 128 * k + 100) for k in range(6)]
    assert launches(apart) == [every[1::2], every[::2]]
    same = [GroupRange(one.start, one.stop, 0) for one in alternating]
    single = flat(same, ((0,),))
    single.lay_out([(0, 256, None), (256, 740, None)])
    assert launches(single) == [[(0, 740)]]
    assert single._calls[0][0].decays is None and whole._calls[0][0].decays is not None
    single.lay_out([(0, 256, torch.zeros(256)), (256, 740, torch.zeros(484))])
    assert launches(single) == [[(0, 228), (256, 740)]]
    three = flat([GroupRange(64 * k, 64 * k + 64, group) for k, group in enumerate((2, 0, 1, 2))], ((0, 1), (2,)))
    three.lay_out([(0, 256, None)])
    assert launches(three) == [[(64, 192)], [(0, 64), (192, 256)]]


def test_groups_of_a_family_that_differ_are_refused() -> None:
    group_ranges = [GroupRange(0, 64, 0), GroupRange(64, 128, 1)]
    adam = flat(group_ranges, ((0, 1),))
    adam.lay_out([(0, 128, None)])
    decays = AdamHyperparameters(0.1, 0.9, 0.95, 1e-8, 0.1)
    adam.check((decays, decays._replace(weight_decay=0.0)))
    for other in (decays, decays._replace(lr=0.2, weight_decay=0.0)):
        with pytest.raises(ValueError, match="groups 0 and 1 are updated together"):
            adam.check((decays, other))
    for families in (((0,),), ((0, 1), (1,)), ((0, 0, 1),)):
        with pytest.raises(ValueError, match=r"each of the groups \[0, 1\] has to be in one"):
            flat(group_ranges, families)
