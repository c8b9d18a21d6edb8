"""Mistakes in what ``gptpar.initialize`` is told."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

OPTIONS = [
    Mutation(
        "warm-up-a-step-early",
        "gptpar/optim/step_schedules.py",
        "    i = max(0, n - 1)\n    return",
        "    i = n\n    return",
        ("tests/unit/deepspeed/engines/test_schedulers.py", "tests/unit/optim/test_step_schedules.py"),
    ),
    Mutation(
        "clients-groups-are-copied",
        "gptpar/deepspeed/engines/client_optimizer.py",
        "client.param_groups, list(torch_optimizers.problems(client))",
        "[dict(g) for g in client.param_groups], list(torch_optimizers.problems(client))",
        ("tests/unit/deepspeed/engines/test_optimizer.py",),
    ),
    Mutation(
        "configurations-numbers-before-the-groups",
        "gptpar/deepspeed/engines/client_optimizer.py",
        "{**defaults, **group}",
        "{**group, **defaults}",
        ("tests/unit/deepspeed/engines/test_optimizer.py",),
    ),
    Mutation(
        "loaded-groups-are-other-objects",
        "gptpar/deepspeed/engines/optimizer.py",
        "for group, other in zip(groups, saved, strict=True):",
        "self.param_groups = groups = [dict(group) for group in groups]\n"
        "        for group, other in zip(groups, saved, strict=True):",
        ("tests/unit/deepspeed/engines/test_schedulers.py",),
    ),
    Mutation(
        "every-process-reads-the-same-samples",
        "gptpar/deepspeed/engines/dataset.py",
        "EpochSampler(dataset, world, rank, seed",
        "EpochSampler(dataset, world, 0, seed",
        ("tests/unit/deepspeed/engines/test_dataset.py",),
    ),
    Mutation(
        "every-epoch-has-the-same-order",
        "gptpar/deepspeed/engines/dataset.py",
        "self.epoch += 1\n        return order",
        "return order",
        ("tests/unit/deepspeed/engines/test_dataset.py",),
    ),
]
