"""Mistakes in the scores of tasks, and in the cache of keys and values."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

SCORES_TESTS = ("tests/unit/run/evaluation/test_scores.py",)
ITEMS_TESTS = ("tests/unit/run/evaluation/test_items.py",)
SAMPLING_TESTS = ("tests/unit/run/test_sampling.py",)

EVALUATION = [
    Mutation(
        "padding-is-scored",
        "gptpar/run/evaluation/evaluator.py",
        "masked_fill(~scored_BS, 0.0)",
        "masked_fill(scored_BS & False, 0.0)",
        SCORES_TESTS,
    ),
    Mutation(
        "last-window-of-a-text-reaches-back-by-nothing",
        "gptpar/run/evaluation/tasks.py",
        "ids[max(0, end - context) : end + 1]",
        "ids[start : end + 1]",
        (*ITEMS_TESTS, *SCORES_TESTS),
    ),
    Mutation(
        "scores-are-summed-over-all-tensor-ranks",
        "gptpar/run/evaluation/evaluator.py",
        "self.topology.sum_over_all(sums / mesh.tensor)",
        "self.topology.sum_over_all(sums)",
        ("tests/ranks/test_evaluation_ranks.py",),
    ),
    Mutation(
        "cached-token-sees-one-more-than-its-window",
        "gptpar/model/key_value_cache.py",
        "places_T > own_BS1 - window",
        "places_T >= own_BS1 - window",
        SAMPLING_TESTS,
    ),
]
