"""Where an element is updated changes no bit on several processes either: each process's state at every ratio."""

from gptpar.data.loader import MicroBatch
from gptpar.topology.mesh import DATA, Mesh
from tests.helpers import make_trainer, random_tokens, tiny_config
from tests.spawn import spawn
from tests.unit.offload.tiny_runs import OFFLOAD, RATIOS, hash_of

CASES = {
    "ZeRO-1": (Mesh(data=2), "--zero-stage 1 --bf16"),
    "ZeRO-3": (Mesh(data=2), "--zero-stage 3 --bf16"),
    "tensor and sequence": (Mesh(tensor=2), "--tensor-model-parallel-size 2 --sequence-parallel"),
    "Muon, ZeRO-3": (Mesh(data=2), "--zero-stage 3 --bf16 --optimizer muon"),
    "Muon, tensor": (Mesh(tensor=2), "--tensor-model-parallel-size 2 --optimizer muon"),
    "tied embedding in two stages": (Mesh(pipeline=2), "--pipeline-model-parallel-size 2 --bf16"),
}


def states(rank: int, mesh: Mesh, words: str) -> list[str]:
    """This process's hash after five steps of two micro-batches, for each ratio."""
    found = []
    words += f" --clip-grad 0.9 --micro-batch-size 1 --global-batch-size {2 * mesh.data}"
    for ratio in RATIOS:
        trainer = make_trainer(tiny_config(f"{words} {OFFLOAD} {ratio}", 2), rank, mesh)
        for step in range(5):
            trainer.expect_step(4.0 * step)
            tokens = random_tokens(2, 16, 60, seed=10 * step + trainer.topology.position(DATA)).split(1)
            loss = trainer.forward_backward([MicroBatch(t[:, :-1], t[:, 1:]) for t in tokens], step)
            trainer.update(loss, iteration=step + 1, samples=4, progress=4.0 * step, stop=False).readings.read()
        if trainer.host is not None:
            trainer.host.finish()
        found.append(hash_of(trainer))
        trainer.close()
    return found


def all_states(rank: int) -> list[list[str]]:
    return [states(rank, mesh, words) for mesh, words in CASES.values()]


def test_no_ratio_changes_a_bit() -> None:
    for of_process in spawn(all_states, 2, timeout_s=300):
        for case, hashes in zip(CASES, of_process, strict=True):
            assert len(hashes) == len(RATIOS) and len(set(hashes)) == 1, f"{case}: {hashes}"
