"""``gptpar benchmark --sweep``: what is run, what is not and why; a run's saved configuration at other verbs."""

import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

from gptpar.cli import main
from gptpar.cli.benchmark.combinations import combinations, contradictions
from gptpar.cli.benchmark.measure import parse
from gptpar.cli.benchmark.predict import most_promising, predict
from gptpar.cli.benchmark.runner import Completed
from gptpar.cli.benchmark.sweep import shared_words, sweep, sweep_flags
from gptpar.cli.benchmark.table import Measurement, table
from gptpar.config import CheckpointConfig, Flags
from gptpar.config.flags import parse_flags
from gptpar.config.run_file import write_run_file
from gptpar.config.validate import resolve

ROOT = Path(__file__).parents[3]
TINY = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 512 --sweep "


def result(tokens_per_s: float, gib: float | None = None) -> dict[str, object]:
    ms = 1024 / tokens_per_s * 1e3
    return {"tokens_per_s": tokens_per_s, "ms_per_step": ms, "mfu": gib and 0.4567, "peak_mem_gib": gib}


# --- combinations ---------------------------------------------------------------------------------------------------


def test_every_layout_and_one_batch_for_all() -> None:
    """4 processes have 6 layouts; micro-batches 2 and 3 on up to 4 data-parallel ones share 24 samples."""
    accepted = combinations(parse(f"{TINY} --sweep-micro-batches 2 3".split(), sweep_flags), 4)
    assert len(accepted) == 12 and not any(one.refusal for one in accepted)
    assert {one.mesh.describe() for one in accepted} == {
        f"dp{d} x tp{t} x pp{p}" for d, t, p in [(4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 4, 1), (1, 1, 4), (1, 2, 2)]
    }
    assert {one.typed.batch.global_batch_size for one in accepted} == {24}
    assert " ".join(accepted[0].flags) == (
        "--global-batch-size 24 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
        "--context-parallel-size 1 --micro-batch-size 2"
    )


# --- the sweep ------------------------------------------------------------------------------------------------------


def test_the_table_is_sorted_and_holds_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [Completed(result(2048.0, 12.5)), Completed(None, "out of GPU memory"), Completed(result(4096.0, 1.25))]
    argv = f"{TINY} --nproc-per-node 2 --sweep-micro-batches 1 --sweep-timeout 7".split()
    runner = mock.Mock(side_effect=answers)
    assert sweep(parse(argv, sweep_flags), shared_words(argv), runner) == 0
    assert [timeout for (_, timeout), _ in runner.call_args_list] == [7, 7, 7]
    command = runner.call_args_list[0].args[0]
    assert command[:4] == [sys.executable, "-m", "gptpar", "benchmark"]
    assert "--sweep-timeout" not in command and "--nproc-per-node" in command
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("the same in all"))
    assert lines[start] == "the same in all: recompute none, ZeRO-0, 1 virtual, CPU ratio 0"
    assert [" ".join(line.split()) for line in lines[start + 1 :]] == [
        "layout micro-batch tokens/s ms MFU % GiB",
        "dp1 x tp2 x pp1 1 4,096.0 250.0 45.7 1.25",
        "dp2 x tp1 x pp1 1 2,048.0 500.0 45.7 12.50",
        "dp1 x tp1 x pp2 1 out of GPU memory",
    ]
    assert len({len(line) for line in lines[start + 1 : start + 4]}) == 1


# --- what plan expects ----------------------------------------------------------------------------------------------


def test_plan_chooses_the_most_promising() -> None:
    """1.3B on 4 H200: plan's fastest of six layouts is data parallelism, and its figures stand beside the measured."""
    words = "--preset 1.3B --seq-length 2048 --bf16 --attention-dropout 0 --hidden-dropout 0 --global-batch-size 32"
    argv = f"{words} --micro-batch-size 8 --zero-stage 1 --sweep --sweep-top 2 --sweep-gpu h200".split()
    parsed = parse(argv, sweep_flags)
    chosen = combinations(parsed, 4)
    kept, left = most_promising(chosen, predict(parsed, chosen, 4), 2)
    assert [one.mesh.describe() for one, _ in kept][0] == "dp4 x tp1 x pp1" and len(left) == 4
    assert kept[0][1].time.total == pytest.approx(0.2580, abs=1e-4)
    assert all(one.refusal.startswith("plan expects ") for one in left)
    text = table([Measurement(kept[0][0], Completed(result(242_833.7, 39.41)), kept[0][1])], left)
    assert text.splitlines()[1].split()[-4:] == ["plan", "ms", "plan", "GiB"]
    assert text.splitlines()[2].split()[-2:] == ["258.0", "38.26"]


# --- benchmarks/regenerate.py ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "count", "with_peers"), [(4, 9, 10), (1, 11, 16)])
def test_all_commands_are_valid(
    gpus: int, count: int, with_peers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command of ours passes validation; each peer that is at hand comes once, after its first case."""
    regenerate = runpy.run_path(str(ROOT / "benchmarks/regenerate.py"), run_name="regenerate")["main"]
    assert regenerate(["--dry-run", "--gpus", str(gpus)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "cpu_adam" not in line]
    assert len(lines) == count
    for line in lines:
        words = line.split(" gptpar benchmark ")[1].split()
        parsed = parse(words, sweep_flags)
        resolve(parsed, parsed.flags.parallel.nproc_per_node)
        assert parsed.flags.parallel.nproc_per_node == max(1, gpus)
    for name in ("fsdp2", "nanogpt"):
        (tmp_path / f"baseline_{name}.py").touch()
    regenerate(["--dry-run", "--gpus", str(gpus), "--peers", str(tmp_path)])
    lines = [line for line in capsys.readouterr().out.splitlines() if "cpu_adam" not in line]
    commands = [line for line in lines if not line.startswith("without")]
    assert len(commands) == with_peers and "baseline_" in commands[1]
    assert any(line.startswith("without megatron-core: ") for line in lines) == (gpus == 4)


# --- A run's saved configuration at verbs other than pretrain: each takes what concerns it --------------------------


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
