"""Whole runs with options that Megatron's users know, and a run repeated from its own file."""

import json
from pathlib import Path

import pytest
import torch

import gptpar.cli
from gptpar.checkpoint import find_checkpoints, read_tensors
from gptpar.cli.pretrain import pretrain
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.errors import ConfigError
from gptpar.run.trainer import Trainer
from tests.helpers import TINY

FEW = TINY.replace("--train-iters 20", "--train-iters 8 --log-interval 1")


def run(folder: Path, flags: str = "") -> None:
    config, derived = resolve(parse_flags(f"{FEW} --save {folder} {flags}".split()), 1)
    pretrain(config, derived, ())


def iterations(folder: Path) -> list[int]:
    return sorted(number for number, _ in find_checkpoints(folder))


@pytest.mark.slow
def test_a_kill_switch_saves_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    switch, update = tmp_path / "stop", Trainer.update

    def updated(self: Trainer, *args: object, iteration: int, **others: object) -> object:
        if iteration == 2:
            switch.touch()
        return update(self, *args, iteration=iteration, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "update", updated)
    flags = f"--save-interval 100 --load {tmp_path}/run --kill-switch-path {switch}"
    run(tmp_path / "run", flags)
    assert iterations(tmp_path / "run") == [3]  # it appears in step 2 after the processes' vote
    with pytest.raises(ConfigError, match=r"--kill-switch-path .*stop is there already, so the run would stop at once"):
        run(tmp_path / "run", flags)
    monkeypatch.undo()
    switch.unlink()
    run(tmp_path / "run", flags)
    assert iterations(tmp_path / "run") == [3, 8]


@pytest.mark.slow
def test_a_deterministic_run_has_the_same_bits_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And every step of it takes deterministic kernels alone, and adds the parts of bf16 sums in fp32 if asked to."""
    update, found, products = Trainer.update, [], torch.backends.cuda.matmul
    adds_in_bf16 = products.allow_bf16_reduced_precision_reduction

    def updated(self: Trainer, *args: object, **others: object) -> object:
        adds = products.allow_bf16_reduced_precision_reduction
        found.append((torch.are_deterministic_algorithms_enabled(), adds))
        return update(self, *args, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "update", updated)
    flags = (
        "--bf16 --deterministic-mode --hidden-dropout 0.1 --attention-dropout 0.1 --num-query-groups 2 "
        "--window-size 4 --cpu-optimizer --cpu-optimizer-ratio 0.5 --disable-bf16-reduced-precision-matmul "
        "--train-iters 3"
    )
    for name in ("one", "other"):
        run(tmp_path / name, flags)
    one, other = (read_tensors(tmp_path / name / "iter_0000003") for name in ("one", "other"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert found == [(True, False)] * 6 and not torch.are_deterministic_algorithms_enabled()
    assert products.allow_bf16_reduced_precision_reduction == adds_in_bf16


# --- A run folder's own ``config.toml``: the run again, in another folder; or further, in the same one --------------


FLAGS = f"{TINY} --lr-decay-style constant --save-interval 2 --no-async-save --data-cache-path cache --log-interval 1"


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record["lm_loss"] for line in lines if "lm_loss" in (record := json.loads(line))]


@pytest.mark.slow
def test_a_run_is_repeated_and_goes_on_from_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert gptpar.cli.main(["pretrain", *FLAGS.split(), "--train-iters", "3", "--save", "a"]) == 0
    assert gptpar.cli.main(["pretrain", "--config", "a/config.toml", "--save", "b"]) == 0
    a, b = ((Path(one) / "config.toml").read_text().split("\n\n", 1)[1] for one in "ab")
    assert b == a.replace('save = "a"', 'save = "b"')
    assert len(losses(Path("a"))) == 3 and losses(Path("b")) == losses(Path("a"))
    assert gptpar.cli.main(["pretrain", "--config", "a/config.toml", "--load", "a", "--train-iters", "5"]) == 0
    assert gptpar.cli.main(["pretrain", "--config", "a/config.toml", "--load", "c", "--save", "c"]) == 0
    assert len(losses(Path("c"))) == 5 and losses(Path("c")) == losses(Path("a"))
