"""Losses, gradients, norms, weights and buffers of each step against plain torch, to 1e-10.

A covering subset; ``python -m tests.any_module --full`` runs all of it: 1, 2 and 4 processes x ZeRO 0-3 x CPU share.
"""

from dataclasses import replace

import pytest

from tests.any_module.case import Setup
from tests.any_module.matrix import Bench

STEPS = 4
EVERY_STAGE_AND_SHARE = [
    Setup(2, stage, ratio, accumulation=1 + 2 * (stage % 2), clip=0.0 if stage == 2 else 0.5)
    for stage in range(4)
    for ratio in (0.0, 0.6, 1.0)
]
MODELS = [Setup(1, 3, 0.6, accumulation=3), Setup(2, 3, 1.0), Setup(2, 2, 0.6, clip=0.0)]
RECOMPUTED = [Setup(1, 3, 0.6), Setup(2, 3, 0.0, accumulation=3)]
SYNCHRONISED = [Setup(1, 0, 0.6), Setup(2, 3, 0.6, accumulation=3), Setup(2, 1, 0.0)]
FOUR = [("gpt2", Setup(4, 3, 0.6)), ("cnn", Setup(4, 3, 1.0)), ("mlp", Setup(4, 0, 0.6))]
CASES = [
    *(("mlp", setup) for setup in EVERY_STAGE_AND_SHARE),
    *((name, setup) for name in ("gpt2", "llama") for setup in MODELS),
    *zip(("gpt2_checkpointed", "llama_checkpointed"), RECOMPUTED, strict=True),
    *zip(("llama_checkpointed_reentrant", "gpt2_checkpointed_reentrant"), RECOMPUTED, strict=True),
    *((name, setup) for name in ("cnn", "cnn_channels_last") for setup in SYNCHRONISED),
    *FOUR,
]


@pytest.mark.parametrize(("name", "setup"), CASES, ids=lambda value: str(value).replace(", ", "-"))
def test_training_is_plain_torchs(bench: Bench, name: str, setup: Setup) -> None:
    bench.check(name, replace(setup, steps=STEPS))
