"""Mistakes in what files say: a run's flags, and a checkpoint's model."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

RUN_FILE = "tests/unit/config/test_run_file.py"
CHECKPOINT_ARGS = "tests/unit/run/test_checkpoint_args.py"
RESUMED = "tests/unit/run/test_resume.py"

FLAGS = [
    Mutation(
        "file-wins-over-command-line",
        "gptpar/config/flags.py",
        "    parsed.from_config = file.values.keys() - typed\n",
        "    parsed.from_config = set(file.values)\n",
        (RUN_FILE,),
    ),
    Mutation(
        "switch-off-is-written-as-on",
        "gptpar/config/run_file.py",
        "_toml(not value)",
        "_toml(value)",
        (RUN_FILE,),
    ),
    Mutation(
        "checkpoint-overrules-a-typed-flag",
        "gptpar/run/checkpoint_args.py",
        "elif key not in parsed.given and value",
        "elif value",
        (CHECKPOINT_ARGS,),
    ),
    Mutation(
        "growing-decay-may-change-length",
        "gptpar/run/accept.py",
        '("total", "decay_style")',
        '("total", "style")',
        (RESUMED,),
    ),
]
