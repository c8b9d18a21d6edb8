"""The flags of Megatron-LM and Megatron-DeepSpeed that are accepted without effect, or refused, and why.

Each maps to (number of values it takes or ``ANY_NUMBER``, why it changes nothing here).
"""

from __future__ import annotations

from gptpar.config.data_files import SPLITS

ALWAYS = "this is always so here"
SDPA = "torch picks the attention kernel"
COMPILED = "the compiler fuses this"
COLLECTIVES = "the ZeRO stage decides what is gathered and reduced, and when"
BUCKETS = "sizes of messages are chosen here"
NO_CONTEXT = "one process has the whole sequence"
CUTS = "every layer counts where the stack is cut; see --partition-method"
WHEN = "when gradients are computed and sent is decided here; it changes no number"
SCHEDULES = "a pipeline has 1F1B or the interleaved schedule; it changes no number"
ONE_FORMAT = "there is one checkpoint format"
LESS_MEMORY = "it changes no number; see --recompute-granularity and --cpu-parameters"
ALL_FP32 = "master weights, moments and gradient sums are always fp32"
PROFILED = "gptpar benchmark --trace records steps, and an outer profiler needs no flag"
NVIDIA_ALONE = "it is for a service inside NVIDIA"
BOTH_PASSES = "each process runs both passes of its micro-batches; it changes no number"
MESSAGES = "a pipeline's messages always overlap"
INDICES = "the indices of data sets are built once, and mapped"
PINNED = "host memory that a GPU reads or writes is always pinned"
LIE = "where gradients lie is decided here; it changes no number"
RECOMPUTED = "what is computed again changes no number; see --recompute-granularity and --recompute-modules"
OF_THE_LAUNCH = ("--world-size", "--rank")
"""Flags that place a process among others; they must fit what the environment says."""
ANY_NUMBER = -1
"""Of values."""

