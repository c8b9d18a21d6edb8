"""Copies in the memories of several machines, each played by a folder: what one machine loses the others bring back."""

import dataclasses
import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from gptpar.checkpoint import find_checkpoints, pieces, read_manifest
from gptpar.checkpoint.copies import Copies, files_read
from gptpar.checkpoint.manifest import MANIFEST_NAME, file_of
from gptpar.checkpoint.tokenizer_copy import FOLDER, KEY, damaged_copy
from gptpar.config import Config
from gptpar.errors import GptparError
from gptpar.run import mirror, resume, saved_state
from gptpar.run.mirror import open_copies, open_mirror, restore
from gptpar.run.progress import Progress
from gptpar.run.saving import Saving
from gptpar.system import restart
from gptpar.system.restart import MEMORY_VARIABLE
from gptpar.topology.mesh import Mesh
from tests.helpers import make_trainer, tiny_config
from tests.ranks.test_saving_ranks import train
from tests.spawn import spawn
from tests.unit.offload.tiny_runs import hash_of
from tests.unit.run.saved_runs import inputs_of

INTERVAL = 2


class Node:
    """This process of a run, which is started again and again, on a machine that is played by a folder."""

    def __init__(self, rank: int, mesh: Mesh, per_node: int, words: str, root: Path):
        self.rank, self.mesh, self.per_node, self.root = rank, mesh, per_node, root
        self.number, self.count = rank // per_node, mesh.world_size // per_node
        self.memory = self.folder(self.number)
        os.environ[MEMORY_VARIABLE] = str(self.memory)
        words += f" --micro-batch-size 1 --global-batch-size {2 * mesh.data} --save {root}/run --load {root}/run"
        self.config: Config = tiny_config(f"{words} --mirror-interval {INTERVAL}", mesh.world_size)
        self.said: list[str] = []

    def folder(self, node: int) -> Path:
        return self.root / f"node{node}"

    def start(self) -> int:
        """As a run does; returns where it goes on."""
        self.said = []
        self.copies = open_copies(self.config, self.said.append)
        assert self.copies is not None and len(self.copies.ring.machines) == self.count
        self.trainer = make_trainer(self.config, self.rank, self.mesh)
        restore(self.copies, self.trainer)
        inputs = dataclasses.replace(inputs_of(self.config), tokenizer_files={"vocab.json": b"{}", "merges.txt": b""})
        self.progress = resume.load(self.trainer, inputs, self.said.append)
        made = open_mirror(self.copies, self.trainer, self.progress.iteration, self.said.append)
        assert made is not None
        self.mirror = made
        self.saving = Saving(self.trainer, inputs, lambda line: None)
        return self.progress.iteration

    def train(self, last: int, *, saved_at: int = 0) -> None:
        """Up to an iteration, with copies on the way, and one checkpoint on the disk."""
        for step in range(self.progress.iteration, last):
            train(self.trainer, step, step + 1)
            samples = 2 * self.mesh.data * (step + 1)
            self.progress = Progress(step + 1, consumed_samples=samples, scheduled_samples=samples)
            if step + 1 == saved_at:
                self.saving.begin(self.saving.targets[0], self.progress, keep_all=True)
            elif self.mirror.is_due(step + 1):
                self.mirror.save(self.saving, self.progress)
        self.saving.finish()
        self.state = hash_of(self.trainer)
        self.trainer.close()
        dist.barrier()

    def lose(self, *nodes: int) -> None:
        """Other machines, with empty memories, take the places of these."""
        if self.rank == 0:
            for node in nodes:
                shutil.rmtree(self.folder(node))
        dist.barrier()

    def flip(self, node: int, iteration: int, name: str) -> None:
        """A bit in one machine's copy of a file."""
        if self.rank == 0:
            path = self.folder(node) / f"iter_{iteration:07d}" / name
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        dist.barrier()

    def content(self, iteration: int) -> dict[str, bytes]:
        """Of this machine's copy."""
        there = self.memory / f"iter_{iteration:07d}"
        found = {path.name: path.read_bytes() for path in there.iterdir() if path.is_file()}
        dist.barrier()
        return found

    def require_healed(self, iteration: int, content: dict[str, bytes], *told: str) -> None:
        """A start says so, and then this machine's copy is what it was."""
        assert self.start() == iteration
        for words in told:
            assert any(words in line for line in self.said), self.said
        assert self.content(iteration) == content
        self.trainer.close()

    def files_read(self) -> set[str]:
        """By this process, of the newest copy."""
        manifest = read_manifest(find_checkpoints(self.memory)[0][1])
        return files_read(manifest, saved_state.checkpoint_tensors(self.trainer))

    def ranks_kept(self, node: int) -> set[int]:
        before = (node - 1) % self.count
        return {n * self.per_node + place for n in (node, before) for place in range(self.per_node)}

    def require_copies(self, *iterations: int, others: bool = False) -> None:
        """This machine's copies are those, newest first, of its own files and its neighbour's, whole.

        Args:
            others: it may hold further files.
        """
        dist.barrier()
        assert [number for number, _ in find_checkpoints(self.memory)] == list(iterations)
        for _, path in find_checkpoints(self.memory):
            manifest = read_manifest(path)
            sizes = manifest.file_sizes()
            assert len(manifest.meta[KEY]) == 2 and not damaged_copy(path, manifest.meta)
            kept = {file_of(rank) for rank in self.ranks_kept(self.number)} & sizes.keys()
            there = {file.name for file in path.iterdir()} - {MANIFEST_NAME, FOLDER}
            assert there == kept or (others and there > kept), (there, kept)
            assert all((path / name).stat().st_size == sizes[name] for name in there)
        dist.barrier()


