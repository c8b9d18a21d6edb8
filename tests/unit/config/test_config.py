"""Flags, derived values and validation."""

from __future__ import annotations

import pytest

from gptpar.config import Config, RecomputeConfig
from gptpar.config.derive import derive, ffn_width, padded_vocab
from gptpar.config.flags import parse_flags
from gptpar.config.presets import PRESETS
from gptpar.config.validate import find_problems, resolve
from gptpar.errors import ConfigError

GOOD = "--preset 124M --micro-batch-size 2 --train-iters 10 --lr 3e-4 --mock-data --vocab-size 50257"


def problems(flags: str, world_size: int = 1) -> list[str]:
    try:
        resolve(parse_flags(f"{GOOD} {flags}".split()), world_size)
    except ConfigError as error:
        return error.problems
    return []


def test_a_good_command_line_is_complete() -> None:
    config, derived = resolve(parse_flags(GOOD.split()), 4)
    m = config.model
    assert (m.num_layers, m.hidden_size, m.num_attention_heads, m.seq_length) == (12, 768, 12, 1024)
    assert (m.ffn_hidden_size, m.kv_channels, m.num_query_groups, m.max_position_embeddings) == (3072, 64, 12, 1024)
    assert config.batch.global_batch_size == 8
    reasons = {d.name: d.reason for d in derived}
    assert reasons["global batch size"] == "micro-batch 2 x 4 data-parallel process(es)"
    assert reasons["num layers"] == "--preset 124M"


def test_what_is_typed_wins_over_the_preset() -> None:
    config, _ = resolve(parse_flags(f"{GOOD} --num-layers 3 --seq-length 64".split()), 1)
    assert (config.model.num_layers, config.model.seq_length, config.model.hidden_size) == (3, 64, 768)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_resolves(preset: str) -> None:
    config, _ = resolve(parse_flags(f"{GOOD} --preset {preset}".split()), 1)
    assert config.model.hidden_size == PRESETS[preset]["hidden_size"]


def test_flags_keep_megatrons_spellings() -> None:
    words = (
        "--override-opt_param-scheduler --layernorm-epsilon 1e-6 --no-log-learnig-rate-to-tensorboard --normalization "
        "rmsnorm --disable-bias-linear --rampup-batch-size 32 32 1953125 --train-samples 439453125 --lr 3.0e-4 "
        "--exit-duration-in-mins 30000000 --use-flash-attn --attention-backend flash --data-impl mmap --num-experts 1"
    )
    parsed = parse_flags(words.split())
    c = parsed.config
    assert parsed.problems == []
    assert c.optimizer.override_opt_param_scheduler and c.model.norm_epsilon == 1e-6
    assert not c.logging.log_learning_rate_to_tensorboard and c.model.normalization == "RMSNorm"
    assert not c.model.add_bias_linear and c.batch.rampup_batch_size == (32, 32, 1953125)
    assert c.batch.train_samples == 439453125 and c.optimizer.lr == 3e-4
    assert {note.split(":")[0] for note in parsed.without_effect} == {
        "--use-flash-attn",
        "--attention-backend",
        "--data-impl",
        "--num-experts",
    }


