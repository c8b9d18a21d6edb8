"""Mistakes in what ``gptpar.initialize`` is told."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

OPTIONS = [
    Mutation(
        "warm-up-a-step-early",
        "gptpar/optim/step_schedules.py",
        "    i = max(0, n - 1)\n    return",
        "    i = n\n    return",
        ("tests/unit/any_module/test_schedulers.py", "tests/unit/optim/test_step_schedules.py"),
    ),
    Mutation(
        "clients-groups-are-copied",
        "gptpar/any_module/client_optimizer.py",
        "client.param_groups, list(torch_optimizers.problems(client))",
        "[dict(g) for g in client.param_groups], list(torch_optimizers.problems(client))",
        ("tests/unit/any_module/test_optimizer.py",),
    ),
    Mutation(
        "configurations-numbers-before-the-groups",
        "gptpar/any_module/client_optimizer.py",
        "{**defaults, **group}",
        "{**group, **defaults}",
        ("tests/unit/any_module/test_optimizer.py",),
    ),
    Mutation(
        "loaded-groups-are-other-objects",
        "gptpar/any_module/optimizer.py",
        "for group, other in zip(groups, saved, strict=True):",
        "self.param_groups = groups = [dict(group) for group in groups]\n"
        "        for group, other in zip(groups, saved, strict=True):",
        ("tests/unit/any_module/test_schedulers.py",),
    ),
    Mutation(
        "every-process-reads-the-same-samples",
        "gptpar/any_module/dataset.py",
        "EpochSampler(dataset, world, rank, seed",
        "EpochSampler(dataset, world, 0, seed",
        ("tests/unit/any_module/test_dataset.py",),
    ),
    Mutation(
        "every-epoch-has-the-same-order",
        "gptpar/any_module/dataset.py",
        "self.epoch += 1\n        return order",
        "return order",
        ("tests/unit/any_module/test_dataset.py",),
    ),
]