def undisturbed(node: Node, last: int) -> str:
    trainer = make_trainer(node.config, node.rank, node.mesh)
    train(trainer, 0, last)
    found = hash_of(trainer)
    trainer.close()
    return found


def every_machine_is_lost_in_turn(rank: int, mesh: Mesh, per_node: int, words: str, root: Path) -> None:
    node = Node(rank, mesh, per_node, words, root)
    assert node.start() == 0
    node.require_copies()
    node.train(3)
    node.require_copies(2)
    at = 3
    for lost in range(node.count):
        node.lose(lost)
        assert node.start() == at - 1
        assert sum(f"restored the copy of iteration {at - 1} in memory" in line for line in node.said) == 1, node.said
        node.train(at + 2)
        node.require_copies(at + 1, at - 1, others=True)
        at += 2
    has_all = {file_of(rank) for rank in node.ranks_kept(node.number)} >= node.files_read()
    has_all = all(dist_each(has_all))
    assert node.start() == at - 1 and any("restored" in line for line in node.said) != has_all
    node.train(at)
    assert node.state == undisturbed(node, at)


def damage_is_healed(node: Node) -> None:
    before = node.content(6)
    for of in range(2):  # a machine's own file, and its copy on the next machine
        node.flip(of, 6, file_of(0))
        node.require_healed(6, before, "1 files")
    unreadable, real = node.folder(0) / "iter_0000006" / file_of(0), pieces.SourceFile
    broken = unreadable.stat().st_ino  # what takes its place can be read

    def opened(path: Path, **options: bool) -> pieces.SourceFile:
        if path == unreadable and path.stat().st_ino == broken:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, **options)

    dist.barrier()
    pieces.SourceFile = opened  # type: ignore[assignment,misc]
    instead = "another machine's file, an older copy or the disk serves"
    node.require_healed(6, before, "1 files", f"{unreadable} cannot be opened: Input/output error: {instead}")
    pieces.SourceFile = real  # type: ignore[misc]
    node.flip(0, 6, MANIFEST_NAME)
    node.require_healed(6, before)
    assert any("manifest" in line and "an older copy or the disk serves" in line for line in node.said), node.said


