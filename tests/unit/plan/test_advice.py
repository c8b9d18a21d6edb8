"""What a plan proposes, and what a search says it has looked at."""

import json
import tomllib
from pathlib import Path

import pytest

from gptpar.cli.plan import main, make_planner
from gptpar.errors import ConfigError
from gptpar.plan.remedies import remedies
from gptpar.plan.report import search_json
from gptpar.plan.search import search
from tests.unit.plan.plans import CALM, GIB, OFFLOAD, TEN_B, plan, planner_of

TEN_B_KEPT = TEN_B.replace("--recompute-granularity full", "")


@pytest.mark.parametrize("offload", ["", pytest.param(f"{OFFLOAD} 1 --cpu-parameters", marks=pytest.mark.slow)])
def test_the_last_resort_recomputes_too(offload: str) -> None:
    planner = planner_of(f"{TEN_B_KEPT} {offload} --gpu-memory 26")
    found = remedies(planner, planner.plan())
    (enough,) = (remedy for remedy in found if remedy.fits)
    assert enough.need < 26 * GIB < plan(f"{TEN_B_KEPT} {OFFLOAD} 1 --cpu-parameters").need
    assert enough.flags().count("--recompute-granularity full") == 1
    assert len({remedy.flags() for remedy in found}) == len(found)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            "--recompute-granularity full --checkpoint-in-cpu --gpu-memory 80 --host-memory 4",
            "without --checkpoint-in-cpu",
        ),
        (
            "--recompute-granularity selective --recompute-modules mlp --gpu-memory 12",
            "--recompute-granularity full without --recompute-modules",
        ),
    ],
)
def test_a_remedy_says_which_flag_to_leave_out(flags: str, told: str) -> None:
    words = "--preset 350M --seq-length 1024 --micro-batch-size 32 --global-batch-size 32 --bf16 --gpu h100"
    planner = planner_of(f"{words} {flags}")
    assert told in [remedy.flags() for remedy in remedies(planner, planner.plan())]


ONE_GPU = "--attention-dropout 0 --hidden-dropout 0 --seq-length 1024 --gpu h100 --recompute-granularity full"


@pytest.mark.slow
def test_one_gpu_without_a_micro_batch_gets_all_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """bf16 and the batch are chosen, the file says what the plan says, and the same plan follows from it."""
    file = tmp_path / "chosen.toml"
    words = f"--preset 350M {ONE_GPU} --gpu-memory 8 --host-memory 64".split()
    assert main([*words, "--write", str(file), "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    chosen = tomllib.loads(file.read_text())
    assert chosen["precision"]["bf16"] is True and chosen["batch"]["global-batch-size"] == 256
    assert "--bf16" in best["flags"] and best["gib"] <= 8
    again = plan(f"--config {file} --gpu h100 --gpu-memory 8 --host-memory 64")
    assert 1e3 * again.time.total == pytest.approx(best["ms_per_step"], abs=1e-3)
    assert best["gpu_hours_a_billion_tokens"] == pytest.approx(1e9 / best["tokens_per_s"] / 3600, abs=0.01)


def test_several_gpus_need_a_batch_and_typed_formats_stay() -> None:
    with pytest.raises(ConfigError, match="--search needs --global-batch-size"):
        make_planner(["--preset", "350M", "--world-size", "2", "--search"])
    planner = planner_of(f"--preset 350M {ONE_GPU} --fp16")
    assert not planner.chosen and planner.typed.precision.fp16
    assert not make_planner(f"--preset 350M {ONE_GPU} --micro-batch-size 4".split())[1].search


def test_no_step_is_shorter_than_its_floors() -> None:
    """All of 6.7B on the CPU: it moves 30 bytes a parameter after accumulation, and 28 for gradients that are no sums.

    The bus carries sums of 4 bytes down at 55 GB/s, or gradients of 2 bytes with weights of 2 both ways at 89.
    """
    flags = f"{CALM} --preset 6.7B --seq-length 1024 --micro-batch-size 8 {OFFLOAD} 1 --gpu-memory 140"
    summed, single = plan(f"{flags} --global-batch-size 256"), plan(f"{flags} --global-batch-size 8")
    count = summed.job.num_parameters
    for planned, seconds, moved in ((summed, 4 / 55e9, 30), (single, 4 / 89e9, 28)):
        assert planned.floors.host == pytest.approx(moved * count / 150e9, rel=1e-3)
        assert planned.floors.bus == pytest.approx(seconds * count, rel=1e-3)
        assert planned.floors.longest < planned.time.total
    on_host = plan(f"{flags} --global-batch-size 256 --offload-gradients on").floors
    assert on_host.host == pytest.approx((30 + 32 * 12) * count / 150e9, rel=1e-3)
    assert on_host.bus == pytest.approx(32 * 2 * count / 55e9, rel=1e-3)
    faster = plan(f"{flags} --global-batch-size 256 --host-bandwidth 300")
    assert faster.floors.host == pytest.approx(summed.floors.host / 2)
    assert 0 < faster.time.cpu_optimizer < summed.time.cpu_optimizer
    assert summed.floors.products == pytest.approx(32 * single.floors.products)
    # Weights come in 32 backward passes and one forward pass, and in other forward passes where activations, here
    # the inputs of 32 blocks, leave no room for all of them.
    weights = f"{flags} --global-batch-size 256 --cpu-parameters"
    assert plan(weights).floors.bus == pytest.approx(33 * 2 * count / 55e9, rel=1e-3)
    recomputed = plan(f"{weights} --recompute-granularity full")
    share = 32 * 8 * 1024 * recomputed.job.shape.hidden_size / count
    assert recomputed.floors.bus == pytest.approx((64 - 31 * share) * 2 * count / 55e9, rel=1e-3)
    assert plan(f"{CALM} --preset 350M --micro-batch-size 4").floors.bus == 0


def test_a_batch_may_be_given_in_tokens() -> None:
    flags = "--preset 350M --seq-length 1000 --micro-batch-size 4 --batch-tokens"
    assert plan(f"{flags} 64K").job.config.batch.global_batch_size == 64
    for tokens, samples in (("64.9K", 64), ("94K", 96), ("85K", 80), ("28.9K", 28), ("1M", 992)):
        assert f"--global-batch-size {samples}" in plan(f"{flags} {tokens}").flags()
    with pytest.raises(ConfigError, match="--batch-tokens 999 is less than a sample of 1,000 tokens"):
        plan(f"{flags} 999")
    with pytest.raises(ConfigError, match="both say the batch"):
        plan(f"{flags} 8K --global-batch-size 8")


def test_a_search_moves_to_the_host_what_does_not_fit_otherwise() -> None:
    """Nothing where it fits; else the fastest of what fits, which one GPU is asked at once."""
    flags = f"{TEN_B} --global-batch-size 10 --search --gpu-memory "
    best = {}
    for memory in (200, 40, 12):
        found = search(planner_of(f"{flags} {memory}"))
        best[memory] = found.accepted[0]
        assert found.tried == len(found.accepted) + sum(count for count, _ in found.refused.values())
        assert search_json(found)["best"]["fits"]
    assert "--cpu" not in best[200].flags()
    assert "--cpu-optimizer --cpu-optimizer-ratio auto" in best[40].flags() and best[40].need < 40 * GIB
    assert best[200].tokens_per_second > best[40].tokens_per_second > best[12].tokens_per_second
    assert "--cpu-parameters" in best[12].flags() and best[12].need < 12 * GIB
    typed = planner_of(f"{flags} 12 --cpu-optimizer --cpu-optimizer-ratio 0.5")
    assert not search(typed).accepted  # what was typed stays
