"""Flags, derived values and validation."""

import json

import pytest

from gptpar.config.flags import parse_flags
from gptpar.config.stored import stored_config
from gptpar.config.validate import complete, resolve
from gptpar.model.gpt import gpt_model
from tests.helpers import TINY, every_field
from tests.unit.config.flag_problems import GOOD, problems


def test_a_good_command_line_is_complete() -> None:
    config, derived = resolve(parse_flags(GOOD.split()), 4)
    m = config.model
    assert (m.num_layers, m.hidden_size, m.num_attention_heads, m.seq_length) == (12, 768, 12, 1024)
    assert (m.ffn_hidden_size, m.kv_channels, m.num_query_groups, m.max_position_embeddings) == (3072, 64, 12, 1024)
    assert config.batch.global_batch_size == 8
    reasons = {d.name: d.reason for d in derived}
    assert reasons["global batch size"] == "micro-batch 2 x 4 data-parallel process(es)"
    assert reasons["num layers"] == "--preset 124M"


@pytest.mark.parametrize(
    ("preset", "vocab_size", "billions", "active"),
    [*(("7B", 32000, 6.738, 6.738), ("Qwen3-30B-A3B", 151936, 30.532, 3.353)), ("gpt-oss-20B", 201088, 20.915, 4.187)],
)
def test_presets_have_the_published_numbers_of_parameters(
    preset: str, vocab_size: int, billions: float, active: float
) -> None:
    config, _ = resolve(parse_flags(f"{GOOD} --preset {preset} --vocab-size {vocab_size}".split()), 1)
    model = gpt_model(complete(config).model)
    assert model.num_parameters / 1e9 == pytest.approx(billions, abs=5e-4)
    assert model.num_active_parameters / 1e9 == pytest.approx(active, abs=5e-4)
    assert (config.model.attention_dropout, config.model.hidden_dropout) == (0, 0)


def test_flags_keep_megatrons_spellings() -> None:
    words = (
        "--override-opt_param-scheduler --layernorm-epsilon 1e-6 --no-log-learnig-rate-to-tensorboard --normalization "
        "rmsnorm --disable-bias-linear --rampup-batch-size 32 32 1953125 --train-samples 439453125 --lr 3.0e-4 "
        "--exit-duration-in-mins 30000000 --use-flash-attn --attention-backend flash --data-impl mmap --num-experts 1"
    )
    parsed = parse_flags(words.split())
    c = parsed.flags
    assert parsed.problems == []
    assert c.optimizer.override_opt_param_scheduler and c.model.norm_epsilon == 1e-6
    assert not c.logging.log_learning_rate_to_tensorboard and c.model.normalization == "RMSNorm"
    assert not c.model.add_bias_linear and c.batch.rampup_batch_size == (32, 32, 1953125)
    assert c.batch.train_samples == 439453125 and c.optimizer.lr == 3e-4
    assert {note.split(":")[0] for note in parsed.without_effect} == {
        "--use-flash-attn",
        "--attention-backend",
        "--data-impl",
    }


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--num-layer 3", "unknown flag --num-layer; did you mean --num-layers?"),
        ("--hidden-size 770", "--hidden-size 770 is not divisible by --num-attention-heads 12: use 768 or 780"),
        ("--position-embedding-type rope --rotary-percent 0.02", "of a head of 64 is 1: choose an even number"),
        ("--global-batch-size 7", "not a multiple of --micro-batch-size 2 x 1 data-parallel process(es) = 2: the"),
        ("--rampup-batch-size 2 2 100", "--rampup-batch-size needs --train-samples or --train-tokens"),
        ("--min-lr 1", "--min-lr 1 must lie between 0 and --lr 0.0003"),
        ("--cuda-graph on", "--cuda-graph on: dropout is seeded by the host"),
        ("--data-path a b", "data is given twice"),
        (
            "--tensor-model-parallel-size 2",
            "1 processes cannot be cut into groups of 2 x 1 = 2 (tensor x pipeline): start a multiple of 2",
        ),
        ("--eod-mask-loss", "need to know the end-of-document id"),
    ],
)
def test_each_problem_is_a_sentence_with_numbers_and_a_remedy(flags: str, expected: str) -> None:
    found = problems(flags)
    assert any(expected in problem for problem in found), found


def test_configuration_survives_json() -> None:
    config, _ = resolve(parse_flags(f"{GOOD} --bf16".split()), 1)
    stored = json.loads(json.dumps(config.to_dict()))
    read, known, wrong = stored_config(stored, every_field(stored))
    assert complete(read) == config and known == every_field(stored) and not wrong
    del stored["batch"]["train_samples"]
    stored["model"] = {"num_layers": 3, "gone": 0}
    read, known, wrong = stored_config(stored, every_field(config.to_dict()))
    assert read.model.num_layers == 3 and "batch.train_samples" not in known and not wrong


def test_a_command_line_leaves_nothing_to_the_next_one() -> None:
    """All parsers have the same flags, which are made once."""
    first = parse_flags(["--lr", "fast", "--num-layers", "2"], extra=lambda parser: parser.add_argument("--mine"))
    assert len(first.problems) == 1 and first.problems[0].startswith("--lr fast: ")
    second = parse_flags(["--lr", "0.5", "--mine", "3"])
    assert len(second.problems) == 1 and "--mine" in second.problems[0]
    assert (second.flags.optimizer.lr, second.typed) == (0.5, {"optimizer.lr": 0.5})


def test_words_without_a_flag_are_one_problem() -> None:
    (problem,) = parse_flags([*TINY.split(), "--lr", "1e-3", "foo", "a=b"]).problems
    assert problem == "unexpected words 'foo', 'a=b'; values follow a flag."
