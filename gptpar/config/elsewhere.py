"""The flags of other programs that ask for something: what is absent, what they mean here, what they may say.

:mod:`gptpar.config.compat` has those that are accepted without effect.
"""

from __future__ import annotations

from gptpar.config.compat import ACCEPTED, ALL_FP32
from gptpar.config.data_files import SPLITS
from gptpar.system.stop import STOP_SIGNALS

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
        (
            *("--disable-moe-top2-2nd-expert-sampling", "--use-tutel", "--enable-expert-tensor-parallelism"),
            *("--overlap-moe-expert-parallel-comm", "--overlap-dispatch-backward-with-experts-wgrad"),
            *("--ep-overlap-early-attn-memory-release", "--high-priority-a2a-comm-stream"),
            "--use-grouped-gemm-for-shared-expert",
        ),
        ANY,
    ),
}
"""Mixture-of-experts flag -> its values that still describe a dense model. ``ANY``: the flag only tunes experts, which
--num-experts asks for, so without them every value is harmless."""

_DISTILLATION, _REINFORCEMENT = "knowledge distillation", "reinforcement learning"
_ENCODER, _MIDDLE = "a model with an encoder", "fill-in-the-middle training"
_MASKED, _VISION, _FP8 = "masked language modelling (BERT)", "a vision model", "training in FP8 or FP4 (see --bf16)"
_LEFT_OUT = "leaving out the data of some steps (see --skip-step-sigma)"
_PREFIX = "a prefix language model or multitask training"
_CONVERSATIONS = "fine-tuning on conversations"
_LATENT, _LINEAR, _CONTEXT = "multi-latent attention", "linear attention", "context parallelism"
_GENERATION = "generating text beside the training (see gptpar generate)"
_TASKS = "evaluating such tasks within a run (see --eval-tasks)"
_MUP = "a factor of muP other than its own (see --mup)"
_OTHER_BATCHES = "evaluation in other batches than training's"
_QUANTIZED = "quantizing or distilling a trained model"
_OTHER_DATA = "another program's data set (see gptpar preprocess)"
_TOKENS = "a tokenizer with other special tokens than its files'"
_NO_NORM = "a block without one of its norms (see --norm-placement)"
_EXPERT = "mixture-of-experts"
_OPTIMIZERS = "an optimizer other than AdamW, Lion and Muon"
_ELASTIC = "a model that is cut to several sizes"
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
    "--hybrid-context-parallel": _CONTEXT,
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
        ("--rotary-scaling-factor", "--mscale", "--yarn-", "--no-yarn-", "--enable-gpt-oss"),
        "YaRN's form of rotary positions",
    ),
    **dict.fromkeys(("--no-fp8-", "--te-precision-config-file", "--kitchen-"), _FP8),
    "--no-rope-freq": "a model with rotary positions in some layers alone",
    "--heterogeneous-layers-config": "a model whose layers differ in shape",
    "--init-method-xavier-uniform": "Xavier's initialization (see --init-method-std)",
    "--fp32-residual-connection": "a residual stream in fp32 beside 16-bit layers",
    "--apply-residual-connection-post-layernorm": "a residual connection from the norm's output (see --norm-placement)",
    "--quick-geglu": "the quick GeGLU",
    "--sft": _CONVERSATIONS,
    "--mtp-": "multi-token prediction",
    "--fim-": _MIDDLE,
    "--retro-": "retrieval",
    **dict.fromkeys(("--inference", "--ds-inference"), "an inference server (see gptpar generate)"),
    **dict.fromkeys(("--ckpt-convert-",), "a conversion of checkpoints within a run (see gptpar convert)"),
    "--iterations-to-skip": _LEFT_OUT,
    "--inprocess-": "a restart within a process (see --max-restarts)",
    "--data-parallel-random-init": "copies of a model that begin with different weights",
    "--decrease-batch-size-if-needed": "a batch that shrinks to what the processes can divide",
    **dict.fromkeys(("--object-storage-cache-path", "--s3-cache-path", "--enable-msc"), "data in object storage"),
    **dict.fromkeys(("--titles-data-path", "--query-in-block-prob", "--use-one-sent-docs"), "retrieval"),
    **dict.fromkeys(("--block-data-path", "--embedding-path"), "retrieval"),
    **dict.fromkeys(("--classes-fraction", "--data-per-class-fraction", "--head-lr-mult", "--swin-"), _VISION),
    **dict.fromkeys(("--mask-type", "--mask-factor", "--iter-per-epoch"), _VISION),
    **dict.fromkeys(("--reweight-loss-based-on-", "--loss-on-targets-only", "--noise-density"), _PREFIX),
    "--mean-noise-span-length": _PREFIX,
    "--dsa-": "sparse attention",
    **dict.fromkeys(("--mhc-", "--enable-mhc-connections"), "hyper-connections"),
    **dict.fromkeys(("--soap-", "--adan-", "--ademamix-", "--adaptive-muon-"), _OPTIMIZERS),
    **dict.fromkeys(("--keep-fp8-", "--tp-only-amax-red"), _FP8),
    "--qk-clip": "the clipping of queries and keys",
    "--qk-l2-norm": "the norm of queries and keys without weights (see --qk-layernorm)",
    "--softmax-scale": "another scale of attention's scores",
    "--embedding-init-method-std": "a standard deviation of the embeddings alone (see --init-method-std)",
    "--goldfish-": "the goldfish loss",
    "--variable-seq-lengths": "a run whose samples differ in length",
    "--random-ltd": "random layer-token dropping",
    "--data-efficiency-": "curriculum learning",
    "--curriculum-learning": "curriculum learning",
    "--use-bnb-optimizer": "an 8-bit optimizer (see --cpu-optimizer)",
    "--compression-training": "compression",
    "--rotary-interleaved": "the interleaved form of rotary positions",
    "--skip-train-iteration-range": _LEFT_OUT,
    "--outer-": "local SGD with an outer optimizer",
    **dict.fromkeys(("--error-injection-", "--fault-injector-"), "the injection of errors"),
    **dict.fromkeys(("--flextron", "--flex-", "--is-flex-eval"), _ELASTIC),
    **dict.fromkeys(("--export-", "--ammo-", "--modelopt-enabled", "--load-model-opt-format"), _QUANTIZED),
    **dict.fromkeys(("--qad-train-target", "--teacher-model-config"), _QUANTIZED),
    **dict.fromkeys(("--distillation", "--distill-coeff", "--distill-only"), _DISTILLATION),
    **dict.fromkeys(("--finetune-data-", "--finetune-hf-dataset", "--chat-template"), _CONVERSATIONS),
    **dict.fromkeys(("--freeze-all-layers", "--freeze-model", "--freeze-base-for-mtp"), "training with frozen weights"),
    **dict.fromkeys(("--dataloader-seq-length", "--decoder-tp-comm-overlap", "--freeze-LM", "--freeze-ViT"), _VISION),
    **dict.fromkeys(("--use-packed-sequence", "--drop-vision-class-token"), _VISION),
    **dict.fromkeys(("--model-spec", "--block-spec"), "a layer that another program's module describes"),
    **dict.fromkeys(("--faiss-use-gpu", "--shared-query-context-model"), "retrieval"),
    **dict.fromkeys(("--report-topk-accuracies", "--hash-data-path", "--block-index-path"), "retrieval"),
    **dict.fromkeys(("--pretrained-bert", "--max-preds-per-seq", "--presplit-sentences", "--masked-lm-prob"), _MASKED),
    **dict.fromkeys(("--use-tfrecords", "--use-npy-data-loader", "--text-key", "--eval-text-key"), _OTHER_DATA),
    **dict.fromkeys(("--train-data-exact-num-epochs", "--train-idx-path", "--train-doc-idx-path"), _OTHER_DATA),
    **dict.fromkeys(("--train-sample-idx-path", "--train-shuffle-idx-path", "--aml-data-download-path"), _OTHER_DATA),
    "--phase-transition-iterations": "a data set that changes in phases",
    **dict.fromkeys(("--multiple-validation-sets", "--validation-set-names"), "a loss for each of several data sets"),
    "--start-eval-at-iter": "evaluation that begins late (see --eval-interval)",
    **dict.fromkeys(("--eval-batch-size", "--eval-micro-batch-size", "--eval-global-batch-size"), _OTHER_BATCHES),
    **dict.fromkeys(("--eval-seq-length", "--eval-max-preds-per-seq"), _OTHER_BATCHES),
    **dict.fromkeys(("--overlapping-eval", "--cloze-eval", "--strict-lambada", "--eval-hf", "--load-openai"), _TASKS),
    "--eval-harness-": _TASKS,
    **dict.fromkeys(("--greedy", "--out-seq-length", "--sample-input-file", "--sample-output-file"), _GENERATION),
    **dict.fromkeys(("--genfile", "--top-p"), _GENERATION),
    "--top-k": "a choice among the k likeliest tokens or experts (see gptpar generate)",
    **dict.fromkeys(("--fp32-embedding", "--fp32-layernorm", "--fp32-tokentypes"), "an fp32 layer beside 16-bit ones"),
    "--num-unique-layers": "a model whose layers share weights",
    **dict.fromkeys(("--use-fp8-params", "--disable-fp8-wgrad", "--reuse-grad-buf-for-mxfp8-param-ag"), _FP8),
    "--use-kitchen-attention": _FP8,
    "--refit-method": _REINFORCEMENT,
    "--activation-func-clamp-value": "a limit of what goes into the activation",
    **dict.fromkeys(("--save-wgrads-interval", "--save-dgrads-interval"), "saving gradients"),
    **dict.fromkeys(("--save-params-interval", "--save-activations-interval"), "saving weights or activations apart"),
    "--save-tokens-per-expert-interval": _EXPERT,
    "--batch-invariant-": "computing the same bits in every batch (see --deterministic-mode)",
    **dict.fromkeys(("--mup-input-mult", "--mup-output-mult", "--mup-attn-mult", "--mup-embedding-mult"), _MUP),
    **dict.fromkeys(("--mup-width-mult", "--mup-base-head-dim", "--mup-attn-scale-power"), _MUP),
    **dict.fromkeys(("--no-dsa-", "--disable-dsa-"), "sparse attention"),
    "--gdp-": _LINEAR,
    "--disable-mamba-mem-eff-path": "the Mamba architecture",
    "--fake-process-group": "a run without its processes (see gptpar plan)",
    "--dump-param-to-param-group-map": "a list of the parameters' groups",
    **dict.fromkeys(("--tokenizer-metadata", "--tokenizer-special-tokens", "--tiktoken-special-tokens"), _TOKENS),
    **dict.fromkeys(("--tokenizer-sentencepiece-legacy", "--null-tokenizer-eod-id"), _TOKENS),
    "--override-ckpt-iteration": "a checkpoint whose iteration is changed (see --finetune)",
    "--onebitadam": _OPTIMIZERS,
    "--train-desc-path": _OTHER_DATA,
    **dict.fromkeys(("--xielu", "--xiprelu", "--xiprelup"), "the xIELU activation"),
    **dict.fromkeys(("--no-final-layernorm", "--no-mlp-layernorm", "--no-attn-layernorm"), _NO_NORM),
    "--layernorm-init": "another initial weight of norms",
    "--no-scaled-init": "an initialization without GPT-2's scale by depth",
    **dict.fromkeys(("--mm-", "--image-", "--cvcuda-image-processing", "--tune-mm-mlp-adapter"), _VISION),
    "--freeze-clip-vision-tower": _VISION,
    "--use-normhead": "an output layer with a norm",
    **dict.fromkeys(("--text-generate-", "--generation-length", "--repetition-penalty"), _GENERATION),
    **dict.fromkeys(("--moe", "--fmoe", "--fmoefy", "--router-type", "--num-shared-experts"), _EXPERT),
    **dict.fromkeys(("--enable-shared-expert", "--shared-moe-ffn-hidden-size"), _EXPERT),
    "--input-embeddings-multiplier": "a factor of the embeddings",
    **dict.fromkeys(("--train-iters-to-skip", "--train-range-to-skip", "--skip-iters"), _LEFT_OUT),
    **dict.fromkeys(("--schedulefree-", "--sophiag-"), _OPTIMIZERS),
    "--lima-dropout": "a dropout that grows with depth",
    "--multiple-valid-sets": "a loss for each of several data sets",
    "--cache-fp8-": _FP8,
    "--vocab-extra-ids-list": _TOKENS,
    "--convert-checkpoint-from-megatron-to-transformers": "a conversion within a run (see gptpar convert)",
    "--emoji-file": "a tokenizer with a file of emoji",
}
"""How flags for what is not there begin, in whole words, and what they ask for."""

