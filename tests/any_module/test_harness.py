"""The harness: its layouts, how it tells of a deviation, and of a process that hangs."""

from __future__ import annotations

import pytest
import torch

from tests.any_module.case import Setup
from tests.any_module.cases import CASES
from tests.any_module.compare import deviations, problems
from tests.any_module.layouts import every_layout
from tests.any_module.rank_pool import RankPool, RanksFailed
from tests.any_module.reference import Trace, reference


def test_the_matrix_has_every_layout_once() -> None:
    wanted = {(world, stage, ratio) for world in (1, 2, 4) for stage in range(4) for ratio in (0.0, 0.6, 1.0)}
    assert len(wanted) == 36
    for name in ("mlp", "evaluation_during_accumulation", "gpt2_resumed", "cnn_resumed"):
        found = list(every_layout(CASES[name], Setup()))
        assert len(found) == 36 and {(one.world, one.stage, one.ratio) for one in found} == wanted
        for place in ("world", "stage", "ratio"):  # each meets one and two micro-batches, where the case permits it
            met = {(getattr(one, place), one.accumulation) for one in found}
            values = len({getattr(one, place) for one in found})
            assert len(met) == 2 * values or name != "mlp"
        savers = {one.saved_by for one in found if one.saved_by}
        assert len(savers) == (36 if CASES[name].resumed else 0)
        for one in found:
            assert one.accumulation >= CASES[name].micro_batches
            if one.saved_by is None:
                continue
            assert one.saved_by.stage != one.stage and one.saved_by.ratio != one.ratio
            assert (one.saved_by.world != one.world) == (name == "gpt2_resumed")
            assert one.saved_by.world * one.saved_by.accumulation == one.world * one.accumulation == 4


def test_the_place_of_a_deviation_is_named() -> None:
    wanted = reference(CASES["mlp"], Setup(steps=3))
    got = Trace(wanted.losses, wanted.norms, [dict(g) for g in wanted.gradients], wanted.weights)
    name = "blocks.1.up.weight"
    got.gradients[1][name] = wanted.gradients[1][name] + 1e-7 * wanted.gradients[1][name].abs().max()
    found = deviations(got, wanted)
    assert problems(found, 1e-10) == f"gradient deviates by 1.0e-07 ({name}, step 2)"
    assert problems(found, 1e-6) == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_what_is_missing_or_not_finite_deviates(value: float | None) -> None:
    wanted = Trace(weights=[{"a": torch.ones(3), "b": torch.zeros(2)}])
    got = Trace(weights=[{"a": torch.ones(3)} if value is None else {"a": torch.ones(3), "b": torch.full((2,), value)}])
    assert deviations(got, wanted)["weight"].size == float("inf")


def hangs_on_one(rank: int) -> int:
    if rank == 1:
        raise ValueError("told")
    torch.distributed.barrier()
    return rank


def answers(rank: int) -> int:
    return rank


def test_a_pool_reports_a_hang_and_goes_on() -> None:
    with RankPool(2) as ranks:
        with pytest.raises(RanksFailed) as caught:
            ranks.run(hangs_on_one)
        assert "ValueError: told" in caught.value.reports[1]
        assert "did not finish" in caught.value.reports[0] and "hangs_on_one" in caught.value.reports[0]
        assert ranks.run(answers) == [0, 1]
