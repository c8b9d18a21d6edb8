"""``gptpar benchmark``: time training steps, of one configuration, of many (``--sweep``) or of a user's module."""

from __future__ import annotations

from gptpar.adapter.user_module import is_named_in
from gptpar.cli.benchmark import measure, module
from gptpar.cli.benchmark.runner import run_command
from gptpar.cli.benchmark.sweep import shared_words, sweep, sweep_flags
from gptpar.config.flags import flag_name


def main(argv: list[str]) -> int:
    """Time one configuration, or all of a sweep.

    Returns:
        0 when something was measured, 1 when nothing could be, 130 after Ctrl-C.
    """
    if is_named_in(argv):
        return module.main(argv)
    parsed = measure.parse(argv, sweep_flags)
    if not parsed.rest.sweep:
        given = [name for name, value in vars(parsed.rest).items() if value is not None]
        unused = [name for name in given if name.startswith("sweep_") or name in ("png", "json_lines")]
        parsed.problems += [f"{flag_name(name)} needs --sweep." for name in unused]
        return measure.measure(parsed, argv)
    return sweep(parsed, shared_words(argv), run_command)
