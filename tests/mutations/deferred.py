"""Mistakes in a stranger's module: whose a parameter is, and how it gets its values."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

DEFERRED_INIT = "gptpar/adapter/deferred.py"
TAPE = "gptpar/adapter/tape.py"
UNITS = "gptpar/adapter/units.py"
REFUSALS = "gptpar/adapter/guards/refusals.py"
DEFERRED_TESTS = "tests/unit/adapter/test_deferred.py"
VALUES_TESTS = "tests/unit/adapter/test_deferred_values.py"
UNIT_TESTS = "tests/unit/adapter/test_units.py"

DEFERRED = [
    Mutation(
        "all-random-operators-draw-alike",
        TAPE,
        'seed_of(self._seed, "deferred", number)',
        'seed_of(self._seed, "deferred")',
        (f"{VALUES_TESTS}::test_two_layers_draw_different_values",),
    ),
    Mutation(
        "former-values-of-a-slice-are-forgotten",
        TAPE,
        "return self.offset == 0 and self.size.numel() * self.dtype.itemsize == num_bytes",
        "return self.offset == 0",
        (f"{VALUES_TESTS}::test_a_slice_that_is_overwritten_leaves_the_rest",),
    ),
    Mutation(
        "default-dtype-is-that-of-the-replay",
        DEFERRED_INIT,
        "return None if floating else torch.get_default_dtype()",
        "return None",
        (f"{DEFERRED_TESTS}::test_values_depend_on_the_seed_alone",),
    ),
    Mutation(
        "changes-after-the-context-are-not-seen",
        DEFERRED_INIT,
        "unchanged = version is None or tracked._version == version",
        "unchanged = True",
        (f"{VALUES_TESTS}::test_changes_after_the_context_are_told",),
    ),
    Mutation(
        "libraries-see-the-meta-device",
        DEFERRED_INIT,
        "if func in PRETENDED and _on_meta(args[0]):",
        "if False:",
        (f"{VALUES_TESTS}::test_tensors_look_as_if_they_were_on_the_cpu",),
    ),
    Mutation(
        "constants-are-not-copied",
        TAPE,
        'values.detach().to("cpu", copy=True)',
        'values.detach().to("cpu")',
        (f"{VALUES_TESTS}::test_tensors_with_memory_are_copied",),
    ),
    Mutation(
        "shared-parameter-belongs-to-one-block",
        UNITS,
        'next(iter(scopes)) if len(scopes) == 1 else ""',
        "min(scopes)",
        (f"{UNIT_TESTS}::test_parameters_shared_by_blocks_belong_to_the_whole_model",),
    ),
    Mutation(
        "frozen-parameters-lie-among-trainable-ones",
        UNITS,
        "p.requires_grad and p in known) for",
        "True) for",
        (f"{UNIT_TESTS}::test_each_dtype_and_frozen_parameters_have_units_of_their_own",),
    ),
    Mutation(
        "views-of-one-memory-are-taken",
        REFUSALS,
        "if start < reached and {name, holder} & parameters:",
        "if False:",
        (f"{UNIT_TESTS}::test_everything_refused_is_told_at_once",),
    ),
]
