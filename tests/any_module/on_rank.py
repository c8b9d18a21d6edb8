"""What a process of a pool runs: a case, half of it, or its reference."""

from collections.abc import Callable
from typing import Any

from gptpar.errors import GptparError
from tests.any_module.case import Case, Setup
from tests.any_module.cases import CASES
from tests.any_module.harness import Training
from tests.any_module.reference import Trace, reference

TAG, CLIENT = "middle", {"epoch": 3, "words": ["any", None]}
OTHER_SEED = 7

Kind = Callable[..., Any]
"""Makes a :class:`~tests.any_module.harness.Training`, called as that class is."""


def kind_of(case: Case, kind: Kind | None) -> Kind:
    """The one that is asked for, or the case's own."""
    return kind or case.training or Training


def run_case(rank: int, name: str, setup: Setup, engine: str, kind: Kind | None = None) -> Trace:
    """Train a case from its beginning to its end, as one of the ranks; ``kind``: a scenario."""
    training = kind_of(CASES[name], kind)(CASES[name], setup, engine)
    trace = training.run(0, setup.steps)
    training.engine.close()
    return trace


def save_half(rank: int, name: str, setup: Setup, engine: str, folder: str) -> Trace:
    """Train to the middle and save; then a step more, which is saved under another tag."""
    middle, training = setup.steps // 2, Training(CASES[name], setup, engine)
    training.run(0, middle)
    training.engine.save_checkpoint(folder, tag=TAG, client_state=CLIENT)
    trace = training.run(middle, middle + 1).until(middle)
    training.engine.save_checkpoint(folder, tag="later")
    training.engine.close()
    return trace


def resume_half(rank: int, name: str, setup: Setup, engine: str, folder: str, tag: str | None = TAG) -> Trace:
    """Train from the middle to the end, from other initial weights; ``tag=None``: from a step later."""
    training = Training(CASES[name], setup, engine, seed=OTHER_SEED)
    path, state = training.engine.load_checkpoint(folder, **({} if tag is None else {"tag": tag}))
    assert path and (tag is None or state["epoch"] == CLIENT["epoch"]), (path, state)
    trace = training.run(setup.steps // 2 + (tag is None), setup.steps)
    training.engine.close()
    return trace


def said(rank: int, act: Callable[..., object], *args: Any) -> str:
    """The sentence of a refused act; other errors are none."""
    try:
        act(*args)
    except GptparError as error:
        return str(error)
    return ""


def reference_on_rank(rank: int, name: str, setup: Setup) -> Trace:
    return reference(CASES[name], setup)
