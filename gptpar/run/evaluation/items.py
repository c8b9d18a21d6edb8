"""Reads a task's items: lines of a JSON file, in the forms in which the data sets are published.

| form | fields of a line |
|---|---|
| HellaSwag | ``activity_label``, ``ctx_a``, ``ctx_b``, ``endings``, ``label`` |
| ARC | ``question`` with ``stem`` and ``choices`` [``text``, ``label``], ``answerKey``; or as Hugging Face has it |
| PIQA | ``goal``, ``sol1``, ``sol2``, ``label``; or a file of labels, ``NAME-labels.lst`` beside NAME.jsonl |
| plain | ``query``, ``choices``, ``gold`` (the number of the right choice, from 0) |
| text | ``text``, for bits per byte |

Queries and choices follow from the fields as in lm-evaluation-harness (lm_eval/tasks: hellaswag, arc, piqa).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from gptpar.system.files import read_regular

_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")

MAX_PROBLEMS = 5
"""Malformed lines of one file that are reported one by one; further ones are counted."""


@dataclass(frozen=True)
class Question:
    """A query and its choices; each choice continues the query after a space.

    Attributes:
        gold: the number of the right choice.
        where: file and line, for messages.
    """

    query: str
    choices: tuple[str, ...]
    gold: int
    where: str


@dataclass(frozen=True)
class Document:
    """A text whose bits per byte are measured."""

    text: str
    where: str


Item = Question | Document
Asked = tuple[str, Sequence[str], int]
"""(query, choices, number of the right one)."""


def read_items(path: Path) -> tuple[list[Item], list[str]]:
    """The items of a file, and a sentence for each malformed line: at most ``MAX_PROBLEMS``, and a count of the others.

    All lines must have the form of the first line.
    """
    try:
        text = read_regular(path).decode("utf-8-sig")  # Windows' programs write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return [], [f"--eval-tasks {path} cannot be read: {reason}; give a .jsonl file of UTF-8 text."]
    items: list[Item] = []
    problems: list[str] = []
    form, label = None, _labels_beside(path)
    # JSON's texts may hold other characters that str.splitlines takes for the end of a line, such as U+2028.
    lines = text.split("\n")
    for number, line in ((number, line) for number, line in enumerate(lines, 1) if line.strip()):
        where = f"{path}, line {number}"
        try:
            values = _object(line)
            form = form or _form_of(values)
            items.append(form.item(values, where, partial(label, number)))
        except ValueError as error:
            problems.append(f"--eval-tasks {where}: {error}.")
    if not items and not problems:
        problems.append(f"--eval-tasks {path} has no lines: give a file with an item on each line.")
    more = len(problems) - MAX_PROBLEMS
    return items, problems[:MAX_PROBLEMS] + ([f"{path} has {more} more malformed lines."] if more > 0 else [])


def _object(line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not JSON ({error}): {line[:60]!r}") from None
    if not isinstance(values, dict):
        raise ValueError(f"an object is needed, this is {line[:60]!r}")
    if half := _HALF_OF_A_PAIR.search(json.dumps(values, ensure_ascii=False)):
        raise ValueError(f"it has {half[0]!a}, one half of a surrogate pair, which has no UTF-8 form: remove the line")
    return values


@dataclass(frozen=True)
class _Form:
    """The form of a file's lines.

    Attributes:
        fields: that a line must have.
        read: (a line's values, a reader of the line's label in the file of labels) -> question; ``None`` for a text.
    """

    fields: tuple[str, ...]
    read: Callable[[dict[str, Any], Callable[[], str]], Asked] | None

    def item(self, values: dict[str, Any], where: str, label_beside: Callable[[], str]) -> Item:
        """The item of a line.

        Raises:
            ValueError: why the line has no item, as a part of a sentence.
        """
        if missing := [name for name in self.fields if name not in values]:
            are = "are" if len(missing) > 1 else "is"
            names = " and ".join(map(repr, missing))
            raise ValueError(f"{names} {are} missing; the first line has {', '.join(self.fields)}")
        if self.read is None:
            if not _text(values, "text"):
                raise ValueError("'text' is empty")
            return Document(values["text"], where)
        query, choices, gold = self.read(values, label_beside)
        if len(choices) < 2:
            raise ValueError(f"a question needs 2 choices or more, here is {len(choices)}")
        if empty := [number for number, choice in enumerate(choices) if not choice.strip()]:
            raise ValueError(f"choice {empty[0]} (counted from 0) is empty")
        if not 0 <= gold < len(choices):
            raise ValueError(f"the right choice is number {gold}, and there are {len(choices)} choices, counted from 0")
        return Question(query, tuple(choices), gold, where)


def _form_of(values: dict[str, Any]) -> _Form:
    """The form with the most fields of those whose fields are all there."""
    fitting = [form for form in _FORMS if all(name in values for name in form.fields)]
    if not fitting:
        known = "; ".join(", ".join(form.fields) for form in _FORMS)
        raise ValueError(f"the fields {', '.join(values) or 'of nothing'} are of no known form: {known}")
    return max(fitting, key=lambda form: len(form.fields))


def _text(values: dict[str, Any], name: str) -> str:
    if not isinstance(value := values.get(name), str):
        raise ValueError(f"{name!r} is {value!r:.60}, where a text belongs")
    return value


def _texts(values: dict[str, Any], name: str) -> list[str]:
    found = values.get(name)
    if not isinstance(found, list) or not all(isinstance(value, str) for value in found):
        raise ValueError(f"{name!r} is {found!r:.60}, where a list of texts belongs")
    return found


def _number(value: object, name: str) -> int:
    """A whole number, which may be written as a text, as the labels of Hugging Face's HellaSwag are."""
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,9}", str(value).strip()):
        raise ValueError(f"{name!r} is {value!r:.60}, where a whole number belongs")
    return int(str(value))


