"""Other moments than a checkpoint's: AdamW's become Muon's momenta, number formats change, and what cannot is told."""

from pathlib import Path

import pytest
import torch

from gptpar.checkpoint import read_manifest
from gptpar.errors import CheckpointError
from gptpar.optim.adam_update import STATES
from gptpar.optim.rounded_states import as_wide, in_formats
from gptpar.run import resume
from gptpar.run.progress import Progress
from gptpar.run.trainer import Trainer
from gptpar.topology.tensor_parts import TensorParts
from tests.helpers import make_trainer, tiny_config
from tests.unit.offload.tiny_runs import OFFLOAD, config_words, train
from tests.unit.run import saved_runs
from tests.unit.run.saved_runs import inputs_of

MUON, ROUNDED = "--optimizer muon --bf16", "--bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
EIGHT = "--bf16 --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8"


def run_of(folder: Path, words: str) -> Trainer:
    return make_trainer(tiny_config(config_words(f"--save {folder} --load {folder} {words}")))


def whole(parts: TensorParts) -> torch.Tensor:
    full = torch.full(parts.shape, float("nan") if parts.dtype.is_floating_point else 0, dtype=parts.dtype)
    for offsets, part in parts.parts:
        full[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part
    return full


def states_of(trainer: Trainer) -> dict[str, dict[str, torch.Tensor]]:
    """Kind -> name -> the values."""
    kinds = trainer.engine.optimizer.state_tensors()
    return {kind: {name: whole(parts) for name, parts in views.items()} for kind, views in kinds.items()}


def saved(folder: Path, words: str, steps: int) -> Trainer:
    """A run after so many steps, which it has saved."""
    trainer = run_of(folder, words)
    train(trainer, 0, steps)
    save(trainer, steps)
    return trainer


def save(trainer: Trainer, steps: int) -> None:
    trainer.engine.finish()
    progress = Progress(iteration=steps, consumed_samples=4 * steps, scheduled_samples=4 * steps)
    saved_runs.save(trainer, progress, inputs_of(trainer.config), keep=None)


def loaded(folder: Path, words: str) -> tuple[Trainer, list[str]]:
    """A run that goes on there, and what it says."""
    trainer, told = run_of(folder, words), list[str]()
    resume.load(trainer, inputs_of(trainer.config), told.append)
    return trainer, told


@pytest.mark.parametrize("name", ["muon", "lion"])
def test_states_without_a_second_moment_go_on(name: str, tmp_path: Path) -> None:
    first = saved(tmp_path, f"--optimizer {name} --bf16", 2)
    second, told = loaded(tmp_path, f"--optimizer {name} --bf16")
    assert not any("the values of" in sentence for sentence in told)
    before, after = states_of(first), states_of(second)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, before[kind][name]) for kind in after for name, value in after[kind].items())
    assert train(first, 2, 4) == train(second, 2, 4)
    first.close()
    second.close()


@pytest.mark.slow
def test_adamw_cannot_go_on_with_momenta(tmp_path: Path) -> None:
    saved(tmp_path, MUON, 1)
    adam = run_of(tmp_path, "--bf16")
    with pytest.raises(CheckpointError, match="no second moment, which AdamW divides by.*--no-load-optim"):
        resume.progress_to_resume(adam.config, inputs_of(adam.config))
    anew, _ = loaded(tmp_path, "--bf16 --no-load-optim")
    assert anew.engine.optimizer.steps_taken == 0
    assert not any(vector.any() for kind, vector in anew.engine.optimizer.vectors.items() if kind != "weights")


TO_MOMENTA = "the matrices' first moments become Muon's momentum"


@pytest.mark.parametrize(
    ("before", "after", "sentences"),
    [
        (
            "--bf16",
            "--bf16 --exp-avg-sq-dtype bf16",
            ["the values of exp_avg_sq are bf16: fp32 was rounded to nearest"],
        ),
        pytest.param(
            ROUNDED,
            "--bf16 --exp-avg-sq-dtype bf16",
            ["the values of exp_avg are fp32, exactly as they were in bf16"],
            marks=pytest.mark.slow,
        ),
        ("--bf16", MUON, [TO_MOMENTA]),
        ("--bf16", EIGHT, ["the values of exp_avg are fp8: fp32 was", "the values of exp_avg_sq are fp8: fp32 was"]),
        (EIGHT, "--bf16 --exp-avg-dtype fp8 --exp-avg-sq-dtype bf16", ["the values of exp_avg_sq are bf16, exactly"]),
        (EIGHT, MUON, [TO_MOMENTA, "exp_avg are fp32, exactly as they were in fp8", "exp_avg_sq are fp32, exactly"]),
    ],
)
def test_a_run_goes_on_with_other_moments_and_says_so(
    before: str, after: str, sentences: list[str], tmp_path: Path
) -> None:
    """The moments are those of before, rounded to nearest once; with Muon a matrix has no second one."""
    first = saved(tmp_path, f"{before} {OFFLOAD} 0.731", 3)
    second, told = loaded(tmp_path, f"{after} {OFFLOAD} {0.4 if 'fp8' in before + after else 0.731}")
    said = [one for one in told if "the values of" in one or TO_MOMENTA in one]
    assert all(sentence in one for sentence, one in zip(sentences, said, strict=True))
    old, new = states_of(first), states_of(second)
    for name in new["weights"]:
        assert torch.equal(new["weights"][name], old["weights"][name])
        stored = [old[kind][name] for kind in STATES]
        found = [new[kind][name] for kind in STATES if name in new[kind]]
        wide, draws = as_wide(stored, torch.float32), torch.full(stored[0].shape, 0x80008000 - 2**32, dtype=torch.int32)
        formats = [one.dtype for one in found] if found[1:] else [torch.float32] * 2
        assert all(map(torch.equal, found, in_formats(*wide, formats, draws))), name
    assert second.engine.optimizer.steps_taken == 3 and not train(second, 3, 4)[0][2]
    first.close()
    second.close()


def test_second_moments_that_only_the_conversion_reads_may_be_damaged(tmp_path: Path) -> None:
    """Muon's matrices have none, but first moments in 8 bits are relative to them."""
    first = saved(tmp_path, EIGHT, 2)
    before = states_of(first)
    old = {name: as_wide([before[kind][name] for kind in STATES], torch.float32)[0] for name in before["weights"]}
    train(first, 2, 3)
    save(first, 3)
    second, told = run_of(tmp_path, MUON), list[str]()
    states = second.engine.optimizer.state_tensors()
    matrix = next(name for name in states["exp_avg"] if name not in states["exp_avg_sq"])
    newest = tmp_path / "iter_0000003"
    chunk = read_manifest(newest).tensors[f"exp_avg_sq/{matrix}"].chunks[0]
    data = bytearray((newest / chunk.file).read_bytes())
    data[chunk.start] ^= 1
    (newest / chunk.file).write_bytes(data)
    assert resume.load(second, inputs_of(second.config), told.append).iteration == 2
    assert any("skipped a damaged checkpoint" in one and f"exp_avg_sq/{matrix}" in one for one in told)
    assert sum("the values of exp_avg are" in one for one in told) == 1
    assert all(torch.equal(value, old[name]) for name, value in states_of(second)["exp_avg"].items())
    first.close()
    second.close()
