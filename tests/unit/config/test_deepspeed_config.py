"""DeepSpeed's JSON in place of flags."""

import sys
from pathlib import Path
from typing import Any

import pytest

from gptpar.config.flags import parse_flags
from gptpar.config.jsonc import JsonError, read_object
from gptpar.config.validate import resolve
from tests.unit.config.deepspeed_files import BATCH, MODEL, RATE, problems, resolved

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "ds_config_offload.json"


def test_the_example_resolves() -> None:
    parsed = parse_flags(f"{MODEL} --deepspeed --deepspeed_config {EXAMPLE}".split())
    config, derived = resolve(parsed, 4)
    batch, o = config.batch, config.optimizer
    assert (batch.global_batch_size, batch.micro_batch_size, config.precision.dtype) == (32, 4, "bf16")
    assert (config.parallel.zero_stage, config.offload.cpu_optimizer, config.offload.ratio) == (3, True, 0.3)
    assert (o.lr, o.adam_beta1, o.adam_beta2, o.adam_eps, o.weight_decay) == (3e-4, 0.9, 0.95, 1e-8, 0.1)
    assert (o.clip_grad, config.logging.log_interval) == (1.0, 10)
    reasons = {d.name: d.reason for d in derived}
    assert reasons["zero stage"] == f"{EXAMPLE}: zero_optimization.stage"
    assert reasons["cpu optimizer ratio"].startswith(
        f"{EXAMPLE}: zero_optimization.offload_optimizer.ratio; exact here"
    )
    assert reasons["micro batches per step"] == "batch 32 / (micro-batch 4 x 4 data-parallel process(es))"
    assert [note.split(": ")[0] for note in parsed.without_effect] == [
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.overlap_comm",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.sub_group_size",
        "zero_allow_untested_optimizer",
    ]


def test_comments_and_trailing_commas() -> None:
    text = """\ufeff{ // one
      "a": [1, 2, /* three, */ ], # four ,}
      "b//c": "x # y, ] // \\" /* z */,}", /* "d": 1,
      */ "e": {"f": 5e8 , } , // last
    }"""
    assert read_object(text.removeprefix("\ufeff")) == {"a": [1, 2], "b//c": 'x # y, ] // " /* z */,}', "e": {"f": 5e8}}


def test_a_key_given_twice_in_looser_json_is_named_once() -> None:
    pytest.importorskip("hjson")
    with pytest.raises(JsonError, match="given twice in one object: x$"):
        read_object('{"a": {"x": 1, "x": 2}, b: 1}')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1,\n // x\n "b" 2}', "line 3, column 6: Expecting ':' delimiter"),
        ('{"a": 1, "b": {"c": 1, "c": 2}, "a": 3}', "given twice in one object: c, a"),
        ("[1]", "an object in braces is needed"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": ' + "[" * 100_000 + "}", ""),
        ('{"a": ' + "1" * 5000 + "}", "Exceeds the limit"),
        ("", "it is empty"),
    ],
)
def test_text_that_cannot_be_read_is_told_with_its_place(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(JsonError) as caught:
        read_object(text)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("train", "micro", "steps", "expected"),
    [
        (32, 2, None, (32, 2)),
        (32, None, 4, (32, 2)),
        (None, 2, 4, (32, 2)),
        (32, None, None, (32, 8)),
        (None, 2, None, (8, 2)),
        (32, "auto", "auto", (32, 8)),
    ],
)
def test_two_of_the_three_batch_sizes_say_the_third(
    folder: Path, train: object, micro: object, steps: object, expected: tuple[int, int]
) -> None:
    said = zip(("train_batch_size", *BATCH), (train, micro, steps), strict=True)
    batch = resolved({**RATE, **{name: value for name, value in said if value is not None}})[0].batch
    assert (batch.global_batch_size, batch.micro_batch_size) == expected


def test_batch_sizes_follow_the_number_of_data_parallel_processes(folder: Path) -> None:
    file = {"train_batch_size": 32, "gradient_accumulation_steps": 4, **RATE}
    config, derived = resolved(file, "--tensor-model-parallel-size 2", world=8)
    assert config.batch.micro_batch_size == 2
    assert derived["micro batch size"].reason == "batch 32 / (4 micro-batches x 4 data-parallel process(es))"
    config, derived = resolved({**BATCH, **RATE}, world=1)
    assert config.batch.global_batch_size == 8
    assert derived["global batch size"].reason == "micro-batch 2 x 1 data-parallel process(es) x 4 a step"


def test_batch_sizes_that_contradict_each_other(folder: Path) -> None:
    (told,) = problems({"train_batch_size": 64, **BATCH, **RATE})
    assert "64 is not train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps 4 x 4 data-parallel" in told
    assert "= 32: drop one of the three, or make them agree." in told
    (told,) = problems({**BATCH, **RATE}, "--micro-batch-size 1")
    assert "train_micro_batch_size_per_gpu is 2, but --micro-batch-size 1 is given, too: drop one of them" in told


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ({"grandient_accumulation_steps": 4}, "grandient_accumulation_steps is unknown; did you mean gradient_accum"),
        ({"weight-decay": 0.1}, "weight-decay is unknown; did you mean optimizer.params.weight_decay?"),
        ({"tensorboard": {"job": 1}}, "tensorboard.job is unknown; the keys there are enabled, output_path, job_name."),
        ({"zero_optimization": 2}, "zero_optimization is 2: an object in braces is needed."),
        ({"zero_optimization": {"stage": "2"}}, 'zero_optimization.stage is "2": a whole number is needed.'),
        ({"bf16": {"enabled": "maybe"}}, 'bf16.enabled is "maybe": true or false is needed.'),
        ({"communication_data_type": "fp8"}, 'communication_data_type is "fp8": one of fp32, fp16, bf16, bfp16 is'),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states is true: master wei"),
    ],
)
def test_a_key_or_value_that_is_not_understood(folder: Path, file: dict[str, Any], expected: str) -> None:
    found = problems({**BATCH, **RATE, **file})
    assert len(found) == 1 and found[0].startswith(f"ds.json: {expected}"), found
