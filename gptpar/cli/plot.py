"""``gptpar plot``: draw runs from their ``metrics.jsonl``."""

from __future__ import annotations

from pathlib import Path

from gptpar.cli.flags import parser_of
from gptpar.errors import GptparError
from gptpar.reporting.curves import load_run
from gptpar.reporting.figures.runs import draw_runs
from gptpar.reporting.figures.style import save


def run_names(paths: list[Path]) -> list[str]:
    """The folders' names, or their whole paths if two names are equal."""
    names = [(path.parent if path.suffix == ".jsonl" else path).resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def main(argv: list[str]) -> int:
    """Write the picture; returns 0."""
    args = parser_of("plot").parse_args(argv)
    first: Path = args.runs[0]
    output: Path = args.output or (first if first.is_dir() else first.parent) / "run.png"
    if output.suffix != ".png":
        raise GptparError(f"--output {output}: the picture is a PNG; let the name end in .png")
    runs = [load_run(path, name) for path, name in zip(args.runs, run_names(args.runs), strict=True)]
    save(draw_runs(runs, args.reference_loss, args.reference_label), output)
    print(f"wrote {output}")
    return 0
