"""A run's saved configuration at verbs other than pretrain: each takes what concerns it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptpar.cli import main
from gptpar.cli.benchmark.combinations import combinations, contradictions
from gptpar.cli.benchmark.measure import parse
from gptpar.cli.benchmark.sweep import sweep_flags
from gptpar.config import CheckpointConfig, Flags
from gptpar.config.flags import parse_flags
from gptpar.config.run_file import write_run_file

RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --train-iters 4 "
    "--vocab-size 60 --mock-data --lr 1e-2 --bf16 --save-interval 2 --wandb-project kept --mirror-interval 2"
)


@pytest.fixture
def config(tmp_path: Path) -> list[str]:
    """The words that name the file of a run whose folder has a checkpoint."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "iter_0000004").mkdir()
    (folder / "iter_0000004" / "rank00000.bin").touch()
    words = [*RUN.split(), "--save", str(folder), "--load", str(folder)]
    write_run_file(folder, parse_flags(words).typed, "")
    return ["--config", str(folder / "config.toml")]


def test_a_benchmark_leaves_out_the_runs_folders_and_records(config: list[str]) -> None:
    parsed = parse(config)
    assert parsed.problems == [] and parsed.flags.checkpoint == CheckpointConfig()
    assert parsed.flags.logging.wandb_project is None and parsed.flags.recovery == Flags().recovery
    assert (parsed.flags.model.hidden_size, parsed.flags.precision.bf16) == (32, True)


def test_a_sweep_goes_over_what_the_file_says(config: list[str]) -> None:
    parsed = parse([*config, "--sweep", "--sweep-micro-batches", "1", "4"], sweep_flags)
    assert list(contradictions(parsed)) == []
    assert [one.typed.batch.micro_batch_size for one in combinations(parsed, 1)] == [1, 4]
    typed = parse([*config, "--micro-batch-size", "2", "--sweep", "--sweep-micro-batches", "1"], sweep_flags)
    told = "--sweep-micro-batches chooses --micro-batch-size, which is given as well: keep one."
    assert list(contradictions(typed)) == [told]


def test_a_plan_is_made_of_it(config: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *config]) == 0
    assert "fits: stage 0 needs the most" in capsys.readouterr().out
