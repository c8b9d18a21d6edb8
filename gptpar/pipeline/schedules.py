"""In which order every stage of a pipeline computes, sends and receives: pure generators of instructions.

Stage s of ``num_stages`` runs ``num_chunks`` chunks of the model. Its chunk c is the virtual stage
``c * num_stages + s``: a micro-batch goes through the virtual stages in order and its gradient comes back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gptpar.errors import GptparError


@dataclass(frozen=True)
class Instruction:
    """Something to do for one micro-batch in one chunk of the stage that does it.

    Attributes:
        micro_batch: number of the micro-batch in its step.
        chunk: the stage's own chunk, 0 to ``num_chunks - 1``; also of what is sent (made by it) or received (for it).
    """

    micro_batch: int
    chunk: int


class Forward(Instruction):
    """Compute a chunk's output."""


class Backward(Instruction):
    """Compute the gradients of a chunk's parameters and input."""


class SendActivation(Instruction):
    """Send a chunk's output to the next stage (the last stage: to the first)."""


class ReceiveActivation(Instruction):
    """Begin to receive a chunk's input from the previous stage (the first stage: from the last)."""


class SendGradient(Instruction):
    """Send the gradient of a chunk's input to the previous stage (the first stage: to the last)."""


class ReceiveGradient(Instruction):
    """Begin to receive the gradient of a chunk's output from the next stage (the last stage: from the first)."""


Action = Forward | Backward


class Span(NamedTuple):
    """An action and when it ran."""

    start: float
    end: float
    action: Action


def one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> Iterator[Action]:
    """One forward, one backward in turn: at most ``num_stages - stage`` micro-batches are in flight.

    Source: PipeDream-Flush, https://arxiv.org/abs/2006.09503.
    """
    _check(stage, num_stages, num_micro_batches, 1)
    warm_up = min(num_stages - stage - 1, num_micro_batches)
    for i in range(warm_up):
        yield Forward(i, 0)
    for i in range(num_micro_batches):
        if i + warm_up < num_micro_batches:
            yield Forward(i + warm_up, 0)
        yield Backward(i, 0)


