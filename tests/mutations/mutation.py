"""One mistake: where it is put into the code, and which tests have to notice it."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutation:
    """A mistake in one file.

    Attributes:
        name: what goes wrong, in a few words joined by hyphens.
        file: the file, from the repository's root.
        right: the text that is right; it occurs exactly once in the file.
        wrong: what takes its place; empty: nothing.
        tests: files or test ids, from the repository's root; at least one of them must fail.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]

    def problem(self, root: Path = ROOT) -> str | None:
        """Why the mutation cannot be injected into a checkout, in a sentence; ``None`` where it can."""
        path = root / self.file
        if not path.is_file():
            return f"mutation {self.name}: there is no {self.file}"
        count = path.read_text().count(self.right)
        if count != 1:
            return f"mutation {self.name}: {self.file} holds {self.right!r} {count} times, not once"
        missing = [test for test in self.tests if not _exists(root, test)]
        return f"mutation {self.name}: there is no test {', '.join(missing)}" if missing else None

    def unit_tests(self, root: Path = ROOT) -> list[str]:
        """The folder of the unit tests of the mutation's package, where there is one."""
        package, room, *_ = Path(self.file).parts
        folder = f"tests/unit/{room}"
        return [folder] if package == "gptpar" and (root / folder).is_dir() else []

    def inject(self, root: Path) -> None:
        """Put the mutation into a checkout.

        Raises:
            ValueError: it does not fit.
        """
        if problem := self.problem(root):
            raise ValueError(problem)
        path = root / self.file
        path.write_text(path.read_text().replace(self.right, self.wrong))


def _exists(root: Path, test: str) -> bool:
    """Whether there is such a test file and, if the id names one, such a test function."""
    file, _, name = test.partition("::")
    path = root / file
    return path.is_file() and (not name or f"def {name.partition('[')[0]}(" in path.read_text())
