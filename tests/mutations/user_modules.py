"""Mistakes in what is proved and foretold of a user's module."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

USER_MODULES = [
    Mutation(
        "processes-get-the-same-batches",
        "gptpar/cli/check_layouts/module_training.py",
        "micro * check.processes + rank",
        "micro * check.processes",
        ("tests/ranks/test_module_layouts.py",),
    ),
    Mutation(
        "casts-to-fp32-stay-in-the-proof",
        "gptpar/cli/check_layouts/module_training.py",
        'kwargs["dtype"] = torch.float64',
        "pass",
        ("tests/ranks/test_module_layouts.py",),
    ),
    Mutation(
        "differences-beside-zero-do-not-count",
        "gptpar/cli/check_layouts/compare.py",
        'return error / size if size else float("inf")',
        "return error / size if size else 0.0",
        ("tests/ranks/test_module_layouts.py",),
    ),
    Mutation(
        "estimate-forgets-the-sums-of-zero-1",
        "gptpar/plan/states.py",
        "elements += sum(unit.length for unit in whole)",
        "pass",
        ("tests/ranks/test_module_memory.py", "tests/unit/plan/test_predictions.py"),
    ),
    Mutation(
        "estimate-forgets-sums-of-the-cpu's-gradients",
        "gptpar/plan/states.py",
        "if micro_batches > 1:",
        "if micro_batches > 2:",
        ("tests/ranks/test_module_memory.py",),
    ),
    Mutation(
        "estimate-takes-masters-for-parameters",
        "gptpar/plan/module_memory.py",
        "all(unit.shards == 1 and unit.dtype == wide for unit in table.units)",
        "all(unit.shards == 1 for unit in table.units)",
        ("tests/ranks/test_module_memory.py",),
    ),
    Mutation(
        "pass-that-failed-on-one-process-forgotten",
        "gptpar/adapter/guards/failed_passes.py",
        "        if len(set(places)) == 1:\n",
        "        if places:\n",
        ("tests/unit/adapter/test_failed_passes.py",),
    ),
    Mutation(
        "gradient-that-was-read-begins-anew",
        "gptpar/deepspeed/engines/engine.py",
        "        if before is not StepGradient.GROWS:\n            self._reopen()\n",
        "        if before is StepGradient.FINAL:\n            self._reopen()\n",
        ("tests/any_module/test_several_backward_passes.py",),
    ),
    Mutation(
        "gradient-read-within-a-pass",
        "gptpar/deepspeed/engines/whole_tensors.py",
        " or self._in_train_batch or self.engine.gradients.in_pass",
        "",
        ("tests/any_module/test_reads_amid_a_step.py",),
    ),
    Mutation(
        "error-after-exchange-not-noted",
        "gptpar/deepspeed/engines/training_engine.py",
        "if exchanging or gathers or self.engine.gradients.reducer.has_begun:",
        "if exchanging or gathers:",
        ("tests/any_module/test_refused.py::test_a_backward_pass_that_fails_on_one_process_is_told",),
    ),
    Mutation(
        "late-read-of-a-weight-forgotten",
        "gptpar/engine/collector.py",
        "self._read_late.add(self._unit_of[parameter].name)",
        "pass",
        ("tests/any_module/test_reads_in_backward.py::test_reads_by_the_graph",),
    ),
    Mutation(
        "late-read-of-the-first-pass-not-taken-back",
        "gptpar/adapter/module_stage.py",
        "        if late:\n            gatherer.keep_last_step()\n",
        "",
        ("tests/any_module/test_reads_in_backward.py::test_reads_by_the_graph",),
    ),
    Mutation(
        "second-backward-pass-forgets-the-first",
        "gptpar/engine/reducer.py",
        "shard if before is None else sum_with(before, shard)",
        "shard",
        ("tests/any_module/test_several_backward_passes.py",),
    ),
    Mutation(
        "second-backward-pass-adds-to-a-reduced-sum",
        "gptpar/engine/collector.py",
        "        self._arrived_before |= self._arrived\n        self._arrived.clear()\n",
        "        self._arrived_before |= self._arrived\n",
        ("tests/any_module/test_several_backward_passes.py",),
    ),
    Mutation(
        "reads-in-a-backward-pass-not-guarded",
        "gptpar/engine/gatherer.py",
        "            self.watch.may_change(unit)",
        "            pass",
        ("tests/any_module/test_reads_in_backward.py::test_reads_by_a_hook",),
    ),
    Mutation(
        "loss-scale-never-negative",
        "gptpar/run/accept.py",
        '"init_lr", "tolerance")',
        '"init_lr")',
        ("tests/unit/run/test_resume.py::test_a_run_of_fp16_goes_on_after_any_number_of_overflows",),
    ),
]
