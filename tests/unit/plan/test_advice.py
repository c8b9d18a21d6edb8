"""What a plan proposes, and what a search says it has looked at."""

from __future__ import annotations

import pytest

from gptpar.cli.plan import make_planner
from gptpar.plan.remedies import remedies
from gptpar.plan.report import plan_text, search_json, search_text
from gptpar.plan.search import candidates, search
from tests.unit.plan.plans import CALM, GIB, OFFLOAD, TEN_B, plan

TEN_B_KEPT = TEN_B.replace("--recompute-granularity full", "")


@pytest.mark.parametrize(("memory", "ratio"), [(36.5, 0), (36, 0.3), (20, 1)])
def test_auto_leaves_all_on_the_gpu_where_masters_are_the_parameters(memory: float, ratio: float) -> None:
    """In fp32 the need is 36.1 GiB with nothing on the host, 40.2 with 5 % of it, and falls from there on."""
    flags = (
        f"--preset 1.3B --seq-length 1024 --micro-batch-size 4 --global-batch-size 4 --gpu-memory {memory} {OFFLOAD}"
    )
    planned = plan(f"{flags} auto")
    assert planned.job.ratio == ratio
    if 0 < ratio < 1:
        less = plan(f"{flags} {ratio - 0.05:.2f} --offload-gradients off")
        assert planned.fits and not less.fits and less.need / GIB < plan(f"{flags} 0.05").need / GIB


@pytest.mark.parametrize("offload", ["", f"{OFFLOAD} 1", f"{OFFLOAD} 1 --cpu-parameters"])
def test_the_last_resort_recomputes_too(offload: str) -> None:
    planner, _ = make_planner(f"{TEN_B_KEPT} {offload} --gpu-memory 26".split())
    planned = planner.plan()
    (enough,) = (remedy for remedy in remedies(planner, planned) if remedy.fits)
    assert enough.need < 26 * GIB < plan(f"{TEN_B_KEPT} {OFFLOAD} 1 --cpu-parameters").need
    assert enough.flags().count("--recompute-granularity full") == 1
    flags = [remedy.flags() for remedy in remedies(planner, planned)]
    assert len(set(flags)) == len(flags)


def test_what_is_not_enough_is_not_called_a_single_change() -> None:
    planner, _ = make_planner(f"{TEN_B_KEPT} --gpu-memory 8".split())
    text = plan_text(planner.plan(), remedies(planner, planner.plan()))
    assert "nothing that was tried is enough; these save the most" in text
    first = text.split("combinations):\n")[1].splitlines()[0]
    assert "--cpu-parameters" in first and "--recompute-granularity full" in first


def test_a_short_host_is_not_told_to_hold_more() -> None:
    planner, _ = make_planner(f"{TEN_B} {OFFLOAD} 0.9 --gpu-memory 140 --host-memory 64".split())
    planned = planner.plan()
    assert planned.fits_gpu and not planned.fits_host
    assert not any("--cpu-parameters" in remedy.flags() for remedy in remedies(planner, planned))


def test_a_search_counts_each_layout_once() -> None:
    """Where none fits, the candidates are judged three times; what is told is of the last time."""
    flags = f"{CALM} --preset 13B --seq-length 2048 --world-size 2 --global-batch-size 8 --gpu-memory 24 --search"
    planner, _ = make_planner(flags.split())
    found = search(planner)
    assert found.tried == len(list(candidates(planner))) == sum(count for count, _ in found.refused.values())
    title = search_text(found).splitlines()[0]
    assert title.startswith(f"--- search with the optimizer and the parameters in host memory: {found.tried} layouts")
    assert search_json(found)["on_host"] == ["the optimizer", "the parameters"]


@pytest.mark.parametrize(
    ("flags", "title"),
    [("", "--- search: "), ("--cpu-parameters", "--- search with the parameters in host memory: ")],
)
def test_a_search_says_what_it_was_told_to_move(flags: str, title: str) -> None:
    planner, _ = make_planner(f"{CALM} --preset 350M --global-batch-size 8 --search {flags}".split())
    assert search_text(search(planner)).startswith(title)
