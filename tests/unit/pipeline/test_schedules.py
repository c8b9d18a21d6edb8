"""Pipeline schedules: complete, free of deadlock, as short as the formula says; no process is started."""

from collections import defaultdict
from collections.abc import Iterable

import pytest

from gptpar.errors import GptparError
from gptpar.pipeline.schedules import (
    Action,
    Backward,
    Forward,
    Instruction,
    ReceiveBackward,
    ReceiveForward,
    SendBackward,
    SendForward,
    bubble,
    chart,
    forward_only,
    interleaved,
    one_f_one_b,
    replay,
    simulate,
    simulated_bubble,
    with_transfers,
)

STAGES, CHUNKS = (1, 2, 3, 4, 5, 8), range(1, 5)
STAGES_BY_SPEED = [*STAGES[:3], *(pytest.param(stages, marks=pytest.mark.slow) for stages in STAGES[3:])]


def micro_batches(p: int) -> range:
    """Fewer than the stages, as many, all remainders, and more than any warm-up takes."""
    return range(1, 2 * p + 2)


def programs(p: int, m: int, v: int) -> list[list[Instruction]]:
    return [with_transfers(interleaved(stage, p, m, v), stage, p, v) for stage in range(p)]


GOOD = programs(2, 2, 1)
SWAPPED = [Forward(1, 0), SendForward(1, 0), Forward(0, 0), SendForward(0, 0)]


def most_in_flight(actions: Iterable[Action]) -> int:
    """The most forwards whose backward is still to come."""
    now = most = 0
    for action in actions:
        now += 1 if isinstance(action, Forward) else -1
        most = max(most, now)
    assert now == 0
    return most


@pytest.mark.parametrize("p", STAGES_BY_SPEED)
@pytest.mark.parametrize("v", CHUNKS)
def test_every_micro_batch_goes_forward_then_backward_once_per_chunk(p: int, v: int) -> None:
    for m in micro_batches(p):
        for stage in range(p):
            actions = list(interleaved(stage, p, m, v))
            place = {action: i for i, action in enumerate(actions)}
            assert len(place) == len(actions) == 2 * m * v
            assert all(place[Forward(i, c)] < place[Backward(i, c)] for i in range(m) for c in range(v))


@pytest.mark.parametrize("p", STAGES_BY_SPEED)
@pytest.mark.parametrize("v", CHUNKS)
def test_steps_end_and_idle_as_the_formula_says(p: int, v: int) -> None:
    for m in micro_batches(p):
        idle, formula = simulated_bubble(simulate(p, m, v)), bubble(p, m, v)
        if v == 1 or m % p == 0:
            assert idle == pytest.approx(formula, abs=1e-12)
        assert idle >= formula - 1e-12
    slow = simulate(p, m, v, forward_time=2, backward_time=3, transfer_time=0.5)
    assert sum(len(spans) for spans in slow) == 2 * p * m * v


@pytest.mark.parametrize("p", STAGES_BY_SPEED[1:])
@pytest.mark.parametrize("v", CHUNKS)
def test_links_deliver_in_the_order_of_the_receives(p: int, v: int) -> None:
    """Apart from the simulator: what a stage sends, in order, is what its neighbour receives, in order."""
    for m in micro_batches(p):
        sent, received = defaultdict(list), defaultdict(list)
        for stage, program in enumerate(programs(p, m, v)):
            for do in program:
                here = do.virtual_stage * p + stage
                match do:
                    case SendForward():
                        sent["activation", (stage + 1) % p].append((do.micro_batch, here + 1))
                    case ReceiveForward():
                        received["activation", stage].append((do.micro_batch, here))
                    case SendBackward():
                        sent["gradient", (stage - 1) % p].append((do.micro_batch, here - 1))
                    case ReceiveBackward():
                        received["gradient", stage].append((do.micro_batch, here))
        assert sent == received
        assert sum(map(len, sent.values())) == 2 * m * (p * v - 1)


@pytest.mark.parametrize("p", STAGES)
def test_few_micro_batches_are_in_flight(p: int) -> None:
    """1F1B: one for each stage behind; interleaving: its warm-up and one more."""
    for m in micro_batches(p):
        for stage in range(p):
            assert most_in_flight(one_f_one_b(stage, p, m)) == min(p - stage, m)
            assert list(interleaved(stage, p, m, 1)) == list(one_f_one_b(stage, p, m))
            for v in CHUNKS[1:] if p == 4 else ():
                bound = min((p - stage - 1) * 2 + (v - 1) * p + 1, m * v)
                most = most_in_flight(interleaved(stage, p, m, v))
                assert most == bound if m % p == 0 else most <= bound