def test_whole_numbers_may_be_written_with_an_exponent() -> None:
    config = parse_flags(["--train-tokens", "300e9", "--loss-scale-window", "5e2"]).config
    assert (config.batch.train_tokens, config.precision.loss_scale_window) == (300 * 10**9, 500)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--num-layer 3", "unknown flag --num-layer; did you mean --num-layers?"),
        ("--zzz", "unknown flag --zzz; see --help"),
        ("--num-layers six", "--num-layers six: a whole number is needed"),
        ("--num-layers 2.5", "--num-layers 2.5: a whole number is needed"),
        ("--split-rule new", "--split-rule new: unknown; it takes one of mcore, legacy"),
        ("--seed", "--seed: expected one argument"),
        ("--cpu-optimizer-ratio 0.3", "--cpu-optimizer-ratio needs --cpu-optimizer"),
        ("--cpu-optimizer --cpu-optimizer-ratio half", "--cpu-optimizer-ratio half: a number from 0 to 1, or auto"),
        ("--cpu-optimizer --cpu-optimizer-ratio 1.5", "--cpu-optimizer-ratio 1.5: a number from 0 to 1, or auto"),
        ("--attention-backend", "--attention-backend takes 1 value(s), 0 given"),
        ("--hidden-size 770", "--hidden-size 770 is not divisible by --num-attention-heads 12: use 768 or 780"),
        ("--num-query-groups 5", "--num-attention-heads 12 is not divisible by --num-query-groups 5"),
        ("--group-query-attention", "--group-query-attention needs --num-query-groups"),
        ("--max-position-embeddings 512", "--max-position-embeddings 512 is less than --seq-length 1024"),
        ("--position-embedding-type rope --rotary-percent 0.02", "of a head of 64 is 1: choose an even number"),
        ("--hidden-dropout 1", "--hidden-dropout is 1; it must be at least 0 and less than 1"),
        ("--micro-batch-size 0", "--micro-batch-size is 0"),
        ("--global-batch-size 7", "not a multiple of --micro-batch-size 2 x 1 data-parallel process(es) = 2: the"),
        ("--train-samples 5", "how long to train is said twice"),
        ("--rampup-batch-size 2 2 100", "--rampup-batch-size needs --train-samples or --train-tokens"),
        ("--min-lr 1", "--min-lr 1 must lie between 0 and --lr 0.0003"),
        ("--lr-warmup-samples 5", "--lr-warmup-samples 5: this run is measured in iterations"),
        ("--lr-warmup-fraction 0.1 --lr-warmup-iters 3", "the warm-up is given more than once"),
        ("--lr-decay-style WSD", "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
        ("--weight-decay-incr-style linear", "needs --start-weight-decay and --end-weight-decay"),
        ("--bf16 --fp16", "--fp16 and --bf16 exclude each other"),
        ("--loss-scale 8", "--loss-scale 8 has a meaning with --fp16 only"),
        ("--cuda-graph on", "--cuda-graph on: dropout is seeded by the host"),
        ("--data-path a b", "data is given twice"),
        ("--save-interval 3", "--save-interval is given but --save is not"),
        ("--finetune", "need --load"),
        (
            "--tensor-model-parallel-size 2",
            "1 processes cannot be cut into groups of 2 x 1 = 2 (tensor x pipeline): start a multiple of 2",
        ),
        ("--no-pipeline-parallel --pipeline-model-parallel-size 2", "contradicts"),
        ("--skip-train", "--skip-train evaluates a checkpoint: give --load"),
        ("--eod-mask-loss", "need to know the end-of-document id"),
        ("--clip-grad -1", "--clip-grad is -1; it must be at least 0"),
        ("--recompute-num-layers 2", "--recompute-num-layers needs --recompute-granularity full"),
        ("--log-interval 0", "--log-interval is 0; it must be at least 1"),
        ("--lr-warmup-iters 10", "--lr-warmup-iters 10 must be less than the decay's 10"),
        ("--lr-warmup-tokens 9 --lr-decay-tokens 8", "--lr-warmup-tokens 9 must be less than the decay's 8"),
        ("--hysteresis 0", "--hysteresis is 0; it must be at least 1"),
        ("--seed -5", "--seed is -5; it must be at least 0"),
        ("--num-workers -1", "--num-workers is -1; it must be at least 0"),
        ("--nproc-per-node -2", "--nproc-per-node is -2; it must be at least 1"),
        ("--kv-channels 0", "--kv-channels is 0; it must be at least 1"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size is 0; it must be at least 1"),
        ("--norm-epsilon 0", "--norm-epsilon is 0; it must be more than 0"),
        ("--lr inf", "--lr inf: a number is needed"),
        ("--lr", "--lr: expected one argument"),
        ("--eval-iters -1", "--eval-iters is -1; it must be at least 0"),
        (
            "--weight-decay-incr-style linear --start-weight-decay 0.3 --end-weight-decay 0.1",
            "the weight decay is to grow from 0.3 to 0.1",
        ),
    ],
)
def test_each_problem_is_a_sentence_with_numbers_and_a_remedy(flags: str, expected: str) -> None:
    found = problems(flags)
    assert any(expected in problem for problem in found), found


