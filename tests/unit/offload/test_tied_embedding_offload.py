"""The tied embedding's gradient is offered before the lookup's part of it is there: the same bits, with less to do."""

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

from gptpar.data.loader import MicroBatch
from gptpar.offload import buckets, build, machine
from gptpar.offload.events import What
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.shared_state import SharedState
from gptpar.run import gpt
from gptpar.run.trainer import Trainer
from gptpar.tensor_parallel import cross_entropy
from tests.helpers import make_trainer, random_tokens, tiny_config
from tests.offload_log import logged, starts_of
from tests.unit.offload.counting import Counting, Seen
from tests.unit.offload.host_optimizers import wait_until

STEPS = 8
ROWS, WIDTH = 64, 32
OFFLOAD = (
    "--global-batch-size 4 --lr-warmup-iters 3 --weight-decay 0.1 --cpu-optimizer-threads 1 --cpu-optimizer "
    "--cpu-optimizer-ratio"
)
SOMETIMES, NEVER, ALWAYS = "--clip-grad 0.9", "--clip-grad 1000", "--clip-grad 0.0001"


def any_tokens(step: int) -> torch.Tensor:
    return random_tokens(4, 16, 60, seed=step)


def batches(tokens: torch.Tensor, count: int) -> list[MicroBatch]:
    return [MicroBatch(t[:, :-1], t[:, 1:]) for t in tokens.split(4 // count)]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Seen]]:
    """Trains with early rows or without; ``patient``: the backward pass goes on when they have been tried."""
    offer, threads = HostOptimizer.submit_gradient, torch.get_num_threads()
    torch.set_num_threads(1)  # the model is tiny, and threads that look for work would hold up the updating one

    def patient(host: HostOptimizer, unit: str, grad: torch.Tensor, *, formed: int | None = None) -> None:
        offer(host, unit, grad, formed=formed)
        if formed is not None and not host.shared.backs_off:
            assert host.shared.log is not None
            mine = {event.start for event in host.shared.log.of(What.PREPARED, unit=unit) if event.stop <= formed}
            wait_until(lambda: mine <= starts_of(host.shared.log, What.SPECULATION_BEGUN, unit))
            assert mine <= starts_of(host.shared.log, What.SPECULATION_BEGUN, unit)

    def train(
        words: str,
        early: bool,
        count: int = 2,
        tokens: Callable[[int], torch.Tensor] = any_tokens,
        is_patient: bool = True,
        look: Callable[[Trainer], None] = lambda trainer: None,
    ) -> Seen:
        with monkeypatch.context() as patch, logged():
            seen = Counting.seen = Seen()
            patch.setattr(machine, "make_host_kernel", lambda _, threads: Counting(threads))
            patch.setattr(SharedState, "note_expectation", lambda *_: None)  # it tries again after a clipped step
            if not early:
                patch.setattr(gpt, "tied_unit", lambda *_: None)
            elif is_patient:
                patch.setattr(HostOptimizer, "submit_gradient", patient)
            trainer = make_trainer(tiny_config(f"--micro-batch-size {4 // count} {words}"))
            look(trainer)
            for step in range(STEPS):
                trainer.expect_step(4.0 * step)
                loss = trainer.forward_backward(batches(tokens(step), count), step)
                launched = trainer.update(loss, iteration=step + 1, samples=4, progress=4.0 * step, stop=False)
                seen.steps.append(launched.readings.read()[:3])
                trainer.loss_scale.update(bool(seen.steps[-1][2]))
            assert trainer.host is not None
            trainer.host.finish()
            for kind, views in trainer.engine.optimizer.state_tensors().items():
                for name, parts in views.items():
                    seen.state |= {f"{kind} {name} {offsets}": part.clone() for offsets, part in parts.parts}
            seen.state |= {
                f"live {unit.name}": trainer.engine.parameters.shards[unit.name].clone()
                for unit in trainer.engine.table.units
            }
            seen.redone = trainer.host.num_redone
            trainer.close()
        return seen

    yield train
    torch.set_num_threads(threads)


def assert_same(one: Seen, other: Seen) -> None:
    assert repr(one.steps) == repr(other.steps)  # a norm may be NaN
    assert one.state.keys() == other.state.keys()
    for name, values in one.state.items():
        assert torch.equal(values, other.state[name]), name


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
    run: Callable[..., Seen], clip: str, count: int, bucket_elements: int, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets of 333 elements cut rows of 32, and do not end with pieces of 16 rows."""
    if pieces:
        in_pieces_of_rows(monkeypatch)
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", bucket_elements)
    words = f"--bf16 {clip} {OFFLOAD} 1 --offload-speculation"
    plain, early = run(f"{words} off", False, count), run(f"{words} on", True, count)
    assert_same(early, plain)
    clipped = [norm > float(clip.split()[-1]) for _, norm, _ in plain.steps]
    assert {NEVER: not any(clipped), ALWAYS: all(clipped), SOMETIMES: any(clipped) and not all(clipped)}[clip]
    assert bool(early.completed) == (not all(clipped)) and early.redone == sum(clipped)


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "count"), [(0.97, 1), (0.985, 2)])
def test_an_embedding_that_is_partly_on_the_device(
    run: Callable[..., Seen], ratio: float, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are cut where the host's part begins, which may lie behind the first piece of them."""
    in_pieces_of_rows(monkeypatch)

    def look(trainer: Trainer) -> None:
        kept = trainer.engine.table.on_device["embedding"]
        assert 0 < kept < ROWS * WIDTH and kept % WIDTH, kept

    words = f"--bf16 {SOMETIMES} {OFFLOAD} {ratio} --offload-speculation"
    plain, early = run(f"{words} off", False, count, look=look), run(f"{words} on", True, count, look=look)
    assert_same(early, plain)
    assert early.completed


@pytest.mark.slow
def test_room_for_a_part_of_it(run: Callable[..., Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is given from the last layer on: here it ends within the embedding; the rest is as it was."""
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", 333)
    monkeypatch.setattr(build, "_speculated_elements", lambda config, size, *_: size.elements - 1000)

    def look(trainer: Trainer) -> None:
        assert trainer.host is not None
        assert trainer.host.shared.log is not None
        prepared = {event.start for event in trainer.host.shared.log.of(What.PREPARED, unit="embedding")}
        buckets_of_it = [first for unit, first, _ in trainer.host.parts("weights") if unit == "embedding"]
        kept = [first in prepared for first in buckets_of_it]
        assert any(kept) and not all(kept) and kept == sorted(kept)

    words = f"--bf16 {SOMETIMES} {OFFLOAD} 1 --offload-speculation auto"
    plain, early = run(words, False), run(words, True, look=look)
    assert_same(early, plain)
    assert early.completed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "rows"),
    [
        pytest.param(lambda step: torch.full((4, 17), step % 60), 1, marks=pytest.mark.slow),
        pytest.param(lambda step: F.pad(torch.arange(ROWS).reshape(4, 16), (0, 1)), ROWS, marks=pytest.mark.slow),
        (lambda step: (torch.arange(68) % 7 + 8 * step).reshape(4, 17) % 60, 7),
    ],
)
def test_only_rows_that_are_looked_up_are_done_again(
    run: Callable[..., Seen], tokens: Callable[[int], torch.Tensor], rows: int
) -> None:
    words = f"--bf16 --softmax-over-padding {NEVER} {OFFLOAD} 1 --offload-speculation"  # some labels are padding
    plain, early = run(f"{words} off", False, 1, tokens), run(f"{words} on", True, 1, tokens)
    assert_same(early, plain)
    assert early.redone == 0 and early.completed == [rows * WIDTH] * STEPS
    assert sum(early.elements) + sum(early.completed) == sum(plain.elements)  # nothing is done twice


@pytest.mark.slow
def test_what_earlier_micro_batches_looked_up_is_in_the_sum_already(run: Callable[..., Seen]) -> None:
    """Three micro-batches look up other tokens than the last."""

    def tokens(step: int) -> torch.Tensor:
        return torch.arange(4)[:, None] * 5 + torch.arange(17)[None] % 5 + step

    words = f"--bf16 {NEVER} {OFFLOAD} 1 --offload-speculation"
    plain, early = run(f"{words} off", False, 4, tokens), run(f"{words} on", True, 4, tokens)
    assert_same(early, plain)
    assert early.completed == [5 * WIDTH] * STEPS


@pytest.mark.slow
def test_steps_that_are_skipped(run: Callable[..., Seen]) -> None:
    words = f"--fp16 --initial-loss-scale 1e7 --hysteresis 1 {OFFLOAD} 1 --offload-speculation"
    plain, early = run(f"{words} off", False), run(f"{words} on", True)
    skipped = [bool(s) for *_, s in plain.steps]
    assert any(skipped) and not all(skipped)
    assert_same(early, plain)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_thread_that_is_too_slow(run: Callable[..., Seen], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the complete gradient comes it has done one of the embedding's seven buckets, and perhaps begun another."""
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", 333)
    words = f"--bf16 {NEVER} {OFFLOAD} 1 --offload-speculation"
    plain, offer = run(f"{words} off", False, count), HostOptimizer.submit_gradient

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
    early = run(f"{words} on", True, count, is_patient=False)
    assert_same(early, plain)
    assert STEPS <= len(early.completed) <= 2 * STEPS and early.redone == 0


def test_it_is_as_it_was_where_it_would_not_be_right() -> None:
    for words, wanted in (
        ("", True),
        ("--offload-speculation off", False),
        ("--untie-embeddings-and-output-weights", False),
        ("--offload-speculation on --cpu-parameters", True),
    ):
        with logged() as log:
            trainer = make_trainer(tiny_config(f"--bf16 {OFFLOAD} 1 {words}"))
        assert bool(log.of(What.PREPARED)) == wanted, words
        trainer.close()
    with logged() as log:
        trainer = make_trainer(tiny_config(f"--bf16 {OFFLOAD} 0.3"))
    assert trainer.engine.table.on_device["embedding"] == ROWS * WIDTH and not log.of(What.PREPARED)
    trainer.close()
