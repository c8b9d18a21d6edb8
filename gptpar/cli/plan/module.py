"""``gptpar plan --module``: predicts the memory of a user's own module."""

from __future__ import annotations

import dataclasses
import json

from gptpar.adapter.deferred import deferred_init
from gptpar.adapter.user_module import SEED, load_user_function
from gptpar.cli.flags import parser_of
from gptpar.plan.module_memory import estimate_memory


def main(argv: list[str]) -> int:
    """Print the table."""
    options = parser_of("plan --module").parse_args(argv)
    make = load_user_function(options.module)
    with deferred_init(seed=SEED):
        module = make().module
    memory = estimate_memory(module, options.config, options.nproc)
    if options.json:
        print(json.dumps({**dataclasses.asdict(memory), "device": memory.device, "host": memory.host}))
    else:
        print(memory)
    return 0
