"""``gptpar plan --module``: predicts the memory of a user's own module."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from gptpar.any_module.deferred import deferred_init
from gptpar.any_module.user_module import SEED, load_user_function
from gptpar.plan.module_memory import estimate_memory
from gptpar.system.command_line import Parser, positive_int

DESCRIPTION = """Predict the memory of each GPU and of the machine that gptpar.initialize will take for your module,
without activations, on a machine without a GPU. The module is built without memory: it may be of any size.

FUNCTION takes no arguments and returns the model, or model, make_batch (see gptpar check-layouts --module --help)."""


def parser() -> argparse.ArgumentParser:
    """The verb's flags for a module."""
    parser = Parser(prog="gptpar plan --module", description=DESCRIPTION)
    parser.add_argument("--module", required=True, metavar="FILE.py:FUNCTION", help="or package.module:FUNCTION")
    parser.add_argument("--config", required=True, type=Path, metavar="JSON", help="DeepSpeed's, as for initialize")
    parser.add_argument("--nproc", type=positive_int, default=1, metavar="N", help="data-parallel processes")
    parser.add_argument("--json", action="store_true", help="print one JSON object of bytes instead")
    return parser


def main(argv: list[str]) -> int:
    """Print the table."""
    options = parser().parse_args(argv)
    make = load_user_function(options.module)
    with deferred_init(seed=SEED):
        module = make().module
    memory = estimate_memory(module, options.config, options.nproc)
    if options.json:
        print(json.dumps({**dataclasses.asdict(memory), "device": memory.device, "host": memory.host}))
    else:
        print(memory)
    return 0
