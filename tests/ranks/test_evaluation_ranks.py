"""Scores of tasks do not depend on the layout."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from gptpar.data.tokenizer import build_tokenizer
from gptpar.reporting.records import TaskScores
from gptpar.run.evaluation.evaluator import Evaluator
from gptpar.run.evaluation.tasks import read_tasks
from gptpar.topology.mesh import Mesh
from tests.helpers import make_trainer
from tests.spawn import spawn
from tests.unit.run.evaluation.task_files import QUESTIONS, TEXTS, byte_config, write_lines

EXPERTS = (
    "--swiglu --disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 16 --moe-router-enable-expert-bias "
    "--moe-expert-capacity-factor 1.25 "
)
CASES = {
    "dp2": (Mesh(data=2), ""),
    "ZeRO-3": (Mesh(data=2), "--zero-stage 3"),
    "ZeRO-3, CPU optimizer 0.5": (Mesh(data=2), "--zero-stage 3 --cpu-optimizer --cpu-optimizer-ratio 0.5"),
    "tp2": (Mesh(tensor=2), "--tensor-model-parallel-size 2"),
    "tp2, sequence parallel": (Mesh(tensor=2), "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (Mesh(pipeline=2), "--pipeline-model-parallel-size 2"),
    "pp2, interleaved": (
        Mesh(pipeline=2),
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4",
    ),
    "experts, ep2": (Mesh(data=2, expert=2), f"{EXPERTS}--expert-model-parallel-size 2 --zero-stage 3"),
    "experts, tp2": (Mesh(tensor=2), f"{EXPERTS}--tensor-model-parallel-size 2 --sequence-parallel"),
    "experts, pp2": (Mesh(pipeline=2), f"{EXPERTS}--pipeline-model-parallel-size 2"),
}
Scores = tuple[torch.Tensor, Mapping[str, float], Mapping[str, float]]


def scores(rank: int, mesh: Mesh, flags: str, files: list[str]) -> Scores:
    """The log-likelihoods of questions, and the scores of questions and of texts."""
    trainer = make_trainer(byte_config(f"--fp64 {flags}", mesh.world_size), rank, mesh)
    evaluator = Evaluator(trainer.pipeline, trainer.topology, 32, 64)
    tasks = read_tasks(files, build_tokenizer("ByteLevelTokenizer"), 32)
    values = evaluator.log_likelihoods(tasks[0], lambda: False)
    found: list[TaskScores | None] = [evaluator.evaluate(task) for task in tasks]
    trainer.close()
    assert values is not None and found[0] is not None and found[1] is not None
    return values, found[0].scores, found[1].scores


def all_cases(rank: int, files: list[str]) -> list[Scores]:
    return [scores(rank, mesh, flags, files) for mesh, flags in CASES.values()]


def test_every_rank_has_the_scores_of_one_process(tmp_path: Path) -> None:
    files = [write_lines(tmp_path / "questions.jsonl", QUESTIONS), write_lines(tmp_path / "texts.jsonl", TEXTS)]
    alone = {model: scores(0, Mesh(), model, files) for model in ("", EXPERTS, "--num-layers 4")}
    for of_rank in spawn(all_cases, 2, files, timeout_s=300):
        for (name, (_, flags)), (values, of_questions, of_texts) in zip(CASES.items(), of_rank, strict=True):
            wanted = next(one for model, one in reversed(alone.items()) if model in flags)
            torch.testing.assert_close(values, wanted[0], rtol=1e-10, atol=0, msg=lambda m, name=name: f"{name}: {m}")
            assert of_questions == wanted[1], name
            assert of_texts["bits_per_byte"] == pytest.approx(wanted[2]["bits_per_byte"], rel=1e-10), name
