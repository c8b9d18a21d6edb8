"""TwinFlowAdamW attached to a module: who waits for whom, in every order of events."""

import copy
import gc
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from gptpar import TwinFlowAdamW
from gptpar.offload import machine
from gptpar.offload.events import What
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.elementwise import Done
from tests.offload_log import logged, starts_of
from tests.unit.offload.two_groups import WIDTH, Beside, Model, backward, equal, inputs, train


class Watched(CpuAdam):
    """Waits for leave before the end of each update."""

    def __init__(self) -> None:
        super().__init__(1)
        self.leave = threading.Semaphore(0)

    def order(self, *args: Any, **kwargs: Any) -> Callable[[], Done]:
        done = super().order(*args, **kwargs)

        def wait() -> Done:
            assert self.leave.acquire(timeout=10)
            return done()

        return wait


def test_each_layer_waits_for_its_own_parameters_only(closing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    adam = Watched()
    monkeypatch.setattr(machine, "make_host_kernel", lambda *_: adam)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    optimizer = closing(TwinFlowAdamW(model.parameters(), speculation="off"))
    optimizer.attach(model)
    before = copy.deepcopy(model)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()  # returns although nothing is updated yet
    seen: list[int] = []
    for place, layer in enumerate(model):
        layer.register_forward_hook(lambda *_, place=place: seen.append(place))
    forward = threading.Thread(target=model, args=(torch.ones(2, WIDTH),))
    forward.start()
    for place in range(3):
        forward.join(0.2)
        assert seen == list(range(place))
        adam.leave.release()
    forward.join(10)
    assert seen == [0, 1, 2]
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before.parameters(), strict=True))


@pytest.mark.parametrize("attached", [False, True])
def test_what_is_read_right_after_a_step_is_finished(attached: bool, closing: Any) -> None:
    """Unattached: the parameters. Attached: what state_dict and hooks of the step see."""
    pair, seen = closing(Beside(attached=attached)), list[torch.Tensor]()
    pair.train([1])
    values = pair.ours.state_dict() if attached else dict(pair.ours.named_parameters())
    torch.testing.assert_close(dict(values), dict(pair.plain.state_dict()), rtol=1e-12, atol=1e-12)
    pair.optimizer.register_step_post_hook(lambda *_: seen.append(pair.ours.third.weight.clone()))
    pair.train([2])
    torch.testing.assert_close(seen[0], pair.plain.third.weight, rtol=1e-12, atol=1e-12)


def test_a_step_that_is_not_taken_leaves_no_trace(closing: Any) -> None:
    """Speculation has written coming values; an evaluation, or zeroing the gradients, brings the old ones back."""
    pair = closing(Beside(attached=True, speculation="on"))
    ours, optimizer = pair.ours, pair.optimizer
    for forget in (lambda: ours(inputs(9)), optimizer.zero_grad, optimizer.state_dict, ours.state_dict):
        backward(optimizer, ours(inputs(1)))
        forget()
        equal(ours, pair.plain, rtol=0, atol=0)
    pair.train(range(1, 4))
    pair.assert_equal()


def test_more_than_the_last_backward_is_noticed(closing: Any) -> None:
    """A second micro-batch inside begins anew; a second backward of one forward would read coming values."""
    with logged() as log:
        pair = closing(Beside(attached=True, speculation="on"))
    ours, optimizer = pair.ours, pair.optimizer
    for step in range(3):
        one, other = inputs(step)
        optimizer.zero_grad()
        with optimizer.last_backward():
            ours(one, use=step % 3 != 0).backward()
            assert starts_of(log, What.SUBMITTED)
            ours(other, use=step % 3 != 0).backward()
        optimizer.step()
    train(pair.plain, pair.reference, range(3))
    pair.assert_equal()
    one, other = ours(inputs(0)), ours(inputs(1))
    with pytest.raises(RuntimeError, match="got a second gradient"), optimizer.last_backward():
        one.backward()
        other.backward()


def test_gradients_changed_after_they_were_sent_are_sent_again(closing: Any) -> None:
    pair = closing(Beside(attached=True, speculation="on"))
    for step in range(3):
        for model, optimizer in pair.each():
            optimizer.zero_grad()
            backward(optimizer, model(inputs(step)))
            assert model.third.weight.grad is not None
            model.third.weight.grad.mul_(-3.0)
            model.first.weight.grad = None
            optimizer.step()
    pair.assert_equal()


class Recomputed(nn.Module):
    """Attention, which reads parameters of a module inside it, and a block that is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.block = nn.MultiheadAttention(WIDTH, 2), nn.Linear(WIDTH, WIDTH)
        self.to(torch.float64)

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        x = x + self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]
        return torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False).square().mean()


def test_attention_and_recomputation_overlap_without_changing_a_bit(closing: Any) -> None:
    torch.manual_seed(0)
    models = [Recomputed()]
    models.append(copy.deepcopy(models[0]))
    with logged() as log:
        optimizers = [closing(TwinFlowAdamW(model.parameters(), lr=1e-2, speculation="on")) for model in models]
    optimizers[1].attach(models[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(10))
    optimizers[1].finish()
    equal(models[1], models[0], rtol=0, atol=0)
    assert optimizers[1].num_redone == 0
    log.events.clear()
    optimizers[1].step()
    assert not log.of(What.WAITED)  # every parameter is read by a module that will wait for it
    models[1](inputs(0)[0])
    assert {event.unit for event in log.of(What.WAITED)} == {str(place) for place in range(len(optimizers[1].homes))}


def test_a_copy_of_an_attached_module_is_a_module_of_its_own(closing: Any) -> None:
    """Copied or pickled, it is neither waited for nor updated."""
    model = Model()
    optimizer = closing(TwinFlowAdamW(model.parameters(), lr=1e-2))
    optimizer.attach(model)
    train(model, optimizer, range(2))
    optimizer.finish()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        equal(other, model, rtol=0, atol=0)
        assert torch.equal(other(inputs(0)), model(inputs(0))) and len(other.state_dict()) == len(model.state_dict())
        backward(optimizer, other(inputs(0)))
        optimizer.finish()
        equal(other, model, rtol=0, atol=0)


def test_an_optimizer_that_is_dropped_amid_a_step_leaves_the_old_parameters() -> None:
    """Speculation has written coming values; the module goes on without waiting for anybody."""
    before, model, untouched = threading.active_count(), Model(), Model()
    optimizer = TwinFlowAdamW(model.parameters(), speculation="on")
    optimizer.attach(model)
    backward(optimizer, model(inputs(1)))
    del optimizer
    gc.collect()
    assert threading.active_count() == before
    equal(model, untouched, rtol=0, atol=0)
    model(inputs(2)).backward()


@pytest.mark.parametrize("speculation", ["on", "off"])
def test_a_change_between_the_last_backward_and_the_step_is_refused(speculation: str, closing: Any) -> None:
    """The CPU may have updated the parameters already."""
    model = nn.Linear(WIDTH, WIDTH)
    optimizer = closing(TwinFlowAdamW(model.parameters(), speculation=speculation))
    optimizer.attach(model)
    with optimizer.last_backward():
        model(torch.ones(2, WIDTH)).sum().backward()
    with torch.no_grad():
        model.weight.add_(0.5)
    with pytest.raises(RuntimeError, match=r"were changed between last_backward\(\) and step\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