def _plain(values: dict[str, Any], label_beside: Callable[[], str]) -> Asked:
    return _text(values, "query"), _texts(values, "choices"), _number(values["gold"], "gold")


def clean_wikihow(text: str) -> str:
    """HellaSwag's preprocessing, which removes the rest of WikiHow's mark-up."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _hellaswag(values: dict[str, Any], label_beside: Callable[[], str]) -> Asked:
    context = f"{_text(values, 'ctx_a')} {_text(values, 'ctx_b').capitalize()}"
    query = clean_wikihow(f"{_text(values, 'activity_label')}: {context}")
    return query, [clean_wikihow(end) for end in _texts(values, "endings")], _number(values["label"], "label")


def _arc(values: dict[str, Any], label_beside: Callable[[], str]) -> Asked:
    question = values["question"]
    if isinstance(question, dict):  # as Allen AI publishes it
        stem, choices = _text(question, "stem"), question.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise ValueError(f"'choices' is {choices!r:.60}, where a list of objects belongs")
        texts, labels = [_text(choice, "text") for choice in choices], [_text(choice, "label") for choice in choices]
    else:
        stem, choices = _text(values, "question"), values.get("choices")
        if not isinstance(choices, dict):
            raise ValueError(f"'choices' is {choices!r:.60}, where an object with text and label belongs")
        texts, labels = _texts(choices, "text"), _texts(choices, "label")
    if (key := _text(values, "answerKey")) not in labels or len(labels) != len(texts):
        raise ValueError(f"'answerKey' is {key!r}, and the {len(texts)} choices have the labels {', '.join(labels)}")
    return f"Question: {stem}\nAnswer:", texts, labels.index(key)


def _piqa(values: dict[str, Any], label_beside: Callable[[], str]) -> Asked:
    label = values["label"] if "label" in values else label_beside()
    choices = [_text(values, "sol1"), _text(values, "sol2")]
    return f"Question: {_text(values, 'goal')}\nAnswer:", choices, _number(label, "label")


_FORMS = (
    _Form(("activity_label", "ctx_a", "ctx_b", "endings", "label"), _hellaswag),
    _Form(("question", "answerKey"), _arc),
    _Form(("goal", "sol1", "sol2"), _piqa),
    _Form(("query", "choices", "gold"), _plain),
    _Form(("text",), None),
)


def _labels_beside(path: Path) -> Callable[[int], str]:
    """A function that returns the label of a line (1, 2, ...) from the file of labels, as PIQA is published."""
    file = path.with_name(f"{path.stem}-labels.lst")
    lines = cache(lambda: read_regular(file).decode().splitlines())

    def label(line: int) -> str:
        try:
            return lines()[line - 1]
        except (OSError, IndexError):
            raise ValueError(f"'label' is missing, and {file} has no line {line}") from None

    return label


def all_problems(paths: Sequence[str]) -> Iterator[str]:
    """The problems of the files of ``--eval-tasks``: a sentence for each malformed line and each repeated file name."""
    names = [Path(path).stem for path in paths]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"--eval-tasks names {names.count(name)} files {name}: scores go by the file's name, so rename one."
    for path in dict.fromkeys(paths):
        yield from read_items(Path(path))[1]
