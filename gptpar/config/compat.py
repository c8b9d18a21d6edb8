"""Flags of Megatron-LM and Megatron-DeepSpeed that are understood although nothing here depends on them.

Each maps to (number of values it takes, why it changes nothing here).
"""

from __future__ import annotations

ALWAYS = "this is always so here"
SDPA = "torch picks the attention kernel"
COMPILED = "the compiler fuses this"
COLLECTIVES = "the ZeRO stage decides what is gathered and reduced, and when"
BUCKETS = "sizes of messages are chosen here"
CUTS = "every layer counts where the stack is cut; see --partition-method"

ACCEPTED: dict[str, tuple[int, str]] = {
    "--use-flash-attn": (0, SDPA),
    "--use-flash-attn-v2": (0, SDPA),
    "--attention-backend": (1, SDPA),
    "--transformer-impl": (1, "there is one implementation"),
    "--use-mcore-models": (0, "there is one implementation"),
    "--no-masked-softmax-fusion": (0, COMPILED),
    "--no-bias-gelu-fusion": (0, COMPILED),
    "--no-bias-dropout-fusion": (0, COMPILED),
    "--no-gradient-accumulation-fusion": (0, COMPILED),
    "--cross-entropy-loss-fusion": (0, ALWAYS),
    "--attention-softmax-in-fp32": (0, ALWAYS),
    "--accumulate-allreduce-grads-in-fp32": (0, "gradients are always summed in fp32; see --grad-reduce-in-bf16"),
    "--overlap-grad-reduce": (0, ALWAYS),
    "--overlap-param-gather": (0, COLLECTIVES),
    "--ddp-bucket-size": (1, BUCKETS),
    "--zero-reduce-scatter": (0, COLLECTIVES),
    "--zero-contigious-gradients": (0, ALWAYS),
    "--zero-reduce-bucket-size": (1, BUCKETS),
    "--zero-allgather-bucket-size": (1, BUCKETS),
    "--tp-comm-overlap": (0, "this is so unless --no-tp-comm-overlap is given"),
    "--account-for-embedding-in-pipeline-split": (0, CUTS),
    "--account-for-loss-in-pipeline-split": (0, CUTS),
    "--deepspeed-activation-checkpointing": (0, "see --recompute-granularity"),
    "--contigious-checkpointing": (0, "torch's allocator keeps memory together"),
    "--synchronize-each-layer": (0, "recomputation needs no synchronisation"),
    "--openai-gelu": (0, "GELU is computed with its tanh form"),
    "--use-cpu-initialization": (0, ALWAYS),
    "--exit-signal-handler": (0, "SIGTERM and Ctrl-C always save and stop"),
    "--data-impl": (1, "data sets are always memory-mapped"),
    "--no-data-sharding": (0, "this is so unless --data-sharding is given"),
    "--mmap-warmup": (0, "data sets are always memory-mapped"),
    "--no-save-rng": (0, "random states are derived from seed and iteration, none are saved"),
    "--no-load-rng": (0, "random states are derived from seed and iteration, none are saved"),
    "--ckpt-format": (1, "there is one checkpoint format"),
    "--distributed-timeout": (1, "see --distributed-timeout-minutes"),
    "--local-rank": (1, "torchrun says it in the environment"),
    "--local_rank": (1, "torchrun says it in the environment"),
    "--timing-log-option": (1, "iteration time and throughput are always measured"),
    "--eod-mask": (0, "see --eod-mask-loss"),
}

NO_EXPERTS = "mixture-of-experts is not part of gptpar"
EXPERTS = ("--moe-", "--expert-")
"""How flags for mixture-of-experts begin; those that are not in ``DENSE`` ask for a model that is not there."""
ANY = ("any value",)
DENSE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("--num-experts", "--moe-expert-parallel-size", "--expert-model-parallel-size"), ("1",)),
    **dict.fromkeys(("--expert-tensor-parallel-size", "--topk"), ("1",)),
    "--mlp-type": ("standard",),
    "--moe-loss-coeff": ANY,
    "--moe-train-capacity-factor": ANY,
    "--moe-eval-capacity-factor": ANY,
    "--moe-min-capacity": ANY,
    "--expert-interval": ANY,
    "--create-moe-param-group": ANY,
}
"""Mixture-of-experts flag -> its values that still describe a dense model. ``ANY``: the flag only tunes experts, which
--num-experts asks for, so without them every value is harmless."""

PLANNED: dict[str, str] = {
    "--context-parallel-size": "context parallelism",
    "--ds-sequence-parallel-size": "context parallelism",
    "--enable-zbh1-pipeline": "a zero-bubble pipeline",
}
