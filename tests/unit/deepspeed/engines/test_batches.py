"""train_batch and eval_batch on one process: micro-batches, losses, modes, and what is refused."""

from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gptpar
from gptpar.deepspeed.engines.batches import BatchSource, call_with, loss_of
from gptpar.deepspeed.engines.engine import ModuleEngine
from gptpar.errors import GptparError

CPU = torch.device("cpu")
NUMBER = torch.tensor(2.0)
Output = namedtuple("Output", ["logits", "loss"])


def make_engine(module: nn.Module, accumulation: int = 1, **given: Any) -> ModuleEngine:
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation}
    optimizer = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.0}}
    config = {**sizes, "gradient_clipping": 0.0, "optimizer": optimizer}
    return gptpar.initialize(model=module, config=config, **given)[0]


def test_how_a_module_is_called() -> None:
    def called(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    assert call_with(called, {"a": 1, "b": 2}) == ((), {"a": 1, "b": 2})
    assert call_with(called, UserDict(a=1)) == ((), {"a": 1})
    assert call_with(called, (1, [2])) == ((1, [2]), {})
    assert call_with(called, [1, 2]) == ((1, 2), {})
    assert call_with(called, NUMBER) == ((NUMBER,), {})
    assert call_with(called, "text") == (("text",), {})


def test_where_the_loss_is() -> None:
    more = torch.ones(3)
    outputs = [NUMBER, NUMBER[None], {"loss": NUMBER, "logits": more}, SimpleNamespace(loss=NUMBER), (NUMBER, more)]
    for output in [*outputs, Output(more, NUMBER)]:
        found = loss_of(output, None, None)
        assert found.shape == () and float(found) == 2
    assert float(loss_of((3.0, more), 4.0, lambda output, batch: NUMBER * output[0] * batch)) == 24


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (torch.ones(3), r"returned a float32 tensor of shape \(3,\) that requires no gradient, and a scalar"),
        (torch.tensor(3), "an? int64 tensor of shape"),
        (SimpleNamespace(loss=None), "a SimpleNamespace whose loss is None"),
        ({"logits": NUMBER}, "returned a dict, and"),
        ((), "returned a tuple, and"),
        ([NUMBER, NUMBER], "returned a list, and"),
    ],
)
def test_what_is_no_loss_is_refused(output: Any, said: str) -> None:
    with pytest.raises(GptparError, match=said):
        loss_of(output, None, None)
    with pytest.raises(GptparError, match="loss_fn returned a list"):
        loss_of(output, None, lambda output, batch: [NUMBER])


def test_batches_are_taken_and_moved() -> None:
    (first,) = BatchSource(1, torch.device("meta")).take(iter([{"x": NUMBER, "n": 1}]))
    assert first["x"].is_meta and first["n"] == 1
    with pytest.raises(GptparError, match="ended after 2 of the step's 3 micro-batches"):
        BatchSource(3, CPU).take(iter([NUMBER, NUMBER]))
    with pytest.raises(GptparError, match="0 micro-batches are asked for"):
        BatchSource(3, CPU).take(iter([NUMBER]), 0)
    with pytest.raises(TypeError, match=r"not a list: call iter\(loader\) once"):
        BatchSource(1, CPU).take([NUMBER])  # type: ignore[arg-type]


class Regression(nn.Module):
    """Returns a loss in one of the usual ways."""

    def __init__(self, shape: Callable[[torch.Tensor], Any] = lambda loss: loss):
        super().__init__()
        self.linear, self.drop, self.shape = nn.Linear(3, 1), nn.Dropout(0.5), shape
        self.modes: list[tuple[bool, bool]] = []

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        self.modes.append((self.training, self.drop.training))
        return self.shape(F.mse_loss(self.linear(x), y))


def samples(number: int) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(number):
        x = torch.randn(2, 3, generator=generator)
        yield {"x": x, "y": x.sum(1, keepdim=True)}


