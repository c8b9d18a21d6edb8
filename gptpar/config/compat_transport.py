"""The flags of other programs about messages, pipeline schedules and shards that are accepted without effect, and why.

:mod:`gptpar.config.compat` has the others.
"""

from __future__ import annotations

COLLECTIVES = "the ZeRO stage decides what is gathered and reduced, and when"
BUCKETS = "sizes of messages are chosen here"
NO_CONTEXT = "one process has the whole sequence"
CUTS = "every layer counts where the stack is cut; see --partition-method"
WHEN = "when gradients are computed and sent is decided here; it changes no number"
SCHEDULES = "a pipeline has 1F1B or the interleaved schedule; it changes no number"
BOTH_PASSES = "each process runs both passes of its micro-batches; it changes no number"
MESSAGES = "a pipeline's messages always overlap"
LIE = "where gradients lie is decided here; it changes no number"
BACKENDS = "stages send and receive by torch's backends"
WATCHED = "the run finds a process that hangs by itself; see --hang-seconds"
OVERLAP = "see --no-tp-comm-overlap"
ANY_NUMBER = -1
"""Of values."""

TRANSPORT: dict[str, tuple[int, str]] = {
    "--overlap-param-gather": (0, COLLECTIVES),
    "--ddp-bucket-size": (1, BUCKETS),
    "--zero-reduce-scatter": (0, COLLECTIVES),
    "--zero-reduce-bucket-size": (1, BUCKETS),
    "--zero-allgather-bucket-size": (1, BUCKETS),
    "--account-for-embedding-in-pipeline-split": (0, CUTS),
    "--account-for-loss-in-pipeline-split": (0, CUTS),
    "--no-async-tensor-model-parallel-allreduce": (0, OVERLAP),
    "--cp-comm-type": (ANY_NUMBER, NO_CONTEXT),
    "--DDP-impl": (1, COLLECTIVES),
    "--overlap-param-gather-with-optimizer-step": (0, COLLECTIVES),
    **dict.fromkeys(("--overlap-p2p-communication-warmup-flush", "--no-overlap-p2p-communication"), (0, MESSAGES)),
    "--defer-embedding-wgrad-compute": (0, WHEN),
    "--wgrad-deferral-limit": (1, WHEN),
    "--delay-wgrad-compute": (0, WHEN),
    **dict.fromkeys(("--use-nccl-ub", "--fsdp-double-buffer", "--fsdp-manual-registration"), (0, COLLECTIVES)),
    **dict.fromkeys(("--enable-zbh1-pipeline", "--enable-zbh1-exact-semantics"), (0, SCHEDULES)),
    **dict.fromkeys(("--enable-zb-runtime", "--enable-zero-bubble", "--zero-bubble-v-schedule"), (0, SCHEDULES)),
    "--enable-optimizer-post-validation": (0, SCHEDULES),
    **dict.fromkeys(
        ("--zero-bubble-pipeline-timers-start-iter", "--zero-bubble-pipeline-timers-end-iter"), (1, SCHEDULES)
    ),
    "--allow-padding-num-layers": (0, CUTS),
    **dict.fromkeys(("--no-pre-communication-optimization", "--measure-activation-memory"), (0, SCHEDULES)),
    "--zero-bubble-max-pending-backward": (1, SCHEDULES),
    **dict.fromkeys(("--forward-backward-disaggregating", "--ignore-forward-tensor-parallel"), (0, BOTH_PASSES)),
    "--no-contiguous-buffers-in-local-ddp": (0, LIE),
    **dict.fromkeys(("--ddp-num-buckets", "--suggested-communication-unit-size"), (1, BUCKETS)),
    "--ddp-pad-buckets-for-high-nccl-busbw": (0, BUCKETS),
    **dict.fromkeys(("--no-align-param-gather", "--create-all-gather-group"), (0, COLLECTIVES)),
    **dict.fromkeys(("--torch-fsdp2-no-reshard-after-forward", "--disable-symmetric-registration"), (0, COLLECTIVES)),
    "--no-gradient-reduce-div-fusion": (0, WHEN),
    "--tp-comm-overlap-cfg": (1, OVERLAP),
    "--overlap-p2p-communication": (0, MESSAGES),
    "--use-ring-exchange-p2p": (0, BACKENDS),
    "--standalone-embedding-stage": (0, CUTS),
    "--use-contiguous-buffers-in-ddp": (0, LIE),
    **dict.fromkeys(("--use-mc2", "--use-ascend-coc"), (0, OVERLAP)),
    "--overlapped-distributed-optimizer": (0, COLLECTIVES),
    **dict.fromkeys(("--use-cp-send-recv-overlap", "--use-fused-ring-attention-update"), (0, NO_CONTEXT)),
    **dict.fromkeys(("--context-parallel-algo", "--cp-attention-mask-type", "--cp-window-size"), (1, NO_CONTEXT)),
    "--ulysses-degree-in-cp": (1, NO_CONTEXT),
    "--kv-head-repeat-before-uly-alltoall": (0, NO_CONTEXT),
    **dict.fromkeys(
        (
            *("--disable-tp-comm-overlap-ag", "--disable-tp-comm-overlap-rs", "--tp-comm-overlap-rs-dgrad"),
            *("--disable-tp-comm-bulk-dgrad", "--disable-tp-comm-bulk-wgrad", "--tp-comm-overlap-disable-qkv"),
            *("--disable-tp-comm-split-ag", "--disable-tp-comm-split-rs", "--tp-comm-overlap-disable-fc1"),
        ),
        (0, OVERLAP),
    ),
    "--tp-comm-bootstrap-backend": (1, OVERLAP),
    "--pipeline-model-parallel-comm-backend": (1, BACKENDS),
    **dict.fromkeys(("--use-sharp", "--no-batch-p2p-comm", "--high-priority-stream-groups"), (ANY_NUMBER, BACKENDS)),
    **dict.fromkeys(("--no-align-grad-reduce", "--enable-full-sharding-in-hsdp"), (0, COLLECTIVES)),
    **dict.fromkeys(
        (
            *("--fsdp-db-use-persist-buf-on-alloc-fail", "--no-use-layer-wise-param-layout"),
            *("--use-layer-wise-param-layout", "--use-layer-wise-distributed-optimizer"),
        ),
        (0, COLLECTIVES),
    ),
    **dict.fromkeys(("--enable-ft-package", "--calc-ft-timeouts"), (0, WATCHED)),
    "--ft-num-warmup-iters": (1, WATCHED),
    **dict.fromkeys(
        (
            *("--tp-comm-split-ag", "--tp-comm-split-rs", "--tp-comm-bulk-dgrad", "--tp-comm-bulk-wgrad"),
            *("--no-tp-comm-split-ag", "--no-tp-comm-split-rs", "--no-tp-comm-bulk-dgrad", "--no-tp-comm-bulk-wgrad"),
            *("--no-tp-comm-overlap-ag", "--no-tp-comm-overlap-rs"),
            *("--async-tensor-model-parallel-allreduce", "--async-tensor-parallel-allreduce"),
        ),
        (0, OVERLAP),
    ),
    "--standalone-embed-stage": (0, CUTS),
    **dict.fromkeys(
        (
            *("--align-param-gather", "--delay-param-gather", "--no-delay-grad-reduce", "--gtp-remat-nccl-ub"),
            *("--megatron-fsdp-enable-fine-grained-param-gather", "--megatron-fsdp-max-pool-double-buffer"),
            *("--gtp-expert-remat-nccl-ub", "--gtp-remat-reduce-scatter-with-fp32-accumulation"),
        ),
        (ANY_NUMBER, COLLECTIVES),
    ),
    "--megatron-fsdp-version": (1, COLLECTIVES),
    "--tensor-parallel-num-weight-shards": (1, COLLECTIVES),
    "--gtp-remat-opt-in-modules": (ANY_NUMBER, COLLECTIVES),
    "--distributed-timeout-seconds-after-init": (1, WATCHED),
    **dict.fromkeys(("--sharp-enabled-group", "--initialize-socket-comms"), (ANY_NUMBER, BACKENDS)),
    **dict.fromkeys(("--max-seqlen-per-dp-cp-rank", "--max-seqlen-per-cp-rank"), (1, NO_CONTEXT)),
    "--reduce-bucket-size": (1, BUCKETS),
    "--last-bucket-split-count": (1, BUCKETS),
    **dict.fromkeys(("--pipe-sp-strategy", "--pipe-sp-splits", "--pipeline-1f1b-enable"), (1, SCHEDULES)),
    **dict.fromkeys(("--enable-fourdirectional-pipeline", "--enable-bidirectional-pipeline"), (0, SCHEDULES)),
    "--enable-exactly-numeric-match": (0, SCHEDULES),
    **dict.fromkeys(
        ("--num-waves-per-pipeline", "--zero-bubble-adaptive-memory-limit-percentile"),
        (1, SCHEDULES),
    ),
    **dict.fromkeys(("--overlap-sp-ag", "--overlap-sp-rs"), (0, OVERLAP)),
    "--kaimm-overlap-cp-slow-ctas": (1, NO_CONTEXT),
    "--use-mics": (0, COLLECTIVES),
}
"""Flag -> (number of values it takes or ``ANY_NUMBER``, why it changes nothing here)."""
