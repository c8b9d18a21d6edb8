"""Mistakes in updates of matrices: their layout, their homes, and the two phases on the CPU."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

LAYOUTS = ("tests/ranks/test_layouts.py::test_layouts_equal_one_process[muon]",)
HOMES = ("tests/unit/engine/test_matrix_homes.py",)
PHASES = ("tests/unit/offload/test_matrix_phases.py",)
STEP = "gptpar/engine/matrix_step.py"

MATRICES = [
    Mutation(
        "matrices-of-a-shard-orthogonalized",
        "gptpar/engine/matrix_homes.py",
        "(*place.sharded_over(unit.copies_over), *_dividing(param.info, update))",
        "_dividing(param.info, update)",
        HOMES,
    ),
    Mutation(
        "matrices-of-a-tensor-rank-orthogonalized",
        "gptpar/engine/matrix_homes.py",
        "(*place.sharded_over(unit.copies_over), *_dividing(param.info, update))",
        "place.sharded_over(unit.copies_over)",
        HOMES,
    ),
    Mutation(
        "momenta-in-the-place-of-directions-with-several-pieces",
        STEP,
        "if parts[1:]:  # else",
        "if parts[2:]:  # else",
        LAYOUTS,
    ),
    Mutation(
        "state-of-a-compact-vector-a-run-too-early",
        "gptpar/optim/state_layout.py",
        "vector[run.offset + start - run.start : run.offset + stop - run.start]",
        "vector[start : stop]",
        ("tests/unit/optim/test_state_layout.py",),
    ),
    Mutation(
        "momentum-of-a-skipped-step-changes",
        "gptpar/optim/matrix_update.py",
        "new if skipped is None else torch.where(skipped == 0, new, old)",
        "new",
        PHASES,
    ),
    Mutation(
        "directions-taken-by-a-skipped-step",
        "gptpar/offload/host_optimizer.py",
        "if bucket.due:  # not where the step is skipped",
        "if True:",
        PHASES,
    ),
    Mutation(
        "padding-of-momenta-left-as-it-was",
        "gptpar/optim/torch_kernels.py",
        "        vector[end:start] = 0\n",
        "        pass\n",
        ("tests/unit/optim/test_muon.py",),
    ),
]
