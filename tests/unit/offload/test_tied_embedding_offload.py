"""The tied embedding's gradient is offered before the lookup's part of it is there: the same bits, with less to do."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gptpar.offload import buckets, build, machine
from gptpar.offload.events import What
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.shared_state import SharedState
from gptpar.run import gpt
from gptpar.run.trainer import Trainer
from gptpar.tensor_parallel import cross_entropy
from tests.helpers import make_trainer, tiny_config
from tests.offload_log import logged, starts_of
from tests.unit.offload.counting import Counting, Seen
from tests.unit.offload.host_optimizers import wait_until
from tests.unit.offload.tiny_runs import ALL, OFFLOAD, Run, assert_same, run_of

STEPS = 6
ROWS, WIDTH = 64, 32
SOMETIMES, NEVER, ALWAYS = "--clip-grad 0.9", "--clip-grad 1000", "--clip-grad 0.0001"
Train = Callable[..., tuple[Run, Seen]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    """Trains with early rows or without; ``patient``: the backward pass goes on when they have been tried."""
    offer, threads = HostOptimizer.submit_gradient, torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny, and threads that look for work would hold up the updating one

    def patient(host: HostOptimizer, unit: str, grad: torch.Tensor, *, formed: int | None = None) -> None:
        offer(host, unit, grad, formed=formed)
        if formed is not None and not host.shared.backs_off:
            assert host.shared.log is not None
            mine = {event.start for event in host.shared.log.of(What.PREPARED, unit=unit) if event.stop <= formed}
            wait_until(lambda: mine <= starts_of(host.shared.log, What.SPECULATION_BEGUN, unit))

    def train(words: str, early: bool, *, is_patient: bool = True, **options: Any) -> tuple[Run, Seen]:
        with monkeypatch.context() as patch, logged():
            seen = Counting.seen = Seen()
            patch.setattr(machine, "make_host_kernel", lambda _, threads: Counting(threads))
            patch.setattr(SharedState, "note_expectation", lambda *_: None)  # it tries again after a clipped step
            if not early:
                patch.setattr(gpt, "tied_unit", lambda *_: None)
            elif is_patient:
                patch.setattr(HostOptimizer, "submit_gradient", patient)
            return run_of(f"--cpu-optimizer-threads 1 {words}", STEPS, **options), seen

    yield train
    torch.set_num_threads(threads)


@pytest.fixture
def early_changes_no_bit(run: Train) -> Train:
    """Trains without early rows and with them, which leaves the same bits; returns what the latter does."""

    def train(words: str, *, speculation: tuple[str, str] = ("off", "on"), **options: Any) -> tuple[Run, Seen]:
        without, with_rows = (f"{words} --offload-speculation {word}" for word in speculation)
        plain, seen_plain = run(without, False, **options)
        early, seen = run(with_rows, True, **options)
        assert_same(early, plain)
        if early.redone == 0:
            assert sum(seen.elements) + sum(seen.completed) == sum(seen_plain.elements)  # nothing is done twice
        return early, seen

    return train


def in_pieces_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output layer's gradient is formed 16 rows at a time."""
    monkeypatch.setattr(cross_entropy, "MIN_ROWS", 10)
    monkeypatch.setattr(cross_entropy, "ROW_TILE", 8)


