"""Flags of forks and older versions of Megatron-LM that say the same as flags here."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from tests.helpers import TINY
from tests.unit.config.test_megatron_flags import problems, resolved


@pytest.mark.parametrize(
    ("said", "meant", "row"),
    [
        ("--use-z-loss", "--z-loss-weight 1e-4", ("z loss weight", 1e-4)),
        ("--no-train 1", "--skip-train", ("skip train", True)),
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


@pytest.mark.parametrize("name", ["save-optim", "load-rng", "check-for-nan-in-loss-and-grad", "rope-fusion"])
def test_a_switch_is_turned_off_by_either_of_megatrons_words(name: str) -> None:
    off, disabled = (parse_flags([f"--{word}-{name}"]) for word in ("no", "disable"))
    assert (disabled.flags, disabled.problems, disabled.without_effect) == (off.flags, [], off.without_effect)
    assert off.flags != parse_flags([]).flags or off.without_effect
