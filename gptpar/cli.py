"""The command line: ``gptpar VERB ...``"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from gptpar.errors import GptparError

VERBS: dict[str, tuple[str, str]] = {
    "pretrain": ("gptpar.training.main", "train a GPT"),
    "benchmark": ("gptpar.training.benchmark", "time training steps on synthetic tokens; prints one JSON line"),
    "generate": ("gptpar.generate", "continue a prompt with a trained model"),
    "preprocess": ("gptpar.data.preprocess", "turn text into .bin/.idx data sets"),
    "inspect": ("gptpar.checkpoint.inspect", "list, describe and verify checkpoints"),
}


def usage() -> str:
    """The verbs, one a line."""
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {text}" for verb, (_, text) in VERBS.items()]
    return "\n".join(["usage: gptpar VERB [flags]; gptpar VERB --help lists a verb's flags", "", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb. Errors meant for the user are printed without a traceback.

    Returns:
        0 on success, 1 after an error, 2 for a wrong command line, 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] not in VERBS:
        print(f"error: there is no verb {words[0]!r}\n{usage()}", file=sys.stderr)
        return 2
    module = importlib.import_module(VERBS[words[0]][0])
    try:
        return module.main(words[1:])
    except GptparError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _fail(message: str, code: int) -> int:
    """Every worker fails alike when the fault is the user's, so one of them says it."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    return code
