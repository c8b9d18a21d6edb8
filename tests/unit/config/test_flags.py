"""Flags, derived values and validation; layouts that can run."""

import json

import pytest

from gptpar.config.flags import parse_flags
from gptpar.config.stored import stored_config
from gptpar.config.validate import complete, resolve
from gptpar.model.gpt import gpt_model
from tests.helpers import every_field
from tests.unit.config.flag_problems import GOOD, problems, resolved


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
    [("7B", 32000, 6.738, 6.738), ("Qwen3-30B-A3B", 151936, 30.532, 3.353), ("gpt-oss-20B", 201088, 20.915, 4.187)],
)
def test_presets_have_the_published_numbers_of_parameters(
    preset: str, vocab_size: int, billions: float, active: float
) -> None:
    config = resolved(f"--preset {preset} --vocab-size {vocab_size}", start=GOOD)
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
    without_effect = {note.split(":")[0] for note in parsed.without_effect}
    assert without_effect == {"--use-flash-attn", "--attention-backend", "--data-impl"}


def test_configuration_survives_json() -> None:
    config = resolved("--bf16", start=GOOD)
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
def test_layouts_of_eight_processes_that_can_run(flags: str) -> None:
    assert problems(flags, 8, GOOD) == []


@pytest.mark.parametrize(
    ("flags", "world_size", "stage", "reason"),
    [
        ("", 8, 0, "every process holds"),
        ("--no-pipeline-parallel", 8, 3, "--no-pipeline-parallel with 8 copies of the weights"),
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


def test_muon_looks_ahead_unless_told_otherwise() -> None:
    for flags, nesterov in (("", True), ("--muon-no-nesterov", False), ("--muon-nesterov", True)):
        assert resolved(f"--optimizer muon {flags}").optimizer.muon_nesterov is nesterov