ACCEPTED: dict[str, tuple[int, str]] = {
    "--use-flash-attn": (0, SDPA),
    "--use-flash-attn-v2": (0, SDPA),
    "--attention-backend": (1, SDPA),
    "--transformer-impl": (1, "there is one implementation"),
    **dict.fromkeys(
        ("--use-mcore-models", "--use-legacy-models", "--enable-experimental"), (0, "there is one implementation")
    ),
    "--no-masked-softmax-fusion": (0, COMPILED),
    "--no-bias-gelu-fusion": (0, "GELU is Megatron's fused one, with tanh; its unfused one is --mlp-activation gelu"),
    "--no-bias-dropout-fusion": (0, COMPILED),
    "--no-gradient-accumulation-fusion": (0, COMPILED),
    "--cross-entropy-loss-fusion": (0, ALWAYS),
    "--cross-entropy-fusion-impl": (1, "there is one fused loss"),
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
    "--data-impl": (1, "data sets have one format, that of mmap"),
    "--no-data-sharding": (0, "this is so unless --data-sharding is given"),
    "--mmap-warmup": (0, "tokens are read when they are needed"),
    "--async-save": (0, "training goes on while a checkpoint is written (--no-async-save stops it)"),
    "--no-save-rng": (0, "random states are derived from seed and iteration, none are saved"),
    "--no-load-rng": (0, "random states are derived from seed and iteration, none are saved"),
    "--ckpt-format": (1, ONE_FORMAT),
    "--distributed-timeout": (1, "see --distributed-timeout-minutes"),
    "--use-mpi": (0, "RANK and WORLD_SIZE in the environment say it"),
    "--local-rank": (1, "torchrun says it in the environment"),
    "--local_rank": (1, "torchrun says it in the environment"),
    "--timing-log-option": (1, "iteration time and throughput are always measured"),
    "--eod-mask": (0, "see --eod-mask-loss"),
    "--use-flash-attn-triton": (0, SDPA),
    "--use-flash-attn-builder": (0, SDPA),
    "--no-query-key-layer-scaling": (0, "scores are never scaled by the layer's number"),
    "--apply-query-key-layer-scaling": (0, "it only guards fp16 scores, which are fp32 inside the kernel here"),
    "--no-bias-swiglu-fusion": (0, COMPILED),
    "--no-rope-fusion": (0, COMPILED),
    "--no-persist-layer-norm": (0, COMPILED),
    "--no-async-tensor-model-parallel-allreduce": (0, "see --no-tp-comm-overlap"),
    "--cp-comm-type": (ANY_NUMBER, NO_CONTEXT),
    "--DDP-impl": (1, COLLECTIVES),
    "--manual-gc": (0, "the loop makes no garbage that waits for its collector"),
    "--manual-gc-interval": (1, "the loop makes no garbage that waits for its collector"),
    "--empty-unused-memory-level": (1, "torch's allocator keeps memory"),
    "--no-mmap-bin-files": (0, "tokens are always read, not mapped"),
    "--no-create-attention-mask-in-dataloader": (0, "attention masks are never made by the loader"),
    "--repeated-dataloader": (0, "a data set that is read to its end begins again"),
    "--universal-checkpoint": (0, "checkpoints load into any layout"),
    "--dist-ckpt-strictness": (1, "a checkpoint is always compared whole"),
    "--dist-ckpt-optim-fully-reshardable": (0, "checkpoints load into any layout"),
    "--ckpt-fully-parallel-save": (0, "every process writes its part"),
    "--ckpt-fully-parallel-load": (0, "every process reads its part"),
    "--ckpt-assume-constant-structure": (0, "checkpoints have one structure"),
    "--use-dist-ckpt": (0, ONE_FORMAT),
    "--use-persistent-ckpt-worker": (0, ONE_FORMAT),
    "--log-optimizer-states-to-tensorboard": (0, "the optimizer's states are not charted; see --log-params-norm"),
    "--log-progress": (0, "metrics.jsonl tells of every step"),
    "--no-barrier-with-level-1-timing": (0, "times are measured without barriers"),
    "--codecarbon-dir": (1, "energy is not measured"),
    "--cpu_torch_adam": (0, "the CPU kernel is chosen here"),
    "--ds_fused_adam": (0, "there is one fused kernel"),
    "--lazy-mpu-init": (ANY_NUMBER, ALWAYS),
    "--no-check-for-nan-in-loss-and-grad": (0, "a step whose gradient is not finite is always skipped"),
    "--check-for-nan-in-loss-and-grad": (0, "a step whose gradient is not finite is always skipped"),
    "--auto-detect-ckpt-format": (0, ONE_FORMAT),
    "--no-ckpt-fully-parallel-save": (0, "every process writes its part"),
    "--async-strategy": (1, "there is one way to save behind the training"),
    "--verify-integrity": (0, "every byte of a checkpoint is proved by checksums"),
    "--no-use-tokenizer-model-from-checkpoint-args": (0, "the tokenizer's files are those that are given"),
    "--trust-remote-code": (0, "no code of a tokenizer's folder is run"),
    "--use-tp-pp-dp-mapping": (0, "processes are numbered along tensor, data, pipeline; it changes no number"),
    "--disable-gloo-process-groups": (0, "groups are made as they are needed"),
    "--ddp-average-in-collective": (0, "the loss is divided before the backward pass"),
    "--overlap-param-gather-with-optimizer-step": (0, COLLECTIVES),
    **dict.fromkeys(("--overlap-p2p-communication-warmup-flush", "--no-overlap-p2p-communication"), (0, MESSAGES)),
    "--microbatch-group-size-per-virtual-pipeline-stage": (1, "groups have as many micro-batches as there are stages"),
    "--defer-embedding-wgrad-compute": (0, WHEN),
    "--wgrad-deferral-limit": (1, WHEN),
    "--delay-wgrad-compute": (0, WHEN),
    "--enable-cuda-graph": (0, "see --cuda-graph"),
    "--cuda-graph-impl": (1, "see --cuda-graph"),
    "--cuda-graph-scope": (1, "see --cuda-graph"),
    "--te-rng-tracker": (0, "dropout needs no state of a random generator"),
    "--use-precision-aware-optimizer": (0, ALL_FP32),
    "--overlap-cpu-optimizer-d2h-h2d": (0, ALWAYS),
    "--use-torch-optimizer-for-cpu-offload": (0, "the CPU kernel is chosen here"),
    "--scattered-embeddings": (0, LESS_MEMORY),
    "--split-transformers": (0, LESS_MEMORY),
    "--memory-centric-tiled-linear": (0, LESS_MEMORY),
    "--tile-factor": (1, LESS_MEMORY),
    "--use-pin-memory": (0, PINNED),
    "--profile-backward": (0, "the whole step is always timed"),
    "--rerun-mode": (1, "no step is computed a second time"),
    "--profile": (ANY_NUMBER, PROFILED),
    **dict.fromkeys(("--use-pytorch-profiler", "--record-memory-history"), (0, PROFILED)),
    **dict.fromkeys(("--profile-step-start", "--profile-step-end", "--profile-steps"), (1, PROFILED)),
    **dict.fromkeys(("--log-straggler", "--disable-straggler-on-startup"), (0, "each process is timed by itself")),
    **dict.fromkeys(("--straggler-ctrlr-port", "--straggler-minmax-count"), (1, "each process is timed by itself")),
    "--profile-ranks": (ANY_NUMBER, PROFILED),
    "--init-model-with-meta-device": (0, ALWAYS),
    **dict.fromkeys(("--use-nccl-ub", "--fsdp-double-buffer", "--fsdp-manual-registration"), (0, COLLECTIVES)),
    "--sgd-momentum": (1, "it is for SGD"),
    "--abort-on-unmet-fused-kernel-constraints": (0, COMPILED),
    "--sync-tp-duplicated-parameters": (0, "copies of a weight get the same gradient"),
    "--valid-num-workers": (1, "see --num-workers"),
    **dict.fromkeys(("--log-level", "--log-level-replica", "--logging-level"), (1, "see --log-interval")),
    **dict.fromkeys(("--enable-zbh1-pipeline", "--enable-zbh1-exact-semantics"), (0, SCHEDULES)),
    **dict.fromkeys(("--enable-zb-runtime", "--enable-zero-bubble", "--zero-bubble-v-schedule"), (0, SCHEDULES)),
    **dict.fromkeys(("--no-pre-communication-optimization", "--measure-activation-memory"), (0, SCHEDULES)),
    "--zero-bubble-max-pending-backward": (1, SCHEDULES),
    "--no-scatter-gather-tensors-in-pipeline": (0, "how stages share what they send is decided here"),
    "--num-dataset-builder-threads": (1, "the indices of data sets are built by compiled code"),
    "--optimizer-split-size": (1, "the optimizer's pieces are chosen here"),
    **dict.fromkeys(("--forward-backward-disaggregating", "--ignore-forward-tensor-parallel"), (0, BOTH_PASSES)),
    "--wandb-tag": (1, "runs at Weights & Biases get no tags; see --wandb-group"),
    "--use-wandb": (0, "--wandb-project says it"),
    "--no-merge-qkv": (0, "queries, keys and values are one product; it changes no number"),
    **dict.fromkeys(OF_THE_LAUNCH, (1, "the launcher says it")),
    "--dist-url": (1, "MASTER_ADDR and MASTER_PORT say it"),
    "--no-contiguous-buffers-in-local-ddp": (0, LIE),
    "--resume-dataloader": (0, "the data go on where the checkpoint left them"),
    "--lazy-loader": (0, "tokens are read when they are needed"),
    "--loose-json": (0, "gptpar preprocess reads one JSON object a line"),
    "--cache-dir": (1, "no tokenizer is downloaded"),
    **dict.fromkeys(("--ddp-num-buckets", "--suggested-communication-unit-size"), (1, BUCKETS)),
    "--ddp-pad-buckets-for-high-nccl-busbw": (0, BUCKETS),
    **dict.fromkeys(("--no-align-param-gather", "--create-all-gather-group"), (0, COLLECTIVES)),
    **dict.fromkeys(("--torch-fsdp2-no-reshard-after-forward", "--disable-symmetric-registration"), (0, COLLECTIVES)),
    "--no-gradient-reduce-div-fusion": (0, WHEN),
    "--tp-comm-overlap-cfg": (1, "see --no-tp-comm-overlap"),
    "--overlap-p2p-communication": (0, MESSAGES),
    "--use-ring-exchange-p2p": (0, "stages send and receive by torch's backends"),
    "--standalone-embedding-stage": (0, CUTS),
    "--dist-ckpt-format": (1, ONE_FORMAT),
    "--dist-ckpt-workers": (1, "each process writes its part"),
    **dict.fromkeys(("--dataloader-fast-cache-load", "--dataloader-defer-npy-index-mmap"), (0, INDICES)),
    "--return-data-index": (0, "a curriculum alone would read it"),
    **dict.fromkeys(("--adlr-autoresume", "--no-one-logger", "--one-logger-async"), (0, NVIDIA_ALONE)),
    **dict.fromkeys(("--adlr-autoresume-interval", "--one-logger-project", "--one-logger-run-name"), (1, NVIDIA_ALONE)),
    **dict.fromkeys(("--app-tag-run-name", "--app-tag-run-version"), (1, NVIDIA_ALONE)),
    "--onnx-safe": (ANY_NUMBER, "nothing is exported to ONNX"),
    **dict.fromkeys(("--no-pin-cpu-grads", "--no-pin-cpu-params"), (0, PINNED)),
    "--disable-mem-efficient-ln": (0, COMPILED),
    "--fp16-lm-cross-entropy": (0, "the loss is always computed in fp32"),
    "--use-contiguous-buffers-in-ddp": (0, LIE),
    "--structured-logs": (0, "metrics.jsonl tells of every step"),
    "--structured-logs-dir": (1, "metrics.jsonl, in the --save folder, tells of every step"),
    **dict.fromkeys(
        (
            *("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-mlp", "--jit-compile", "--use-te-custom-op"),
            *("--use-fused-rotary-pos-emb", "--use-fused-rotary-pos-emb-new", "--use-regional-compilation"),
            *("--use-torch-compile", "--use-torch-compiled-autograd", "--allow-unspec-int-on-nn-module"),
        ),
        (ANY_NUMBER, f"{COMPILED}; see --no-compile"),
    ),
    **dict.fromkeys(("--use-fused-sdpa", "--use-fused-sdpa-with-recompute", "--use-fast-softmax"), (1, SDPA)),
    "--cache-size-limit": (1, "each shape is compiled once"),
    "--verify-checkpoint": (0, "every byte of a checkpoint is proved by checksums"),
    "--verify-checkpoint-model-type": (1, "every byte of a checkpoint is proved by checksums"),
    **dict.fromkeys(("--save-distrib-optimizer-method", "--load-distrib-optimizer-method"), (1, ONE_FORMAT)),
    "--distributed-engine": (1, "messages are torch.distributed's"),
    **dict.fromkeys(("--experiment-name", "--experiment-run-id"), (1, "a run is named by --wandb-exp-name")),
    "--experiment-root-dir": (1, "what a run writes is in its --save folder"),
    **dict.fromkeys(("--sparse-mode", "--shape-order"), (1, SDPA)),
    **dict.fromkeys(("--use-mc2", "--use-ascend-coc"), (0, "see --no-tp-comm-overlap")),
    "--overlapped-distributed-optimizer": (0, COLLECTIVES),
    "--use-hetnet": (0, "torch's backends choose the network"),
    **dict.fromkeys(("--swap-attention", "--reuse-fp32-param"), (0, LESS_MEMORY)),
    **dict.fromkeys(("--recompute-in-advance", "--recompute-activation-function"), (0, RECOMPUTED)),
    "--recompute-activation-function-num-layers": (1, RECOMPUTED),
    "--enable-recompute-layers-per-pp-rank": (0, RECOMPUTED),
    "--tokenizer-not-use-fast": (0, "a folder's tokenizer.json is read, which gives the same tokens"),
    **dict.fromkeys(("--use-cp-send-recv-overlap", "--use-fused-ring-attention-update"), (0, NO_CONTEXT)),
    **dict.fromkeys(("--context-parallel-algo", "--cp-attention-mask-type", "--cp-window-size"), (1, NO_CONTEXT)),
    "--ulysses-degree-in-cp": (1, NO_CONTEXT),
    "--kv-head-repeat-before-uly-alltoall": (0, NO_CONTEXT),
}

