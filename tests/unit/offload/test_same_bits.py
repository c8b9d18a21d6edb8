"""Where an element is updated changes no bit: the same weights and moments after 20 steps at every ratio."""

from __future__ import annotations

import pytest
import torch

from gptpar import TwinFlowAdamW
from tests.helpers import make_trainer, tiny_config
from tests.unit.offload.tiny_runs import OFFLOAD, RATIOS, config_words, hash_of, train


def state_after(words: str, ratio: str, *, count: int) -> tuple[str, int]:
    """The hash after 20 steps, and how many of them were clipped."""
    trainer = make_trainer(tiny_config(config_words(f"{words} --max-position-embeddings 24 {OFFLOAD} {ratio}")))
    norms = [norm for _, norm, _ in train(trainer, 0, 20, count)]
    found = hash_of(trainer)
    trainer.close()
    return found, sum(norm > 0.9 for norm in norms)


ROUNDED = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
EIGHT = ROUNDED.replace("bf16", "fp8")


@pytest.mark.parametrize(
    ("dtype", "count", "speculation"),
    [
        ("--bf16", 1, "on"),
        (f"--bf16 {ROUNDED}", 1, "on"),
        (f"--bf16 {EIGHT}", 1, "on"),
        pytest.param("--bf16", 2, "off", marks=pytest.mark.slow),
        pytest.param("", 2, "off", marks=pytest.mark.slow),
        pytest.param("--fp64", 1, "on", marks=pytest.mark.slow),
        pytest.param("--fp16 --initial-loss-scale 3000", 2, "on", marks=pytest.mark.slow),
    ],
)
def test_no_ratio_changes_a_bit(dtype: str, count: int, speculation: str) -> None:
    """One micro-batch, whose gradient may travel in 16 bits, and two, whose sum may not; some steps are clipped."""
    words = f"{dtype} --clip-grad 0.9 --micro-batch-size {4 // count} --offload-speculation {speculation}"
    found = [state_after(words, ratio, count=count) for ratio in RATIOS]
    assert 0 < found[0][1] < 20
    assert len(set(found)) == 1, found


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(d, marks=pytest.mark.slow) for d in (torch.float32, torch.float64))]
)
def test_no_ratio_changes_a_bit_of_any_module(dtype: torch.dtype) -> None:
    """TwinFlowAdamW, with two groups, a parameter that has no gradient now and then, clipping and other rates."""
    states = []
    for ratio in (0.0, 0.3, 0.731, 1.0):
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(torch.nn.Linear(17, 17, dtype=dtype) for _ in range(3))
        groups = [
            {"params": list(layers[0].parameters()), "weight_decay": 0.0},
            {"params": list(layers[1:].parameters())},
        ]
        with TwinFlowAdamW(groups, lr=1e-2, offload_ratio=ratio, max_norm=0.3) as optimizer:
            for step in range(20):
                x = torch.randn(8, 17, generator=torch.Generator().manual_seed(step), dtype=torch.float64).to(dtype)
                used = layers if step % 3 else layers[:2]
                for layer in used:
                    x = layer(x).tanh()
                (x.square().sum() * (10.0 if step % 4 else 0.01)).backward()
                optimizer.param_groups[1]["lr"] = 1e-2 / (1 + step)
                optimizer.step()
                optimizer.zero_grad()
            state = optimizer.state_dict()["state"]
        states.append(
            [p.detach().clone() for p in layers.parameters()] + [t for s in state.values() for t in s.values()]
        )
    for other in states[1:]:
        assert len(other) == len(states[0])
        assert all(torch.equal(a, b) for a, b in zip(states[0], other, strict=True))
