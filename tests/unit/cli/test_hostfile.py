"""DeepSpeed's hostfile and what selects from it."""

import os
import shlex
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gptpar.cli import hostfile
from gptpar.cli.ssh import PASSED_ON
from gptpar.errors import ConfigError

HOSTS = {host: [0, 1, 2, 3] for host in "abc"}
NAMES = {host: [0, 1] for host in ("a", "b", "me@a", "me@ab", "fe80::1")}
"""Names may have users and colons."""


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
        ({"include": "c:0,2@a:1,3"}, {"c": [0, 2], "a": [1, 3]}),
        ({"exclude": "a:0,1@b:2,3@c:0,3"}, {"a": [2, 3], "b": [0, 1], "c": [1, 2]}),
        ({"num_nodes": 2}, {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}),
        ({"num_nodes": 1, "num_gpus": 2}, {"a": [0, 1]}),
        ({"hosts": NAMES, "include": "me@a:1@b:0"}, {"me@a": [1], "b": [0]}),
        ({"hosts": NAMES, "include": "b@me@ab"}, {"b": [0, 1], "me@ab": [0, 1]}),
        ({"hosts": NAMES, "include": "me@a@fe80::1"}, {"me@a": [0, 1], "fe80::1": [0, 1]}),
    ],
)
def test_selections(how: dict[str, Any], expected: dict[str, list[int]]) -> None:
    assert hostfile.selected(**{"hosts": HOSTS, **how}) == expected


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"include": "a", "exclude": "b"}, "--include and --exclude cannot be combined"),
        ({"include": "a:4"}, "a:4: a has the slots 0, 1, 2, 3."),
        ({"include": "me@a"}, "me is not in the hostfile, which names a, b, c."),
        ({"exclude": "a:0"}, "every host must have the same number of slots (a 3, b 4, c 4)"),
    ],
)
def test_selections_that_cannot_be(how: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        hostfile.selected(HOSTS, **how)
    assert caught.value.problems[0].startswith(expected)


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--num_gpus", "2", "train.py"], ["--nproc-per-node", "2", "--pass-local-rank", "train.py"]),
        (["--num_gpus=-1", "--module", "m"], ["--nproc-per-node", "1", "--pass-local-rank", "--module", "m"]),
        (["--no_local_rank", "--master_port", "4", "t"], ["--master-port", "4", "--nproc-per-node", "1", "t"]),
        (["--no_local_rank", "--master_addr", "::1", "t"], ["--master-addr", "::1", "--nproc-per-node", "1", "t"]),
        (["--num_nodes", "1", "t", "--num_gpus"], ["--nproc-per-node", "1", "--pass-local-rank", "t", "--num_gpus"]),
    ],
)
def test_flags_of_deepspeeds_launcher_without_a_hostfile_start_workers_here(
    words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run_here = mock.Mock(return_value=0)
    assert hostfile.is_asked_for(words) and hostfile.main(words, run_here) == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert hostfile.main(["--dry-run", *words], run_here) == 0
    run_here.assert_called_once_with(expected)
    assert capsys.readouterr().out == f"CUDA_VISIBLE_DEVICES= {shlex.join(['gptpar', 'launch', *expected])}\n"


@pytest.mark.parametrize(
    "slots, before, expected", [([0, 1], None, "0,1"), ([1], "4,5", "5"), ([0, 1], "", ""), ([0, 1], "-1", "-1")]
)
def test_gpus_that_were_hidden_stay_hidden(slots: list[int], before: str | None, expected: str) -> None:
    assert hostfile._visible(slots, before) == expected


def test_the_command_of_each_host_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "my hosts"
    path.write_text("a slots=4\nb slots=4\n")
    for name in [name for name in os.environ if name.startswith(PASSED_ON)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_DEBUG", "it's on")
    monkeypatch.setenv("NCCL_A;touch X;B", "1")  # no name of a shell's variable: not passed on
    monkeypatch.setenv("PYTHON", "/opt/python")
    monkeypatch.chdir(tmp_path)
    words = ["-H", str(path), "--include", "a:0,1@b:2,3", "--master_port=4000", "--ssh_port", "23", "--dry-run"]
    words += ["train.py", "--name", "two words"]
    assert hostfile.is_asked_for(words) and not hostfile.is_asked_for(["--nnodes", "2", "train.py"])
    assert not hostfile.is_asked_for(["--master_port", "4", "--module", "train"])
    run_here = mock.Mock()
    assert hostfile.main(words, run_here) == 0 and not run_here.called
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[:6] for line in lines] == [["ssh", "-o", "BatchMode=yes", "-p", "23", host] for host in "ab"]
    for rank, (gpus, line) in enumerate(zip(("0,1", "2,3"), lines, strict=True)):
        bash, option, script = shlex.split(line[6])
        assert (bash, option) == ("bash", "-c")
        launch = f"--nnodes 2 --master-addr a --master-port 4000 --nproc-per-node 2 --node-rank {rank}"
        expected = f"cd {tmp_path} && export PYTHON=/opt/python NCCL_DEBUG='it'\"'\"'s on' && {{ "
        expected += f'CUDA_VISIBLE_DEVICES={gpus} "$PYTHON" -m gptpar launch {launch} --pass-local-rank train.py'
        assert script.startswith(f"{expected} --name 'two words' </dev/null & child=$!")
