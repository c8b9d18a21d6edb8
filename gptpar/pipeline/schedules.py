"""The order in which each stage of a pipeline computes, sends and receives (1F1B, interleaved): pure generators.

Each of ``num_stages`` stages runs ``num_virtual_stages`` virtual stages of the model. Virtual stage c of stage s is
number ``c * num_stages + s`` in the model. A micro-batch passes through all virtual stages in the order of these
numbers, and its gradient comes back in the reverse order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from gptpar.errors import GptparError


@dataclass(frozen=True)
class Instruction:
    """One stage's computation or transfer for one micro-batch.

    Attributes:
        micro_batch: index of the micro-batch in its step.
        virtual_stage: index of the virtual stage on its stage, 0 to ``num_virtual_stages - 1``. In a send it is the
            virtual stage that computed the tensor, in a receive the one that needs it.
    """

    micro_batch: int
    virtual_stage: int


class Forward(Instruction):
    """Compute a virtual stage's output."""


class Backward(Instruction):
    """Compute the gradients of a virtual stage's parameters and input."""


class SendForward(Instruction):
    """Send a virtual stage's output to the next stage (the last stage: to the first)."""


class ReceiveForward(Instruction):
    """Begin to receive a virtual stage's input from the previous stage (the first stage: from the last)."""


class SendBackward(Instruction):
    """Send the gradient of a virtual stage's input to the previous stage (the first stage: to the last)."""


class ReceiveBackward(Instruction):
    """Begin to receive the gradient of a virtual stage's output from the next stage (the last: from the first)."""


Action = Forward | Backward


class Span(NamedTuple):
    """An action, and when it began and ended."""

    start: float
    end: float
    action: Action


def one_f_one_b(stage: int, num_stages: int, num_micro_batches: int) -> Iterator[Action]:
    """1F1B, one forward and one backward in turn: at most ``num_stages - stage`` micro-batches are in flight.

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


def interleaved(stage: int, num_stages: int, num_micro_batches: int, num_virtual_stages: int) -> Iterator[Action]:
    """Interleaved 1F1B: v virtual stages per stage divide the idle time by v. With one virtual stage it is 1F1B.

    Source: https://arxiv.org/abs/2104.04473, section 2.2, for whole groups of ``num_stages`` micro-batches. Here any
    number of micro-batches is possible: the last group is filled up with micro-batches that do not exist, and these are
    then left out. Leaving out a micro-batch everywhere removes waits and adds none: it cannot deadlock.
    (A short last group without these gaps can deadlock: 4 stages, 3 virtual stages, 5 micro-batches.)
    """
    _check(stage, num_stages, num_micro_batches, num_virtual_stages)
    if num_virtual_stages == 1:
        yield from one_f_one_b(stage, num_stages, num_micro_batches)
        return
    whole = -(-num_micro_batches // num_stages) * num_stages
    order = list(_grouped(num_stages, whole, num_virtual_stages))
    warm_up = min((num_stages - stage - 1) * 2 + (num_virtual_stages - 1) * num_stages, len(order))
    actions: list[Action] = [Forward(i, virtual_stage) for i, virtual_stage in order[:warm_up]]
    for turn, (i, virtual_stage) in enumerate(order):
        if turn + warm_up < len(order):
            actions.append(Forward(*order[turn + warm_up]))
        actions.append(Backward(i, num_virtual_stages - 1 - virtual_stage))
    yield from (action for action in actions if action.micro_batch < num_micro_batches)


def forward_only(stage: int, num_stages: int, num_micro_batches: int, num_virtual_stages: int = 1) -> Iterator[Forward]:
    """The forwards alone, for evaluation; all stages run them in the same order."""
    _check(stage, num_stages, num_micro_batches, num_virtual_stages)
    for i, virtual_stage in _grouped(num_stages, num_micro_batches, num_virtual_stages):
        yield Forward(i, virtual_stage)


@lru_cache(maxsize=8)
def instructions(
    order: Callable[[int, int, int, int], Iterator[Action]],
    stage: int,
    num_stages: int,
    num_micro_batches: int,
    num_virtual_stages: int,
) -> tuple[Instruction, ...]:
    """A stage's actions of a step in an order, :func:`interleaved` or :func:`forward_only`, :func:`with_transfers`."""
    actions = order(stage, num_stages, num_micro_batches, num_virtual_stages)
    return tuple(with_transfers(actions, stage, num_stages, num_virtual_stages))


