"""Scores against sums by hand: plain logits, one row at a time, and the definitions of lm-evaluation-harness."""

import math
from pathlib import Path

import pytest
import torch

from gptpar.data.tokenizer import build_tokenizer
from gptpar.run.evaluation.evaluator import Evaluator, plan_batches
from gptpar.run.evaluation.items import Question
from gptpar.run.evaluation.tasks import Task, read_tasks
from gptpar.run.trainer import Trainer
from tests.helpers import make_trainer
from tests.unit.run.evaluation.task_files import QUESTIONS, TEXTS, byte_config, write_lines

CONTEXT = 32
TOKENIZER = build_tokenizer("ByteLevelTokenizer")
OPTIONS = {
    "gpt2": "",
    "llama": "--position-embedding-type rope --swiglu --normalization RMSNorm --num-query-groups 2 "
    "--untie-embeddings-and-output-weights --disable-bias-linear --group-query-attention",
    "z-loss and softcap": "--z-loss-weight 1e-2 --logit-softcap 3",
}


def tasks_in(folder: Path) -> list[Task]:
    files = [write_lines(folder / "questions.jsonl", QUESTIONS), write_lines(folder / "texts.jsonl", TEXTS)]
    return read_tasks(files, TOKENIZER, CONTEXT)


def evaluator_of(trainer: Trainer, tokens: int = 64) -> Evaluator:
    return Evaluator(trainer.pipeline, trainer.topology, CONTEXT, tokens)


def by_hand(trainer: Trainer, context: list[int], continuation: list[int]) -> float:
    """The log-likelihood of a continuation, from the logits of the whole row."""
    (stage,) = trainer.pipeline.stages_here
    ids = (context + continuation)[-(CONTEXT + 1) :]
    logits_NV = stage.eval()(torch.tensor([ids[:-1]]), {"seq_length": len(ids) - 1})
    logs_NV = logits_NV.log_softmax(-1)
    places = range(len(ids) - 1 - len(continuation), len(ids) - 1)
    return sum(logs_NV[place, ids[place + 1]].item() for place in places)


@pytest.mark.parametrize("name", OPTIONS)
def test_log_likelihoods_and_scores_are_those_by_hand(name: str, tmp_path: Path) -> None:
    trainer = make_trainer(byte_config(f"--fp64 {OPTIONS[name]}"))
    questions, texts = tasks_in(tmp_path)
    encode, eod = TOKENIZER.encode, TOKENIZER.eod
    wanted, right = [], {"acc": 0, "acc_norm": 0, "acc_bytes": 0}
    with torch.no_grad():
        for question in QUESTIONS:
            query = encode(str(question["query"])) or [eod]
            ends = [" " + choice for choice in question["choices"]]  # type: ignore[attr-defined]
            if str(question["query"]).endswith(" "):  # that space belongs to the continuation
                query, ends = query[:-1], [" " + end for end in ends]
            sums = [by_hand(trainer, query, encode(end)) for end in ends]
            choices: list[str] = question["choices"]  # type: ignore[assignment]
            bytes_of = [len(choice.encode()) for choice in choices]
            for score, by in (("acc", [1] * 3), ("acc_norm", [*map(len, choices)]), ("acc_bytes", bytes_of)):
                values = torch.tensor([value / length for value, length in zip(sums, by, strict=False)])
                right[score] += int(values.argmax()) == question["gold"]
            wanted += sums
        long = encode(str(TEXTS[1]["text"]))
        windows = [([eod], long[:32]), (long[:32][-1:], long[32:64]), (long[-33:64], long[64:])]
        bits = [by_hand(trainer, *window) for window in [([eod], encode("short")), *windows]]
    evaluator = evaluator_of(trainer)
    found = evaluator.log_likelihoods(questions, lambda: False)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-10, atol=0)
    scores = evaluator.evaluate(questions)
    assert scores is not None and scores.num_items == 5
    assert {score: scores.scores[score] for score in right} == {score: hits / 5 for score, hits in right.items()}
    of_texts = evaluator.evaluate(texts)
    assert of_texts is not None
    num_bytes = sum(len(text["text"].encode()) for text in TEXTS)
    assert of_texts.scores["bits_per_byte"] == pytest.approx(-sum(bits) / math.log(2) / num_bytes, rel=1e-10)


def test_the_three_accuracies_differ_as_defined() -> None:
    question = Question("q", ("\u00e9\u00e9", "abcd", "x"), 1, "here")
    task = Task("t", [question, question], [], [0, 0, 0, 1, 1, 1])
    # by sums: 2 and 1; by characters (2, 4, 1): 1 and 1; by bytes (4, 4, 1): 0 and 1
    found = task.scores([-3.0, -4.0, -2.5, -5.0, -4.0, -4.5])
    assert found["acc"] == 0.5 and found["acc_norm"] == 1.0 and found["acc_bytes"] == 0.5
    assert found["acc_stderr"] == pytest.approx(math.sqrt(0.25 / 1)) and found["acc_norm_stderr"] == 0.0


def test_batch_size_and_padding_change_nothing(tmp_path: Path) -> None:
    trainer = make_trainer(byte_config("--fp64"))
    (questions, _) = tasks_in(tmp_path)
    one_by_one = [Task("one", [], [row], [0]) for row in questions.rows]
    alone = torch.cat([evaluator_of(trainer).log_likelihoods(one, lambda: False) for one in one_by_one])
    for tokens in (1, 32, 100, 10_000):
        together = evaluator_of(trainer, tokens).log_likelihoods(questions, lambda: False)
        torch.testing.assert_close(together, alone, rtol=1e-10, atol=0)


def test_all_data_ranks_compute_the_same_shapes_and_each_row_once() -> None:
    lengths = [5, 40, 17, 17, 3, 1, 33, 0, 16]
    for ranks in (1, 2, 4):
        how = {"tokens": 64, "context": 40, "multiple": 3, "ranks": ranks}
        plans = [plan_batches(lengths, **how, rank=rank) for rank in range(ranks)]
        assert len({tuple((batch.height, batch.width) for batch in plan) for plan in plans}) == 1
        assert sorted(row for plan in plans for batch in plan for row in batch.rows) == list(range(len(lengths)))
        assert all(batch.width == 40 for batch in plans[0])  # 48 tokens would be more than the context
        assert all(len(batch.rows) <= batch.height for plan in plans for batch in plan)
