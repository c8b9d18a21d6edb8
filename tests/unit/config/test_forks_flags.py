"""Flags of forks and older versions of Megatron-LM that say the same as flags here, or nothing at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.errors import ConfigError
from tests.helpers import TINY
from tests.unit.config.test_megatron_flags import problems, resolved


@pytest.mark.parametrize(
    ("said", "meant", "row"),
    [
        ("--use-z-loss", "--z-loss-weight 1e-4", ("z loss weight", 1e-4)),
        ("--attention-head-type multiquery", "--num-query-groups 1", ("num query groups", 1)),
        ("--keep-last-checkpoint-only", "--keep-checkpoints 1", ("keep checkpoints", 1)),
        ("--no-train 1", "--skip-train", ("skip train", True)),
        ("--eval-only True", "--skip-train", ("skip train", True)),
        ("--no-cuda", "--distributed-backend gloo", ("distributed backend", "gloo")),
        ("--multi-query-attention", "--num-query-groups 1", ("num query groups", 1)),
        ("--RMSNorm", "--normalization RMSNorm", ("normalization", "RMSNorm")),
        ("--erf-gelu", "--mlp-activation gelu", ("mlp activation", "gelu")),
    ],
)
def test_a_flag_that_stands_for_another_is_told_and_may_not_contradict_it(
    said: str, meant: str, row: tuple[str, object], tmp_path: Path
) -> None:
    start = f"--load {tmp_path}"
    config, derived = resolve(parse_flags([*TINY.split(), *start.split(), *said.split()]), 1)
    assert config == resolved(f"{start} {meant}") == resolved(f"{start} {said} {meant}") != resolved(start)
    assert (*row, said) in [(one.name, one.value, one.reason) for one in derived]


def test_a_flag_that_stands_for_another_value_is_refused() -> None:
    assert problems("--use-z-loss --z-loss-weight 1e-5") == [
        "--use-z-loss means --z-loss-weight 0.0001, and --z-loss-weight 1e-05 is given, too: keep one."
    ]
    assert problems("--num-query-groups 2 --attention-head-type multiquery") == [
        "--attention-head-type multiquery means --num-query-groups 1, and --num-query-groups 2 is given, too: keep one."
    ]
    assert problems("--attention-head-type multi --fim-rate 0.5") == [
        "--attention-head-type multi: without --num-query-groups each query head has its own key and value; leave it "
        "out, or give multihead or multiquery.",
        "--fim-rate 0.5: fill-in-the-middle training is not part of gptpar; leave it out, or give 0.",
    ]


def test_second_names_of_flags() -> None:
    assert resolved("--z-loss-strength 1e-3") == resolved("--z-loss-weight 1e-3")
    for name in ("--tokenizer-path", "--tokenizer-file", "--tokenizer-name-or-path"):
        assert parse_flags([name, "a.model"]).flags.tokenizer.tokenizer_model == "a.model"
    assert resolved("--gas 2 --pipe-parallel-size 1") == resolved("--gradient-accumulation-steps 2")
    assert resolved("--save run --persistent-save-interval 7") == resolved("--save run --save-interval 7")
    assert resolved("--kill-switch-file stop") == resolved("--kill-switch-path stop")
    assert parse_flags(["--save-xser", "run"]).flags.checkpoint.save == "run"
    assert parse_flags(["--num_experts", "1"]).problems == []


@pytest.mark.parametrize(
    ("flag", "why"),
    [
        ("--position-embedding-type alibi", "ALiBi's distances do not depend on where positions start"),
        ("--no-position-embedding", "there are no positions"),
    ],
)
def test_positions_that_have_no_start_do_not_start_again(flag: str, why: str) -> None:
    words = [*TINY.split(), *flag.split(), "--tokenizer-type", "NullTokenizer"]
    config, derived = resolve(parse_flags([*words, "--reset-position-ids"]), 1)
    assert config == resolve(parse_flags(words), 1)[0]
    assert [one.reason for one in derived if one.name == "reset position ids"] == [why]


def test_an_interval_may_be_longer_than_any_run() -> None:
    config = resolved(f"--save x --save-interval 1{'0' * 27} --eval-interval 1{'0' * 27}")
    assert (config.checkpoint.save_interval, config.logging.eval_interval) == (10**27, 10**27)


@pytest.mark.parametrize("flag", ["--save-interval", "--exit-interval", "--exit-duration-in-mins"])
def test_an_interval_of_0_is_none_as_in_megatron(flag: str) -> None:
    config, derived = resolve(parse_flags([*TINY.split(), "--save", "x", flag, "0"]), 1)
    assert config == resolved("--save x")
    assert (flag[2:].replace("-", " "), "none", "0 is off, as in Megatron") in [
        (one.name, one.value, one.reason) for one in derived
    ]
    assert problems(f"{flag} -15") == [f"{flag} is -15; it must be at least 0."]


def test_text_in_place_of_a_data_set_is_told_with_the_command_that_makes_one(tmp_path: Path) -> None:
    words = [word for word in TINY.split() if word != "--mock-data"]
    for name, remedy in (
        ("a.jsonl", "gptpar preprocess makes them from text"),
        ("a.bin", "give the path without .bin or .idx"),
    ):
        (tmp_path / name).touch()
        path = tmp_path / name
        with pytest.raises(ConfigError) as caught:
            resolve(parse_flags([*words, "--data-path", str(path)]), 1)
        assert caught.value.problems == [
            f"the data set {path} is not complete: {path}.bin and {path}.idx not found; {remedy}."
        ]


def test_a_process_that_flags_alone_place_among_others_does_not_train_by_itself() -> None:
    told = (
        "but 1 process(es) take part; torchrun starts more, and sets RANK and WORLD_SIZE in the environment, which "
        "places them."
    )
    assert problems("--rank 3 --world-size 8") == [f"--world-size is 8 and --rank is 3, {told}"]
    assert problems("--rank a") == [f"--rank is a, {told}"]
    assert resolve(parse_flags([*TINY.split(), "--rank", "1", "--world-size", "2"]), 2)


def test_what_turns_a_flag_off_is_not_answered_with_the_flag_that_it_is_for() -> None:
    assert resolve(parse_flags([*TINY.split(), "--no-train", "0", "--eval-only", "False"]), 1)
    assert problems("--no-train 2") == ["--no-train 2: training is left out by --skip-train; leave it out, or give 0."]
    assert resolve(parse_flags([*TINY.split(), "--exit-interval", "9" * 25]), 1)


def test_flags_of_mindspeed_and_flagscale_that_change_no_number_are_named() -> None:
    words = (
        "--use-fused-rmsnorm --use-fused-rotary-pos-emb --jit-compile --use-mc2 --swap-attention --sparse-mode 4 "
        "--recompute-activation-function-num-layers 1 --context-parallel-algo ulysses_cp_algo --use-hetnet"
    )
    assert resolved(words) == resolved("")
    told = parse_flags([*TINY.split(), *words.split()]).without_effect
    assert "--use-mc2: see --no-tp-comm-overlap" in told and len(told) == 9


def test_rotary_positions_of_llama_3_by_the_names_of_mindspeed() -> None:
    start = "--position-embedding-type rope"
    words = (
        "--rope-scaling-type llama3 --rope-scaling-factor 8.0 --low-freq-factor 1.0 --high-freq-factor 4.0 "
        "--original-max-position-embeddings 8192"
    )
    assert resolved(f"{start} {words}") == resolved(f"{start} --use-rope-scaling") != resolved(start)
    assert resolved("--output-logit-softcapping 30") == resolved("--logit-softcap 30")
    assert resolved("--use-deter-comp") == resolved("--deterministic-mode")
    assert resolved(f"{start} {words} --high-freq-factor 8") != resolved(f"{start} --use-rope-scaling")
    yarn = f"{start} --rope-scaling-type yarn --rope-scaling-factor 4 --original-max-position-embeddings 4096"
    megatron = f"{start} --rope-type yarn --rotary-scaling-factor 4 --original-max-position-embeddings 4096"
    assert resolved(yarn) == resolved(megatron) == resolved(f"{yarn} --beta-fast 32 --yarn-beta-slow 1")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--rope-scaling-type yarn", "give --position-embedding-type rope, or drop it"),
        ("--use-rope-scaling --rope-scaling-type yarn", "and yarn is given: drop one of them"),
        ("--rope-scaling-type dynamic", "give their length, --original-max-position-embeddings"),
        (
            "--rope-scaling-type llama3 --low-freq-factor 4",
            "--low-freq-factor 4 must be less than --high-freq-factor 4",
        ),
        ("--rope-scaling-type yarn --beta-slow 32", "--yarn-beta-slow 32 must be less than --yarn-beta-fast 32"),
        ("--rope-scaling-type yarn --rotary-base 1", "with --rotary-base 1 all are equal"),
        ("--rope-scaling-type dynamic --rotary-percent 0.25", "and a head turns one"),
        ("--rope-pattern RX", "--rope-pattern RX may hold the letters R (rotary) and N (none) alone"),
        ("--no-rope-freq 4x", "--no-rope-freq 4x: a number from 1 to 10,000, or a list of 0 and 1 such as [0]*3+[1]"),
        ("--no-rope-freq 2 --rope-pattern RRN", "--no-rope-freq is --rope-pattern RN, and RRN is given"),
        ("--window-size 4 --window-attn-skip-freq [2]", "--window-attn-skip-freq [2]: a number from 1"),
    ],
)
def test_positions_that_contradict_each_other_are_refused(flags: str, told: str) -> None:
    rope = "" if told.startswith("give --position") else "--position-embedding-type rope"
    (problem, *more) = problems(f"{rope} {flags}")
    assert any(told in one for one in (problem, *more))


@pytest.mark.parametrize(
    ("flags", "same"),
    [
        ("--no-rope-freq 4", "--rope-pattern RRRN"),
        ("--no-rope-freq ([0]*3+[1]*1)*2", "--rope-pattern RRRNRRRN"),
        ("--no-rope-freq [1,0]", "--rope-pattern NR"),
        ("--no-rope-freq 1", "--rope-pattern N"),
        ("--window-size 4 --window-attn-skip-freq 3", "--window-size 4 --window-pattern SSF"),
        ("--window-size 4 --window-attn-skip-freq [1]*2+[0]", "--window-size 4 --window-pattern SSF"),
    ],
)
def test_layers_without_positions_or_windows_by_the_names_of_megatron(flags: str, same: str) -> None:
    assert resolved(f"--position-embedding-type rope {flags}") == resolved(f"--position-embedding-type rope {same}")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "--hetero-mode pp",
            "--hetero-mode pp: a run on devices of several kinds is not part of gptpar; leave it out.",
        ),
        ("--scale-emb 12", "--scale-emb 12: a factor of the embeddings is not part of gptpar; leave it out."),
        ("--lora-r 8", "--lora-r 8: low-rank adaptation (LoRA) is not part of gptpar; leave it out."),
        ("--add-rmsnorm-offset", "unknown flag --add-rmsnorm-offset; did you mean --apply-layernorm-1p?"),
        ("--post-norm", "unknown flag --post-norm; did you mean --norm-placement?"),
    ],
)
def test_what_mindspeed_and_flagscale_have_besides_is_refused_by_what_it_is(said: str, told: str) -> None:
    assert problems(said) == [told]


def test_flags_of_gaudi_and_of_experiments_that_change_no_number_are_named() -> None:
    words = (
        "--optimizer fusedadamw --use-torch-compile=1 --use-fused-sdpa 1 --use-fused-rmsnorm 1 --cache-size-limit=0 "
        "--verify-checkpoint --distributed-engine torch --experiment_name a --experiment-root-dir b"
    )
    assert resolved(words) == resolved("")
    told = parse_flags([*TINY.split(), *words.split()]).without_effect
    assert "--experiment-root-dir: what a run writes is in its --save folder" in told and len(told) == 8


def test_flags_of_megatron_core_that_change_no_number_are_named() -> None:
    words = (
        "--disable-tp-comm-overlap-ag --tp-comm-bootstrap-backend nccl --train-sync-interval 4 --no-manual-gc-eval "
        "--enable-ft-package --num-layers-at-end-in-bf16 1 --encoder-tensor-model-parallel-size 0 --flash-decode "
        "--cuda-graph-modules attn mlp --use-mp-args-from-checkpoint-args --rotary-theta 10000"
    )
    assert resolved(words) == resolved("")
    told = parse_flags([*TINY.split(), *words.split()]).without_effect
    assert "--enable-ft-package: the run finds a process that hangs by itself; see --hang-seconds" in told
    assert len(told) == 10


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("--pretrained-checkpoint x", "unknown flag --pretrained-checkpoint; did you mean --load with --finetune?"),
        (
            "--non-persistent-local-ckpt-dir x",
            "unknown flag --non-persistent-local-ckpt-dir; did you mean --save-local?",
        ),
        (
            "--iterations-to-skip 3 4",
            "--iterations-to-skip 3 4: leaving out the data of some steps (see --skip-step-sigma) is not part of "
            "gptpar; leave it out.",
        ),
        (
            "--encoder-pipeline-model-parallel-size 2",
            "--encoder-pipeline-model-parallel-size 2: a model with an encoder is not part of gptpar; leave it out, or "
            "give 0.",
        ),
        ("--qk-clip", "--qk-clip: the clipping of queries and keys is not part of gptpar; leave it out."),
    ],
)
def test_what_megatron_core_has_besides_is_refused_by_what_it_is(said: str, told: str) -> None:
    assert problems(said) == [told]


@pytest.mark.parametrize(
    "flag",
    [
        *("--masked-softmax-fusion", "--params-dtype", "--most-recent-k", "--specification"),
        *("--no-attention-softmax-in-fp32", "--dion-beta1", "--disable-bias-linear-fc", "--internals-log-interval"),
        *("--glu", "--checkpoint", "--validation", "--remode", "--init-method"),
    ],
)
def test_another_flag_with_like_letters_gets_no_hint(flag: str) -> None:
    assert problems(flag) == [f"unknown flag {flag}; see --help for the flags there are."]


def test_a_switch_that_is_given_a_value_is_told_so() -> None:
    assert problems("--geglu 1 --use-swiglu") == [
        "--geglu takes 0 value(s), 1 given.",
        "unknown flag --use-swiglu; did you mean --swiglu?",
    ]


@pytest.mark.parametrize("name", ["save-optim", "load-rng", "check-for-nan-in-loss-and-grad", "rope-fusion"])
def test_a_switch_is_turned_off_by_either_of_megatrons_words(name: str) -> None:
    off, disabled = (parse_flags([f"--{word}-{name}"]) for word in ("no", "disable"))
    assert (disabled.flags, disabled.problems, disabled.without_effect) == (off.flags, [], off.without_effect)
    assert off.flags != parse_flags([]).flags or off.without_effect


@pytest.mark.parametrize("words", ["--recompute-activations", ""])
def test_how_whole_blocks_are_recomputed_may_be_said_where_none_are(words: str) -> None:
    more = "" if words else "--recompute-method uniform"
    given = f"{words} --recompute-num-layers 1 --checkpoint-num-layers 1 {more}"
    config, derived = resolve(parse_flags([*TINY.split(), *given.split()]), 1)
    assert config == resolved(words)
    told = {one.name for one in derived if one.reason.startswith("no whole blocks are recomputed")}
    assert told == {"recompute num layers", "checkpoint num layers", *(["recompute method"] if more else [])}


def test_flags_of_the_newest_and_the_oldest_megatron_that_change_no_number_are_named() -> None:
    words = (
        "--ckpt-pg-tensors-cache-path x --fine-grained-activation-offloading --offload-modules core_attn mlp_norm "
        "--log-energy --exit-signal SIGTERM --flight-recorder-dump-path x --no-tp-comm-split-ag "
        "--disable-tp-comm-bulk-wgrad --scaled-upper-triang-masked-softmax-fusion --fp32-allreduce --use-flash-attn-v1 "
        "--pipe-sp-splits 4 --overlap-moe-expert-parallel-comm --replication-factor 2 --sample-rate 1.0"
    )
    assert resolved(words) == resolved("")
    told = parse_flags([*TINY.split(), *words.split()]).without_effect
    assert any(
        line.startswith("--offload-modules: it changes no number; see") and "--cpu-offloading-num-layers" in line
        for line in told
    )
    assert len(told) == 15


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("--top-k 2", "a choice among the k likeliest tokens or experts (see gptpar generate)"),
        ("--top_k 2", "a choice among the k likeliest tokens or experts (see gptpar generate)"),
        ("--top_p 0.9", "generating text beside the training (see gptpar generate)"),
        ("--enable-gpt-oss", "gpt-oss's options all at once (see --preset gpt-oss-20B)"),
        ("--use_one_sent_docs", "retrieval"),
        ("--fmoe-num-experts 4", "this option of experts"),
        ("--hybrid-context-parallel", "context parallelism"),
        ("--hybrid-layer-pattern M*", "the Mamba architecture"),
        ("--fp4", "training in FP8 or FP4 (see --bf16)"),
        ("--eval-micro-batch-size 4", "evaluation in other batches than training's"),
        ("--mup-output-mult 2", "a factor of muP other than its own (see --mup)"),
        ("--num-unique-layers 3", "a model whose layers share weights"),
        ("--train-idx-path x", "another program's data set (see gptpar preprocess)"),
    ],
)
def test_what_published_programs_have_and_gptpar_has_not_is_named(said: str, what: str) -> None:
    assert problems(said) == [f"{said}: {what} is not part of gptpar; leave it out."]


@pytest.mark.parametrize("flag", ["--moe-latent-size", "--moe_latent_size"])
def test_underscores_change_no_answer(flag: str) -> None:
    other = "a model without it would be another model"
    why = "this option of experts is not part of gptpar yet"
    assert problems(f"{flag} 2") == [f"{flag} 2: {why}, and {other}: leave it out."]


def test_all_signals_that_stop_a_run_are_accepted() -> None:
    every = "SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 always make a run save and stop"
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        parsed = parse_flags([*TINY.split(), "--exit-signal", name])
        assert (parsed.problems, parsed.without_effect) == ([], [f"--exit-signal: {every}"])
    given = "SIGTERM or SIGINT or SIGHUP or SIGUSR1 or SIGUSR2"
    assert problems("--exit-signal SIGALRM") == [f"--exit-signal SIGALRM: {every}; leave it out, or give {given}."]


def test_older_and_newer_words_for_flags_are_hints() -> None:
    for said, meant in (
        ("--virtual-pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank"),
        ("--min-scale", "--min-loss-scale"),
        ("--intermediate-size", "--ffn-hidden-size"),
        ("--checkpoint-granularity", "--recompute-granularity"),
        ("--vocab-model-file", "--tokenizer-model"),
        ("--num_attention_heads_kv", "--num-query-groups"),
    ):
        assert problems(f"{said} 1") == [f"unknown flag {said}; did you mean {meant}?"]
