"""Another model than the checkpoint's is refused, or fine-tuned if asked for, also with longer samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gptpar.errors import CheckpointError
from gptpar.run import resume
from gptpar.run.progress import Progress
from gptpar.run.resume import progress_to_resume
from tests.helpers import make_trainer, tiny_config
from tests.unit.run.saved_runs import initial, inputs_of, saved

ROPE = "--position-embedding-type rope --disable-bias-linear"


@pytest.mark.parametrize(
    ("before", "flags", "told"),
    [
        ("", "--num-attention-heads 8", "--num-attention-heads 4 there, 8 here; --num-query-groups 4 there, 8 here"),
        (ROPE, "--rotary-base 500", "--rotary-base 10000 there, 500 here"),
        (ROPE, "--normalization RMSNorm", "--normalization LayerNorm there, RMSNorm here"),
    ],
)
def test_another_model_is_refused_unless_it_is_fine_tuned(tmp_path: Path, before: str, flags: str, told: str) -> None:
    """Among them those that keep every tensor's shape, which nothing else would notice."""
    saved(tmp_path, before)
    config = tiny_config(f"--load {tmp_path} {before} {flags}")
    with pytest.raises(CheckpointError) as refused:
        progress_to_resume(config, inputs_of(config))
    message = str(refused.value)
    assert "iter_0000007 cannot be resumed" in message and "it is another model (" in message and told in message
    assert "--finetune" in message and "other data" not in message
    finetuned = tiny_config(f"--load {tmp_path} {before} {flags} --finetune")
    assert progress_to_resume(finetuned, inputs_of(finetuned)) == Progress()


def test_a_short_training_goes_on_with_longer_samples(tmp_path: Path) -> None:
    """Rotary positions by a flag, which is told; the weights are those of the short training."""
    saved(tmp_path, ROPE)
    longer = "--seq-length 32 --rope-scaling-type yarn --rope-scaling-factor 2 --original-max-position-embeddings 16"
    config, said = tiny_config(f"--load {tmp_path} {ROPE} --finetune --seed 5 {longer}"), list[str]()
    trainer = make_trainer(config)
    assert progress_to_resume(config, inputs_of(config)) == Progress()
    assert resume.load(trainer, inputs_of(config), said.append) == Progress()
    assert said[-1] == (
        " > fine-tuning another model than the checkpoint's: --rope-scaling-type not given there, yarn here"
    )
    before = initial(ROPE).engine.parameters.views()
    assert all(torch.equal(view, before[name]) for name, view in trainer.engine.parameters.views().items())