WORLD = 8


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--num-attention-heads 6 --tensor-model-parallel-size 4",
            ["--num-attention-heads 6 is not divisible by --tensor-model-parallel-size 4; sizes that fit: 1, 2, 3, 6."],
        ),
        (
            "--num-query-groups 2 --tensor-model-parallel-size 4",
            ["--num-query-groups 2 is not divisible by --tensor-model-parallel-size 4; sizes that fit: 1, 2."],
        ),
        (
            "--ffn-hidden-size 50 --tensor-model-parallel-size 4",
            [
                "--ffn-hidden-size 50 is not divisible by --tensor-model-parallel-size 4; sizes that fit: "
                "1, 2, 5, 10, 25, 50."
            ],
        ),
        (
            "--sequence-parallel",
            [
                "--sequence-parallel splits tokens over the --tensor-model-parallel-size processes, which is 1: raise "
                "it, or drop the flag."
            ],
        ),
        (
            "--sequence-parallel --tensor-model-parallel-size 4 --seq-length 7",
            [
                "--sequence-parallel: the 2 x 7 = 14 tokens of a micro-batch are not divisible by "
                "--tensor-model-parallel-size 4: make --micro-batch-size or --seq-length a multiple of it."
            ],
        ),
        (
            "--num-layers 3 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
            [
                "--pipeline-model-parallel-size 4 x 2 virtual stage(s) = 8 parts, but there are only 3 + 4 = 7 layers "
                "(embedding, positions, blocks, final norm, output): use at most 7 parts."
            ],
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 2",
            [
                "virtual stages interleave the work of a pipeline, but --pipeline-model-parallel-size is 1: raise it "
                "to at least 2, or drop the flags for virtual stages."
            ],
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 5 --pipeline-model-parallel-size 2",
            [
                "--num-layers 12 is not divisible by --pipeline-model-parallel-size 2 x "
                "--num-layers-per-virtual-pipeline-stage 5 = 10: choose other numbers, or give "
                "--num-virtual-stages-per-pipeline-rank, which takes any number of layers."
            ],
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 3 --num-virtual-stages-per-pipeline-rank 3 "
            "--pipeline-model-parallel-size 2",
            [
                "--num-layers-per-virtual-pipeline-stage 3 makes 2 virtual stage(s) a process, "
                "--num-virtual-stages-per-pipeline-rank says 3: keep one."
            ],
        ),
        (
            "--no-pipeline-parallel --pipeline-model-parallel-size 2",
            ["--no-pipeline-parallel contradicts --pipeline-model-parallel-size > 1: drop one of them."],
        ),
        ("--zero-stage 4", ["--zero-stage is 4; it must be at most 3."]),
        ("--zero-stage -1", ["--zero-stage is -1; it must be at least 0."]),
        (
            "--zero-stage 0 --use-distributed-optimizer",
            ["--zero-stage 0 contradicts --use-distributed-optimizer, which is stage 1: drop one of them."],
        ),
        (
            "--fp64 --grad-reduce-in-bf16",
            ["--grad-reduce-in-bf16 rounds the gradients that --fp64 is to keep exact: drop one of them."],
        ),
        (
            "--partition-method best",
            [
                "--partition-method best: unknown; it takes parameters, flops, uniform, type:REGEX, or boundaries such "
                "as 0,7,14."
            ],
        ),
        (
            "--partition-method type:(",
            [
                "--partition-method type:(: not a regular expression (missing ), unterminated subpattern at position "
                "0): match layer classes, for example type:block."
            ],
        ),
        (
            "--partition-method 0,9,8,16",
            ["--partition-method 0,9,8,16: boundaries start with 0 and grow, for example 0,7,14."],
        ),
        (
            "--partition-method 0,9,16",
            [
                "--partition-method 0,9,16: these are 2 part(s), but stages x virtual stages is 1: give 2 boundaries.",
            ],
        ),
        (
            "--partition-method 0,7,14 --pipeline-model-parallel-size 2",
            [
                "--partition-method 0,7,14: the last boundary is 14, but there are 16 layers (4 beside the blocks: "
                "embedding, positions, final norm, output): end with 16."
            ],
        ),
        (
            "--checkpoint-in-cpu --partition-activations --tensor-model-parallel-size 2",
            [
                "--distribute-saved-activations needs --recompute-granularity full.",
                "--checkpoint-in-cpu needs --recompute-granularity full.",
            ],
        ),
        (
            "--checkpoint-activations --recompute-activations",
            [
                "--recompute-activations means --recompute-granularity selective, but full is asked for, too: keep "
                "one.",
            ],
        ),
        ("--recompute-modules mlp", ["--recompute-modules needs --recompute-granularity selective."]),
        (
            "--recompute-activations --recompute-modules mlp gelu",
            ["--recompute-modules gelu: unknown; it takes one of core_attn, mlp, layernorm."],
        ),
        ("--checkpoint-num-layers 2", ["--checkpoint-num-layers needs --recompute-granularity full."]),
        (
            "--checkpoint-activations --checkpoint-num-layers 2 --recompute-num-layers 3",
            [
                "--checkpoint-num-layers 2 means --recompute-method uniform --recompute-num-layers 2, but uniform and "
                "3 are asked for, too: keep one."
            ],
        ),
        (
            "--checkpoint-activations --distribute-saved-activations",
            [
                "--distribute-saved-activations (--partition-activations) shares saved inputs between tensor-parallel "
                "processes, but --tensor-model-parallel-size is 1: raise it, or drop the flag."
            ],
        ),
        (
            "--checkpoint-activations --partition-activations --tensor-model-parallel-size 2 --sequence-parallel",
            [
                "--distribute-saved-activations (--partition-activations) saves nothing with --sequence-parallel, "
                "where each process holds only its own tokens already: drop it."
            ],
        ),
        (
            "--context-parallel-size 2",
            ["--context-parallel-size: context parallelism is not part of this version yet;"],
        ),
    ],
)
def test_what_cannot_be_laid_out_is_told_once_each(flags: str, expected: list[str]) -> None:
    found = problems(flags, WORLD)
    assert len(found) == len(expected)
    assert all(sentence.startswith(start) for sentence, start in zip(found, expected, strict=True)), found


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 4 --sequence-parallel --no-tp-comm-overlap --vocab-size 50257",
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 3",
        "--pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 2",
        "--pipeline-model-parallel-size 4 --global-batch-size 12 --partition-method 0,5,9,12,16",
        "--pipeline-model-parallel-size 4 --partition-method type:Block --grad-reduce-in-bf16",
        "--no-pipeline-parallel --zero-stage 0 --bf16",
        "--overlap-param-gather --ddp-bucket-size 4000000 --synchronize-each-layer --contigious-checkpointing "
        "--checkpoint-activations --checkpoint-num-layers 1 --tp-comm-overlap --deepspeed-activation-checkpointing",
    ],
)
def test_layouts_that_can_run(flags: str) -> None:
    assert problems(flags, WORLD) == []