@pytest.mark.parametrize(
    ("clip", "count", "bucket_elements", "pieces"),
    [
        pytest.param(SOMETIMES, 2, 1 << 24, False, marks=pytest.mark.slow),
        (SOMETIMES, 2, 333, True),
        pytest.param(SOMETIMES, 1, 333, False, marks=pytest.mark.slow),
        pytest.param(NEVER, 4, 333, True, marks=pytest.mark.slow),
        pytest.param(ALWAYS, 1, 333, True, marks=pytest.mark.slow),
    ],
)
def test_no_bit_is_changed(
    early_changes_no_bit: Train,
    clip: str,
    count: int,
    bucket_elements: int,
    pieces: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Buckets of 333 elements cut rows of 32, and do not end with pieces of 16 rows."""
    if pieces:
        in_pieces_of_rows(monkeypatch)
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", bucket_elements)
    early, seen = early_changes_no_bit(f"--bf16 {clip} {ALL}", count=count)
    clipped = [norm > float(clip.split()[-1]) for norm in early.norms]
    assert {NEVER: not any(clipped), ALWAYS: all(clipped), SOMETIMES: any(clipped) and not all(clipped)}[clip]
    assert bool(seen.completed) == (not all(clipped)) and early.redone == sum(clipped)


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "count"), [(0.97, 1), (0.985, 2)])
def test_an_embedding_that_is_partly_on_the_device(
    early_changes_no_bit: Train, ratio: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are cut where the host's part begins, which may lie behind the first piece of them."""
    in_pieces_of_rows(monkeypatch)
    early, seen = early_changes_no_bit(f"--bf16 {SOMETIMES} {OFFLOAD} {ratio}", count=count)
    kept = early.trainer.engine.table.on_device["embedding"]
    assert 0 < kept < ROWS * WIDTH and kept % WIDTH, kept
    assert seen.completed


@pytest.mark.slow
def test_room_for_a_part_of_it(early_changes_no_bit: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is given from the last layer on: here it ends within the embedding; the rest is as it was."""
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", 333)
    monkeypatch.setattr(build, "_speculated_elements", lambda config, size, *_: size.elements - 1000)

    def look(trainer: Trainer) -> None:
        assert trainer.host is not None
        assert trainer.host.shared.log is not None
        prepared = {event.start for event in trainer.host.shared.log.of(What.PREPARED, unit="embedding")}
        buckets_of_it = [first for unit, first, _ in trainer.host.parts("weights") if unit == "embedding"]
        kept = [first in prepared for first in buckets_of_it]
        assert kept == sorted(kept) and not all(kept)
        looked.append(any(kept))

    looked = list[bool]()
    _, seen = early_changes_no_bit(f"--bf16 {SOMETIMES} {ALL}", speculation=("auto", "auto"), look=look)
    assert looked == [False, True] and seen.completed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "count", "rows"),
    [
        (lambda step: torch.full((4, 17), step % 60), 1, 1),
        (lambda step: F.pad(torch.arange(ROWS).reshape(4, 16), (0, 1)), 1, ROWS),
        (lambda step: (torch.arange(68) % 7 + 8 * step).reshape(4, 17) % 60, 1, 7),
        # three micro-batches look up other tokens than the last: they are in the sum already
        (lambda step: torch.arange(4)[:, None] * 5 + torch.arange(17)[None] % 5 + step, 4, 5),
    ],
)
def test_only_rows_that_are_looked_up_are_done_again(
    early_changes_no_bit: Train, tokens: Callable[[int], torch.Tensor], count: int, rows: int
) -> None:
    words = f"--bf16 --softmax-over-padding {NEVER} {ALL}"  # some labels are padding
    early, seen = early_changes_no_bit(words, tokens=tokens, count=count)
    assert early.redone == 0 and seen.completed == [rows * WIDTH] * STEPS


@pytest.mark.slow
def test_steps_that_are_skipped(early_changes_no_bit: Train) -> None:
    early, _ = early_changes_no_bit(f"--fp16 --initial-loss-scale 1e7 --hysteresis 1 {ALL}")
    assert early.skips_some()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_thread_that_is_too_slow(run: Train, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the complete gradient comes it has done one of the embedding's seven buckets, and perhaps begun another."""
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", 333)
    words = f"--bf16 {NEVER} {ALL} --offload-speculation"
    (plain, _), offer = run(f"{words} off", False, count=count), HostOptimizer.submit_gradient

    def held_up(host: HostOptimizer, unit: str, grad: torch.Tensor, *, formed: int | None = None) -> None:
        if formed is not None:
            monkeypatch.setattr(Counting, "gate", threading.Semaphore(1))
        offer(host, unit, grad, formed=formed)
        if formed is not None:
            wait_until(lambda: bool(starts_of(host.shared.log, What.SPECULATION_BEGUN, unit)))
        elif unit == "embedding":
            assert Counting.gate is not None
            Counting.gate.release(1000)

    monkeypatch.setattr(HostOptimizer, "submit_gradient", held_up)
    early, seen = run(f"{words} on", True, count=count, is_patient=False)
    assert_same(early, plain)
    assert STEPS <= len(seen.completed) <= 2 * STEPS and early.redone == 0


def test_it_is_as_it_was_where_it_would_not_be_right() -> None:
    for words, wanted in (
        ("1", True),
        ("1 --offload-speculation off", False),
        ("1 --untie-embeddings-and-output-weights", False),
        ("1 --offload-speculation on --cpu-parameters", True),
        ("0.3", False),  # all of it is on the device
    ):
        with logged() as log:
            make_trainer(tiny_config(f"--bf16 {OFFLOAD} {words}")).close()
        assert bool(log.of(What.PREPARED)) == wanted, words
