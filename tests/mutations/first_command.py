"""Mistakes in what the first command chooses, in the time it takes, and in the refusal of too large a run."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

FIT_TESTS = ("tests/unit/cli/test_fit.py",)
LENGTH_TESTS = (*FIT_TESTS, "tests/unit/run/test_fitted_length.py")
MEMORY_TESTS = ("tests/unit/run/test_host_memory.py",)

FIRST_COMMAND = [
    Mutation(
        "length-decided-once",
        "gptpar/run/fitted_length.py",
        "self._due += max(1, (steps - done) // 10)",
        "self._due += 10**9",
        LENGTH_TESTS,
    ),
    Mutation(
        "an-evaluation-is-a-step",
        "gptpar/run/fitted_length.py",
        "statistics.fmean(steps[:-1])",
        "statistics.fmean(steps)",
        LENGTH_TESTS,
    ),
    Mutation(
        "time-left-of-all-steps-allowed",
        "gptpar/run/reporter.py",
        "eta = min(eta, 60 * minutes)",
        "pass",
        LENGTH_TESTS,
    ),
    Mutation(
        "largest-model-always",
        "gptpar/cli/fit/choose.py",
        "if steps >= lesson.steps:",
        "if steps >= 0:",
        FIT_TESTS,
    ),
    Mutation(
        "busy-machine-closes-as-a-quiet-one",
        "gptpar/cli/fit/choose.py",
        "closing = slowness * (",
        "closing = (",
        FIT_TESTS,
    ),
    Mutation(
        "expectation-taken-for-exact",
        "gptpar/run/banner.py",
        "need > OVERESTIMATE * free",
        "need > free",
        MEMORY_TESTS,
    ),
    Mutation(
        "memory-of-one-process",
        "gptpar/run/banner.py",
        "range(first, min(first + count, topology.mesh.world_size))",
        "range(first, first + 1)",
        MEMORY_TESTS,
    ),
]
