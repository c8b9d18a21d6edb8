"""Lists what all processes of a run must have in common: the flags, the corpora and the tokenizer.

A process with another learning rate or another seed trains on without an error, and its copies of the parameters become
others. So the processes compare these things before the first step.
"""

from __future__ import annotations

import dataclasses
import os

from gptpar.config import Config
from gptpar.config.fields import flag_name
from gptpar.run.accept import Inputs
from gptpar.run.same_run import as_typed

_PLACES = """
    data.data_path data.train_data_path data.valid_data_path data.test_data_path data.data_cache_path
    tokenizer.tokenizer_model tokenizer.vocab_file tokenizer.merge_file offload.optimizer_nvme_path
    logging.tensorboard_dir logging.csv_dir logging.wandb_save_dir
"""
"""Fields that say where files are; corpora and tokenizers are compared by their contents."""

_WITHOUT_NUMBERS = "data.num_workers offload.cpu_optimizer_threads recovery.max_restarts recovery.hang_seconds"
_OF_A_MACHINE = frozenset(f"{_PLACES} {_WITHOUT_NUMBERS}".split())
"""Fields that may differ from machine to machine."""


def flags_of(config: Config) -> dict[str, str]:
    """Flag -> value, of all flags that must be the same on all processes."""
    found = {}
    for section in dataclasses.fields(config):
        for field in dataclasses.fields(getattr(config, section.name)):
            name = f"{section.name}.{field.name}"
            if name not in _OF_A_MACHINE:
                flag, value = as_typed(name, config)
                is_folder = section.name == "checkpoint" and isinstance(getattr(config.checkpoint, field.name), str)
                found[flag] = os.path.normpath(value) if is_folder else value
    return found


def inputs_of(inputs: Inputs) -> dict[str, str]:
    """The identities of corpora and tokenizer; where their files are does not matter."""
    corpora = {
        flag_name(name): ", ".join(
            " ".join(f"{key} {value}" for key, value in one.items() if key != "prefix") for one in corpora
        )
        for name, corpora in inputs.corpora.items()
    }
    return {**corpora, "the tokenizer": ", ".join(f"{key} {value}" for key, value in inputs.tokenizer.items())}