def test_a_step_is_that_of_the_loop() -> None:
    model = Regression(lambda loss: {"loss": loss})
    other = Regression()
    other.load_state_dict(model.state_dict())
    engine, loop = make_engine(model, 2), make_engine(other, 2)
    data = samples(6)
    for step in range(3):
        losses = []
        for batch in list(samples(2 * step + 2))[-2:]:
            loss = loop(**batch)
            loop.backward(loss)
            loop.step()
            losses.append(loss.item())
        got = engine.train_batch(data)
        assert got.dtype == torch.float32 and not got.requires_grad and got.shape == ()
        assert float(got) == pytest.approx(sum(losses) / 2, rel=1e-6)
        assert engine.get_global_grad_norm() == loop.get_global_grad_norm()
        assert torch.equal(model.linear.weight, other.linear.weight)
    assert (engine.global_steps, engine.micro_steps) == (loop.global_steps, loop.micro_steps) == (3, 6)
    with pytest.raises(StopIteration):
        engine.train_batch(data)


def test_the_training_data_is_repeated() -> None:
    data = [(batch["x"][0], batch["y"][0]) for batch in samples(3)]
    engine = make_engine(Regression(), 2, training_data=data)
    losses = [float(engine.train_batch()) for _ in range(40)]
    assert losses[-1] < 0.1 * losses[0] and engine.global_steps == 40


def test_the_data_may_be_changed_between_steps() -> None:
    """A loader begins again after its end; an iterator ends, as one that is passed does."""
    source = BatchSource(2, CPU)
    with pytest.raises(GptparError, match="pass an iterator, or training_data"):
        source.take(None)
    ones, twos, nothing = (torch.full((3,), value).split(1) for value in (1, 2, 0))
    for loader, value in ((ones, 1), (twos, 2), (ones, 1)):
        source.loader = loader
        assert [torch.cat(source.take(None)).tolist() for _ in range(3)] == [[value] * 2] * 3
    source.loader = iter(twos)
    assert torch.cat(source.take(None)).tolist() == [2, 2]
    with pytest.raises(GptparError, match="ended after 1 of the step's 2"):
        source.take(None)
    with pytest.raises(StopIteration):
        source.take(None)
    source.loader = nothing[:0]
    with pytest.raises(GptparError, match="has no batch"):
        source.take(None)


def test_evaluation_leaves_modes_and_the_step_at_work() -> None:
    model = Regression()
    model.drop.eval()
    engine = make_engine(model, 2)
    first, second, *others = samples(4)
    loss = engine(**first)
    engine.backward(loss)
    engine.step()
    got = engine.eval_batch(iter(others))
    wanted = sum(float(F.mse_loss(model.linear(b["x"]), b["y"])) for b in others) / 2
    assert float(got) == pytest.approx(wanted, rel=1e-6) and not got.requires_grad
    assert model.modes == [(True, False), (False, False), (False, False)]
    assert model.training and not model.drop.training and engine.training
    engine.backward(engine(**second))
    engine.step()
    assert engine.global_steps == 1
    with pytest.raises(StopIteration):
        engine.eval_batch(iter([]))


def test_an_error_of_the_module_forgets_the_step() -> None:
    model = Regression(lambda loss: None)
    engine = make_engine(model, 2)
    with pytest.raises(GptparError, match="returned None"):
        engine.eval_batch(samples(2))
    assert model.training and model.drop.training
    model.shape = lambda loss: 1 / 0
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            engine.train_batch(samples(2))
    model.shape = lambda loss: (loss,)
    engine.train_batch(samples(2))
    assert engine.global_steps == 1


def test_what_has_no_meaning_is_refused() -> None:
    engine = make_engine(Regression(), 2)
    engine.backward(engine(**next(samples(1))))
    engine.step()
    with pytest.raises(GptparError, match="within a step, 1 of whose micro-batches are done"):
        engine.train_batch(samples(2))
    engine.zero_grad()
    with engine.no_sync():
        with pytest.raises(GptparError, match="no_sync"):
            engine.train_batch(samples(2))
        with pytest.raises(GptparError, match="inside no_sync"):
            engine.step()  # would count a micro-batch and take no step, without a word
    with torch.no_grad(), pytest.raises(GptparError, match="requires no gradient"):
        engine.train_batch(samples(2))
    engine.train_batch(samples(2))
    assert engine.global_steps == 1
    engine.close()
    with pytest.raises(GptparError, match="closed"):
        engine.train_batch(samples(2))
