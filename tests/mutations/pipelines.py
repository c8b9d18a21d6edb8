"""Mistakes in pipelines of layers under ``gptpar.initialize``."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

COLLECTOR = "gptpar/engine/collector.py"
LAYER_STAGES = "gptpar/adapter/layer_stages.py"
INITIALIZE = "gptpar/deepspeed/engines/initialize_layers.py"
AGREEMENT = "gptpar/topology/agreement.py"
LOOP = "tests/any_module/test_pipeline_layers.py::test_layers_train_like_a_plain_loop"
TWO_STAGES = f"{LOOP}[dp1 x pp2, ZeRO-0, CPU 0]"
TWICE_ON_ONE = f"{LOOP}[dp2 x pp2, ZeRO-0, CPU 1, 2 virtual, partition 0,3,5,6,10]"

PIPELINES = [
    Mutation(
        "shared-unit-final-in-the-last-virtual-stage",
        COLLECTOR,
        "final = last and self._last_stage[name] == virtual_stage",
        "final = last",
        (TWICE_ON_ONE,),
    ),
    Mutation(
        "tied-layers-summed-over-no-stages",
        LAYER_STAGES,
        "            if unit in trained\n        }",
        "            if unit not in trained\n        }",
        (TWO_STAGES,),
    ),
    Mutation(
        "activations-expected-in-the-formats-before-the-cast",
        INITIALIZE,
        "        pipeline.expect_dtype(options.dtype)",
        "        pass",
        ("tests/any_module/test_pipeline_formats.py::test_number_formats_do_not_depend_on_the_stages",),
    ),
    Mutation(
        "one-stage-refuses-alone",
        AGREEMENT,
        "        dist.all_gather_object(everyone, _plain(mine))",
        "        everyone[dist.get_rank()] = _plain(mine)",
        ("tests/any_module/test_pipeline_refused.py::test_what_one_stage_refuses_all_refuse",),
    ),
]
