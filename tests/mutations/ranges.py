"""Mistakes in the parameter table: whose an element is, where it is updated, how often it is counted and summed."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TABLE = "gptpar/engine/table.py"
PARAMETER_RANGES = "gptpar/engine/ranges.py"
UNITS = "gptpar/engine/units.py"
COVER = "tests/unit/engine/test_table.py::test_ranges_and_padding_cover_each_shard_once"
COUNTED_ONCE = "tests/unit/engine/test_table.py::test_every_element_of_the_model_is_counted_once"
ROUND_TRIP = "tests/unit/engine/test_strides.py::test_ranges_bring_every_value_back"
CUT_ALIKE = "tests/unit/engine/test_table.py::test_all_tensor_ranks_send_equal_messages_and_cut_alike"

RANGES = [
    Mutation(
        "device-has-one-element-more",
        PARAMETER_RANGES,
        "end = min(stop, start + count)",
        "end = min(stop, start + count) + 1",
        ("tests/unit/engine/test_table.py::test_the_ratio_is_exact_to_the_element",),
    ),
    Mutation(
        "each-stage-divides-a-tied-unit-by-its-own-total",
        PARAMETER_RANGES,
        "in sizes.items() if name in tied}",
        "in sizes.items() if name in ()}",
        ("tests/unit/engine/test_table.py::test_stages_divide_a_tied_unit_at_the_same_element",),
    ),
    Mutation(
        "replicated-range-counted-on-every-tensor-rank",
        TABLE,
        "self.place.is_first(unit) and (self.place.position(TENSOR) == 0 or not param.replicated)",
        "self.place.is_first(unit)",
        (COUNTED_ONCE,),
    ),
    Mutation(
        "tied-range-counted-on-both-stages",
        TABLE,
        "first_stage = tie is None or self.place.position(PIPELINE) == tie.stages[0]",
        "first_stage = True",
        (COUNTED_ONCE,),
    ),
    Mutation(
        "range-reaches-into-the-padding",
        TABLE,
        "start, stop = a, min(b, param.stop - low)",
        "start, stop = a, b",
        (COVER,),
    ),
    Mutation(
        "range-forgets-the-shards-before-it",
        TABLE,
        "at, counted = low + first - param.start,",
        "at, counted = first - min(param.start, first),",
        (COUNTED_ONCE,),
    ),
    Mutation(
        "gradients-of-another-axis-summed-over-this-one",
        TABLE,
        "((a, b, axis in param.info.placement.gradient_sum)",
        "((a, b, bool(param.info.placement.gradient_sum))",
        (CUT_ALIKE,),
    ),
    Mutation(
        "uneven-splits-cut-at-their-own-ends",
        PARAMETER_RANGES,
        "max(low, param.start), min(high, param.start + param.longest)",
        "max(low, param.start), min(high, param.stop)",
        (CUT_ALIKE,),
    ),
    Mutation(
        "uneven-splits-followed-by-parameters-at-other-places",
        UNITS,
        "end = _round_up(start + longest, ALIGNMENT)",
        "end = _round_up(start + info.shape.numel(), ALIGNMENT)",
        (CUT_ALIKE, "tests/unit/engine/test_units.py::test_uneven_shares_reserve_the_longest"),
    ),
    Mutation(
        "host-counts-from-the-beginning-of-the-shard",
        "gptpar/optim/group_ranges.py",
        "(max(a, low) - low, min(b, high) - low) for a, b in self.counted",
        "(max(a, low), min(b, high)) for a, b in self.counted",
        ("tests/unit/engine/test_table.py::test_what_the_host_updates_is_what_the_table_says",),
    ),
    Mutation(
        "boxes-of-a-convolution-as-if-it-were-row-major",
        TABLE,
        "elements.to(dtype), info.memory_order",
        "elements.to(dtype), None",
        (ROUND_TRIP,),
    ),
    Mutation(
        "view-of-a-box-with-its-dims-permuted-twice",
        "gptpar/topology/tensor_parts.py",
        ".permute(place_of)",
        ".permute(tuple(order))",
        (ROUND_TRIP,),
    ),
    Mutation(
        "empty-parameter-left-out-of-checkpoints",
        "gptpar/engine/master_optimizer.py",
        "dtype, empty)  # a",
        "dtype)  # a",
        ("tests/unit/engine/test_strides.py::test_a_checkpoint_brings_every_value_back",),
    ),
    Mutation(
        "decay-groups-swapped",
        "gptpar/optim/parameter_groups.py",
        "1.0 if decays else 0.0",
        "0.0 if decays else 1.0",
        ("tests/unit/run/test_plain_loop.py::test_fifty_steps_follow_a_plain_loop",),
    ),
    Mutation(
        "decay-of-a-bias-with-two-dimensions",
        "gptpar/optim/group_ranges.py",
        'num_dims > 1 and not name.endswith("bias")',
        "num_dims > 1",
        ("tests/unit/engine/test_units.py::test_a_unit_is_aligned_and_ordered_by_kind",),
    ),
]
