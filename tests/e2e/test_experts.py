"""A mixture of experts as a user has it: scores and texts do not depend on the layout that trained or evaluates it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.commands import gptpar, said_by
from tests.unit.run.evaluation.task_files import BYTES, QUESTIONS, TEXTS, write_lines

EXPERTS = (
    f"{BYTES.replace('--eval-iters 0', '--eval-iters 2')} --swiglu --disable-bias-linear "
    "--position-embedding-type rope --num-experts 4 --moe-ffn-hidden-size 16 --moe-layer-freq [0,1] "
    "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1 --moe-expert-capacity-factor 1.25 "
    "--global-batch-size 4 --fp64"
)
LAYOUTS = {
    "one": "--nproc-per-node 1",
    "four": "--nproc-per-node 4 --expert-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 1",
}
SCORES = ("lm_loss", "validation_loss", "test_loss", "acc", "acc_norm", "bits_per_byte")


def scores_of(run: Path) -> list[float]:
    """All losses and scores that a run has reported, in their order."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines for name in SCORES if name in line]


def test_scores_and_texts_of_a_mixture_are_those_of_one_process(tmp_path: Path) -> None:
    files = [write_lines(tmp_path / "questions.jsonl", QUESTIONS), write_lines(tmp_path / "texts.jsonl", TEXTS)]
    texts = {}
    for name, layout in LAYOUTS.items():
        said_by(["pretrain", *f"{EXPERTS} {layout} --save {tmp_path}/{name} --eval-tasks".split(), *files])
        sampling = f"--load {tmp_path}/{name} --prompt The --num-tokens 40 --temperature 0 --device cpu"
        texts[name] = gptpar(sampling, "generate")
    assert texts["four"] == texts["one"] and len(texts["one"]) > 10
    found = scores_of(tmp_path / "four")
    assert found == pytest.approx(scores_of(tmp_path / "one"), rel=1e-10) and len(found) == 4 + 2 + 3
    words = f"--dtype fp64 --nproc-per-node 2 --expert-model-parallel-size 2 --load {tmp_path}/four --eval-tasks"
    said = said_by(["evaluate", *words.split(), *files])
    tasks = json.loads(said[: said.rindex("\n}") + 2])["tasks"].values()
    assert [task[name] for task in tasks for name in SCORES if name in task] == pytest.approx(found[-3:], rel=1e-10)
    three = "--nproc-per-node 3 --expert-model-parallel-size 3"
    told = gptpar(f"--load {tmp_path}/one --eval-tasks {files[0]} {three}", "evaluate", expect=1)
    assert "--expert-model-parallel-size 3 does not divide --num-experts 4: sizes that do: 1, 2, 4." in told
