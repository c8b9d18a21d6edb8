"""The file of other programs' flags: each flag once, values and fields that are there, sentences that can be made."""

import re
import tomllib
from collections import Counter

from gptpar.config import Flags, flag_fields
from gptpar.config.elsewhere import ANY_NUMBER, FILE, elsewhere
from gptpar.config.flags import parse_flags
from tests.helpers import TINY


def words_of(value: object) -> list[str]:
    """Every flag at the leaves of a part of the file."""
    if isinstance(value, dict):
        return [word for one in value.values() for word in words_of(one)]
    return list(value) if isinstance(value, list) else []


def test_each_flag_has_one_answer() -> None:
    told = tomllib.loads(FILE.read_text(encoding="utf-8"))
    assert told.keys() == {"no_effect", "limited", "experts", "absent", "stands_for", "meant"}
    accepted = [*words_of(told["no_effect"]), *(flag for one in told["limited"] for flag in one["flags"])]
    for words in (accepted, words_of(told["absent"]), words_of(told["meant"])):
        assert [word for word, times in Counter(words).items() if times > 1] == []
        assert all(re.fullmatch(r"--[A-Za-z0-9_-]+", word) for word in words)
    assert {one for by_count in told["no_effect"].values() for one in by_count} == {"0", "1", "any"}
    assert not elsewhere().meant.keys() & {*told["stands_for"], *accepted} - {"--no-train", "--eval-only"}


def test_flags_stand_for_fields_that_are_there() -> None:
    fields = {one.key: one for one in flag_fields()}
    assert elsewhere().stands_for
    for said, (key, value) in elsewhere().stands_for.items():
        choices = fields[key].spec.metadata["choices"]
        assert choices is None or value in choices
        section, name = key.split(".")
        assert getattr(getattr(parse_flags(said.split()).flags, section), name) == value
        assert isinstance(value, type(getattr(getattr(Flags(), section), name)) | fields[key].kind.scalar)


def test_accepted_flags_change_nothing_and_are_told_with_their_reasons() -> None:
    words = TINY.split()
    for name, answer in elsewhere().flags.items():
        words += [name, *(answer.accepted[:1] or ("word",) * max(answer.count, 0))]
    parsed = parse_flags(words)
    assert parsed.flags == parse_flags(TINY.split()).flags and not parsed.problems
    assert parsed.without_effect == [f"{name}: {answer.why}" for name, answer in elsewhere().flags.items()]


def test_other_values_are_refused_with_the_reason() -> None:
    for name, answer in elsewhere().flags.items():
        if answer.refused:
            without_effect, (problem,) = answer.to(name, ["unheard-of"])
            assert without_effect == [] and name in problem and "leave it out" in problem and "{" not in problem
        elif answer.count != ANY_NUMBER:
            _, (problem,) = answer.to(name, ["word"] * 2)
            assert problem == f"{name} takes {answer.count} value(s), 2 given."
