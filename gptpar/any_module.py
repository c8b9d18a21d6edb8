"""Former names of three modules, so that whole pipelines that ``torch.save`` wrote under them still load."""

import sys

from gptpar.adapter import abstract_run, built_layers, pipeline_module

for module in (abstract_run, built_layers, pipeline_module):
    sys.modules[f"{__name__}.{module.__name__.rpartition('.')[2]}"] = module
