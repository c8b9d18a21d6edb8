"""What processes of one run compare before they train."""

from __future__ import annotations

from gptpar.run.same_everywhere import _OF_A_MACHINE, flags_of, inputs_of
from tests.helpers import tiny_config
from tests.unit.run.saved_runs import inputs_of as inputs_of_run


def test_flags_that_change_numbers_are_compared_and_places_of_a_machine_are_not() -> None:
    config = tiny_config()
    for name in _OF_A_MACHINE:
        section, field = name.split(".")
        assert hasattr(getattr(config, section), field), name
    flags = flags_of(config)
    assert flags["--lr"] == "0.01" and flags["--train-iters"] == "20" and flags["--seed"] == "1234"
    other = tiny_config("--lr 1e-4 --seed 1 --num-workers 0 --save runs/a --hidden-size 64 --disable-bias-linear")
    differ = {name for name in flags if flags[name] != flags_of(other)[name]}
    assert differ >= {"--lr", "--seed", "--save", "--hidden-size", "--disable-bias-linear"}, differ
    assert "--num-workers" not in flags and flags_of(tiny_config("--save runs/a/"))["--save"] == "runs/a"


def test_a_corpus_is_compared_by_its_contents() -> None:
    inputs = inputs_of_run(tiny_config())
    one = {"prefix": "/here/a", "weight": 1.0, "sequences": 2, "tokens": 3, "sha256": "ab"}
    here, there, other = (
        inputs_of(type(inputs)(inputs.tokenizer, {"data_path": [{**one, **change}]}, inputs.data_order))
        for change in ({}, {"prefix": "/there/a"}, {"sha256": "cd"})
    )
    assert here == there and here["--data-path"] != other["--data-path"]
    assert here["the tokenizer"] == "type none, vocab_size 60"
