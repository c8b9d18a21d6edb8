"""Whole runs with options that Megatron's users know, and a run repeated from its own file."""

from pathlib import Path

import pytest
import torch

import gptpar.cli
from gptpar.errors import ConfigError
from gptpar.run.trainer import Trainer
from tests.unit.run.whole_runs import FEW, assert_same_tensors, iterations, losses, run


@pytest.mark.slow
def test_a_kill_switch_saves_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    switch, update = tmp_path / "stop", Trainer.update

    def updated(self: Trainer, *args: object, iteration: int, **others: object) -> object:
        if iteration == 2:
            switch.touch()
        return update(self, *args, iteration=iteration, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "update", updated)
    flags = f"--save-interval 100 --kill-switch-path {switch}"
    run(tmp_path / "run", flags)
    assert iterations(tmp_path / "run") == [3]  # it appears in step 2 after the processes' vote
    with pytest.raises(ConfigError, match=r"--kill-switch-path .*stop is there already, so the run would stop at once"):
        run(tmp_path / "run", flags)


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
    assert_same_tensors(tmp_path / "one/iter_0000003", tmp_path / "other/iter_0000003")
    assert found == [(True, False)] * 6 and not torch.are_deterministic_algorithms_enabled()
    assert products.allow_bf16_reduced_precision_reduction == adds_in_bf16


FLAGS = f"{FEW} --lr-decay-style constant --save-interval 2 --no-async-save --data-cache-path cache"


@pytest.mark.slow
def test_a_run_is_repeated_and_goes_on_from_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another folder, or further in the same one, whose file then says the longer run."""

    def pretrain(flags: str) -> None:
        assert gptpar.cli.main(["pretrain", *flags.split()]) == 0

    monkeypatch.chdir(tmp_path)
    a, b, c = map(Path, "abc")
    pretrain(f"{FLAGS} --train-iters 3 --save a")
    pretrain("--config a/config.toml --save b")
    of_a, of_b = ((one / "config.toml").read_text().split("\n\n", 1)[1] for one in (a, b))
    assert of_b == of_a.replace('save = "a"', 'save = "b"')
    assert len(losses(a)) == 3 and losses(b) == losses(a)
    pretrain("--config a/config.toml --load a --train-iters 5")
    pretrain("--config a/config.toml --load c --save c")
    assert len(losses(c)) == 5 and losses(c) == losses(a)
