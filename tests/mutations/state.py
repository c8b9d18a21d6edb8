"""Mistakes in what outlives a step: checkpoints, resuming, the order of the data, seeds."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

RESUME = "gptpar/run/resume.py"
ENGINE = "gptpar/deepspeed/engines/checkpoint.py"
KEPT = "tests/any_module/test_checkpoint_contents.py"
COMES_BACK = "tests/unit/run/test_resume.py::test_all_that_a_run_needs_to_go_on_comes_back"
BITS_AFTER_RESUMING = "tests/e2e/test_pretrain.py::test_resume_is_bit_identical"
FAILED = "tests/unit/run/test_failed_saves.py"
BEHIND = "tests/unit/run/test_saving.py::test_it_is_the_state_of_its_moment"
LATE = "tests/unit/run/test_saving.py::test_a_save_begins_before_the_cpu_has_done_the_step"
ANNOUNCED = "tests/unit/run/test_saving.py::test_everything_that_a_step_changes_is_announced"
MACHINES = "tests/ranks/test_mirror_ranks.py::test_the_run_goes_on_as_an_undisturbed_one[two]"

STATE = [
    Mutation(
        "step-count-not-restored",
        RESUME,
        "trainer.engine.optimizer.steps_taken = stored.optimizer_steps",
        "pass",
        (COMES_BACK,),
    ),
    Mutation(
        "loss-scale-not-restored",
        RESUME,
        "    trainer.loss_scale.load(stored.loss_scale)\n",
        "",
        (COMES_BACK,),
    ),
    Mutation(
        "parameters-not-published-after-loading",
        RESUME,
        "report=_only_missing(say),\n    )\n    trainer.engine.publish()\n",
        "report=_only_missing(say),\n    )\n",
        (COMES_BACK,),
    ),
    Mutation(
        "box-begins-at-the-wrong-row",
        "gptpar/topology/tensor_parts.py",
        "yield (first, *(0 for _ in inner)), (last - first, *inner)",
        "yield (first - bool(head), *(0 for _ in inner)), (last - first, *inner)",
        ("tests/unit/topology/test_tensor_parts.py",),
    ),
    Mutation(
        "tensor-ranks-offset-left-out-of-the-box",
        "gptpar/topology/tensor_parts.py",
        "tuple(lows[place] + at for place, at in zip(place_of, offsets, strict=True))",
        "tuple(lows[place] for place, _ in zip(place_of, offsets, strict=True))",
        ("tests/unit/topology/test_tensor_parts.py",),
    ),
    Mutation(
        "box-written-by-two-ranks",
        "gptpar/topology/tensor_parts.py",
        "return (lows, sizes) if all(size > 0 for size in sizes) else None",
        "return None",
        ("tests/ranks/test_checkpoint_ranks.py::test_a_layout_with_holes_or_overlaps_is_never_a_checkpoint",),
    ),
    Mutation(
        "damaged-piece-read",
        "gptpar/checkpoint/pieces.py",
        "if found != crc:",
        "if found != crc and not found:",
        ("tests/unit/checkpoint/test_damage.py",),
    ),
    Mutation(
        "data-order-of-the-first-epoch-again",
        "gptpar/data/order.py",
        "self._permutation(epoch, self.num_samples)[places[here] % self.num_samples]",
        "self._permutation(0, self.num_samples)[places[here] % self.num_samples]",
        ("tests/unit/data/test_order.py",),
    ),
    Mutation(
        "resumed-data-begin-with-the-first-sample",
        RESUME,
        "    return stored.progress\n",
        "    return dataclasses.replace(stored.progress, consumed_samples=0)\n",
        (BITS_AFTER_RESUMING,),
    ),
    Mutation(
        "each-data-rank-reads-the-same-samples",
        "gptpar/data/order.py",
        "start = consumed + dp_rank * micro_batch_size",
        "start = consumed",
        ("tests/unit/data/test_order.py",),
    ),
    Mutation(
        "dropout-seed-without-the-iteration",
        "gptpar/model/dropout.py",
        'seed_of(seed, "dropout", iteration, place, layer, kind)',
        'seed_of(seed, "dropout", place, layer, kind)',
        ("tests/unit/model/test_dropout.py",),
    ),
    Mutation(
        "dropout-seed-without-the-data-rank",
        "gptpar/run/trainer.py",
        "place = number * self.topology.mesh.data + self._data_position",
        "place = number * self.topology.mesh.data",
        ("tests/ranks/test_layouts.py::test_layouts_equal_one_process[two processes]",),
    ),
    Mutation(
        "initial-values-without-the-parameters-name",
        "gptpar/topology/initial_values.py",
        "generator = torch.Generator().manual_seed(seed_of(seed, name))",
        "generator = torch.Generator().manual_seed(seed_of(seed))",
        ("tests/unit/model/test_parts.py::test_initial_values_depend_on_seed_and_name_alone",),
    ),
    Mutation(
        "step-count-of-an-engine-not-restored",
        ENGINE,
        """        engine.engine.optimizer.steps_taken = state.counts["optimizer_steps"]\n""",
        "",
        (f"{KEPT}::test_number_formats",),
    ),
    Mutation(
        "parameters-changed-before-loading-win",
        "gptpar/adapter/weights.py",
        "        self.catch_up()\n",
        "",
        (f"{KEPT}::test_weights_changed_in_place_are_saved_and_old_changes_are_forgotten",),
    ),
    Mutation(
        "damaged-checkpoint-half-loaded",
        ENGINE,
        "        prove_first=True,\n",
        "",
        (
            "tests/any_module/test_checkpoint_mismatch.py::test_a_damaged_one_gives_way_to_an_older_one_or_changes_nothing",
        ),
    ),
    Mutation(
        "last-process-saves-its-buffers",
        ENGINE,
        "    if engine.topology.position(DATA) == 0:\n        tensors |= _buffers",
        "    if engine.topology.position(DATA) == engine.topology.mesh.data - 1:\n        tensors |= _buffers",
        (f"{KEPT}::test_on_several_processes",),
    ),
    Mutation(
        "one-stage-names-the-groups-of-all",
        ENGINE,
        "each = [of_process()] if engine.topology.mesh.pipeline == 1 else ranks.each(of_process)",
        "each = [of_process()]",
        ("tests/any_module/test_pipeline_layers.py::test_any_ratio_of_tied_layers_is_saved_and_goes_on_in_another",),
    ),
    Mutation(
        "device-state-overwritten-while-it-is-saved",
        "gptpar/engine/flat_optimizer.py",
        "                self._guard.before_write(state)\n",
        "",
        (BEHIND, ANNOUNCED),
    ),
    Mutation(
        "bucket-overwritten-while-it-is-saved",
        "gptpar/offload/kernel_queue.py",
        "        self._shared.guard.before_write(new or old)\n",
        "",
        (BEHIND, ANNOUNCED),
    ),
    Mutation(
        "double-buffer-of-a-saved-state-overwritten",
        "gptpar/offload/kernel_queue.py",
        "self._shared.guard.before_write(new or old)",
        "self._shared.guard.before_write(() if new else old)",
        (BEHIND,),
    ),
    Mutation(
        "what-begins-before-the-overwritten-memory-is-lost",
        "gptpar/system/regions.py",
        "while place >= 0 and self._starts[place] > start - self._longest:",
        "while place >= 0 and self._starts[place] > start:",
        ("tests/unit/system/test_snapshot.py",),
    ),
    Mutation(
        "step-requested-before-the-state-of-the-last-one-is-taken",
        "gptpar/engine/master_optimizer.py",
        "        self.guard.wait_until_held()\n",
        "",
        (LATE,),
    ),
    Mutation(
        "held-state-overwritten-before-its-parts-are-taken",
        "gptpar/system/snapshot.py",
        "                self._wait(self._complete)\n",
        "                pass\n",
        (LATE,),
    ),
    Mutation(
        "state-taken-before-the-cpu-has-done-the-step",
        "gptpar/offload/shared_state.py",
        "self.loop_waits(lambda: self.request is None and not any(bucket.due for bucket in self.buckets))",
        "pass",
        (LATE,),
    ),
    Mutation(
        "error-behind-the-training-is-lost",
        "gptpar/checkpoint/saver.py",
        "            self._warn(self._warning(save, error))\n",
        "            pass\n",
        (f"{FAILED}::test_one_failed_save_costs_a_run_nothing",),
    ),
    Mutation(
        "saves-that-keep-failing-are-forgiven-for-ever",
        "gptpar/checkpoint/saver.py",
        "self._failures[save.folder] = self._failures.get(save.folder, 0) + 1",
        "self._failures[save.folder] = 1",
        (f"{FAILED}::test_a_run_whose_saves_keep_failing_ends_at_the_third",),
    ),
    Mutation(
        "failed-last-save-is-forgiven",
        "gptpar/run/saving.py",
        "required=last, since=since)",
        "required=False, since=since)",
        (f"{FAILED}::test_a_run_whose_last_save_fails_says_what_is_lost",),
    ),
    Mutation(
        "weights-overwritten-by-a-user-while-they-are-saved",
        "gptpar/adapter/weights.py",
        "                guard.before_write(part for _, part in weights[name].parts)\n",
        "",
        ("tests/any_module/test_saving_behind.py::test_one_process_without_others_saves_the_state_of_its_moment",),
    ),
    Mutation(
        "buffers-of-an-engine-change-while-they-are-saved",
        ENGINE,
        '    return kind in ("buffers", "client")',
        "    return False",
        ("tests/any_module/test_saving_behind.py::test_one_process_without_others_saves_the_state_of_its_moment",),
    ),
    Mutation(
        "a-mapping-for-each-copied-piece",
        "gptpar/system/spare_memory.py",
        "pages.untouched(max(size, MAPPING_BYTES))",
        "pages.untouched(size)",
        ("tests/unit/system/test_spare_memory.py::test_hundreds_of_gigabytes_take_few_mappings",),
    ),
    Mutation(
        "saved-twice-under-one-number",
        "gptpar/deepspeed/engines/tags.py",
        "return max(step, newest + 1), [",
        "return step, [",
        ("tests/any_module/test_checkpoint_tags.py::test_another_seed_is_not_taken_for_the_same_checkpoint",),
    ),
    Mutation(
        "milestones-of-a-schedule-become-texts",
        "gptpar/deepspeed/engines/plain_values.py",
        'if kind == "dict" and _MARK not in value and all(isinstance(key, str) for key in value):',
        "if True:",
        (f"{KEPT}::test_schedulers",),
    ),
    Mutation(
        "machine-keeps-its-own-files-twice",
        "gptpar/checkpoint/ring.py",
        "for place, rank in enumerate(self.before(machine))",
        "for place, rank in enumerate(mine)",
        ("tests/unit/checkpoint/test_ring.py",),
    ),
    Mutation(
        "damaged-file-is-sent-to-who-lost-it",
        "gptpar/checkpoint/verify.py",
        "return there - problems.keys(),",
        "return there,",
        ("tests/unit/checkpoint/test_damage.py::test_a_damaged_file_is_no_sound_one", MACHINES),
    ),
    Mutation(
        "machine-restores-what-it-keeps-and-not-what-it-reads",
        "gptpar/checkpoint/ring.py",
        "*(read[rank] for rank in ranks)",
        "*(read[rank] for rank in ranks[:0])",
        ("tests/unit/checkpoint/test_ring.py::test_a_machine_wants_what_it_keeps_and_what_its_processes_read",),
    ),
]