def with_transfers(
    actions: Iterable[Action], stage: int, num_stages: int, num_virtual_stages: int
) -> list[Instruction]:
    """A stage's actions with their sends and receives.

    Each receive comes one action early, so that the transfer overlaps that action. Each send comes right after its
    action. One stage sends nothing; callers refuse virtual stages there.
    """
    instructions: list[Instruction] = []
    waiting: list[Instruction] = []  # the previous action and its send
    for action in actions:
        receives, sends = _transfers(action, stage, num_stages, num_virtual_stages)
        instructions += receives + waiting
        waiting = [action, *sends]
    return instructions + waiting


def simulate(
    num_stages: int,
    num_micro_batches: int,
    num_virtual_stages: int,
    forward_time: float = 1,
    backward_time: float = 2,
    transfer_time: float = 0,
) -> list[list[Span]]:
    """Timelines of all stages in a training step.

    Args:
        num_stages: number of stages.
        num_micro_batches: micro-batches in the step.
        num_virtual_stages: virtual stages per stage; 1: the 1F1B schedule, more: the interleaved schedule.
        forward_time: time of one virtual stage's forward.
        backward_time: time of one virtual stage's backward.
        transfer_time: time from the end of an action to the arrival of its result.

    Raises:
        GptparError: the schedule deadlocks, or the order of a link's receives differs from that of its sends.
    """
    programs = [
        with_transfers(
            interleaved(stage, num_stages, num_micro_batches, num_virtual_stages), stage, num_stages, num_virtual_stages
        )
        for stage in range(num_stages)
    ]
    return replay(programs, num_virtual_stages, forward_time, backward_time, transfer_time)


def replay(
    programs: Sequence[Sequence[Instruction]],
    num_virtual_stages: int,
    forward_time: float = 1,
    backward_time: float = 2,
    transfer_time: float = 0,
) -> list[list[Span]]:
    """Timelines of stages that follow the given instructions.

    Every stage has a first-in-first-out link to the next stage for activations, and another to the previous stage for
    gradients. Sends and receives never wait; an action waits for the receive that it needs.

    Args:
        programs: each stage's instructions.
        num_virtual_stages: virtual stages per stage.
        forward_time: time of one virtual stage's forward.
        backward_time: time of one virtual stage's backward.
        transfer_time: time from the end of an action to the arrival of its result.

    Raises:
        GptparError: the stages deadlock, the order of a link's receives differs from that of its sends, a message is
            never received, or an action comes before an action of its own stage that it needs.
    """
    links: dict[type, list[_Link]] = {kind: [_Link() for _ in programs] for kind in (Forward, Backward)}
    times: dict[type, float] = {Forward: forward_time, Backward: backward_time}
    stages = [_Stage(i, num_virtual_stages, program, links) for i, program in enumerate(programs)]
    while sum(stage.advance(times, transfer_time) for stage in stages):
        pass
    stuck = [f"stage {s.index} at {s.program[s.position]}" for s in stages if s.position < len(s.program)]
    if stuck:
        raise GptparError(f"the schedule deadlocks: {'; '.join(stuck)}.")
    lost = sum(len(link.sent) - link.num_received for kind in links.values() for link in kind)
    if lost:
        raise GptparError(f"{lost} messages of the schedule are sent and never received.")
    return [stage.spans for stage in stages]


def bubble(num_stages: int, num_micro_batches: int, num_virtual_stages: int = 1) -> float:
    """The bubble fraction of a step if all actions of a kind take equally long: (p - 1) / (v m + p - 1).

    It is exact with one virtual stage, and with several if the number of micro-batches is a multiple of the number of
    stages; else the bubble is larger.
    Source: https://arxiv.org/abs/2104.04473, section 2.2, there relative to the busy time.
    """
    return (num_stages - 1) / (num_virtual_stages * num_micro_batches + num_stages - 1)


def simulated_bubble(timelines: Sequence[Sequence[Span]]) -> float:
    """The bubble fraction of timelines: the stages' idle time over their whole time, until the last one ends."""
    length = max(span.end for spans in timelines for span in spans)
    busy = sum(span.end - span.start for spans in timelines for span in spans)
    return 1 - busy / (length * len(timelines))