def what_is_lost_twice_is_given_up(rank: int, mesh: Mesh, per_node: int, words: str, root: Path) -> None:
    node = Node(rank, mesh, per_node, words, root)
    node.start()
    node.train(7, saved_at=3)
    if node.count == 2:
        damage_is_healed(node)
    for of in range(2):
        node.flip(of, 6, file_of(0))
    assert node.start() == 4
    given_up = "iteration 6 in memory is given up, for no machine has all bytes of rank00000.bin"
    assert any(given_up in line for line in node.said), node.said
    node.require_copies(4)
    node.trainer.close()

    node.lose(0, 1)  # the machine before the lost ones has no copy of the second one's files
    assert node.start() == 3, node.said
    told = any("iteration 4 in memory is given up" in line for line in node.said)
    assert told == (node.count > 2)
    node.require_copies()
    node.train(8)
    assert node.state == undisturbed(node, 8)


def a_death_between_two_machines_publishing(rank: int, mesh: Mesh, per_node: int, words: str, root: Path) -> None:
    node = Node(rank, mesh, per_node, words, root)
    node.start()
    node.train(5)
    if rank == 0:
        (node.folder(1) / "iter_0000004").rename(node.folder(1) / "iter_0000004.tmp-nowhere-1-00")
    dist.barrier()
    assert node.start() == 4  # two machines: the first has all files
    node.require_copies(4, 2)
    node.trainer.close()


def room_is_looked_for_on_each_machine(rank: int, mesh: Mesh, per_node: int, words: str, root: Path) -> None:
    node = Node(rank, mesh, per_node, words, root)
    node.start()
    node.trainer.close()
    kept = sum(part.nbytes for one in saved_state.tensors_to_save(node.trainer).values() for _, part in one.parts)
    machine = Copies(node.memory, node.copies.ring, print)
    needed = mirror.Mirror(machine, INTERVAL).prepare(node.trainer, 0)
    sizes = sum(dist_each(kept))
    assert needed >= 2 * sizes // node.count  # its own and its neighbour's, of the machine that has most
    real = mirror.available_memory
    mirror.available_memory = lambda: 2 * needed - 1 if node.number == 1 else 2**40
    with pytest.raises(GptparError, match=r"keeps 2 copies of .* own state and .* of its neighbour's.* in memory, and"):
        mirror.Mirror(machine, INTERVAL).prepare(node.trainer, 0)
    mirror.available_memory = real
    statvfs = os.statvfs
    os.statvfs = lambda path: SimpleNamespace(f_bavail=10, f_frsize=1)  # type: ignore[assignment,misc]
    with pytest.raises(GptparError, match="the file system of .* has room for"):
        mirror.Mirror(machine, INTERVAL).prepare(node.trainer, 0)
    os.statvfs = statvfs
    dist.barrier()


def dist_each(value: int) -> list[int]:
    """Every process's."""
    found = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def several(rank: int, names: list[str], *arguments: object) -> None:
    """Cases of one layout in one set of processes, each with folders of its own."""
    os.environ.pop(restart.VARIABLE, None)
    mesh, per_node, words, root = arguments
    for name in names:
        globals()[name](rank, mesh, per_node, words, root / name)  # type: ignore[operator]
        dist.barrier()


IN_TURN = "every_machine_is_lost_in_turn"
LOST_TWICE = "what_is_lost_twice_is_given_up"
BETWEEN = "a_death_between_two_machines_publishing"
ROOM = "room_is_looked_for_on_each_machine"


@pytest.mark.parametrize(
    ("mesh", "per_node", "words", "names"),
    [
        pytest.param(Mesh(data=2), 1, "--zero-stage 1", [IN_TURN, LOST_TWICE, BETWEEN, ROOM], id="two"),
        pytest.param(Mesh(data=3), 1, "--zero-stage 3 --bf16", [IN_TURN, LOST_TWICE], id="three"),
        pytest.param(
            *(Mesh(data=2, tensor=2), 2, "--tensor-model-parallel-size 2 --zero-stage 1", [IN_TURN, LOST_TWICE]),
            id="two-of-two",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_run_goes_on_as_an_undisturbed_one(
    tmp_path: Path, mesh: Mesh, per_node: int, words: str, names: list[str]
) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    spawn(several, mesh.world_size, names, mesh, per_node, words, tmp_path, timeout_s=300)