NO_EXPERTS = "mixture-of-experts is not part of gptpar"
EXPERTS = ("--moe-", "--expert-", "--num-experts-switch")
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
    "--disable-moe-token-dropping": ANY,
    **dict.fromkeys(
        ("--disable-moe-top2-2nd-expert-sampling", "--use-tutel", "--enable-expert-tensor-parallelism"), ANY
    ),
}
"""Mixture-of-experts flag -> its values that still describe a dense model. ``ANY``: the flag only tunes experts, which
--num-experts asks for, so without them every value is harmless."""

_DISTILLATION, _REINFORCEMENT = "knowledge distillation", "reinforcement learning"
_ENCODER, _MIDDLE = "a model with an encoder", "fill-in-the-middle training"
_MASKED, _VISION, _FP8 = "masked language modelling (BERT)", "a vision model", "training in FP8 or FP4 (see --bf16)"
_CONVERSATIONS = "fine-tuning on conversations"
_LATENT, _LINEAR, _CONTEXT = "multi-latent attention", "linear attention", "context parallelism"
ABSENT: dict[str, str] = {
    **dict.fromkeys(("--fp8-", "--fp4-"), _FP8),
    **dict.fromkeys(("--kd", "--mos", "--load-teacher", "--num-layers-teacher"), _DISTILLATION),
    **dict.fromkeys(("--hidden-size-teacher", "--num-attention-heads-teacher"), _DISTILLATION),
    **dict.fromkeys(("--num-experts-teacher", "--logits-"), _DISTILLATION),
    **dict.fromkeys(("--rl-", "--grpo-", "--langrl-", "--perform-rl-step"), _REINFORCEMENT),
    **dict.fromkeys(("--multi-latent-attention", "--q-lora-rank", "--kv-lora-rank", "--qk-head-dim"), _LATENT),
    **dict.fromkeys(("--qk-pos-emb-head-dim", "--v-head-dim", "--mla-", "--cache-mla-latents"), _LATENT),
    **dict.fromkeys(("--linear-", "--experimental-attention-variant"), _LINEAR),
    **dict.fromkeys(("--force-ds-sequence-parallel", "--ds-sequence-parallel-fpdt"), _CONTEXT),
    "--hierarchical-context-parallel-sizes": _CONTEXT,
    **dict.fromkeys(("--mamba-", "--hybrid-", "--is-hybrid-model"), "the Mamba architecture"),
    **dict.fromkeys(("--patch-size", "--vision-", "--disable-vision-class-token", "--mrope-section"), _VISION),
    **dict.fromkeys(("--encoder-num-layers", "--decoder-num-layers"), _ENCODER),
    **dict.fromkeys(("--encoder-seq-length", "--decoder-seq-length", "--relative-attention-"), _ENCODER),
    "--pipeline-model-parallel-split-rank": _ENCODER,
    **dict.fromkeys(("--multi-head-latent-", "--qk-rope-head-dim", "--qk-nope-head-dim"), _LATENT),
    **dict.fromkeys(("--hetero-", "--enable-hetero"), "a run on devices of several kinds"),
    **dict.fromkeys(("--input-embeds-norm", "--scale-emb", "--embedding-multiplier"), "a factor of the embeddings"),
    **dict.fromkeys(("--scale-depth", "--dim-model-base"), "MiniCPM's scaling (see --mup)"),
    **dict.fromkeys(("--attn-logit-softcapping", "--query-pre-attn-scalar"), "another scale of attention's scores"),
    "--use-glm-rope": "GLM's form of rotary positions",
    "--add-output-layer-bias": "a bias of the output layer",
    "--spec": "a layer that another program's module describes",
    "--lora-": "low-rank adaptation (LoRA)",
    **dict.fromkeys(("--is-instruction-dataset", "--is-pairwise-dataset", "--prompt-type"), _CONVERSATIONS),
    **dict.fromkeys(("--bert-", "--mask-prob", "--short-seq-prob", "--output-bert-embeddings"), _MASKED),
    **dict.fromkeys(("--ict-", "--biencoder-", "--indexer-", "--retriever-", "--evidence-data-path"), "retrieval"),
    **dict.fromkeys(("--dino-", "--img-", "--num-classes", "--num-channels", "--patch-dim"), _VISION),
    **dict.fromkeys(
        ("--rotary-scaling-factor", "--mscale", "--yarn-", "--no-yarn-"), "YaRN's form of rotary positions"
    ),
    **dict.fromkeys(("--no-fp8-", "--te-precision-config-file", "--kitchen-"), _FP8),
    "--no-rope-freq": "a model with rotary positions in some layers alone",
    "--heterogeneous-layers-config": "a model whose layers differ in shape",
    "--init-method-xavier-uniform": "Xavier's initialization (see --init-method-std)",
    "--fp32-residual-connection": "a residual stream in fp32 beside 16-bit layers",
    "--apply-residual-connection-post-layernorm": "a residual connection from the norm's output (see --norm-placement)",
    "--quick-geglu": "the quick GeGLU",
    "--muon-": "the Muon optimizer",
    "--sft": _CONVERSATIONS,
    "--mtp-": "multi-token prediction",
    "--fim-": _MIDDLE,
    "--retro-": "retrieval",
    "--inference-": "an inference server (see gptpar generate)",
    "--random-ltd": "random layer-token dropping",
    "--data-efficiency-": "curriculum learning",
    "--curriculum-learning": "curriculum learning",
    "--use-bnb-optimizer": "an 8-bit optimizer (see --cpu-optimizer)",
    "--compression-training": "compression",
    "--rotary-interleaved": "the interleaved form of rotary positions",
    "--skip-train-iteration-range": "leaving out the data of some steps (see --skip-step-sigma)",
    "--outer-": "local SGD with an outer optimizer",
    "--error-injection-": "the injection of errors",
}
"""How flags for what is not there begin, and what they ask for."""

