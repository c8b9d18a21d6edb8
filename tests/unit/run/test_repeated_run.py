"""A run folder's own ``config.toml``: the run again, in another folder; or further, in the same one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gptpar.cli
from tests.helpers import TINY

FLAGS = f"{TINY} --lr-decay-style constant --save-interval 2 --no-async-save --data-cache-path cache --log-interval 1"


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record["lm_loss"] for line in lines if "lm_loss" in (record := json.loads(line))]


@pytest.mark.slow
def test_a_run_is_repeated_and_goes_on_from_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert gptpar.cli.main(["pretrain", *FLAGS.split(), "--train-iters", "3", "--save", "a"]) == 0
    assert gptpar.cli.main(["pretrain", "--config", "a/config.toml", "--save", "b"]) == 0
    a, b = ((Path(one) / "config.toml").read_text().split("\n\n", 1)[1] for one in "ab")
    assert b == a.replace('save = "a"', 'save = "b"')
    assert len(losses(Path("a"))) == 3 and losses(Path("b")) == losses(Path("a"))
    assert gptpar.cli.main(["pretrain", "--config", "a/config.toml", "--load", "a", "--train-iters", "5"]) == 0
    assert gptpar.cli.main(["pretrain", "--config", "a/config.toml", "--load", "c", "--save", "c"]) == 0
    assert len(losses(Path("c"))) == 5 and losses(Path("c")) == losses(Path("a"))