_LLAMA = "--use-rope-scaling has the numbers of Llama 3.1"
_SIGNALS = tuple(one.name for one in STOP_SIGNALS)

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
    **dict.fromkeys(
        ("--encoder-tensor-model-parallel-size", "--encoder-pipeline-model-parallel-size"),
        (("0",), f"{_ENCODER} is not part of gptpar"),
    ),
    **dict.fromkeys(("--megatron-fsdp-main-params-dtype", "--megatron-fsdp-main-grads-dtype"), (("fp32",), ALL_FP32)),
    "--cpu-offloading-num-layers": (("0",), "see --checkpoint-in-cpu"),
    "--rope-scaling-type": (("llama3",), "--use-rope-scaling has the form of Llama 3.1"),
    "--low-freq-factor": (("1",), _LLAMA),
    "--high-freq-factor": (("4",), _LLAMA),
    **dict.fromkeys(
        ("--original-max-position-embeddings", "--rope-scaling-original-max-position-embeddings"), (("8192",), _LLAMA)
    ),
    "--sample-rate": (("1",), "every sample of the data counts"),
    "--glu-linear-offset": (("0",), "a gate has no offset"),
    "--null-tokenizer-pad-id": (("-1",), "no token of the data counts as padding"),
    "--output-logit-dtype": (("bf16",), "the last product is computed like the others, and the loss in fp32"),
    "--megatron-fsdp-grad-comm-dtype": (("auto", "fp32"), "see --grad-reduce-in-bf16"),
    "--exit-signal": (_SIGNALS, f"{', '.join(_SIGNALS[:-1])} and {_SIGNALS[-1]} always make a run save and stop"),
    "--use-dataset-only": (("False",), "a run always loads the data itself"),
    "--rotary-scale-factor": (("1",), "rotary positions are not stretched"),
    "--transformer-type": (("megatron",), "there is one implementation"),
    "--sparsity": (("none",), "sparse attention is not part of gptpar"),
    "--rotary-seq-len-interpolation-factor": (("1",), "rotary positions are not stretched"),
    "--muon-tp-mode": (
        ("duplicated", "distributed"),
        "a matrix is orthogonalized whole, however many tensor ranks split it, so that no layout changes a number",
    ),
    "--muon-fp32-matmul-prec": (("medium",), "Muon's products are in the model's number format"),
    "--muon-scalar-optimizer": (("adam",), "AdamW updates what Muon does not"),
}
"""Flag -> its values that change nothing here, and why no other can be had."""

