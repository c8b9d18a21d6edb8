"""Mistakes in the engine's gradients and gathered parameters: collector, reducer, gatherer."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

COLLECTOR = "gptpar/engine/collector.py"
REDUCER = "gptpar/engine/reducer.py"
GATHERER = "gptpar/engine/gatherer.py"
ONE_ORDER = "tests/unit/engine/test_gradients.py::test_units_are_reduced_in_one_order_whatever_autograd_does"
PLAIN_LOOP = "tests/unit/run/test_plain_loop.py::test_fifty_steps_follow_a_plain_loop"
RATIOS = "tests/unit/offload/test_same_bits.py::test_no_ratio_changes_a_bit"
RATIOS_ON_RANKS = "tests/ranks/test_offload_bits_ranks.py::test_no_ratio_changes_a_bit"
RECORDED = "tests/unit/deepspeed/engines/test_graph.py"
TWO_WAYS = "tests/ranks/test_layouts.py::test_layouts_equal_one_process[two processes]"

GRADIENTS = [
    Mutation(
        "gradient-overwritten-in-place-of-added",
        COLLECTOR,
        "add_each([views[name] for name in known], [fresh[name] for name in known], self._factor)",
        "torch._foreach_copy_([views[name] for name in known], [fresh[name] for name in known])",
        (PLAIN_LOOP,),
    ),
    Mutation(
        "parameter-without-gradient-keeps-the-last-steps",
        COLLECTOR,
        "            if name not in self._arrived:\n                total[param.start : param.stop].zero_()\n",
        "            if name not in self._arrived:\n                pass\n",
        (ONE_ORDER,),
    ),
    Mutation(
        "units-reduced-as-they-complete",
        COLLECTOR,
        "in_order = self._in_order or not self._has_learned",
        "in_order = False",
        (ONE_ORDER,),
    ),
    Mutation(
        "gradients-travel-as-wide-as-they-are",
        REDUCER,
        "else total.to(self._dtype)",
        "else total",
        ("tests/unit/engine/test_gradients.py::test_gradients_travel_in_the_reductions_dtype",),
    ),
    Mutation(
        "reduction-not-waited-for",
        REDUCER,
        "        oldest.wait()\n        oldest.add()\n",
        "        oldest.add()\n",
        (TWO_WAYS,),
    ),
    Mutation(
        "dropped-gradients-added-to-the-next-steps",
        REDUCER,
        "        while self._pending:\n            dropped =",
        "        while False:\n            dropped =",
        ("tests/unit/engine/test_gradients.py::test_reductions_of_a_dropped_step_are_waited_for_and_not_added",),
    ),
    Mutation(
        "last-reductions-left-behind",
        REDUCER,
        "        while self._pending:\n            self._finish_oldest()\n",
        "        if self._pending:\n            self._finish_oldest()\n",
        (TWO_WAYS,),
    ),
    Mutation(
        "sharded-sum-not-restarted",
        REDUCER,
        "        self._summed.clear()\n        self._final_before.clear()\n        self.has_begun",
        "        self._final_before.clear()\n        self.has_begun",
        (TWO_WAYS,),
    ),
    Mutation(
        "shard-of-the-wrong-rank",
        "gptpar/engine/ranges.py",
        "return self.mesh.position(self.rank, *self.sharded_over(unit.copies_over))",
        "return unit.shards - 1 - self.mesh.position(self.rank, *self.sharded_over(unit.copies_over))",
        (TWO_WAYS,),
    ),
    Mutation(
        "padding-not-zero",
        "gptpar/engine/gradient_memory.py",
        "total[start:stop].zero_()",
        "pass",
        ("tests/unit/engine/test_gradients.py::test_padding_of_memory_that_is_taken_ahead_is_zero",),
    ),
    Mutation(
        "tensor-sum-dropped-at-the-end-of-the-step",
        REDUCER,
        "sum_together([part for unit in shards for part in self._addends(unit, shards[unit])], self._tensor_group)",
        "shards",
        (TWO_WAYS, RATIOS_ON_RANKS),
    ),
    Mutation(
        "tensor-sum-dropped-before-the-cut",
        REDUCER,
        "        sum_together(self._addends(unit.name, shard), self._tensor_group)\n        self._give_out",
        "        self._give_out",
        (RATIOS_ON_RANKS,),
    ),
    Mutation(
        "tied-sum-dropped",
        REDUCER,
        "sum_together([self.memory.shards[name] if held is None else held[1]], group)",
        "pass",
        (TWO_WAYS,),
    ),
    Mutation(
        "norm-of-the-devices-elements-alone",
        REDUCER,
        "self._norm.measured({unit.name: shard})",
        "self._norm.measured({unit.name: shard[: self.memory.shards[unit.name].numel()]})",
        (RATIOS,),
    ),
    Mutation(
        "norm-before-the-sum-over-the-tensor-axis",
        REDUCER,
        "        sum_together(self._addends(unit.name, shard), self._tensor_group)\n"
        "        self._give_out(unit, shard)\n",
        "        self._give_out(unit, shard)\n"
        "        sum_together(self._addends(unit.name, shard), self._tensor_group)\n",
        (RATIOS_ON_RANKS,),
    ),
    Mutation(
        "wait-for-the-CPU-optimizer-skipped",
        GATHERER,
        "            self._graph_breaks.at(partial(self._subscriber.wait, unit))\n",
        "            pass\n",
        (RATIOS,),
    ),
    Mutation(
        "gathering-not-waited-for",
        GATHERER,
        "            work = self._pending.pop(unit, None)\n"
        "            if work is not None:\n                self._data.wait_for(work)\n"
        "            if self.watch is not None:\n                self.watch.arrived",
        "            self._pending.pop(unit, None)\n"
        "            if self.watch is not None:\n                self.watch.arrived",
        (TWO_WAYS,),
    ),
    Mutation(
        "shards-published-while-older-ones-are-gathered",
        "gptpar/engine/engine.py",
        "        self.gatherer.finish_pending()\n        if self.subscriber is not None:\n",
        "        if self.subscriber is not None:\n",
        ("tests/ranks/test_gathers.py",),
    ),
    Mutation(
        "not-gathered-again-for-the-backward-pass",
        GATHERER,
        "        self._in_backward.add(name)\n        self.acquire(name)\n",
        "        self._in_backward.add(name)\n",
        (TWO_WAYS,),
    ),
    Mutation(
        "released-before-the-gradients-are-complete",
        COLLECTOR,
        "        self._missing[unit.name] -= 1\n",
        "        self._missing[unit.name] -= 1\n        self._done(unit.name, False)\n",
        (TWO_WAYS,),
    ),
    Mutation(
        "old-parameters-used-after-a-step",
        GATHERER,
        "        elif self.acquires:\n            self._present = set(self._frozen)\n",
        "        elif self.acquires:\n",
        (TWO_WAYS,),
    ),
    Mutation(
        "norm-of-a-recorded-step-taken-when-it-is-recorded",
        REDUCER,
        "        self._graph_breaks.at(partial(self._hand_over, unit.name, norms, shard[low:]))\n",
        "        self._norms |= norms\n"
        "        self._graph_breaks.at(partial(self._hand_over, unit.name, {}, shard[low:]))\n",
        (RECORDED,),
    ),
    Mutation(
        "hooks-see-undivided-losses",
        "gptpar/deepspeed/engines/training_engine.py",
        "self._work.scale.fill_(self.loss_scaler.value / self.options.batch.accumulation_steps)",
        "self._work.scale.fill_(self.loss_scaler.value)",
        ("tests/any_module/test_plain_backward.py::test_gradients_are_in_grad_without_zero",),
    ),
    Mutation(
        "loss-scale-of-the-recorded-step",
        "gptpar/deepspeed/engines/step_work.py",
        "scale = self.scale if incoming is None else torch.full_like(self.scale, incoming)",
        "scale = torch.full_like(loss, float(self.scale.numpy()) if incoming is None else incoming)",
        (RECORDED,),
    ),
    Mutation(
        "train-batch-forgets-its-loss",
        "gptpar/deepspeed/engines/training_engine.py",
        "result = self._result or self._result_of_calls()",
        "result = self._result_of_calls()",
        (RECORDED,),
    ),
    Mutation(
        "blocks-called-first-under-a-dispatch-mode",
        "gptpar/adapter/module_stage.py",
        "EAGER_STANCE.force()\n            self._uncompiled.callback(EAGER_STANCE.restore)",
        "pass",
        ("tests/any_module/test_compiled.py",),
    ),
]
