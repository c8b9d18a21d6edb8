"""Going back, forking and fine-tuning in one folder: what was there becomes a branch, a run folder of its own."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gptpar.checkpoint import find_checkpoints, load_meta, read_tensors, save_checkpoint, verify_checkpoint
from gptpar.checkpoint.folders import HINT_NAME
from gptpar.cli import main
from gptpar.config.sections.logging import LoggingConfig
from gptpar.reporting.metrics_file import read_metrics
from gptpar.reporting.sinks import TensorBoardSink
from gptpar.run.run_folder.branches import finish_branches, leave_branch, read_journal
from tests.helpers import TINY
from tests.unit.reporting.records import record
from tests.unit.run.whole_runs import iterations

Run = Callable[..., str]
BASE = [word for word in TINY.split() if word not in ("--train-iters", "20")]
BACK = "--lr 1e-3 --override-opt-param-scheduler --train-iters 8"


@pytest.fixture
def pretrain(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``gptpar pretrain`` in this process and returns what it prints."""

    def run(flags: str, expect: int = 0) -> str:
        status = main(["pretrain", *BASE, *flags.split()])
        captured = capsys.readouterr()
        assert status == expect, captured.out + captured.err
        return captured.out + captured.err

    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 8 steps with checkpoints 2, 4, 6 and 8."""
    root = tmp_path_factory.mktemp("finished")
    assert main(["pretrain", *BASE, *f"--train-iters 8 --save {root} --save-interval 2".split()]) == 0
    return root


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return shutil.copytree(finished, tmp_path / "run")


def steps(root: Path) -> list[int]:
    return [line["iteration"] for line in read_metrics(root / "metrics.jsonl")]


def curve(root: Path, name: str = "lm loss") -> list[int]:
    """The steps of a curve as TensorBoard shows them, in order; each must be there once."""
    events = EventAccumulator(str(root / "tensorboard"))
    events.Reload()
    return sorted(event.step for event in events.Scalars(name))


def test_a_beginning_without_a_checkpoint_has_curves_of_its_own(tmp_path: Path, pretrain: Run) -> None:
    flags = f"--tensorboard-dir {tmp_path}/tensorboard --save {tmp_path} --log-interval 1 --train-iters 3"
    other = tmp_path / "tensorboard" / "other" / "events.out.tfevents.1.another-run"
    other.parent.mkdir(parents=True)
    other.touch()
    for earlier in range(3):
        pretrain(flags)
        assert curve(tmp_path) == [1, 2, 3]
        found = [len(list((tmp_path / "tensorboard").glob(f"earlier-{n}/*tfevents*"))) for n in (1, 2, 3)]
        assert found == [1] * earlier + [0] * (3 - earlier)
        shutil.rmtree(tmp_path / "iter_0000003")  # as if it had been killed before
        (tmp_path / HINT_NAME).unlink()
    assert other.exists()


@pytest.mark.slow
def test_going_back_leaves_a_branch_that_is_a_run_folder(folder: Path, pretrain: Run) -> None:
    before = read_tensors(folder / "iter_0000008")
    history = (folder / "metrics.jsonl").read_bytes()
    said = pretrain(f"{BACK} --load {folder} --save {folder} --ckpt-step 4 --save-interval 2 --exit-interval 6")
    branch = folder / "branches" / "1-from-0000004"
    assert f"(checkpoints 6, 8, with metrics and TensorBoard files) was moved to {branch}" in said
    assert f"--load {branch} --save {branch}" in said
    assert iterations(folder) == [2, 4, 6] and iterations(branch) == [6, 8]
    assert steps(folder) == [1, 2, 3, 4, 5, 6] and (branch / "metrics.jsonl").read_bytes() == history
    assert curve(folder) == [1, 2, 3, 4, 5, 6] and curve(branch) == list(range(1, 9))
    assert curve(folder, "lm loss vs samples") == [2, 4, 6, 8, 10, 12]
    hints = [int((place / "latest_checkpointed_iteration.txt").read_text()) for place in (folder, branch)]
    assert hints == [6, 8]
    assert all(torch.equal(value, before[name]) for name, value in read_tensors(branch / "iter_0000008").items())
    schedule = "--train-iters 10 --override-opt-param-scheduler"
    assert "(iteration 8)" in pretrain(f"{schedule} --load {branch} --save {branch}")
    assert iterations(branch) == [6, 8, 10] and steps(branch) == list(range(1, 11)) == curve(branch)
    assert iterations(folder) == [2, 4, 6]


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_leaves_no_trace_in_the_plan_of_the_run(folder: Path, pretrain: Run) -> None:
    """Its batches had another size, so that the run would end and decay elsewhere."""
    same = f"--load {folder} --save {folder} --override-opt-param-scheduler --lr-decay-style linear"
    shutil.rmtree(folder / "iter_0000008")
    pretrain(f"{same} --train-iters 8 --global-batch-size 4")
    other = shutil.copytree(folder, folder.parent / "other")
    shutil.rmtree(other / "iter_0000008")
    with open(folder / "iter_0000008" / "rank00000.bin", "r+b") as file:
        file.write(b"damage")
    runs = []
    for root in (folder, other):
        said = pretrain(f"{same.replace(str(folder), str(root))} --train-iters 10 --global-batch-size 8")
        assert ("skipped a damaged checkpoint" in said) == (root == folder) and "(iteration 6)" in said
        assert load_meta(root)["progress"]["consumed_samples"] == 6 * 2 + 4 * 8
        assert load_meta(root)["schedule"]["total"] == 44
        lines = read_metrics(root / "metrics.jsonl")
        runs.append([(line["iteration"], line["lm_loss"], line["learning_rate"]) for line in lines])
    assert runs[0] == runs[1] and runs[0][-1][0] == 10


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        pytest.param("--load RUN --save RUN --ckpt-step 4 --skip-train", "", marks=pytest.mark.slow),
        pytest.param(
            "--train-iters 6 --load RUN --ckpt-step 4 --override-opt-param-scheduler", "", marks=pytest.mark.slow
        ),
        ("--lr 1e-3 --load RUN --save RUN --ckpt-step 4", "its schedule is another one"),
        ("--save RUN", "already holds checkpoints"),
    ],
)
def test_what_only_reads_the_folder_or_is_refused_moves_nothing(
    folder: Path, pretrain: Run, flags: str, refused: str
) -> None:
    before = snapshot(folder)
    said = pretrain(f"--train-iters 8 {flags.replace('RUN', str(folder))}", expect=bool(refused))
    assert refused in said and snapshot(folder) == before


def test_a_folder_whose_checkpoints_are_all_in_branches_is_no_fresh_start(folder: Path, pretrain: Run) -> None:
    """As after a kill between the move and the first save of a fine-tuning."""
    leave_branch(folder, -1, 0, folder / "tensorboard", lambda _: None)
    assert iterations(folder) == [] and not (folder / "metrics.jsonl").exists()
    before = snapshot(folder)
    branch = folder / "branches" / "1-from-0000000"
    for flags in ("", "--ckpt-step 4", "--finetune --ckpt-step 5"):
        said = pretrain(f"--train-iters 8 --load {folder} --save {folder} {flags}", expect=1)
        assert "there is no readable checkpoint" in said and snapshot(folder) == before
        assert (f"left one in --load {branch}" in said) == ("5" not in flags)
    said = pretrain(f"--train-iters 3 --load {folder} --save {folder} --finetune --ckpt-step 6")
    assert f"all checkpoints of {folder} are in branches: fine-tuning begins with {branch}" in said
    assert f"loaded {branch}/iter_0000006 (iteration 6)" in said
    assert iterations(folder) == [3] and curve(folder) == [1, 2, 3]


CALLS = ("mkdir", "rename", "replace", "unlink")


@pytest.mark.slow
def test_kill_9_at_every_step_of_the_move_loses_nothing(tmp_path: Path) -> None:
    first = tmp_path / "first"
    for number in (2, 4, 6):
        save_checkpoint(first, number, {"w": torch.full((8,), float(number))}, {})
    lines = [json.dumps({"iteration": number}) + "\n" for number in range(1, 8)]
    (first / "metrics.jsonl").write_text("".join(lines))
    sink = TensorBoardSink(first / "tensorboard", LoggingConfig())
    for number in range(1, 8):
        sink.iteration(record(number))
    sink.close()
    states = set()
    for instant in range(1, 60):
        root = tmp_path / f"killed{instant}"
        shutil.copytree(first, root)
        child = os.fork()
        if child == 0:
            die_at(instant)
            leave_branch(root, 2, 16, root / "tensorboard", lambda _: None)
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        said: list[str] = []
        finish_branches(root, said.append)
        branches = list((root / "branches").iterdir()) if (root / "branches").exists() else []
        states.add((moved := bool(branches), bool(said)))
        branch = branches[0] if moved else root
        assert iterations(root) == ([2] if moved else [2, 4, 6]) and iterations(branch) == (
            [4, 6] if moved else [2, 4, 6]
        )
        for history in (steps, curve):
            assert history(root) == ([1, 2] if moved else list(range(1, 8))) and history(branch) == list(range(1, 8))
        assert all(verify_checkpoint(path) == [] for place in (root, branch) for _, path in find_checkpoints(place))
        if moved:
            journal = read_journal(branch)
            assert journal is not None and journal.complete and load_meta(branch) == {}
        if not killed:
            break
    assert not killed and instant > 8 and states == {(False, False), (True, True), (True, False)}


def die_at(instant: int) -> None:
    """Let this process kill itself at the n-th system call of those that change a folder."""
    seen = 0

    def counting(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            nonlocal seen
            seen += 1
            if seen == instant:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **options)

        return call

    for name in CALLS:
        setattr(os, name, counting(getattr(os, name)))


def test_damaged_newer_checkpoints_are_left_in_a_branch(folder: Path, pretrain: Run) -> None:
    for number in (6, 8):
        (folder / f"iter_{number:07d}" / "rank00000.bin").write_bytes(b"short")
    said = pretrain(f"--train-iters 8 --load {folder} --save {folder} --save-interval 2 --keep-checkpoints 2")
    assert "skipped a damaged checkpoint" in said and "goes on from iteration 4" in said
    assert "1-from-0000004 (damaged: no run can go on from there)" in said
    assert iterations(folder) == [6, 8] and steps(folder) == list(range(1, 9))
    assert all(verify_checkpoint(path) == [] for _, path in find_checkpoints(folder))
    assert iterations(folder / "branches" / "1-from-0000004") == [6, 8]


@pytest.mark.slow
def test_nothing_is_deleted_while_steps_are_skipped(folder: Path, pretrain: Run) -> None:
    """The weights break at iteration 9; what was saved before is what its user needs."""
    same = f"--load {folder} --save {folder} --keep-checkpoints 2 --save-interval 2 --override-opt-param-scheduler"
    said = pretrain(f"--train-iters 14 --lr 1e30 --clip-grad 0 --lr-decay-style constant {same}")
    assert iterations(folder) == [2, 4, 6, 8, 10, 12, 14]
    assert said.count("no older checkpoint is deleted while steps are skipped") == 1
    pretrain(f"--train-iters 12 {same} --ckpt-step 8")
    assert iterations(folder) == [10, 12] and iterations(folder / "branches" / "1-from-0000008") == [10, 12, 14]


def test_a_branch_whose_checkpoints_are_gone_leaves_the_hint_of_the_run(folder: Path) -> None:
    before = (folder / HINT_NAME).read_text()
    branch = folder / "branches" / "1-from-0000008"
    branch.mkdir(parents=True)
    journal = {"iteration": 8, "consumed_samples": 16, "checkpoints": [10], "complete": False}
    (branch / "branch.json").write_text(json.dumps(journal))
    finish_branches(folder, print)
    assert (folder / HINT_NAME).read_text() == before and not (branch / HINT_NAME).exists()
    assert json.loads((branch / "branch.json").read_text())["complete"]
