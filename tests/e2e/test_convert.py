"""Runs that begin with a Hugging Face model and export it, in any layout, as a user types them."""

from pathlib import Path

import pytest

from tests.e2e.commands import said_by
from tests.unit.exchange.hf_models import contents, save_theirs
from tests.unit.model.test_families import LLAMA, OLMOE

pytest.importorskip("transformers")

RUN = (
    "--seq-length 16 --global-batch-size 4 --micro-batch-size 1 --train-iters 2 --lr 1e-30 --weight-decay 0 "
    "--mock-data --eval-iters 0 --attention-dropout 0 --hidden-dropout 0"
)
EIGHT = "tp2 x pp2 x dp2, ZeRO-1"
EXPERTS = "ZeRO-3, experts on two processes"
LAYOUTS = {
    EIGHT: "--nproc-per-node 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--use-distributed-optimizer",
    EXPERTS: "--nproc-per-node 2 --zero-stage 3 --expert-model-parallel-size 2",
}


@pytest.mark.parametrize("layout", [EXPERTS, pytest.param(EIGHT, marks=pytest.mark.long)])
def test_a_run_that_changes_nothing_gives_the_files_that_it_began_with(layout: str, tmp_path: Path) -> None:
    """Each layout reads what it holds of the weights, and its checkpoint is exported to the same bytes."""
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    fields = OLMOE if layout == EXPERTS else {**LLAMA, "model_type": "llama"}
    save_theirs(theirs, {**fields, "num_hidden_layers": 4})
    words = f"pretrain --load-hf {theirs} --save {run} --save-interval 1 --save-hf-interval 2 {RUN} {LAYOUTS[layout]}"
    told = said_by(words.split())
    assert f"weights of the {fields['model_type']} model" in told and "exported iter_0000002" in told
    assert contents(run / "hf/iter_0000002") == contents(theirs)
    assert not (run / "hf/iter_0000001").exists()
    said_by(f"convert {run} {tmp_path / 'out'}".split())
    assert contents(tmp_path / "out") == contents(theirs)
