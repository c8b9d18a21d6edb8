"""The settings with which a run folder was made: a run must not go on unnoticed with another text, model or length."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gptpar.checkpoint import load_meta
from gptpar.cli.fit.choose import LENGTH_FLAGS, Choice, flag_names
from gptpar.cli.fit.text import Text
from gptpar.errors import CheckpointError, GptparError
from gptpar.system.files import MAX_SMALL_BYTES, atomic_output, read_regular

FILE_NAME = "made_with.json"


@dataclass(frozen=True)
class MadeWith:
    """The settings of a run folder.

    Attributes:
        preset: the model that was taken.
        minutes: MINUTES as the user gave it, if at all.
        choices: the flags that fitted the machine then.
    """

    preset: str
    minutes: float | None
    text: Text
    choices: tuple[Choice, ...]

    def write(self, run: Path) -> None:
        """Write the settings into the folder, by one rename."""
        values = {
            "preset": self.preset,
            "minutes": self.minutes,
            "text": asdict(self.text),
            "choices": [[choice.flag, choice.value, choice.reason] for choice in self.choices],
        }
        with atomic_output(run / FILE_NAME) as file:
            file.write(json.dumps(values, indent=1).encode() + b"\n")

    @staticmethod
    def read(run: Path) -> MadeWith | None:
        """The settings of a folder; ``None`` if it is new or empty.

        Raises:
            GptparError: the folder holds something else.
        """
        path = run / FILE_NAME
        if path.exists():
            try:
                return _from_dict(json.loads(read_regular(path, MAX_SMALL_BYTES)))
            except (ValueError, KeyError, TypeError) as error:
                raise GptparError(f"{path} cannot be read ({error!r}): {_remedy(run)}") from error
        if run.exists() and any(run.iterdir()):
            raise GptparError(
                f"{run} holds {min(run.iterdir()).name} and no {FILE_NAME}, which would say what it was made with: "
                f"{_remedy(run)}"
            )
        return None

    def finished(self, run: Path, given: Sequence[str]) -> int | None:
        """The number of steps that the run has taken, if none is left; ``None`` otherwise, also if it is not known.

        Args:
            given: the command line's words; if they say how long to train, the run goes on.
        """
        if LENGTH_FLAGS & flag_names(given):
            return None
        with contextlib.suppress(CheckpointError, LookupError, TypeError, ValueError):
            progress = load_meta(run)["progress"]
            typed = {choice.flag: choice.value for choice in self.choices}
            wanted = progress["fitted_iters"] if "train-minutes" in typed else int(typed["train-iters"])
            return progress["iteration"] if progress["iteration"] >= wanted else None
        return None

    def require_same(self, run: Path, preset: str | None, minutes: float | None, text: Text) -> None:
        """Check that a command has the settings with which the folder was made.

        Raises:
            GptparError: it does not; names every difference.
        """
        problems = self._differences(preset, minutes, text)
        if problems:
            raise GptparError(f"{run} {'; it '.join(problems)}: {_remedy(run)}")

    def _differences(self, preset: str | None, minutes: float | None, text: Text) -> Sequence[str]:
        problems = []
        if preset not in (None, self.preset):
            problems.append(f"was made with PRESET={self.preset}, and this command gives PRESET={preset}")
        if minutes is not None and minutes != self.minutes:
            before = "without MINUTES" if self.minutes is None else f"with MINUTES={self.minutes:g}"
            problems.append(f"was made {before}, and this command gives MINUTES={minutes:g}")
        if (differs := self.text.difference(text)) is not None:
            problems.append(differs)
        return problems


def _from_dict(values: dict[str, Any]) -> MadeWith:
    vocabulary, *choices = (Choice(*three) for three in values["choices"])
    if choices[0].flag != "preset":  # folders that were made before the model was a choice
        choices.insert(0, Choice("preset", values["preset"], ""))
    return MadeWith(values["preset"], values["minutes"], Text.from_dict(values["text"]), (vocabulary, *choices))


def _remedy(run: Path) -> str:
    return f"choose another folder with RUN=..., or remove {run} to begin anew."
