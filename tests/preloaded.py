"""Modules that the server of :mod:`tests.forked` imports, once for all processes that are forked from it."""

import gc

import pytest  # noqa: F401
import torch._dynamo  # noqa: F401

import gptpar.cli.pretrain
import gptpar.deepspeed.engines.initialize  # noqa: F401
import tests.any_module.on_rank
import tests.helpers  # noqa: F401
from gptpar.system.source import source_hash

source_hash()  # is known from here on
gc.collect()
gc.freeze()  # garbage collection in the forks leaves out the shared objects
