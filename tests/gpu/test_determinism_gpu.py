"""Training on a GPU with deterministic kernels alone: two runs have the same bits."""

import pytest
import torch

from gptpar.system.determinism import deterministic
from tests.gpu.training import run

pytestmark = pytest.mark.gpu

EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 48 --disable-bias-linear --swiglu "
    "--moe-z-loss-coeff 0.01 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 "
    "--moe-router-enable-expert-bias"
)
MODELS = {
    "gpt": "--bf16",
    "dropout": "--bf16 --hidden-dropout 0.1 --attention-dropout 0.1",
    "windows": "--fp16 --num-query-groups 2 --position-embedding-type rope --swiglu --window-size 5 --qk-layernorm",
    "windows-by-a-kernel": "--bf16 --num-query-groups 2 --window-size 5 --window-pattern SF",
    "alibi": "--bf16 --position-embedding-type alibi --embed-layernorm --apply-layernorm-1p --decoupled-lr 2e-2",
    "fp32": "--normalization RMSNorm --z-loss-weight 0.01 --logit-softcap 5 --no-adam-bias-correction",
    "plain": "--bf16 --no-compile --cuda-graph off --recompute-granularity full",
    "experts": f"--bf16 {EXPERTS}",
    "plain experts": f"--bf16 --no-compile {EXPERTS}",
    "experts with capacity": f"--bf16 --moe-expert-capacity-factor 0.75 {EXPERTS}",
}


@pytest.mark.parametrize("name", MODELS)
def test_two_runs_have_the_same_bits(name: str) -> None:
    """The second may be compiled afresh: without the mode, torch would choose its reductions by their times again."""
    flags = f"{MODELS[name]} --deterministic-mode"
    with deterministic(True):
        first, second = run("cuda", flags), run("cuda", flags)
        assert torch.are_deterministic_algorithms_enabled()
    assert first[0] == second[0] and torch.equal(first[1], second[1])


@pytest.mark.parametrize("name", ["alibi", "fp32"])
def test_new_options_follow_the_cpu(name: str) -> None:
    """ALiBi's channels, norms less one, a rate of the ends, Adam without bias correction; without rounding's chaos."""
    flags = MODELS[name].replace("--bf16 ", "") + " --fp64"
    (gpu, _), (cpu, _) = run("cuda", flags), run("cpu", flags)
    assert gpu == pytest.approx(cpu, rel=1e-9)
