"""Mistakes in the CPU optimizer: states of buckets, speculation, the updating thread, copies."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

STATES = "gptpar/offload/bucket_state.py"
THREAD = "gptpar/offload/updating_thread.py"
QUEUE = "gptpar/offload/kernel_queue.py"
OPTIMIZER = "gptpar/offload/host_optimizer.py"
SPECULATION = "tests/unit/offload/test_whole_runs.py::test_speculation_changes_no_bit"
OVERFLOWS = "tests/unit/offload/test_whole_runs.py::test_fp16_overflows_are_skipped_on_both_sides"
ANY_ORDER = "tests/unit/offload/test_events.py::test_any_order_gives_the_same_bits"
TIED_EMBEDDING = "tests/unit/offload/test_tied_embedding_offload.py"
ACTIVATIONS = "gptpar/pipeline/host_activations.py"
ACTIVATION_TESTS = "tests/unit/pipeline/test_host_activations.py"
EARLY_GRADIENTS = "tests/unit/offload/test_early_gradients.py"

OFFLOAD = [
    Mutation(
        "speculation-kept-although-the-step-is-clipped",
        STATES,
        "if same_numbers and state == BucketState.SPECULATED:",
        "if state == BucketState.SPECULATED:",
        (SPECULATION,),
    ),
    Mutation(
        "speculation-committed-although-the-norm-is-not-finite",
        "gptpar/offload/step_request.py",
        'if self.unclipped is None or not norm < float("inf"):',
        "if self.unclipped is None:",
        (OVERFLOWS,),
    ),
    Mutation(
        "speculated-parameters-stay-after-a-skipped-step",
        THREAD,
        "if event is What.SKIPPED and before in HOLDS_SPECULATION:\n                self._queue.send_weights(bucket)\n",
        "if event is What.SKIPPED:\n                pass\n",
        (OVERFLOWS, "tests/unit/offload/test_twin_flow_attached.py::test_a_step_that_is_not_taken_leaves_no_trace"),
    ),
    Mutation(
        "double-buffer-shared-after-a-commit",
        QUEUE,
        "bucket.buffers, bucket.double_buffer = bucket.double_buffer, bucket.buffers",
        "bucket.buffers = bucket.double_buffer",
        (ANY_ORDER,),
    ),
    Mutation(
        "update-beside-a-save-not-made-valid",
        QUEUE,
        "swaps=update.into is not None",
        "swaps=update.ends_with is What.COMMITTED",
        ("tests/unit/run/test_saving.py::test_it_is_the_state_of_its_moment",),
    ),
    Mutation(
        "replaced-gradient-ignored",
        THREAD,
        "        for bucket in shared.buckets:\n            bucket.use_newer()\n",
        "",
        (ANY_ORDER,),
    ),
    Mutation(
        "speculation-with-a-replaced-gradient-kept",
        STATES,
        "(_S.SPECULATED, _W.SUBMITTED): _S.STALE",
        "(_S.SPECULATED, _W.SUBMITTED): _S.SPECULATED",
        (ANY_ORDER,),
    ),
    Mutation(
        "back-off-forgotten",
        THREAD,
        "shared.note_foresight(request.expected, hyperparameters)",
        "shared.note_foresight(request.expected, request.expected)",
        ("tests/unit/offload/test_bucket_state.py::test_a_step_after_a_clipped_one_does_not_speculate",),
    ),
    Mutation(
        "skipped-step-counted-by-the-CPU-optimizer",
        QUEUE,
        "bucket.steps += how is not What.SKIPPED",
        "bucket.steps += 1",
        (OVERFLOWS,),
    ),
    Mutation(
        "step-number-of-the-step-before",
        "gptpar/offload/step_request.py",
        "if self._are_of != (hyperparameters, step):",
        "if self._are_of[0] != hyperparameters:",
        ("tests/unit/offload/test_twin_flow.py::test_every_ratio_is_torchs_adamw",),
    ),
    Mutation(
        "first-bucket-of-a-unit-waited-for-alone",
        OPTIMIZER,
        "not any(bucket.due for bucket in buckets)",
        "not any(bucket.due for bucket in buckets[:1])",
        (ANY_ORDER,),
    ),
    Mutation(
        "step-requested-meanwhile-lost",
        THREAD,
        "            if shared.request is request:  # the loop may have requested the next step "
        "since the last bucket was done\n"
        "                shared.request = None\n",
        "            shared.request = None\n",
        ("tests/unit/offload/test_host_optimizer.py::test_a_step_that_is_announced_while_the_last_one_ends_is_taken",),
    ),
    Mutation(
        "closed-ranges-of-a-partial-gradient-computed-again",
        THREAD,
        "What.COMMITTED, aside=True, only=bucket.partial.to_complete())",
        "What.COMMITTED, aside=True, only=bucket.partial.closed)",
        (TIED_EMBEDDING, EARLY_GRADIENTS),
    ),
    Mutation(
        "open-ranges-one-row-off",
        "gptpar/offload/index_ranges.py",
        "marked[rows] = 1",
        "marked[rows - 1] = 1",
        (TIED_EMBEDDING, EARLY_GRADIENTS),
    ),
    Mutation(
        "open-ranges-counted-from-the-unit",
        OPTIMIZER,
        "between(open_ranges, bucket.start, bucket.stop) - bucket.start",
        "between(open_ranges, bucket.start, bucket.stop)",
        (ANY_ORDER,),
    ),
    Mutation(
        "bucket-taken-before-all-of-it-is-formed",
        OPTIMIZER,
        "bucket.stop <= formed",
        "bucket.start < formed",
        (ANY_ORDER,),
    ),
    Mutation(
        "gradient-given-up-before-its-copy-is-done",
        "gptpar/offload/copying_transfers.py",
        "if self._grad is not None and self._is_there.query():",
        "if self._grad is not None and self.made():",
        ("tests/unit/offload/test_copying_transfers.py", "tests/unit/offload/test_offload_gradients_flag.py"),
    ),
    Mutation(
        "thread-sleeps-for-the-gradient-that-comes-last",
        "gptpar/offload/next_action.py",
        "for bucket in reversed(buckets) if bucket.grad is not None and bucket.partial is None]",
        "for bucket in buckets if bucket.grad is not None and bucket.partial is None]",
        (EARLY_GRADIENTS,),
    ),
    Mutation(
        "thread-waits-for-each-update",
        QUEUE,
        "(MAX_QUEUED if ends_with is None and self._shared.request is None else 1)",
        "1",
        ("tests/unit/offload/test_host_optimizer.py",),
    ),
    Mutation(
        "a-speculation-that-was-replaced-stays-on-the-device",
        THREAD,
        "if bucket.state in (BucketState.SPECULATED, BucketState.STALE):",
        "if bucket.state is BucketState.SPECULATED:",
        ("tests/unit/offload/test_bucket_state.py",),
    ),
    Mutation(
        "backward-pass-never-held-back",
        "gptpar/offload/copying_transfers.py",
        "(self._num_bytes > self._max_bytes or self._copies[0].arrived())",
        "self._copies[0].arrived()",
        ("tests/unit/offload/test_copying_transfers.py::test_only_what_is_above_the_bound_is_waited_for",),
    ),
    Mutation(
        "changed-storage-not-copied-again",
        ACTIVATIONS,
        "key = x.untyped_storage().data_ptr(), x._version",
        "key = x.untyped_storage().data_ptr(), 0",
        (ACTIVATION_TESTS,),
    ),
    Mutation(
        "activations-return-at-another-offset",
        ACTIVATIONS,
        "self._place = x.storage_offset(), x.shape, x.stride()",
        "self._place = 0, x.shape, x.stride()",
        (ACTIVATION_TESTS,),
    ),
    Mutation("activations-never-leave-the-device", ACTIVATIONS, "self._leaving.leave()", "pass", (ACTIVATION_TESTS,)),
    Mutation(
        "activations-do-not-return-early",
        ACTIVATIONS,
        "if before is not None and not before.has_returned:",
        "if before is not None and before.has_returned:",
        (ACTIVATION_TESTS,),
    ),
    Mutation(
        "parameters-leave-with-the-activations",
        ACTIVATIONS,
        " or storage.data_ptr() in stay:",
        ":",
        (ACTIVATION_TESTS,),
    ),
    Mutation(
        "activations-of-all-passes-return-in-a-row",
        ACTIVATIONS,
        "        self._newest = None\n\n    def call",
        "        pass\n\n    def call",
        (ACTIVATION_TESTS,),
    ),
]
