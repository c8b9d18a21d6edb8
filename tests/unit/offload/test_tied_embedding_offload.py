"""The tied embedding's gradient is offered before the lookup's part of it is there: the same bits, with less to do."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gptpar.offload import buckets, machine
from gptpar.offload.events import What
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.shared_state import SharedState
from gptpar.run import gpt
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
def early_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    """Trains without early rows and with them, which leaves the same bits; returns what the latter run is and does."""
    offer, threads = HostOptimizer.submit_gradient, torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny, and threads that look for work would hold up the updating one
    monkeypatch.setattr(machine, "make_host_kernel", lambda _, threads: Counting(threads))
    monkeypatch.setattr(SharedState, "note_expectation", lambda *_: None)  # it tries again after a clipped step

    def patient(host: HostOptimizer, unit: str, grad: torch.Tensor, *, formed: int | None = None) -> None:
        """The backward pass goes on when the early rows have been tried."""
        offer(host, unit, grad, formed=formed)
        if formed is not None and not host.shared.backs_off:
            assert host.shared.log is not None
            mine = {event.start for event in host.shared.log.of(What.PREPARED, unit=unit) if event.stop <= formed}
            wait_until(lambda: mine <= starts_of(host.shared.log, What.SPECULATION_BEGUN, unit))

    def train(words: str, **options: Any) -> tuple[Run, Seen]:
        words = f"--cpu-optimizer-threads 1 {words} --offload-speculation"
        Counting.seen = Seen()
        with monkeypatch.context() as patch:
            patch.setattr(gpt, "tied_unit", lambda *_: None)
            plain, without = run_of(f"{words} off", STEPS, **options), Counting.seen
        seen = Counting.seen = Seen()
        with monkeypatch.context() as patch, logged():
            patch.setattr(HostOptimizer, "submit_gradient", patient)
            early = run_of(f"{words} on", STEPS, **options)
        assert_same(early, plain)
        if early.redone == 0:
            assert sum(seen.elements) + sum(seen.completed) == sum(without.elements)  # nothing is done twice
        return early, seen

    yield train
    torch.set_num_threads(threads)


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
