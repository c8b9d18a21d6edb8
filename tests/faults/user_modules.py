"""Mistakes in what is proved and foretold of a user's module."""

from __future__ import annotations

from tests.faults.fault import Fault

USER_MODULES = [
    Fault(
        "processes-get-the-same-batches",
        "gptpar/cli/check_layouts/module_training.py",
        "micro * check.processes + rank",
        "micro * check.processes",
        ("tests/ranks/test_module_layouts.py",),
    ),
    Fault(
        "casts-to-fp32-stay-in-the-proof",
        "gptpar/cli/check_layouts/module_training.py",
        'kwargs["dtype"] = torch.float64',
        "pass",
        ("tests/ranks/test_module_layouts.py",),
    ),
    Fault(
        "differences-beside-zero-do-not-count",
        "gptpar/cli/check_layouts/compare.py",
        'return error / size if size else float("inf")',
        "return error / size if size else 0.0",
        ("tests/ranks/test_module_layouts.py",),
    ),
    Fault(
        "estimate-forgets-the-sums-of-zero-1",
        "gptpar/plan/states.py",
        "elements += sum(unit.length for unit in whole)",
        "pass",
        ("tests/ranks/test_module_memory.py", "tests/unit/plan/test_predictions.py"),
    ),
    Fault(
        "estimate-forgets-sums-of-the-cpu's-gradients",
        "gptpar/plan/states.py",
        "if micro_batches > 1:",
        "if micro_batches > 2:",
        ("tests/ranks/test_module_memory.py",),
    ),
    Fault(
        "estimate-takes-masters-for-parameters",
        "gptpar/plan/module_memory.py",
        "all(unit.dtype == wide for unit in table.units)",
        "True",
        ("tests/ranks/test_module_memory.py",),
    ),
]
