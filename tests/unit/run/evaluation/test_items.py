"""Published forms of questions, malformed lines, and how choices become tokens."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from gptpar.data.tokenizer import build_tokenizer
from gptpar.errors import ConfigError
from gptpar.run.evaluation import items
from gptpar.run.evaluation.items import Document, Question, all_problems, read_items
from gptpar.run.evaluation.tasks import TokenRow, continuation_rows, document_rows, read_tasks
from tests.unit.run.evaluation.task_files import write_lines

TOKENIZER = build_tokenizer("ByteLevelTokenizer")
HELLASWAG = {
    "activity_label": "Baking",
    "ctx_a": "[header] How to bake [title] Buy flour. [step] Go to  a shop.",
    "ctx_b": "then the BAKER",
    "endings": [" mixes it.", "sleeps [substeps] long [title] Rest."],
    "label": "1",
    "ind": 4,
}
ARC = {
    "id": "A1",
    "question": {"stem": "What is hot?", "choices": [{"text": "fire", "label": "1"}, {"text": "ice", "label": "2"}]},
    "answerKey": "1",
}
ARC_OF_HUGGING_FACE = {
    "question": "What is hot?",
    "choices": {"text": ["ice", "fire", "snow"], "label": ["A", "B", "C"]},
    "answerKey": "B",
}
PIQA = {"goal": "To cut bread,", "sol1": "use a knife.", "sol2": "use a spoon."}
PLAIN = {"query": "a", "choices": ["b", "c"], "gold": 1}


BAKING = "Baking: How to bake. Buy flour. Go to a shop. Then the baker"
HOT = "Question: What is hot?\nAnswer:"
BREAD = "Question: To cut bread,\nAnswer:"


@pytest.mark.parametrize(
    ("line", "item"),
    [
        (HELLASWAG, Question(BAKING, ("mixes it.", "sleeps long. Rest."), 1, "")),
        (ARC, Question(HOT, ("fire", "ice"), 0, "")),
        (ARC_OF_HUGGING_FACE, Question(HOT, ("ice", "fire", "snow"), 1, "")),
        (PIQA | {"label": 1}, Question(BREAD, ("use a knife.", "use a spoon."), 1, "")),
        (PLAIN, Question("a", ("b", "c"), 1, "")),
        ({"text": "one", "meta": {}}, Document("one", "")),
    ],
)
def test_published_forms(line: dict, item: Question | Document, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "one.jsonl", ["", line])
    found, problems = read_items(Path(file))
    assert problems == [] and found == [dataclasses.replace(item, where=f"{file}, line 2")]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "this is not JSON"),
        (PLAIN | {"gold": 2}, "the right choice is number 2, and there are 2 choices, counted from 0"),
        (PLAIN | {"choices": ["b", " "]}, "choice 1 (counted from 0) is empty"),
        (
            '{"query": "\\ud83d\\ude00 \\ud800", "choices": ["b", "c"], "gold": 0}',
            "it has '\\ud800', one half of a surrogate",
        ),
    ],
)
def test_malformed_lines_are_told_with_file_and_line(line: dict | str, told: str, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", [PLAIN, line, PLAIN])
    (problem,) = all_problems([file])
    assert problem.startswith(f"--eval-tasks {file}, line 2: {told}")
    with pytest.raises(ConfigError, match="line 2"):
        read_tasks([file], TOKENIZER, 8)


def texts_of(rows: list[TokenRow]) -> list[tuple[str, str]]:
    """(what is read before the scored tokens, the scored tokens), as text."""
    cut = [(row.tokens, len(row.tokens) - row.num_scored) for row in rows]
    return [(TOKENIZER.decode(tokens[:start]), TOKENIZER.decode(tokens[start:])) for tokens, start in cut]


def test_white_space_between_query_and_choice_belongs_to_the_choice() -> None:
    assert texts_of(continuation_rows(TOKENIZER, "ab \n", [" c", " de"], 8)) == [("ab", " \n c"), ("ab", " \n de")]


@pytest.mark.parametrize("query", ["", "  "])
def test_an_empty_query_is_the_end_of_document(query: str) -> None:
    (row,) = continuation_rows(TOKENIZER, query, [" c"], 8)
    assert list(row.tokens) == [TOKENIZER.eod, *TOKENIZER.encode(f"{query} c")]
    assert row.num_scored == len(query) + 2


@pytest.mark.parametrize("length", [1, 4, 5, 8, 11])
def test_each_token_of_a_document_is_scored_once(length: int) -> None:
    text = "abcdefghijklmnop"[:length]
    rows = list(document_rows(TOKENIZER, text, 4))
    assert "".join(scored for _, scored in texts_of(rows)) == text
    assert all(len(row) == 4 for row in rows[1:])  # as much context as there is
    assert rows[0].tokens[0] == TOKENIZER.eod


def test_labels_beside_a_file_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, reads = Path(write_lines(tmp_path / "piqa.jsonl", [PIQA] * 3)), Counter()
    (tmp_path / "piqa-labels.lst").write_text("1\n0\n")

    def read(path: Path) -> bytes:
        reads[path.name] += 1
        return path.read_bytes()

    monkeypatch.setattr(items, "read_regular", read)
    found, problems = read_items(file)
    assert [item.gold for item in found] == [1, 0] and reads == {"piqa.jsonl": 1, "piqa-labels.lst": 1}
    assert problems == [
        f"--eval-tasks {file}, line 3: 'label' is missing, and {tmp_path / 'piqa-labels.lst'} has no line 3."
    ]