_LLAMA = "--use-rope-scaling has the numbers of Llama 3.1"
LIMITED: dict[str, tuple[tuple[str, ...], str]] = {
    "--num-distributed-optimizer-instances": (
        ("1",),
        "the optimizer is always divided over all data-parallel processes",
    ),
    **dict.fromkeys(
        ("--main-grads-dtype", "--main-params-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype"), (("fp32",), ALL_FP32)
    ),
    "--softmax-type": (("vanilla",), "attention has the plain softmax, without a further term in its sum"),
    "--remote-device": (("none", "cpu"), "what leaves the GPU is said by --cpu-optimizer and --cpu-parameters"),
    "--attention-head-type": (
        ("multihead", "multiquery"),
        "without --num-query-groups each query head has its own key and value",
    ),
    "--fim-rate": (("0",), f"{_MIDDLE} is not part of gptpar"),
    "--no-train": (("0",), "training is left out by --skip-train"),
    "--eval-only": (("False", "false", "0"), "training is left out by --skip-train"),
    "--rope-type": (("rope",), "stretching rotary positions (YaRN) is not part of gptpar"),
    "--vocab-extra-ids": (("0",), "ids that no tokenizer has are for T5 alone"),
    "--cpu-offloading-num-layers": (("0",), "see --checkpoint-in-cpu"),
    "--rope-scaling-type": (("llama3",), "--use-rope-scaling has the form of Llama 3.1"),
    "--low-freq-factor": (("1",), _LLAMA),
    "--high-freq-factor": (("4",), _LLAMA),
    **dict.fromkeys(
        ("--original-max-position-embeddings", "--rope-scaling-original-max-position-embeddings"), (("8192",), _LLAMA)
    ),
    "--rotary-seq-len-interpolation-factor": (("1",), "rotary positions are not stretched"),
}
"""Flag -> its values that change nothing here, and why no other can be had."""