def interleaved(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> Iterator[Action]:
    """Several chunks per stage, which divides the idle time by their number; with one chunk it is 1F1B.

    Source: https://arxiv.org/abs/2104.04473, section 2.2, for whole groups of ``num_stages`` micro-batches. Here their
    number is free: the last group is filled up with micro-batches that do not exist, and these are then left out.
    Leaving a micro-batch out on all stages removes waits and adds none, so what could not deadlock still cannot. (A
    short last group whose turns follow each other at once can: 4 stages, 3 chunks, 5 micro-batches.)
    """
    _check(stage, num_stages, num_micro_batches, num_chunks)
    if num_chunks == 1:
        yield from one_f_one_b(stage, num_stages, num_micro_batches)
        return
    whole = -(-num_micro_batches // num_stages) * num_stages
    order = list(_grouped(num_stages, whole, num_chunks))
    warm_up = min((num_stages - stage - 1) * 2 + (num_chunks - 1) * num_stages, len(order))
    actions: list[Action] = [Forward(i, chunk) for i, chunk in order[:warm_up]]
    for turn, (i, chunk) in enumerate(order):
        if turn + warm_up < len(order):
            actions.append(Forward(*order[turn + warm_up]))
        actions.append(Backward(i, num_chunks - 1 - chunk))
    yield from (action for action in actions if action.micro_batch < num_micro_batches)


def forward_only(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> Iterator[Forward]:
    """The forwards alone, for evaluation; all stages take them in the same order."""
    _check(stage, num_stages, num_micro_batches, num_chunks)
    for i, chunk in _grouped(num_stages, num_micro_batches, num_chunks):
        yield Forward(i, chunk)


def with_transfers(actions: Iterable[Action], stage: int, num_stages: int, num_chunks: int) -> list[Instruction]:
    """A stage's actions with what it sends and receives.

    A receive stands before the action that precedes its own, so that data travel while that one computes; a send stands
    right after its action. Chunks of one stage alone hand over in memory.
    """
    instructions: list[Instruction] = []
    waiting: list[Instruction] = []  # the action before and its send
    for action in actions:
        receives, sends = _transfers(action, stage, num_stages, num_chunks)
        instructions += receives + waiting
        waiting = [action, *sends]
    return instructions + waiting


def simulate(
    num_stages: int,
    num_micro_batches: int,
    num_chunks: int,
    forward_time: float = 1,
    backward_time: float = 2,
    transfer_time: float = 0,
) -> list[list[Span]]:
    """Timelines of all stages in a training step.

    Args:
        num_stages: number of stages.
        num_micro_batches: micro-batches in the step.
        num_chunks: chunks per stage; 1 is the 1F1B schedule, more the interleaved one.
        forward_time: time of one chunk's forward.
        backward_time: time of one chunk's backward.
        transfer_time: time from the end of an action until its result has arrived.

    Raises:
        GptparError: the schedule deadlocks, or a link's receives are in another order than its sends.
    """
    programs = [
        with_transfers(interleaved(stage, num_stages, num_micro_batches, num_chunks), stage, num_stages, num_chunks)
        for stage in range(num_stages)
    ]
    return replay(programs, num_chunks, forward_time, backward_time, transfer_time)


def replay(
    programs: Sequence[Sequence[Instruction]],
    num_chunks: int,
    forward_time: float = 1,
    backward_time: float = 2,
    transfer_time: float = 0,
) -> list[list[Span]]:
    """Timelines of stages that follow the given instructions.

    Every stage has a first-in-first-out link to the next stage for activations and one to the previous stage for
    gradients. Sends never wait; a receive is only begun, and the action that needs it waits.

    Args:
        programs: each stage's instructions.
        num_chunks: chunks per stage.
        forward_time: time of one chunk's forward.
        backward_time: time of one chunk's backward.
        transfer_time: time from the end of an action until its result has arrived.

    Raises:
        GptparError: the stages deadlock, a link's receives are in another order than its sends, what is sent is not
            received, or an action comes before one that it needs on its own stage.
    """
    links: dict[type, list[_Link]] = {kind: [_Link() for _ in programs] for kind in (Forward, Backward)}
    times: dict[type, float] = {Forward: forward_time, Backward: backward_time}
    stages = [_Stage(i, num_chunks, program, links) for i, program in enumerate(programs)]
    while sum(stage.advance(times, transfer_time) for stage in stages):
        pass
    stuck = [f"stage {s.index} at {s.program[s.position]}" for s in stages if s.position < len(s.program)]
    if stuck:
        raise GptparError(f"the schedule deadlocks: {'; '.join(stuck)}.")
    lost = sum(len(link.sent) - link.num_received for kind in links.values() for link in kind)
    if lost:
        raise GptparError(f"{lost} messages of the schedule are sent and never received.")
    return [stage.spans for stage in stages]


def bubble(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> float:
    """The idle share of a step when all actions of a kind take equally long: (p - 1) / (v m + p - 1).

    Exact with one chunk, and with several when the stages divide the micro-batches; else the idle share is larger.
    Source: https://arxiv.org/abs/2104.04473, section 2.2, there relative to the busy time.
    """
    return (num_stages - 1) / (num_chunks * num_micro_batches + num_stages - 1)


def idle_share(timelines: Sequence[Sequence[Span]]) -> float:
    """The share of all stages' time, until the last one ends, in which nothing is computed."""
    length = max(span.end for spans in timelines for span in spans)
    busy = sum(span.end - span.start for spans in timelines for span in spans)
    return 1 - busy / (length * len(timelines))


def chart(timelines: Sequence[Sequence[Span]], width: int = 100) -> str:
    """A drawing with a row per stage; a column is as long as the shortest action and shows what runs in its middle.

    Micro-batch 0 is ``A`` in its forwards and ``a`` in its backwards, micro-batch 1 ``B`` and ``b``, and so on (again
    ``A`` after ``Z``); a dot is idle time. Rows end with ``>`` where the drawing is cut.

    Args:
        timelines: spans of every stage.
        width: the most columns to draw.
    """
    column = min(span.end - span.start for spans in timelines for span in spans)
    length = math.ceil(round(max(span.end for spans in timelines for span in spans) / column - 0.5, 6))
    rows = []
    for stage, spans in enumerate(timelines):
        row = ["."] * length
        for span in spans:
            first, stop = (math.ceil(round(time / column - 0.5, 6)) for time in (span.start, span.end))
            letter = chr(ord("A" if isinstance(span.action, Forward) else "a") + span.action.micro_batch % 26)
            row[first:stop] = letter * (stop - first)
        text = "".join(row) if length <= width else "".join(row[: width - 1]) + ">"
        rows.append(f"stage {stage:>{len(str(len(timelines) - 1))}} {text}")
    return "\n".join(rows)


def _check(stage: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> None:
    if not 0 <= stage < num_stages or num_micro_batches < 1 or num_chunks < 1:
        raise ValueError(
            f"no schedule for stage {stage} of {num_stages}, {num_micro_batches} micro-batches, {num_chunks} chunks"
        )


def _grouped(num_stages: int, num_micro_batches: int, num_chunks: int) -> Iterator[tuple[int, int]]:
    """(micro-batch, chunk): groups of ``num_stages`` micro-batches, each chunk taking the whole group in turn."""
    for first in range(0, num_micro_batches, num_stages):
        for chunk in range(num_chunks):
            for i in range(first, min(first + num_stages, num_micro_batches)):
                yield i, chunk


def _transfers(
    action: Action, stage: int, num_stages: int, num_chunks: int
) -> tuple[list[Instruction], list[Instruction]]:
    """(receives, sends) of an action: one each, or none where its path begins or ends."""
    forward = isinstance(action, Forward)
    virtual_stage = action.chunk * num_stages + stage
    beginning, end = (0, num_stages * num_chunks - 1)[:: 1 if forward else -1]
    receive, send = (ReceiveActivation, SendActivation) if forward else (ReceiveGradient, SendGradient)
    what = action.micro_batch, action.chunk
    alone = num_stages == 1
    return (
        [] if alone or virtual_stage == beginning else [receive(*what)],
        [] if alone or virtual_stage == end else [send(*what)],
    )


@dataclass
class _Link:
    """One direction between two stages: (time of arrival, micro-batch, receiving virtual stage) of what was sent."""

    sent: list[tuple[float, int, int]] = field(default_factory=list)
    num_received: int = 0


class _Stage:
    """A stage in a replay: where it is in its program, what it has done and when."""

    def __init__(self, index: int, num_chunks: int, program: Sequence[Instruction], links: dict[type, list[_Link]]):
        self.index, self.num_chunks, self.program, self.links = index, num_chunks, program, links
        self.num_stages = len(links[Forward])
        self.position = 0
        self.spans: list[Span] = []
        self.done: set[Instruction] = set()
        self.tickets: dict[Instruction, int] = {}

    def advance(self, times: dict[type, float], transfer_time: float) -> int:
        """Follow the program as far as messages allow; returns by how many instructions."""
        before = self.position
        for instruction in self.program[before:]:
            match instruction:
                case ReceiveActivation(micro_batch=i, chunk=c):
                    self._receive(Forward(i, c))
                case ReceiveGradient(micro_batch=i, chunk=c):
                    self._receive(Backward(i, c))
                case SendActivation(micro_batch=i, chunk=c):
                    self._send(Forward(i, c), 1, transfer_time)
                case SendGradient(micro_batch=i, chunk=c):
                    self._send(Backward(i, c), -1, transfer_time)
                case Forward() | Backward():
                    arrival = self._arrival(instruction)
                    if arrival is None:
                        break
                    start = max(arrival, self.spans[-1].end if self.spans else 0)
                    self.spans.append(Span(start, start + times[type(instruction)], instruction))
                    self.done.add(instruction)
            self.position += 1
        return self.position - before

    def _receive(self, action: Action) -> None:
        link = self.links[type(action)][self.index]
        self.tickets[action] = link.num_received
        link.num_received += 1

    def _send(self, action: Action, step: int, transfer_time: float) -> None:
        if action not in self.done:
            raise GptparError(f"stage {self.index} sends the result of {action} before it has computed it.")
        to = action.chunk * self.num_stages + self.index + step
        link = self.links[type(action)][to % self.num_stages]
        link.sent.append((self.spans[-1].end + transfer_time, action.micro_batch, to))

    def _arrival(self, action: Action) -> float | None:
        """When what the action needs is there; ``None`` while it has not been sent."""
        receives, _ = _transfers(action, self.index, self.num_stages, self.num_chunks)
        missing = self._needs(action) - self.done
        if missing or (receives and action not in self.tickets):
            raise GptparError(f"stage {self.index} runs {action} before {', '.join(map(str, missing or receives))}.")
        if not receives:
            return 0
        link, ticket = self.links[type(action)][self.index], self.tickets[action]
        if ticket >= len(link.sent):
            return None
        arrival, *what = link.sent[ticket]
        if what != [action.micro_batch, action.chunk * self.num_stages + self.index]:
            raise GptparError(
                f"stage {self.index} receives for {action} what was sent as micro-batch {what[0]} for virtual stage "
                f"{what[1]}: receives and sends of this link differ in order."
            )
        return arrival

    def _needs(self, action: Action) -> set[Instruction]:
        """Actions of this very stage that come first."""
        i, chunk = action.micro_batch, action.chunk
        needs: set[Instruction] = {Forward(i, chunk)} if isinstance(action, Backward) else set()
        if self.num_stages == 1 and isinstance(action, Forward) and chunk > 0:
            needs.add(Forward(i, chunk - 1))
        if self.num_stages == 1 and isinstance(action, Backward) and chunk < self.num_chunks - 1:
            needs.add(Backward(i, chunk + 1))
        return needs
