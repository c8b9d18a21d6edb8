"""What launch scripts of Megatron-LM and Megatron-DeepSpeed say: defaults, older names, flags that change nothing."""

from __future__ import annotations

import pytest

from gptpar.config import Config
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.errors import ConfigError
from tests.helpers import TINY


def resolved(flags: str) -> Config:
    return resolve(parse_flags([*TINY.split(), *flags.split()]), 1)[0]


def problems(flags: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolved(flags)
    return caught.value.problems


@pytest.mark.parametrize(
    "flags",
    [
        "--context-parallel-size 1 --cp-comm-type p2p",
        "--ds-sequence-parallel-size 1",
        "--no-query-key-layer-scaling",
        "--no-async-tensor-model-parallel-allreduce",
        "--universal-checkpoint --dist-ckpt-strictness log_all",
        "--manual-gc --manual-gc-interval 100 --empty-unused-memory-level 1",
        "--use-flash-attn-triton --no-bias-swiglu-fusion --no-rope-fusion",
        "--log-optimizer-states-to-tensorboard --no-data-sharding --codecarbon-dir X",
        "--calculate-per-token-loss --no-mmap-bin-files --no-create-attention-mask-in-dataloader",
        "--no-check-for-nan-in-loss-and-grad --check-for-nan-in-loss-and-grad --rerun-mode disabled",
        "--auto-detect-ckpt-format --no-ckpt-fully-parallel-save --async-strategy mcore --verify-integrity",
        "--use-tp-pp-dp-mapping --disable-gloo-process-groups --ddp-average-in-collective --delay-wgrad-compute",
        "--defer-embedding-wgrad-compute --wgrad-deferral-limit 22 --overlap-p2p-communication-warmup-flush",
        "--microbatch-group-size-per-virtual-pipeline-stage 4 --num-distributed-optimizer-instances 1",
        "--enable-cuda-graph --cuda-graph-impl none --cuda-graph-scope full --te-rng-tracker",
        "--use-precision-aware-optimizer --main-grads-dtype fp32 --exp-avg-dtype fp32 --sgd-momentum 0.9",
        "--scattered-embeddings --split-transformers --memory-centric-tiled-linear --tile-factor 2 --use-pin-memory",
        "--remote-device none --profile-backward --vocab-extra-ids 0 --disable-moe-token-dropping --moe-min-capacity 4",
    ],
)
def test_flags_that_change_nothing_are_told_and_change_nothing(flags: str) -> None:
    parsed = parse_flags([*TINY.split(), *flags.split()])
    assert resolve(parsed, 1)[0] == resolved("")
    assert len(parsed.without_effect) == flags.count("--")
    assert all(f"--{words.split()[0]}: " in " ".join(parsed.without_effect) for words in flags.split("--")[1:])


def test_sequence_parallelism_of_one_process_is_off_as_in_megatron() -> None:
    config, derived = resolve(parse_flags([*TINY.split(), "--sequence-parallel"]), 1)
    assert config == resolved("")
    assert [one.reason for one in derived if one.name == "sequence parallel"] == [
        "--tensor-model-parallel-size is 1: nothing to split"
    ]


def test_a_parallelism_that_is_not_there_is_refused() -> None:
    told = "context parallelism is not part of this version yet; leave it out."
    assert problems("--context-parallel-size 2 --ds-sequence-parallel-size 4") == [
        f"--context-parallel-size: {told}",
        f"--ds-sequence-parallel-size: {told}",
    ]


def test_a_value_that_cannot_be_had_is_refused_with_those_that_can() -> None:
    assert problems("--rerun-mode validate_results --exp-avg-dtype fp8 --remote-device nvme --vocab-extra-ids") == [
        "--rerun-mode validate_results: no step is computed a second time; leave it out, or give disabled.",
        "--exp-avg-dtype fp8: master weights, moments and gradient sums are always fp32; leave it out, or give fp32.",
        "--remote-device nvme: what leaves the GPU is said by --cpu-optimizer and --cpu-parameters; leave it out, or "
        "give none.",
        "--vocab-extra-ids: ids that no tokenizer has are for T5 alone; leave it out, or give 0.",
    ]


def test_older_and_other_names_mean_the_same() -> None:
    older = resolved("--model-parallel-size 1 --batch-size 4 --warmup 0.1 --optimizer adamw")
    assert older == resolved("--micro-batch-size 4 --lr-warmup-fraction 0.1")
    assert resolved("--optimizer-cpu-offload --optimizer-offload-fraction 0.3").offload.ratio == 0.3
    assert resolved("--check-weight-hash-across-dp-replicas-interval 5").health.check_replicas_interval == 5


def test_an_interval_without_a_folder_saves_nothing() -> None:
    config, derived = resolve(parse_flags([*TINY.split(), "--save-interval", "3"]), 1)
    assert config.checkpoint.save is None
    assert ("save interval", "none") in [(one.name, one.value) for one in derived]


def test_older_names_of_recomputation() -> None:
    r = resolved("--activations-checkpoint-method uniform --activations-checkpoint-num-layers 2").recompute
    assert (r.recompute_granularity, r.recompute_method, r.recompute_num_layers) == ("full", "uniform", 2)
    assert (
        resolved("--activations-checkpoint-method block").recompute
        == resolved("--recompute-granularity full --recompute-method block").recompute
    )
    assert resolved("--pp-partition-method uniform").parallel.pipeline_partition_method == "uniform"


def test_both_files_of_gpt2_name_its_tokenizer() -> None:
    config = resolved("--vocab-file v.json --merge-file m.txt")
    assert config.tokenizer.tokenizer_type == "GPT2BPETokenizer"
    assert resolved("--vocab-file v.json").tokenizer.tokenizer_type is None
    by_file = resolved("--tokenizer-type HFTokenizer --vocab-file t.json").tokenizer
    assert by_file.tokenizer_model == "t.json"
    by_name = resolved("--tokenizer-type PretrainedFromHF --tokenizer-name-or-path folder").tokenizer
    assert by_name.tokenizer_model == "folder"


def test_a_constant_scale_of_a_bf16_loss_is_neutral() -> None:
    assert resolved("--bf16 --loss-scale 12") == resolved("--bf16")
    assert problems("--loss-scale 12") == ["--loss-scale 12 has a meaning with --fp16 only."]


def test_a_loss_per_token_needs_micro_batches_of_as_many_tokens() -> None:
    told = problems("--calculate-per-token-loss --eod-mask-loss")[0]
    assert told.startswith("--calculate-per-token-loss weighs micro-batches by their tokens, whose number differs")


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--num-layer", "--num-layers"),
        ("--load-tag", "--ckpt-step"),
        ("--use-torch-fsdp2", "--zero-stage"),
        ("--non-persistent-save-interval", "--save-local-interval"),
        ("--offload-optimizer", "--cpu-optimizer"),
        ("--profile", ""),
        ("--random-ltd", ""),
        ("--pad-vocab-size-to", ""),
        ("--embed-layernorm", ""),
    ],
)
def test_a_hint_means_nearly_the_same(flag: str, hint: str) -> None:
    (told,) = parse_flags([*TINY.split(), flag]).problems
    expected = f"; did you mean {hint}?" if hint else "; see --help for the flags there are."
    assert told == f"unknown flag {flag}{expected}"
