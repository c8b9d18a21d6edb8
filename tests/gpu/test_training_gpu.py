"""Training on a GPU against the same training on the CPU."""

import pytest
import torch

from gptpar.engine import fused_sums
from tests.gpu.training import run

pytestmark = pytest.mark.gpu


AGAIN = "--recompute-granularity selective --recompute-modules mlp_act layernorm"


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--no-compile",
        "--swiglu --num-query-groups 2 --position-embedding-type rope",
        AGAIN,
        f"--swiglu --normalization RMSNorm {AGAIN}",
    ],
)
def test_fp32_follows_the_cpu(flags: str) -> None:
    """Compiled and not: losses to 1e-4 over eight steps; initial weights are equal by construction."""
    gpu, _ = run("cuda", flags)
    cpu, _ = run("cpu", flags)
    assert gpu == pytest.approx(cpu, rel=1e-4)


@pytest.mark.parametrize("flags", ["--bf16", "--fp16 --loss-scale 1024"])
def test_sixteen_bits_stay_close_to_fp32(flags: str) -> None:
    gpu, _ = run("cuda", flags)
    cpu, _ = run("cpu", "")
    assert gpu == pytest.approx(cpu, rel=2e-2)


@pytest.mark.parametrize("attention_dropout", [0, 0.2])
def test_the_same_run_twice_is_bit_identical(attention_dropout: float) -> None:
    flags = f"--bf16 --hidden-dropout 0.1 --attention-dropout {attention_dropout}"
    first, second = run("cuda", flags), run("cuda", flags)
    assert first[0] == second[0] and torch.equal(first[1], second[1])


def test_a_step_as_one_graph_is_bit_identical() -> None:
    """Eight steps, the third and later ones replayed, with clipping; a moving loss scale, too."""
    for flags in ("--bf16 --clip-grad 0.1", "--fp16 --initial-loss-scale 1e30 --hysteresis 1"):
        one_by_one = run("cuda", f"{flags} --cuda-graph off")
        as_graph = run("cuda", f"{flags} --cuda-graph on")
        assert one_by_one[0] == as_graph[0] and torch.equal(one_by_one[1], as_graph[1])


@pytest.mark.parametrize(
    "flags",
    [
        "--no-compile",
        "--no-compile --bf16 --cpu-optimizer --offload-gradients on",
        f"--no-compile --bf16 --cpu-optimizer --offload-gradients on --swiglu {AGAIN}",
        f"--bf16 --cpu-optimizer --offload-gradients on --swiglu --normalization RMSNorm {AGAIN}",
    ],
)
def test_gradients_that_products_write_to_their_places_have_the_same_bits(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a micro-batch that is summed on the host, those of fp32's first micro-batch.

    A compiler may fuse other operators around a product, and so round other numbers to 16 bits.
    """
    copied = run("cuda:0", flags)
    monkeypatch.setattr(fused_sums, "MIN_ELEMENTS", 0)
    placed = run("cuda:0", flags)
    assert copied[0] == pytest.approx(placed[0], rel=0 if "--no-compile" in flags else 5e-3)
    assert "--no-compile" not in flags or torch.equal(copied[1], placed[1])
