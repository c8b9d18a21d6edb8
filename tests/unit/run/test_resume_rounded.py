"""Checkpoints of rounded moments: a run goes on with the other number format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gptpar.errors import CheckpointError
from gptpar.run import resume
from tests.unit.offload.tiny_runs import OFFLOAD, train
from tests.unit.run.saved_runs import inputs_of
from tests.unit.run.test_resume_muon import ROUNDED, run_of, save, whole

BOTH = f"--bf16 {ROUNDED}"


@pytest.mark.parametrize(
    ("before", "after", "sentences"),
    [
        (
            BOTH,
            "--bf16 --exp-avg-sq-dtype bf16",
            ["the values of exp_avg are fp32 again, exactly as they were in bf16"],
        ),
        (
            "--bf16",
            "--bf16 --exp-avg-sq-dtype bf16",
            ["the values of exp_avg_sq are bf16: fp32 was rounded to nearest once"],
        ),
        (BOTH, BOTH, []),
    ],
)
def test_a_run_goes_on_with_another_number_format_and_says_so(
    before: str, after: str, sentences: list[str], tmp_path: Path
) -> None:
    first, told = run_of(tmp_path, f"{before} {OFFLOAD} 0.731"), list[str]()
    train(first, 0, 3)
    save(first, 3)
    second = run_of(tmp_path, f"{after} {OFFLOAD} 0.731")
    resume.load(second, inputs_of(second.config), told.append)
    assert [one for one in told if "the values of" in one] == [f" > {one}" for one in sentences]
    assert any("-dtype" in one for one in told) == (before != after)
    old, new = (trainer.engine.optimizer.state_tensors() for trainer in (first, second))
    for kind, views in new.items():
        for name, view in views.items():
            assert torch.equal(whole(view), whole(old[kind][name]).to(view.dtype)), (kind, name)
    assert not train(second, 3, 4)[0][2]
    first.close()
    second.close()


def test_weights_are_never_cast(tmp_path: Path) -> None:
    first = run_of(tmp_path, BOTH)
    save(first, 0)
    second = run_of(tmp_path, f"--fp64 {ROUNDED}")
    with pytest.raises(CheckpointError, match="is float32 in the checkpoint and float64 here; it is not cast"):
        resume.load(second, inputs_of(second.config), lambda _: None)
    first.close()
    second.close()


def test_an_older_checkpoint_of_another_number_format_takes_a_damaged_one_s_place(tmp_path: Path) -> None:
    first, told = run_of(tmp_path, f"--bf16 {OFFLOAD} 1"), list[str]()
    train(first, 0, 1)
    save(first, 1)
    second = run_of(tmp_path, f"--bf16 --exp-avg-sq-dtype bf16 {OFFLOAD} 1")
    resume.load(second, inputs_of(second.config), lambda _: None)
    train(second, 1, 2)
    save(second, 2)
    (data,) = tmp_path.rglob("iter_0000002/*.bin")
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    third = run_of(tmp_path, f"--bf16 --exp-avg-sq-dtype bf16 {OFFLOAD} 1")
    assert resume.load(third, inputs_of(third.config), told.append).iteration == 1
    assert " > the values of exp_avg_sq are bf16: fp32 was rounded to nearest once" in told
    for trainer in (first, second, third):
        trainer.close()
