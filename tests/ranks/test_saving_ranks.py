"""Behind the training of several processes, a save writes what standing still would have written."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gptpar.checkpoint import find_checkpoints, read_tensors, saver, verify_checkpoint
from gptpar.checkpoint import room as memory
from gptpar.checkpoint.data_file import DataFile
from gptpar.data.loader import MicroBatch
from gptpar.errors import CheckpointError
from gptpar.run.progress import Progress
from gptpar.run.saving import Saving
from gptpar.run.trainer import Trainer
from gptpar.topology.mesh import DATA, Mesh
from tests.helpers import make_trainer, random_tokens, tiny_config
from tests.spawn import spawn
from tests.unit.offload.tiny_runs import OFFLOAD, hash_of
from tests.unit.run import saved_runs
from tests.unit.run.saved_runs import inputs_of

CASES = {
    "ZeRO-1": (Mesh(data=2), "--zero-stage 1 --bf16"),
    "ZeRO-3": (Mesh(data=2), "--zero-stage 3 --bf16"),
    "ZeRO-3, half on the CPU": (
        Mesh(data=2),
        f"--zero-stage 3 --bf16 {OFFLOAD} 0.5 --offload-speculation on --clip-grad 99",
    ),
    "tensor and sequence": (Mesh(tensor=2), "--tensor-model-parallel-size 2 --sequence-parallel"),
    "interleaved pipeline": (
        Mesh(pipeline=2),
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ),
}


def train(trainer: Trainer, first: int, last: int) -> None:
    for step in range(first, last):
        trainer.expect_step(4.0 * step)
        tokens = random_tokens(2, 16, 60, seed=10 * step + trainer.topology.position(DATA)).split(1)
        loss = trainer.forward_backward([MicroBatch(t[:, :-1], t[:, 1:]) for t in tokens], step)
        trainer.update(loss, iteration=step + 1, samples=4, progress=4.0 * step, stop=False).readings.read()


def assert_same(one: Path, other: Path) -> None:
    ours, theirs = read_tensors(one), read_tensors(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def save_both_ways(rank: int, mesh: Mesh, words: str, root: Path) -> None:
    words += f" --micro-batch-size 1 --global-batch-size {2 * mesh.data}"
    config = tiny_config(f"{words} --save {root / 'behind'}", 2)
    trainer, said = make_trainer(config, rank, mesh), []
    behind = Saving(trainer, inputs_of(config), said.append)
    train(trainer, 0, 2)
    done = Progress(2, consumed_samples=8, scheduled_samples=8)
    still = config.update("checkpoint", save=str(root / "still"))
    trainer.config = still
    saved_runs.save(trainer, done, inputs_of(still), keep=None)
    trainer.config = config
    behind.begin(behind.targets[0], done, keep_all=False)
    train(trainer, 2, 5)
    behind.finish()
    assert verify_checkpoint(root / "behind/iter_0000002") == []
    assert_same(root / "behind/iter_0000002", root / "still/iter_0000002")
    plain = make_trainer(config, rank, mesh)
    train(plain, 0, 5)
    assert hash_of(trainer) == hash_of(plain)
    trainer.close()
    plain.close()
    dist.barrier()


def two_processes(rank: int, root: Path, words: str = "") -> tuple[Trainer, Saving, list[str]]:
    mesh, zero = CASES["ZeRO-1"]
    config = tiny_config(f"{zero} --micro-batch-size 1 --global-batch-size 4 --save {root} {words}", 2)
    trainer, said = make_trainer(config, rank, mesh), []
    return trainer, Saving(trainer, inputs_of(config), said.append), said


def an_error_of_one_is_everyones(rank: int, root: Path) -> None:
    """Rank 1's disk is full: both forgive it as often, and both end."""
    trainer, behind, said = two_processes(rank, root)
    behind.begin(behind.targets[0], Progress(1), keep_all=False)
    behind.finish()
    real = os.pwrite

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank == 1:
        os.pwrite = full
    for iteration in (2, 3):
        behind.begin(behind.targets[0], Progress(iteration), keep_all=False)
        train(trainer, 0, 3)
        if rank == 0:
            behind.poll()  # one sees the end before the other
        behind.finish()
        assert "rank00001.bin: No space left on device" in said[-1] and said[-1].startswith("WARNING: the save of")
    lost = "rank00001.bin: No space left on device.*iteration 4, is not on the disk: the steps since iteration 1"
    with pytest.raises(CheckpointError, match=lost):
        behind.begin(behind.targets[0], Progress(4), keep_all=False)
    os.pwrite = real
    dist.barrier()
    assert [number for number, _ in find_checkpoints(root)] == [1]
    trainer.close()


