"""DeepSpeed's hostfile and what selects from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gptpar.cli import hostfile, without_local_rank
from gptpar.errors import ConfigError

HOSTS = {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3], "c": [0, 1, 2, 3]}


def test_comments_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# ours\n\nme@a slots=4 # fast\n b  slots=2\n")
    assert hostfile.read_hostfile(path) == {"me@a": [0, 1, 2, 3], "b": [0, 1]}
    path.write_text("a slot=4\nb slots=2\nb slots=2\n")
    with pytest.raises(ConfigError) as caught:
        hostfile.read_hostfile(path)
    assert caught.value.problems == [
        f"{path}, line 1: HOST slots=NUMBER is needed, not 'a slot=4'.",
        f"{path}, line 3: b is named again.",
    ]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({}, HOSTS),
        ({"include": "b"}, {"b": [0, 1, 2, 3]}),
        ({"include": "c:0,2@a:1,3"}, {"c": [0, 2], "a": [1, 3]}),
        ({"exclude": "b"}, {"a": [0, 1, 2, 3], "c": [0, 1, 2, 3]}),
        ({"exclude": "a:0,1@b:2,3@c:0,3"}, {"a": [2, 3], "b": [0, 1], "c": [1, 2]}),
        ({"num_nodes": 2}, {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}),
        ({"num_nodes": 1, "num_gpus": 2}, {"a": [0, 1]}),
    ],
)
def test_selections(how: dict[str, Any], expected: dict[str, list[int]]) -> None:
    assert hostfile.selected(HOSTS, **how) == expected


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"include": "a", "exclude": "b"}, "--include and --exclude exclude each other"),
        ({"include": "d"}, "d is not in the hostfile, which names a, b, c."),
        ({"include": "a:4"}, "a:4: a has the slots 0, 1, 2, 3."),
        ({"exclude": "a@b@c"}, "no slot is left"),
        ({"exclude": "a:0"}, "every host must have the same number of slots (a 3, b 4, c 4)"),
        ({"num_nodes": 4}, "--num_nodes 4, but 3 host(s) are there."),
        ({"num_gpus": 5}, "--num_gpus 5, but a host has fewer slots."),
    ],
)
def test_selections_that_cannot_be(how: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hostfile.selected(HOSTS, **how)
    assert caught.value.problems[0].startswith(expected)


def test_the_command_of_each_host_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=4\nb slots=4\n")
    words = f"--hostfile={path} --include a:0,1@b:2,3 --master_port 4000 train.py --hidden-size 8".split()
    assert hostfile.is_asked_for(words) and not hostfile.is_asked_for(["--nnodes", "2", "train.py"])
    assert hostfile.main(words) == 0
    first, second, _ = capsys.readouterr().out.splitlines()
    start = "gptpar launch --nnodes 2 --master-addr a --master-port 4000 --nproc-per-node 2 --node-rank"
    assert first == f"a: CUDA_VISIBLE_DEVICES=0,1 {start} 0 train.py --hidden-size 8"
    assert second == f"b: CUDA_VISIBLE_DEVICES=2,3 {start} 1 train.py --hidden-size 8"


@pytest.mark.parametrize("rank", [["--local_rank=3"], ["--local-rank", "3"]])
def test_a_local_rank_may_stand_before_the_verb(rank: list[str]) -> None:
    assert without_local_rank([*rank, "pretrain", "--lr", "1"]) == ["pretrain", "--lr", "1"]
    assert without_local_rank(["pretrain", *rank]) == ["pretrain", *rank]