@pytest.mark.parametrize(
    ("flags", "world_size", "stage", "reason"),
    [
        ("", 8, 0, "every process holds"),
        ("--no-pipeline-parallel", 8, 3, "--no-pipeline-parallel with 8 data-parallel processes"),
        ("--no-pipeline-parallel", 1, 0, "every process holds"),
        ("--no-pipeline-parallel --tensor-model-parallel-size 4", 4, 0, "every process holds"),
        ("--use-distributed-optimizer", 8, 1, "--use-distributed-optimizer"),
        ("--use-distributed-optimizer --zero-stage 2", 8, 2, None),
    ],
)
def test_zero_stage_follows_from_the_layout(flags: str, world_size: int, stage: int, reason: str | None) -> None:
    config, derived = resolve(parse_flags(f"{GOOD} {flags}".split()), world_size)
    assert config.parallel.zero_stage == stage
    reasons = {d.name: d.reason for d in derived}
    assert "zero stage" not in reasons if reason is None else reasons["zero stage"].startswith(reason)


def test_layout_numbers_are_derived() -> None:
    flags = (
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
        "--global-batch-size 20"
    )
    config, derived = resolve(parse_flags(f"{GOOD} {flags}".split()), 4)
    known = {d.name: (d.value, d.reason) for d in derived}
    assert config.parallel.num_virtual_stages_per_pipeline_rank == config.parallel.num_chunks == 3
    assert config.parallel.data_parallel_size(24) == 6 and config.parallel.model_parallel_size == 4
    assert known["data parallel size"] == (1, "4 processes / (2 tensor x 2 pipeline)")
    assert known["micro batches per step"] == (10, "batch 20 / (micro-batch 2 x 1 data-parallel process(es))")
    assert known["num virtual stages per pipeline rank"] == (
        3,
        "12 layers / (2 stages x 2 layers in a virtual stage)",
    )


