"""Published forms of questions, malformed lines, and how choices become tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gptpar.data.tokenizer import build_tokenizer
from gptpar.data.tokenizer.train import train
from gptpar.errors import ConfigError
from gptpar.run.evaluation.items import Document, Question, all_problems, read_items
from gptpar.run.evaluation.tasks import TokenRow, continuation_rows, document_rows, read_tasks
from tests.unit.data.tokenizer.test_hf import UNIGRAM, tokenizer_of
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


@pytest.mark.parametrize(
    ("line", "query", "choices", "gold"),
    [
        (
            HELLASWAG,
            "Baking: How to bake. Buy flour. Go to a shop. Then the baker",
            ("mixes it.", "sleeps long. Rest."),
            1,
        ),
        (ARC, "Question: What is hot?\nAnswer:", ("fire", "ice"), 0),
        (ARC_OF_HUGGING_FACE, "Question: What is hot?\nAnswer:", ("ice", "fire", "snow"), 1),
        (PIQA | {"label": 1}, "Question: To cut bread,\nAnswer:", ("use a knife.", "use a spoon."), 1),
        (PLAIN, "a", ("b", "c"), 1),
    ],
)
def test_published_forms(line: dict, query: str, choices: tuple[str, ...], gold: int, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "one.jsonl", ["", line])
    (item,), problems = read_items(Path(file))
    assert problems == [] and item == Question(query, choices, gold, f"{file}, line 2")


def test_piqas_labels_may_lie_beside(tmp_path: Path) -> None:
    file = Path(write_lines(tmp_path / "valid.jsonl", [PIQA, PIQA]))
    (tmp_path / "valid-labels.lst").write_text("1\n0\n")
    assert [item.gold for item in read_items(file)[0] if isinstance(item, Question)] == [1, 0]
    (tmp_path / "valid-labels.lst").write_text("1\n")
    assert "line 2: 'label' is missing, and " in read_items(file)[1][0]


def test_texts(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "t.jsonl", [{"text": "one", "meta": {}}])
    assert read_items(Path(file))[0] == [Document("one", f"{file}, line 1")]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "this is not JSON"),
        ("[1]", "an object is needed, this is '[1]'"),
        ({"query": "a", "choices": ["b", "c"]}, "'gold' is missing; the first line has query, choices, gold"),
        (PLAIN | {"gold": 2}, "the right choice is number 2, and there are 2 choices, counted from 0"),
        (PLAIN | {"gold": True}, "'gold' is True, where a whole number belongs"),
        (PLAIN | {"gold": -1}, "'gold' is -1, where a whole number belongs"),
        (PLAIN | {"choices": ["b"]}, "a question needs 2 choices or more, here is 1"),
        (PLAIN | {"choices": ["b", " "]}, "choice 1 (counted from 0) is empty"),
        (PLAIN | {"choices": "bc"}, "'choices' is 'bc', where a list of texts belongs"),
        (PLAIN | {"query": None}, "'query' is None, where a text belongs"),
        (
            '{"query": "a \\ud83d\\ude00 \\ud800", "choices": ["b", "c"], "gold": 0}',
            "it has '\\ud800', one half of a surrogate pair, which has no UTF-8 form: remove the line.",
        ),
    ],
)
def test_malformed_lines_are_told_with_file_and_line(line: dict | str, told: str, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", [PLAIN, line, PLAIN])
    (problem,) = all_problems([file])
    assert problem.startswith(f"--eval-tasks {file}, line 2: {told}")
    with pytest.raises(ConfigError, match="line 2"):
        read_tasks([file], TOKENIZER, 8)


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    """JSON allows U+2028, U+0085 and others in texts; a file may begin with a byte order mark, and have CRLF."""
    query = "one\u2028two\u2029three\x85four"
    line = json.dumps(PLAIN | {"query": query}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_bytes(f"\ufeff{line}\r\n\r\n{line}".encode())
    items, problems = read_items(tmp_path / "a.jsonl")
    assert not problems
    assert [item.where.rpartition(" ")[2] for item in items] == ["1", "3"]
    assert [item.query for item in items if isinstance(item, Question)] == [query, query]


def test_a_pipe_is_refused_where_a_file_belongs(tmp_path: Path) -> None:
    """It would be waited for without end, and each process reads the file."""
    os.mkfifo(tmp_path / "a.jsonl")
    assert list(all_problems([str(tmp_path / "a.jsonl")])) == [
        f"--eval-tasks {tmp_path / 'a.jsonl'} cannot be read: it is no regular file; give a .jsonl file of UTF-8 text."
    ]


def test_problems_of_all_files_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    many = write_lines(tmp_path / "many.jsonl", [PLAIN, *["x"] * 9])
    unknown = write_lines(tmp_path / "unknown.jsonl", [{"a": 1}])
    again = write_lines(tmp_path / "sub" / "unknown.jsonl", [PLAIN])
    empty = write_lines(tmp_path / "empty.jsonl", [])
    told = list(all_problems([many, unknown, again, empty, str(tmp_path / "absent.jsonl")]))
    assert told[0].startswith("--eval-tasks names 2 files unknown:")
    assert told[6] == f"{many} has 4 more malformed lines."
    assert "line 1: the fields a are of no known form: activity_label," in told[7]
    assert told[8] == f"--eval-tasks {empty} has no lines: give a file with an item on each line."
    assert "absent.jsonl cannot be read" in told[9] and len(told) == 10


def texts_of(rows: list[TokenRow]) -> list[tuple[str, str]]:
    """(what is read before the scored tokens, the scored tokens), as text."""
    return [
        (
            TOKENIZER.decode(row.tokens[: -row.num_scored]),
            TOKENIZER.decode(row.tokens[len(row.tokens) - row.num_scored :]),
        )
        for row in rows
    ]


def test_white_space_between_query_and_choice_belongs_to_the_choice() -> None:
    assert texts_of(continuation_rows(TOKENIZER, "ab \n", [" c", " de"], 8)) == [("ab", " \n c"), ("ab", " \n de")]


@pytest.mark.parametrize("query", ["", "  "])
def test_an_empty_query_is_the_end_of_document(query: str) -> None:
    (row,) = continuation_rows(TOKENIZER, query, [" c"], 8)
    assert list(row.tokens) == [TOKENIZER.eod, *TOKENIZER.encode(f"{query} c")]
    assert row.num_scored == len(query) + 2


def test_a_long_query_loses_its_beginning() -> None:
    """The model reads as many tokens as its context is long; the last one is predicted only."""
    (row,) = continuation_rows(TOKENIZER, "abcdefghij", [" xyz"], 6)
    assert texts_of([row]) == [("hij", " xyz")] and len(row) == 6
    (all_scored,) = continuation_rows(TOKENIZER, "abcdefghij", [" vwxyz"], 6)
    assert texts_of([all_scored]) == [("j", " vwxyz")]


def test_a_choice_longer_than_the_context_is_told_with_file_and_line(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "p.jsonl", [PLAIN, PLAIN | {"choices": ["b", "much too long"]}])
    with pytest.raises(ConfigError, match=r"p.jsonl, line 2: choice 1 .* has 14 tokens, the model reads 8; remove"):
        read_tasks([file], TOKENIZER, 8)


class Merging:
    """Encodes 'a b' to one token: nothing is left for the choice."""

    eod = 0

    def encode(self, text: str) -> list[int]:
        return [1] if text.startswith("a") else [2]


def test_a_choice_without_tokens_of_its_own_is_told() -> None:
    with pytest.raises(ValueError, match="choice 0 .* has no tokens beside those of the query"):
        continuation_rows(Merging(), "a", [" b"], 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 4, 5, 8, 11])
def test_each_token_of_a_document_is_scored_once(length: int) -> None:
    text = "abcdefghijklmnop"[:length]
    rows = list(document_rows(TOKENIZER, text, 4))
    assert "".join(scored for _, scored in texts_of(rows)) == text
    assert all(len(row) == 4 for row in rows[1:])  # as much context as there is
    assert rows[0].tokens[0] == TOKENIZER.eod


def test_rows_begin_with_the_bos_token_of_the_models_files(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = tokenizer_of(tmp_path, UNIGRAM)  # bos 1, eod 2, a 4, b 5
    assert list(document_rows(tokenizer, "ab", 8)) == [TokenRow([1, 4, 5], 2)]
    assert continuation_rows(tokenizer, "", ["ab"], 8) == [TokenRow([1, 4, 5], 2)]
    assert continuation_rows(tokenizer, "a", ["b"], 8) == [TokenRow([4, 5], 1)]


def test_rows_have_one_token_before_a_text(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(train(["ab ba", "b a"] * 5, 263))
    for name, begin in (("SentencePieceTokenizer", 2), ("Llama2Tokenizer", 1)):
        tokenizer = build_tokenizer(name, tokenizer_model=str(tmp_path))
        (row,) = document_rows(tokenizer, "\u00e9", 8)
        assert row == TokenRow([begin, 3 + 0xC3, 3 + 0xA9], 2)
        assert continuation_rows(tokenizer, " ", ["\u00e9"], 8)[0].tokens[0] == begin
        assert continuation_rows(tokenizer, "", ["\u00e9"], 8) == [row]
        assert tokenizer.encode_prompt("") == [begin]