STANDS_FOR: dict[str, tuple[str, object]] = {
    "--use-z-loss": ("model.z_loss_weight", 1e-4),
    "--attention-head-type multiquery": ("model.num_query_groups", 1),
    "--keep-last-checkpoint-only": ("checkpoint.keep_checkpoints", 1),
    **dict.fromkeys(("--no-train 1", "--eval-only 1", "--eval-only True"), ("logging.skip_train", True)),
    "--no-cuda": ("parallel.distributed_backend", "gloo"),
    "--rope-scaling-type llama3": ("model.use_rope_scaling", True),
    "--geglu": ("model.glu_activation", "geglu"),
    "--gelu-tanh": ("model.glu_activation", "geglu_tanh"),
    "--use-deter-comp": ("precision.deterministic_mode", True),
}
"""What another program's flag says, with its value -> the field that says it here, and its value."""

PLANNED: dict[str, tuple[str, str]] = {
    "--context-parallel-size": ("context parallelism", "1"),
    "--ds-sequence-parallel-size": ("context parallelism", "1"),
}
"""Flag -> what it asks for, and the value that asks for nothing."""

ELSEWHERE = frozenset({*ACCEPTED, *DENSE, *LIMITED, *PLANNED, *(said.split()[0] for said in STANDS_FOR)})
"""Other programs' flags that can be accepted."""

