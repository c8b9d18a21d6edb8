"""What a user sees of the command line's own machinery: typos, empty paths, workers that fail together."""

import os
import signal

import pytest

from gptpar.cli import main
from gptpar.errors import DataError
from gptpar.system import command_line


def test_a_typo_is_named_rather_than_the_flag_it_leaves_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["inspect", "--verfy"])
    assert stopped.value.code == 2
    assert "unrecognized argument --verfy (did you mean --verify?)" in capsys.readouterr().err


def test_a_failure_of_another_worker_alone_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(command_line, "OTHERS_FIRST_SECONDS", 0)

    def bad(argv: list[str]) -> int:
        raise DataError("sample 7 is damaged")

    assert command_line.run(bad, []) == 1
    assert capsys.readouterr().err == "error: local rank 3: sample 7 is damaged\n"


@pytest.mark.parametrize(
    "words",
    [
        ["preprocess", "--input", "", "--output-prefix", "x", "--tokenizer-type", "ByteLevelTokenizer"],
        ["merge", "--input", "a", "", "--output-prefix", "x"],
        ["inspect", ""],
        ["summary", "run", "--data-path", ""],
        ["plot", ""],
        ["plot", "run", "--output", " "],
    ],
)
def test_an_empty_path_is_an_unset_variable_to_every_verb(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert "is empty, perhaps by an unset shell variable: set it, or leave the flag out" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "told"), [(signal.SIGTERM, "stopped by SIGTERM"), (signal.SIGINT, "interrupted")])
def test_a_request_to_stop_that_became_another_error_stays_one(
    number: signal.Signals, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an extension module does whose import a signal cuts short."""

    def importing(argv: list[str]) -> int:
        try:
            os.kill(os.getpid(), number)
        except BaseException:
            raise ImportError("initialization failed") from None
        return 0

    assert command_line.run(importing, []) == 128 + number
    assert capsys.readouterr().err == f"error: {told}\n"