def test_flags_for_recomputation_by_all_their_names() -> None:
    def resolved(flags: str) -> RecomputeConfig:
        return resolve(parse_flags(f"{GOOD} {flags}".split()), 2)[0].recompute

    r = resolved("--checkpoint-activations --checkpoint-num-layers 3 --checkpoint-in-cpu")
    assert (r.recompute_granularity, r.recompute_method, r.recompute_num_layers) == ("full", "uniform", 3)
    assert r.checkpoint_in_cpu and r.recompute_modules is None
    r = resolved("--recompute-activations")
    assert (r.recompute_granularity, r.recompute_modules) == ("selective", ("core_attn",))
    r = resolved("--recompute-granularity selective --recompute-modules mlp layernorm")
    assert r.recompute_modules == ("mlp", "layernorm")
    r = resolved("--recompute-granularity full --partition-activations --tensor-model-parallel-size 2")
    assert r.distribute_saved_activations and r.recompute_method is None


def test_ramp_that_cannot_be_cut_is_found_before_it_starts() -> None:
    flags = "--preset 124M --micro-batch-size 2 --train-samples 1000 --lr 1e-4 --mock-data --vocab-size 9"
    config, _ = derive(parse_flags(f"{flags} --global-batch-size 16 --rampup-batch-size 2 4 100".split()).config, 2)
    found = find_problems(config, 2)
    assert len(found) == 2 and "not a whole number of steps of 4" in found[0] and "= 4" in found[1]


def test_nothing_given_reports_everything_missing() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(parse_flags([]), 1)
    assert len(caught.value.problems) == 9


def test_configuration_survives_json() -> None:
    config, _ = resolve(parse_flags(f"{GOOD} --bf16".split()), 1)
    assert Config.from_dict(config.to_dict()) == config
    assert Config.from_dict({"model": {"num_layers": 3, "gone": 1}}).model.num_layers == 3


def test_derived_sizes() -> None:
    assert ffn_width(1024, swiglu=False) == 4096 and ffn_width(4096, swiglu=True) == 10880
    assert [padded_vocab(v, 128) for v in (50257, 128, 129)] == [50304, 128, 256]


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_flags(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(flag in text for flag in ("--num-layers", "--no-compile", "--disable-bias-linear", "--lr-decay-style"))


def test_a_flag_without_its_value_is_the_only_problem_told() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_flags(["--num-layers", "2", "--lr"])
    assert caught.value.problems == ["--lr: expected one argument."]


def test_a_number_out_of_range_is_told_once_whatever_follows_from_it() -> None:
    assert problems("--hidden-size -8 --num-attention-heads 1") == ["--hidden-size is -8; it must be at least 1."]