MEANT: dict[str, str] = {
    "--offload-optimizer": "--cpu-optimizer",
    "--load-tag": "--ckpt-step",
    "--non-persistent-save-interval": "--save-local-interval",
    "--use-mup": "--mup",
    "--apply-wd-to-qk-layernorm": "--weight-decay-override",
    "--decoder-first-pipeline-num-layers": "--partition-method",
    "--decoder-last-pipeline-num-layers": "--partition-method",
    "--pipeline-model-parallel-layout": "--partition-method",
    "--reset-progress": "--finetune",
    "--train-data": "--data-path",
    "--data-file-list": "--data-args-path",
    **dict.fromkeys(("--eval-only", "--no-train"), "--skip-train"),
    **dict.fromkeys(("--check-for-spiky-loss", "--check-for-large-grads"), "--skip-step-sigma"),
    "--yaml-cfg": "--config",
    "--add-rmsnorm-offset": "--apply-layernorm-1p",
    "--post-norm": "--norm-placement",
    "--num-layer-list": "--partition-method",
    **dict.fromkeys(("--interleave-sliding-window", "--sliding-window"), "--window-size"),
    "--window-attn-skip-freq": "--window-pattern",
    "--dataloader-inter-document-masking": "--reset-attention-mask",
    "--no-weight-decay-cond-type": "--weight-decay-override",
    **{f"--{split}-weighted-split-paths{end}": f"--{split}-data-path" for split in SPLITS for end in ("", "-path")},
}
"""Another program's flag -> the one that means nearly the same."""
CLOSE_ENOUGH, ALMOST_THE_SAME = 0.75, 0.92
"""How alike (0 to 1) an unknown flag and a known one must be, word by word or as a whole, to be called mistyped."""