STANDS_FOR: dict[str, tuple[str, object]] = {
    **dict.fromkeys(("--muon-nesterov", "--muon-use-nesterov"), ("optimizer.muon_nesterov", True)),
    **dict.fromkeys(("--muon-no-nesterov", "--muon-no-use-nesterov"), ("optimizer.muon_nesterov", False)),
    "--muon-split-qkv": ("optimizer.muon_qkv", "split"),
    "--muon-no-split-qkv": ("optimizer.muon_qkv", "fused"),
    "--muon-split-qkv-per-head": ("optimizer.muon_qkv", "heads"),
    "--use-z-loss": ("model.z_loss_weight", 1e-4),
    "--attention-head-type multiquery": ("model.num_query_groups", 1),
    "--keep-last-checkpoint-only": ("checkpoint.keep_checkpoints", 1),
    **dict.fromkeys(("--no-train 1", "--eval-only 1", "--eval-only True"), ("logging.skip_train", True)),
    "--no-cuda": ("parallel.distributed_backend", "gloo"),
    "--rope-scaling-type llama3": ("model.use_rope_scaling", True),
    "--activation swiglu": ("model.swiglu", True),
    "--geglu": ("model.glu_activation", "geglu"),
    "--gelu-tanh": ("model.glu_activation", "geglu_tanh"),
    "--multi-query-attention": ("model.num_query_groups", 1),
    "--rms-norm": ("model.normalization", "RMSNorm"),
    "--RMSNorm": ("model.normalization", "RMSNorm"),
    "--erf-gelu": ("model.mlp_activation", "gelu"),
    "--no-pad-vocab-size": ("model.make_vocab_size_divisible_by", 1),
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
    **dict.fromkeys(("--non-persistent-local-ckpt-dir", "--non-persistent-global-ckpt-dir"), "--save-local"),
    "--pretrained-checkpoint": "--load with --finetune",
    "--use-mup": "--mup",
    "--apply-wd-to-qk-layernorm": "--weight-decay-override",
    "--decoder-first-pipeline-num-layers": "--partition-method",
    "--decoder-last-pipeline-num-layers": "--partition-method",
    "--pipeline-model-parallel-layout": "--partition-method",
    "--reset-progress": "--finetune",
    "--train-data": "--data-path",
    **dict.fromkeys(("--valid-data", "--val-data-path"), "--valid-data-path"),
    "--test-data": "--test-data-path",
    "--save-iters": "--save-interval",
    "--checkpoint-granularity": "--recompute-granularity",
    "--checkpoint-method": "--recompute-method",
    "--checkpoint-attention": "--recompute-activations",
    "--distribute-recomputed-activations": "--distribute-saved-activations",
    "--model-parallel-memory-opt": "--sequence-parallel",
    "--start-wd": "--start-weight-decay",
    "--end-wd": "--end-weight-decay",
    "--wd-incr-style": "--weight-decay-incr-style",
    "--log-zeros": "--log-num-zeros-in-grad",
    "--min-scale": "--min-loss-scale",
    "--lr-warmup-percent": "--lr-warmup-fraction",
    "--learning-rate": "--lr",
    "--muon-ns-steps": "--muon-num-ns-steps",
    "--min-learning-rate": "--min-lr",
    **dict.fromkeys(("--max-steps", "--num-steps", "--steps", "--max-iters"), "--train-iters"),
    **dict.fromkeys(("--warmup-steps", "--num-warmup-steps"), "--lr-warmup-iters"),
    **dict.fromkeys(("--warmup-ratio", "--warmup-fraction"), "--lr-warmup-fraction"),
    **dict.fromkeys(("--per-device-train-batch-size", "--train-micro-batch-size-per-gpu"), "--micro-batch-size"),
    "--train-batch-size": "--global-batch-size",
    **dict.fromkeys(("--max-seq-length", "--max-length", "--sequence-length", "--context-length"), "--seq-length"),
    **dict.fromkeys(("--n-layer", "--n-layers", "--num-hidden-layers"), "--num-layers"),
    **dict.fromkeys(("--n-embd", "--d-model", "--dim"), "--hidden-size"),
    **dict.fromkeys(("--n-head", "--n-heads", "--num-heads"), "--num-attention-heads"),
    **dict.fromkeys(("--max-grad-norm", "--grad-clip"), "--clip-grad"),
    **dict.fromkeys(("--output-dir", "--out-dir"), "--save"),
    **dict.fromkeys(("--resume", "--resume-from-checkpoint"), "--load"),
    **dict.fromkeys(("--num-microbatches", "--num-microbatches-in-minibatch"), "--gradient-accumulation-steps"),
    "--intra-layer-model-parallel-size": "--tensor-model-parallel-size",
    "--inter-layer-model-parallel-size": "--pipeline-model-parallel-size",
    "--virtual-pipeline-model-parallel-size": "--num-virtual-stages-per-pipeline-rank",
    "--intermediate-size": "--ffn-hidden-size",
    "--vocab-model-file": "--tokenizer-model",
    "--patch-tokenizer-type": "--tokenizer-type",
    **dict.fromkeys(("--causal-lm", "--no-tie-embed-logits"), "--untie-embeddings-and-output-weights"),
    **dict.fromkeys(("--post-layer-norm", "--use-post-ln"), "--norm-placement"),
    **dict.fromkeys(("--n-head-kv", "--num-attention-heads-kv"), "--num-query-groups"),
    **dict.fromkeys(("--use-alibi-mask", "--use-alibi-position-embeddings"), "--position-embedding-type alibi"),
    **dict.fromkeys(
        ("--use-llama2-rotary-position-embeddings", "--use-mistral-rotary-position-embeddings"),
        "--position-embedding-type rope",
    ),
    "--rope-theta": "--rotary-base",
    "--use-rms-norm": "--normalization RMSNorm",
    "--partition-vector": "--partition-method",
    "--trigger-path": "--kill-switch-path",
    "--extra-vocab-size": "--pad-vocab-size-to",
    "--tokenizer-model-file": "--tokenizer-model",
    "--distrib-opt-comm-mem-savings": "--use-distributed-optimizer",
    "--override-lr-new": "--override-opt_param-scheduler",
    "--data-file-list": "--data-args-path",
    **dict.fromkeys(("--eval-only", "--no-train"), "--skip-train"),
    **dict.fromkeys(("--check-for-spiky-loss", "--check-for-large-grads"), "--skip-step-sigma"),
    "--yaml-cfg": "--config",
    "--no-bias": "--disable-bias-linear",
    "--use-swiglu": "--swiglu",
    "--exp-name": "--wandb-exp-name",
    "--activation": "--mlp-activation",
    "--add-rmsnorm-offset": "--apply-layernorm-1p",
    "--post-norm": "--norm-placement",
    "--num-layer-list": "--partition-method",
    **dict.fromkeys(("--interleave-sliding-window", "--sliding-window"), "--window-size"),
    "--window-attn-skip-freq": "--window-pattern",
    **dict.fromkeys(
        ("--num-layers-in-first-pipeline-stage", "--num-layers-in-last-pipeline-stage"), "--partition-method"
    ),
    "--dataloader-inter-document-masking": "--reset-attention-mask",
    "--no-weight-decay-cond-type": "--weight-decay-override",
    **{f"--{split}-weighted-split-paths{end}": f"--{split}-data-path" for split in SPLITS for end in ("", "-path")},
}
"""Another program's flag -> the one that means nearly the same."""
CLOSE_ENOUGH = 0.75
"""How alike (0 to 1) an unknown flag and a known one must be, and each of their words, to be called mistyped."""
SHORTEST_MISTYPED = 5
"""Fewest letters of a word that counts as mistyped. A shorter word that differs means something else."""
