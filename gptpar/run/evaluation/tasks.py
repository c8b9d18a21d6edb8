"""``Task``: a task's rows, its scores (accuracy, bits per byte), and the choice of a sample of its items.

Let l_i be the sum of the natural logarithms of the probabilities of choice i's tokens, given the query:

- ``acc``: the fraction of questions whose right choice has the greatest l_i;
- ``acc_norm``: the same with l_i / (number of characters of choice i), without the space before the choice;
- ``acc_bytes``: the same with l_i / (number of UTF-8 bytes of choice i);
- ``bits_per_byte``: for texts, -(sum of all l) / (ln 2 x number of UTF-8 bytes); ``byte_perplexity`` is 2 to its power.

These are the definitions of lm-evaluation-harness (lm_eval/api/task.py, ``process_results`` of multiple choice;
lm_eval/api/metrics.py, ``bits_per_byte``). Its pages call ``acc_norm`` byte-length normalised, but its code counts
characters; for ASCII both are the same. The first choice wins a draw. If any l_i is not a number, neither
are the task's scores. The standard error of an accuracy p over n questions is sqrt(p (1 - p) / (n - 1)).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gptpar.data.tokenizer import Tokenizer
from gptpar.errors import ConfigError
from gptpar.run.evaluation.items import MAX_PROBLEMS, Document, Item, Question, all_problems, read_items

SAMPLE_SEED = 1234
"""Seed that draws the items of ``--eval-limit``: the same in every run, so that runs can be compared."""


@dataclass(frozen=True)
class Task:
    """The items of a file, as rows.

    Attributes:
        name: the file's, without its ending.
        owners: for each row the number of its item.
    """

    name: str
    items: Sequence[Item]
    rows: Sequence[TokenRow]
    owners: Sequence[int]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the model reads, without padding."""
        return sum(map(len, self.rows))

    def scores(self, log_likelihoods: Sequence[float]) -> dict[str, float]:
        """The scores by name, from each row's log-likelihood (natural logarithm)."""
        of_items: list[list[float]] = [[] for _ in self.items]
        for owner, value in zip(self.owners, log_likelihoods, strict=True):
            of_items[owner].append(value)
        pairs = list(zip(self.items, of_items, strict=True))
        questions = [(item, values) for item, values in pairs if isinstance(item, Question)]
        texts = [(item.text, math.fsum(values)) for item, values in pairs if isinstance(item, Document)]
        return _accuracies(questions) if questions else _bits_per_byte(texts)


def _accuracies(answered: Sequence[tuple[Question, Sequence[float]]]) -> dict[str, float]:
    measures: dict[str, Callable[[str], int]] = {
        "acc": lambda choice: 1,
        "acc_norm": len,
        "acc_bytes": lambda choice: len(choice.encode()),
    }
    if any(math.isnan(value) for _, values in answered for value in values):  # no choice has the greatest one
        return dict.fromkeys((key for name in measures for key in (name, f"{name}_stderr")), math.nan)
    found: dict[str, float] = {}
    for name, measure in measures.items():
        right = sum(
            _first_greatest([value / measure(choice) for value, choice in zip(values, question.choices, strict=True)])
            == question.gold
            for question, values in answered
        )
        found[name] = mean = right / len(answered)
        found[f"{name}_stderr"] = math.sqrt(mean * (1 - mean) / max(1, len(answered) - 1))
    return found


def _first_greatest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _bits_per_byte(texts: Sequence[tuple[str, float]]) -> dict[str, float]:
    num_bytes = sum(len(text.encode()) for text, _ in texts)
    bits = -math.fsum(value for _, value in texts) / (math.log(2) * num_bytes)
    return {"bits_per_byte": bits, "byte_perplexity": 2.0 ** min(bits, 1000.0)}


def make_task(name: str, items: Sequence[Item], tokenizer: Tokenizer, context: int) -> tuple[Task, list[str]]:
    """A task, and the problems of its items' tokens.

    Args:
        context: the most tokens that the model reads.
    """
    rows: list[TokenRow] = []
    owners: list[int] = []
    problems = []
    for number, item in enumerate(items):
        try:
            of_item = _rows_of(item, tokenizer, context)
        except ValueError as error:
            problems.append(f"--eval-tasks {item.where}: {error}; remove the line.")
            continue
        rows += of_item
        owners += [number] * len(of_item)
    return Task(name, items, rows, owners), problems[:MAX_PROBLEMS]


def _rows_of(item: Item, tokenizer: Tokenizer, context: int) -> list[TokenRow]:
    if isinstance(item, Document):
        return list(document_rows(tokenizer, item.text, context))
    return continuation_rows(tokenizer, item.query, [f" {choice}" for choice in item.choices], context)


def sampled(items: Sequence[Item], limit: int | None) -> list[Item]:
    """``limit`` items, drawn by a fixed seed, in the file's order; all items if there are no more."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[number] for number in sorted(random.Random(SAMPLE_SEED).sample(range(len(items)), limit))]


def read_tasks(paths: Sequence[str], tokenizer: Tokenizer, context: int, limit: int | None = None) -> list[Task]:
    """The tasks of some files.

    Args:
        context: the most tokens that the model reads.
        limit: items of each file that are evaluated (:func:`sampled`); ``None``: all.

    Raises:
        ConfigError: malformed lines, and items that the model cannot read, each with its file and line.
    """
    if problems := list(all_problems(paths)):
        raise ConfigError(problems)
    made = [make_task(Path(path).stem, sampled(read_items(Path(path))[0], limit), tokenizer, context) for path in paths]
    if problems := [problem for _, found in made for problem in found]:
        raise ConfigError(problems)
    return [task for task, _ in made]


@dataclass(frozen=True)
class TokenRow:
    """A row of tokens; the last ones are scored.

    Attributes:
        tokens: one more than the model reads: the last token is only predicted.
        num_scored: number of tokens at the end that are scored.
    """

    tokens: Sequence[int]
    num_scored: int

    def __len__(self) -> int:
        """Number of tokens that the model reads."""
        return len(self.tokens) - 1


def continuation_rows(tokenizer: Tokenizer, query: str, continuations: Sequence[str], context: int) -> list[TokenRow]:
    """A row for each continuation of a query.

    Args:
        context: the most tokens that the model reads.

    Raises:
        ValueError: a continuation has no tokens of its own, or more than the context; a part of a sentence.
    """
    stripped = query.rstrip()
    space = query[len(stripped) :]
    encode = tokenizer.encode if stripped else tokenizer.encode_document
    query_ids = encode(stripped)
    rows = []
    for number, continuation in enumerate(continuations):
        ids = encode(stripped + space + continuation)
        scored = len(ids) - len(query_ids)
        if scored <= 0:
            raise ValueError(f"choice {number} (counted from 0) has no tokens beside those of the query")
        if scored > context:
            raise ValueError(f"choice {number} (counted from 0) has {scored:,} tokens, the model reads {context:,}")
        rows.append(TokenRow(ids[-(context + 1) :], scored))
    return rows


def document_rows(tokenizer: Tokenizer, text: str, context: int) -> Iterator[TokenRow]:
    """The windows of a document; each of its tokens is scored in one of them.

    Args:
        context: the most tokens that the model reads.
    """
    ids = tokenizer.encode_document(text)
    for start in range(0, len(ids) - 1, context):
        end = min(start + context, len(ids) - 1)
        yield TokenRow(ids[max(0, end - context) : end + 1], end - start)