def a_slow_disk_is_no_hung_rank(rank: int, root: Path) -> None:
    """Rank 1 writes for longer than a collective may take."""
    write, slow = DataFile.write, [rank == 1]

    def once_slow(self: DataFile, place: int, data: memoryview) -> None:
        if slow.pop() if slow else False:
            time.sleep(4.0)
        write(self, place, data)

    DataFile.write = once_slow  # type: ignore[method-assign]
    trainer, behind, _ = two_processes(rank, root, "--distributed-timeout-minutes 0.04")
    for iteration in (1, 2):
        behind.begin(behind.targets[0], Progress(iteration), keep_all=False)
        behind.finish(required=True)
    DataFile.write = write  # type: ignore[method-assign]
    assert [number for number, _ in find_checkpoints(root)] == [2, 1]
    trainer.close()


def a_hung_writer_ends_with_a_sentence(rank: int, root: Path) -> None:
    """Rank 1's file system does not answer any more, and rank 0 waits for it in a collective of the save."""
    gate, write, saver.STILL_SECONDS = threading.Event(), DataFile.write, 1.2

    def hang(self: DataFile, place: int, data: memoryview) -> None:
        gate.wait(60)

    if rank == 1:
        DataFile.write = hang  # type: ignore[method-assign]
    trainer, behind, _ = two_processes(rank, root, "--distributed-timeout-minutes 0.04")
    behind.begin(behind.targets[0], Progress(1), keep_all=False)
    train(trainer, 0, 2)
    started = time.monotonic()
    hangs = f"the save of iteration 1 hangs: no process has written or read a piece in {root} for 0.02"
    with pytest.raises(CheckpointError, match=hangs):
        behind.finish()
    assert time.monotonic() - started < 20
    behind.abandon()
    DataFile.write = write  # type: ignore[method-assign]
    trainer.close()


def all_cases(rank: int, root: Path) -> None:
    write = DataFile.write

    def slow(self: DataFile, place: int, data: memoryview) -> None:
        time.sleep(0.003)
        write(self, place, data)

    DataFile.write = slow  # type: ignore[method-assign]
    for number, (mesh, words) in enumerate(CASES.values()):
        for room in (0, 1 << 30)[number % 3 > 0 :]:
            memory.host_room = lambda held=0, room=room: room
            save_both_ways(rank, mesh, words, root / f"{number}-{room}")
    DataFile.write = write  # type: ignore[method-assign]
    an_error_of_one_is_everyones(rank, root / "full")
    a_slow_disk_is_no_hung_rank(rank, root / "slow")


def test_it_is_the_state_of_its_moment_in_every_layout_and_one_full_or_slow_disk_is_everyones(tmp_path: Path) -> None:
    spawn(all_cases, 2, tmp_path, timeout_s=500)


def test_a_disk_of_one_process_that_hangs(tmp_path: Path) -> None:
    """The processes also come to their end, with a thread of each left behind."""
    started = time.monotonic()
    spawn(a_hung_writer_ends_with_a_sentence, 2, tmp_path, timeout_s=100)
    assert time.monotonic() - started < 50  # the thread of rank 1 waits for longer