def chart(timelines: Sequence[Sequence[Span]], width: int = 100) -> str:
    """A text chart with a row for each stage; a column is one shortest action long and shows what runs at its middle.

    Micro-batch 0 is ``A`` in its forwards and ``a`` in its backwards, micro-batch 1 is ``B`` and ``b``, and so on
    (again ``A`` after ``Z``); a dot is idle time. A row that is longer than ``width`` ends with ``>``.

    Args:
        timelines: spans of every stage.
        width: maximum number of columns.
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


def _check(stage: int, num_stages: int, num_micro_batches: int, num_virtual_stages: int) -> None:
    if not 0 <= stage < num_stages or num_micro_batches < 1 or num_virtual_stages < 1:
        raise ValueError(
            f"no schedule for stage {stage} of {num_stages}, {num_micro_batches} micro-batches, "
            f"{num_virtual_stages} virtual stages"
        )


def _grouped(num_stages: int, num_micro_batches: int, num_virtual_stages: int) -> Iterator[tuple[int, int]]:
    """(micro-batch, virtual stage) in order: each virtual stage takes a whole group of ``num_stages`` micro-batches."""
    for first in range(0, num_micro_batches, num_stages):
        for virtual_stage in range(num_virtual_stages):
            for i in range(first, min(first + num_stages, num_micro_batches)):
                yield i, virtual_stage


def _transfers(
    action: Action, stage: int, num_stages: int, num_virtual_stages: int
) -> tuple[list[Instruction], list[Instruction]]:
    """(receives, sends) of an action: one each, but no receive where a path begins and no send where it ends."""
    forward = isinstance(action, Forward)
    number = action.virtual_stage * num_stages + stage
    beginning, end = (0, num_stages * num_virtual_stages - 1)[:: 1 if forward else -1]
    receive, send = (ReceiveForward, SendForward) if forward else (ReceiveBackward, SendBackward)
    what = action.micro_batch, action.virtual_stage
    alone = num_stages == 1
    return ([] if alone or number == beginning else [receive(*what)], [] if alone or number == end else [send(*what)])


@dataclass
class _Link:
    """One direction between two stages: (time of arrival, micro-batch, receiving virtual stage) of each message."""

    sent: list[tuple[float, int, int]] = field(default_factory=list)
    num_received: int = 0


class _Stage:
    """A stage in a replay: its position in its program, and the times of its actions."""

    def __init__(
        self, index: int, num_virtual_stages: int, program: Sequence[Instruction], links: dict[type, list[_Link]]
    ):
        self.index, self.num_virtual_stages, self.program, self.links = index, num_virtual_stages, program, links
        self.num_stages = len(links[Forward])
        self.position = 0
        self.spans: list[Span] = []
        self.done: set[Instruction] = set()
        self.tickets: dict[Instruction, int] = {}

    def advance(self, times: dict[type, float], transfer_time: float) -> int:
        """Follow the program until a message is missing; returns the number of instructions that were executed."""
        before = self.position
        for instruction in self.program[before:]:
            match instruction:
                case ReceiveForward(micro_batch=i, virtual_stage=c):
                    self._receive(Forward(i, c))
                case ReceiveBackward(micro_batch=i, virtual_stage=c):
                    self._receive(Backward(i, c))
                case SendForward(micro_batch=i, virtual_stage=c):
                    self._send(Forward(i, c), 1, transfer_time)
                case SendBackward(micro_batch=i, virtual_stage=c):
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
        to = action.virtual_stage * self.num_stages + self.index + step
        link = self.links[type(action)][to % self.num_stages]
        link.sent.append((self.spans[-1].end + transfer_time, action.micro_batch, to))

    def _arrival(self, action: Action) -> float | None:
        """The time at which the action's input arrives; ``None`` if it has not been sent yet."""
        receives, _ = _transfers(action, self.index, self.num_stages, self.num_virtual_stages)
        missing = self._needs(action) - self.done
        if missing or (receives and action not in self.tickets):
            raise GptparError(f"stage {self.index} runs {action} before {', '.join(map(str, missing or receives))}.")
        if not receives:
            return 0
        link, ticket = self.links[type(action)][self.index], self.tickets[action]
        if ticket >= len(link.sent):
            return None
        arrival, *what = link.sent[ticket]
        if what != [action.micro_batch, action.virtual_stage * self.num_stages + self.index]:
            raise GptparError(
                f"stage {self.index} receives, for {action}, the message of micro-batch {what[0]} to virtual stage "
                f"{what[1]}: receives and sends of this link differ in order."
            )
        return arrival

    def _needs(self, action: Action) -> set[Instruction]:
        """Actions of the same stage that must come before this one."""
        i, virtual_stage = action.micro_batch, action.virtual_stage
        needs: set[Instruction] = {Forward(i, virtual_stage)} if isinstance(action, Backward) else set()
        if self.num_stages == 1 and isinstance(action, Forward) and virtual_stage > 0:
            needs.add(Forward(i, virtual_stage - 1))
        if self.num_stages == 1 and isinstance(action, Backward) and virtual_stage < self.num_virtual_stages - 1:
            needs.add(Backward(i, virtual_stage + 1))
        return needs