def test_interleaved_order_is_megatrons() -> None:
    """Two stages, two virtual stages, four micro-batches: groups of two; the last stage warms up with one group."""
    actions = list(interleaved(1, 2, 4, 2))
    forwards = [(a.micro_batch, a.virtual_stage) for a in actions if isinstance(a, Forward)]
    backwards = [(a.micro_batch, a.virtual_stage) for a in actions if isinstance(a, Backward)]
    assert forwards == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    assert backwards == [(0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (3, 1), (2, 0), (3, 0)]
    assert [isinstance(a, Forward) for a in actions] == [True, True, *[True, False] * 6, False, False]


def test_a_short_last_group_may_not_take_its_turns_at_once() -> None:
    """Why the last group is filled up: else 4 stages, 3 virtual stages and 5 micro-batches wait for each other."""

    def naive(stage: int) -> list[Action]:
        order = [(i, c) for c in range(3) for i in range(4)] + [(4, c) for c in range(3)]
        warm_up = min((3 - stage) * 2 + 2 * 4, len(order))
        actions: list[Action] = [Forward(*key) for key in order[:warm_up]]
        for turn, (i, c) in enumerate(order):
            actions += [Forward(*key) for key in order[turn + warm_up : turn + warm_up + 1]]
            actions.append(Backward(i, 2 - c))
        return actions

    with pytest.raises(GptparError, match=r"deadlocks: stage 0 at Forward\(micro_batch=4, virtual_stage=2\)"):
        replay([with_transfers(naive(stage), stage, 4, 3) for stage in range(4)], 3)
    length = max(spans[-1].end for spans in simulate(4, 5, 3))
    assert length == 66  # without any wait but the first 54, with the three that are left out 81


@pytest.mark.parametrize("v", CHUNKS)
def test_evaluation_runs_every_forward_once(v: int) -> None:
    for p in STAGES[:4]:
        for m in micro_batches(p):
            orders = [list(forward_only(stage, p, m, v)) for stage in range(p)]
            assert all(order == orders[0] for order in orders)
            assert set(orders[0]) == {Forward(i, c) for i in range(m) for c in range(v)} and len(orders[0]) == m * v
            timelines = replay([with_transfers(order, stage, p, v) for stage, order in enumerate(orders)], v)
            if m % p == 0:
                assert max(spans[-1].end for spans in timelines) == m * v + p - 1


def in_short(program: Iterable[Instruction]) -> str:
    """Without virtual stages: ``rf0`` receives the activation of micro-batch 0, ``B1`` is the backward pass of 1."""
    names = {ReceiveForward: "rf", Forward: "F", SendForward: "sf", ReceiveBackward: "rb", Backward: "B"}
    return " ".join(f"{names.get(type(do), 'sb')}{do.micro_batch}" for do in program)


def test_receives_are_one_action_ahead_and_sends_follow() -> None:
    middle, first = with_transfers(one_f_one_b(1, 3, 2), 1, 3, 1), with_transfers(one_f_one_b(0, 2, 1), 0, 2, 1)
    assert in_short(middle) == "rf0 rf1 F0 sf0 rb0 F1 sf1 rb1 B0 sb0 B1 sb1"
    assert in_short(first) == "rb0 F0 sf0 B0"
    alone = list(interleaved(0, 1, 3, 2))
    assert with_transfers(alone, 0, 1, 2) == alone


def test_transfer_time_delays_every_hop() -> None:
    assert simulate(4, 1, 1, transfer_time=0.5)[0][-1].end == 4 * 3 + 6 * 0.5
    assert simulate(2, 1, 2, transfer_time=0.5)[0][-1].end == 4 * 3 + 6 * 0.5


@pytest.mark.parametrize(
    ("programs", "num_virtual_stages", "told"),
    [
        ([SWAPPED, GOOD[1]], 1, "micro-batch 1 to virtual stage 1: receives and sends .* differ in order"),
        ([[], GOOD[1]], 1, "deadlocks: stage 1 at Forward"),
        ([SWAPPED, []], 1, "2 messages .* never received"),
        ([[SendForward(0, 0)], []], 1, "stage 0 sends the result of .* before it has computed it"),
        ([GOOD[0], [Forward(0, 0)]], 1, "stage 1 runs Forward.* before ReceiveForward"),
        ([[Backward(0, 0)]], 1, "stage 0 runs Backward.* before Forward"),
        ([[Forward(0, 1)]], 2, r"Forward\(.*, virtual_stage=1\) before Forward\(.*, virtual_stage=0"),
    ],
)
def test_wrong_programs_are_found(programs: list[list[Instruction]], num_virtual_stages: int, told: str) -> None:
    with pytest.raises(GptparError, match=told):
        replay(programs, num_virtual_stages)


def test_chart_of_four_stages() -> None:
    drawing = chart(simulate(4, 4, 1))
    assert drawing.splitlines() == [
        "stage 0 ABCD......aa.bb.cc.dd",
        "stage 1 .ABC....aaDbb.cc.dd..",
        "stage 2 ..AB..aaCbbDcc.dd....",
        "stage 3 ...AaaBbbCccDdd......",
    ]
    assert chart(simulate(4, 4, 1), width=8).splitlines()[3] == "stage 3 ...AaaB>"
    assert bubble(4, 4) == pytest.approx(3 / 7)
    assert chart(simulate(2, 2, 1, transfer_time=0.5)).splitlines()[1] == "stage 1 .AaaBbb..."
