"""Cyclic training and full validation give the same numbers in every layout."""

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.data.indexed import IndexedDatasetWriter
from gptpar.data.loader import make_micro_batch
from gptpar.reporting.records import ValidationRecord
from gptpar.run.batch_plan import BatchPlan
from gptpar.run.data import Vocabulary, make_loaders
from gptpar.run.loop import Run
from gptpar.run.progress import Progress
from gptpar.run.saving import Saving
from gptpar.system.stop import StopRequest
from gptpar.topology.mesh import Mesh
from tests.helpers import make_trainer
from tests.spawn import spawn

STEPS, BATCH, VALID = 4, 4, 7
LAYOUTS = [(Mesh(data=2), 2), (Mesh(tensor=2), 2), (Mesh(pipeline=2), 1)]  # and the micro-batch size
Result = tuple[list[float], float, float | None]
FLAGS = (
    "--fp64 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size {micro} "
    f"--global-batch-size {BATCH} --train-iters {STEPS} --lr 1e-2 --vocab-size 60 --make-vocab-size-divisible-by 64 "
    "--hidden-dropout 0 --attention-dropout 0 --dataloader-type cyclic --full-validation --num-workers 0 "
    "--train-data-path {train} {valid} --valid-data-path {valid} --tensor-model-parallel-size {tensor} "
    "--pipeline-model-parallel-size {pipeline}"
)


def run(rank: int, folder: str, mesh: Mesh, micro: int) -> Result:
    """Training losses, the validation loss, and on one process its mean over the samples taken one at a time."""
    flags = FLAGS.format(
        train=f"{folder}/train", valid=f"{folder}/valid", micro=micro, tensor=mesh.tensor, pipeline=mesh.pipeline
    )
    config, _ = resolve(parse_flags(flags.split()), mesh.world_size)
    config = config.update("model", padded_vocab_size=64, softmax_vocab_size=60)
    trainer = make_trainer(config, rank, mesh)
    plan = BatchPlan.of(config.batch)
    loaders = make_loaders(config, trainer.topology, plan, Vocabulary(60, None, {}), lambda _: None)
    train = loaders["train"]
    assert train is not None
    losses = []
    for step in range(STEPS):
        loss = trainer.forward_backward(train.fetch(step * BATCH, BATCH), step)
        launched = trainer.update(loss, iteration=step, samples=BATCH, progress=step * BATCH, stop=False)
        losses.append(launched.readings.read()[0])
    records: list[ValidationRecord] = []
    reporter = SimpleNamespace(validation=records.append)
    saving = Saving(trainer, Vocabulary(60, None, {}), print)  # type: ignore[arg-type]
    parts = (trainer, Progress(STEPS), plan, loaders, reporter, StopRequest(), print, time.time(), saving)
    story = Run(*parts)  # type: ignore[arg-type]
    story.evaluate("valid")
    return losses, records[0].loss, by_hand(trainer, folder) if mesh.world_size == 1 else None


def by_hand(trainer: object, folder: str) -> float:
    tokens = np.fromfile(f"{folder}/valid.bin", "<u2").astype(np.int64)
    samples = [tokens[16 * i : 16 * i + 17] for i in range(VALID)]
    losses = [trainer.evaluate([make_micro_batch(sample[None])]).item() for sample in samples]  # type: ignore[attr-defined]
    return sum(losses) / VALID


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("corpora")
    random = np.random.RandomState(0)
    for name, samples in (("train", 6), ("valid", VALID)):
        with IndexedDatasetWriter(folder / name, "uint16") as writer:
            writer.add_document(random.randint(0, 60, 16 * samples + 1))
    return str(folder)


@pytest.fixture(scope="module")
def alone(corpora: str) -> tuple[list[float], float]:
    losses, loss, mean = run(0, corpora, Mesh(), 1)
    assert loss == pytest.approx(mean, rel=1e-13)  # 7 samples in global batches of 4
    return losses, loss


def runs(rank: int, folder: str) -> list[Result]:
    return [run(rank, folder, mesh, micro) for mesh, micro in LAYOUTS]


def test_every_layout_agrees_with_one_process(corpora: str, alone: tuple[list[float], float]) -> None:
    results = [run(0, corpora, Mesh(), 4), *(result for of_rank in spawn(runs, 2, corpora) for result in of_rank)]
    assert len(results) == 1 + 2 * len(LAYOUTS)
    for losses, loss, _ in results:
        torch.testing.assert_close(losses, alone[0], rtol=1e-12, atol=0)
        assert loss == pytest.approx(alone[1], rel=1e-12)
