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


def save(trainer: Trainer, steps: int) -> None:
    trainer.engine.finish()
    samples = 4 * steps
    progress = Progress(iteration=steps, consumed_samples=samples, scheduled_samples=samples)
    saved_runs.save(trainer, progress, inputs_of(trainer.config), keep=None)


@pytest.mark.parametrize("ratio", [pytest.param("0", marks=pytest.mark.slow), "0.731"])
def test_adamw_s_moments_become_momenta(ratio: str, tmp_path: Path) -> None:
    adam = run_of(tmp_path, f"--bf16 {OFFLOAD} {ratio}")
    train(adam, 0, 3)
    save(adam, 3)
    muon, told = run_of(tmp_path, f"{MUON} {OFFLOAD} {ratio}"), list[str]()
    resume.load(muon, inputs_of(muon.config), told.append)
    assert any("first moments become Muon's momentum" in sentence for sentence in told)
    before, after = adam.engine.optimizer.state_tensors(), muon.engine.optimizer.state_tensors()
    for kind, views in after.items():
        for name, view in views.items():
            assert torch.equal(whole(view), whole(before[kind][name])), (kind, name)
    assert muon.engine.optimizer.steps_taken == 3
    assert not train(muon, 3, 4)[0][2]
    adam.close()
    muon.close()


@pytest.mark.parametrize("name", ["muon", "lion"])
def test_states_without_a_second_moment_go_on(name: str, tmp_path: Path) -> None:
    first = run_of(tmp_path, f"--optimizer {name} --bf16")
    train(first, 0, 2)
    save(first, 2)
    second, told = run_of(tmp_path, f"--optimizer {name} --bf16"), list[str]()
    assert resume.load(second, inputs_of(second.config), told.append).iteration == 2
    assert not any("the values of" in sentence for sentence in told)
    before, after = (run.engine.optimizer.state_tensors() for run in (first, second))
    assert before.keys() == after.keys() and all(
        torch.equal(whole(view), whole(before[kind][name]))
        for kind, views in after.items()
        for name, view in views.items()
    )
    assert train(first, 2, 4) == train(second, 2, 4)
    first.close()
    second.close()


@pytest.mark.slow
def test_adamw_cannot_go_on_with_momenta(tmp_path: Path) -> None:
    muon = run_of(tmp_path, MUON)
    train(muon, 0, 1)
    save(muon, 1)
    adam = run_of(tmp_path, "--bf16")
    with pytest.raises(CheckpointError, match="no second moment, which AdamW divides by.*--no-load-optim"):
        resume.progress_to_resume(adam.config, inputs_of(adam.config))
    anew = run_of(tmp_path, "--bf16 --no-load-optim")
    assert resume.load(anew, inputs_of(anew.config), lambda _: None).iteration == 1
    assert anew.engine.optimizer.steps_taken == 0
    assert not any(vector.any() for kind, vector in anew.engine.optimizer.vectors.items() if kind != "weights")


@pytest.mark.parametrize(
    ("before", "sentence"),
    [
        pytest.param(ROUNDED, "the values of exp_avg are fp32, exactly as they were in bf16", marks=pytest.mark.slow),
        ("--bf16", "the values of exp_avg_sq are bf16: fp32 was rounded to nearest once"),
    ],
)
def test_a_run_goes_on_with_another_number_format_and_says_so(before: str, sentence: str, tmp_path: Path) -> None:
    first, told = run_of(tmp_path, f"{before} {OFFLOAD} 0.731"), list[str]()
    train(first, 0, 3)
    save(first, 3)
    second = run_of(tmp_path, f"--bf16 --exp-avg-sq-dtype bf16 {OFFLOAD} 0.731")
    resume.load(second, inputs_of(second.config), told.append)
    assert [one for one in told if "the values of" in one] == [f" > {sentence}"]
    old, new = (trainer.engine.optimizer.state_tensors() for trainer in (first, second))
    for kind, views in new.items():
        for name, view in views.items():
            assert torch.equal(whole(view), whole(old[kind][name]).to(view.dtype)), (kind, name)
    assert not train(second, 3, 4)[0][2]
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("before", "after", "sentences"),
    [
        ("--bf16", EIGHT, ["exp_avg are fp8: fp32 was", "exp_avg_sq are fp8: fp32 was"]),
        (EIGHT, "--bf16 --exp-avg-dtype fp8 --exp-avg-sq-dtype bf16", ["exp_avg_sq are bf16, exactly"]),
        (EIGHT, MUON, ["exp_avg are fp32, exactly as they were in fp8", "exp_avg_sq are fp32, exactly"]),
        pytest.param(
            ROUNDED, EIGHT, ["exp_avg are fp8: bf16 was", "exp_avg_sq are fp8: bf16 was"], marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_goes_on_to_and_from_8_bits(before: str, after: str, sentences: list[str], tmp_path: Path) -> None:
    first, told = run_of(tmp_path, f"{before} {OFFLOAD} 0.731"), list[str]()
    train(first, 0, 3)
    save(first, 3)
    second = run_of(tmp_path, f"{after} {OFFLOAD} 0.4")
    resume.load(second, inputs_of(second.config), told.append)
    said = [one for one in told if "the values of" in one]
    assert all(sentence in one for sentence, one in zip(sentences, said, strict=True))
    old, new = (trainer.engine.optimizer.state_tensors() for trainer in (first, second))
    for name in new["weights"]:
        assert torch.equal(whole(new["weights"][name]), whole(old["weights"][name]))
        stored = [whole(old[kind][name]) for kind in STATES]
        found = [whole(new[kind][name]) for kind in STATES if name in new[kind]]
        wide, draws = as_wide(stored, torch.float32), torch.full(stored[0].shape, 0x80008000 - 2**32, dtype=torch.int32)
        formats = [one.dtype for one in found] if found[1:] else [torch.float32] * 2
        assert all(map(torch.equal, found, in_formats(*wide, formats, draws))), name
    assert not train(second, 3, 4)[0][2]
    first.close()
    second.close()


def test_second_moments_that_only_the_conversion_reads_may_be_damaged(tmp_path: Path) -> None:
    """Muon's matrices have none, but first moments in 8 bits are relative to them."""
    first, told = run_of(tmp_path, EIGHT), list[str]()
    train(first, 0, 2)
    save(first, 2)
    old = {
        name: as_wide([whole(first.engine.optimizer.state_tensors()[kind][name]) for kind in STATES], torch.float32)[0]
        for name in first.engine.optimizer.state_tensors()["weights"]
    }
    train(first, 2, 3)
    save(first, 3)
    second = run_of(tmp_path, MUON)
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
    for name, view in second.engine.optimizer.state_tensors()["exp_avg"].items():
        assert torch.equal(whole(view), old[name]), name
    first.close()
    second.close()
