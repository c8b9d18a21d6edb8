"""Who keeps whose files, how they get there, and who repairs what was lost. No processes."""

import pytest

from gptpar.checkpoint.ring import Move, Ring, waves

THREE = Ring.of(["a", "a", "b", "b", "c", "c"])


@pytest.mark.parametrize("names", ["ab", "abc", "aabbcc", "aabccc", "abababcc"])
def test_every_file_is_on_two_machines_and_each_process_moves_about_one(names: str) -> None:
    ring = Ring.of(list(names))
    sizes = [10 + rank for rank in range(len(names))]
    moves = ring.copies(sizes)
    assert sorted(move.source for move in moves) == list(range(len(names)))
    for move in moves:
        assert ring.machine_of(move.target) == (ring.machine_of(move.source) + 1) % len(ring.machines)
        assert (move.name, move.num_bytes) == (f"rank{move.source:05d}.bin", sizes[move.source])
    if len(set(map(len, ring.machines))) == 1:  # as many processes on each machine: all moves at once
        assert len(list(waves(moves))) == 1


def test_a_machine_wants_what_it_keeps_and_what_its_processes_read() -> None:
    """Rank 4 has no file; rank 1 reads a file of the machine after its own, and rank 5 its own alone."""
    file = "rank{:05d}.bin".format
    read = [{file(0)}, {file(1), file(3)}, {file(2)}, {file(3)}, set(), {file(5)}]
    wanted = THREE.wanted(read, {file(rank) for rank in (0, 1, 2, 3, 5)})
    assert wanted == [set(map(file, ranks)) for ranks in ([0, 1, 3, 5], [0, 1, 2, 3], [2, 3, 5])]


def test_what_is_lost_comes_from_those_who_have_it_in_turns() -> None:
    names = {f"rank{rank:05d}.bin": 8 for rank in range(6)}
    everything = set(names)
    moves = THREE.repairs([everything] * 3, [everything, set(), everything], names)
    assert sorted(move.name for move in moves) == sorted(names)
    assert all(THREE.machine_of(move.target) == 1 for move in moves)
    by_machine = [THREE.machine_of(move.source) for move in moves]
    assert by_machine.count(0) == by_machine.count(2) == 3
    assert {move.source for move in moves} == {0, 1, 4, 5} and {move.target for move in moves} == {2, 3}
    assert THREE.repairs([everything] * 3, [everything] * 3, names) == []


def test_in_a_wave_each_process_sends_once_and_takes_once() -> None:
    moves = [Move(source, target, f"{source}{target}", 1) for source in range(4) for target in range(4)]
    found = list(waves(moves))
    assert sorted((move for wave in found for move in wave), key=lambda move: move.name) == moves
    for wave in found:
        assert len({move.source for move in wave}) == len({move.target for move in wave}) == len(wave)
    assert list(waves([])) == []
