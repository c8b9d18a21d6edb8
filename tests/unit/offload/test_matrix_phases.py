"""The CPU optimizer's two phases of updates of matrices: the same bits at every ratio, and skipped steps."""

import math

import pytest
import torch

from gptpar.engine import matrix_homes
from gptpar.offload import buckets
from tests.helpers import make_trainer, tiny_config
from tests.unit.offload.tiny_runs import (
    OFFLOAD,
    RATIOS,
    assert_same_state,
    config_words,
    hash_of,
    run_of,
    state_of,
    train,
)

WORDS = "--optimizer muon --max-position-embeddings 24 --clip-grad 0.9"


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("--bf16", 1 << 23),
        *(pytest.param(dtype, 333, marks=pytest.mark.slow) for dtype in ("--fp64", "--bf16 --cpu-parameters")),
    ],
)
def test_no_ratio_changes_a_bit(dtype: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some steps are clipped; buckets of AdamW speculate beside those of Muon."""
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", size)
    plain = run_of(f"{WORDS} {dtype.replace('--cpu-parameters', '')}", 6)
    assert any(norm > 0.9 for norm in plain.norms)
    for ratio in RATIOS[1:]:
        assert_same_state(run_of(f"{WORDS} {dtype} {OFFLOAD} {ratio}", 6), plain)


@pytest.mark.parametrize("dtype", ["--bf16", pytest.param("--fp64", marks=pytest.mark.slow)])
def test_directions_may_be_wider_than_gradients(dtype: str) -> None:
    """A CPU orthogonalizes in fp32 or wider; the gradients of a single micro-batch leave in the model's format."""
    states = []
    for offload in ("", f"{OFFLOAD} 1 --offload-gradients on"):
        trainer = make_trainer(tiny_config(config_words(f"{WORDS} {dtype} --micro-batch-size 4 {offload}")))
        train(trainer, 0, 3, 1)
        trainer.engine.finish()
        states.append(hash_of(trainer))
        trainer.close()
    assert states[0] == states[1]


@pytest.mark.parametrize("chunk", [1 << 30, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ratio", ["0.731", "1", pytest.param("0", marks=pytest.mark.slow)])
def test_a_step_that_is_not_finite_changes_nothing(ratio: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fp16 gradients that overflow; the steps after it are those of a run without offload."""
    monkeypatch.setattr(matrix_homes, "CHUNK_ELEMENTS", chunk)
    states = []
    for offload in (f"{OFFLOAD} {ratio}", ""):
        trainer = make_trainer(tiny_config(config_words(f"{WORDS} --fp16 --initial-loss-scale 1024 {offload}")))
        found = []
        for first, last, scale in ((0, 3, 1024.0), (3, 4, 2.0**40), (4, 6, 1024.0)):
            trainer.loss_scale.load({**trainer.loss_scale.state(), "value": scale})
            for _, norm, skipped in train(trainer, first, last):
                assert math.isfinite(norm) == (scale == 1024.0) == (not skipped)
            trainer.engine.finish()
            found.append(hash_of(trainer))
        assert found[0] == found[1] != found[2]
        states.append(state_of(trainer))
        trainer.close()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
