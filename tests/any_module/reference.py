"""Training in plain torch: what an engine has to give, number by number.

Parameters that a step does not use have a zero gradient: AdamW moves them by their moments and decays them. Master
weights and gradient sums have the widest dtype of all trained parameters, at least fp32. Losses are divided by the
number of micro-batches before the backward pass, as in torch's own loops, and sums by that of processes afterwards.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from tests.any_module.case import Case, Model, Setup, make_optimizer

Named = dict[str, Tensor]


@dataclass
class Trace:
    """What some steps gave; each list has an entry a step.

    Attributes:
        losses: mean over micro-batches and ranks.
        gradients: averaged, before clipping, by the parameter's name.
        norms: of the gradient before clipping.
        weights: after the step.
        buffers: after the last step, rank 0's.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Named] = field(default_factory=list)
    weights: list[Named] = field(default_factory=list)
    buffers: Named = field(default_factory=dict)

    def since(self, step: int) -> "Trace":
        """Without the first steps."""
        return Trace(self.losses[step:], self.norms[step:], self.gradients[step:], self.weights[step:], self.buffers)

    def until(self, step: int) -> "Trace":
        """The first steps alone, without buffers."""
        return Trace(self.losses[:step], self.norms[:step], self.gradients[:step], self.weights[:step])

    def then(self, later: "Trace") -> "Trace":
        """The steps of both."""
        return Trace(
            self.losses + later.losses,
            self.norms + later.norms,
            self.gradients + later.gradients,
            self.weights + later.weights,
            later.buffers,
        )


class MasterCopies:
    """Gradient sums and AdamW of the trainable parameters, in one dtype: fp32 or wider."""

    def __init__(self, case: Case, model: nn.Module):
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        wide = functools.reduce(torch.promote_types, (p.dtype for p in self.trainable.values()), torch.float32)
        self.of = {p: nn.Parameter(p.detach().to(wide, copy=True)) for p in self.trainable.values()}
        self.zero()
        self.optimizer = make_optimizer(self._groups(case.groups(model)))
        self.scheduler = LambdaLR(self.optimizer, case.schedule) if case.schedule else None

    def _groups(self, given: Any) -> list[dict[str, Any]]:
        groups = list(given)
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        return [{**group, "params": [self.of[p] for p in group["params"] if p.requires_grad]} for group in groups]

    def zero(self) -> None:
        for master in self.of.values():
            master.grad = torch.zeros_like(master)

    def add_gradients(self) -> None:
        """Take what a backward pass has left."""
        for p, master in self.of.items():
            if p.grad is not None:
                assert master.grad is not None
                master.grad += p.grad.to(master.dtype)
                p.grad = None

    def average(self, addends: int) -> None:
        """Make sums means."""
        for master in self.of.values():
            _grad_of(master).div_(addends)

    def gradients(self) -> Named:
        return {name: _grad_of(self.of[p]).clone() for name, p in self.trainable.items()}

    @torch.no_grad()
    def step(self, clip: float) -> float:
        """Returns the norm before clipping. Parameters that are frozen now have no gradient: AdamW skips them."""
        for p, master in self.of.items():
            if not p.requires_grad:
                master.grad = None
        norm = nn.utils.clip_grad_norm_(list(self.of.values()), clip or float("inf"))
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        for p, master in self.of.items():
            p.copy_(master)
        self.zero()
        return norm.item()


def reference(case: Case, setup: Setup) -> Trace:
    """One process computes the micro-batches of all ranks; each rank has its own buffers."""
    assert not case.synchronised or setup.world == 1, "see reference_of_rank"
    model = case.make_model()
    masters, trace = MasterCopies(case, model), Trace()
    buffers = [copy_of_buffers(model) for _ in range(setup.world)]
    for step in range(setup.steps):
        losses = []
        for rank in range(setup.world):
            _restore_buffers(model, buffers[rank])
            losses += [loss / setup.world for loss in _accumulate(case, setup, model, masters, step, rank)]
            buffers[rank] = copy_of_buffers(model)
        masters.average(setup.world)
        _take_step(setup, model, masters, sum(losses), trace)
    trace.buffers = buffers[0]
    return trace


def reference_of_rank(rank: int, case: Case, setup: Setup) -> Trace:
    """DistributedDataParallel of the same size, for one of its ranks: all run this together."""
    model = case.make_model()
    masters, trace = MasterCopies(case, model), Trace()
    parallel = DistributedDataParallel(model)
    for step in range(setup.steps):
        losses = _accumulate(case, setup, parallel, masters, step, rank, parallel.no_sync)
        _take_step(setup, model, masters, mean_over_ranks(sum(losses)), trace)
    trace.buffers = copy_of_buffers(model)
    return trace


def _accumulate(
    case: Case,
    setup: Setup,
    model: Model,
    masters: MasterCopies,
    step: int,
    rank: int,
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[float]:
    """Add a rank's micro-batches of a step to the gradient sums; the returned losses' sum is its mean loss.

    Gradients stay in ``.grad`` until the last one: DistributedDataParallel averages what it finds there.
    """
    total = []
    for micro in range(setup.accumulation):
        with nullcontext() if micro == setup.accumulation - 1 else no_sync():
            losses = case.losses_of(model, case.make_batch(step, micro, rank, setup.world))
            for number, loss in enumerate(losses):
                again = case.shares_graph and number < len(losses) - 1
                (loss / setup.accumulation).backward(retain_graph=again)
        total.append(sum(loss.item() for loss in losses) / setup.accumulation)
        if no_sync is nullcontext:
            masters.add_gradients()
    masters.add_gradients()
    return total


def _take_step(setup: Setup, model: nn.Module, masters: MasterCopies, loss: float, trace: Trace) -> None:
    trace.losses.append(loss)
    trace.gradients.append(masters.gradients())
    trace.norms.append(masters.step(setup.clip))
    trace.weights.append(copy_of_weights(model))


def weights_of_a_loop(
    case: Case,
    steps: int,
    accumulation: int = 1,
    clip: float = 0.0,
    before_step: Callable[[nn.Module, int], object] = lambda model, step: None,
    after_step: Callable[[nn.Module], object] = lambda model: None,
) -> Named:
    """The last weights of a user's own loop over rank 0's batches: what engines have whose ranks all have these."""
    model = case.make_model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trained)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulation):
            (case.losses_of(model, case.make_batch(step, micro, 0, 1))[0] / accumulation).backward()
        if clip:
            nn.utils.clip_grad_norm_(trained, clip)
        before_step(model, step)
        optimizer.step()
        after_step(model)
    return copy_of_weights(model)


def assert_weights(found: Iterable[Named], wanted: Named) -> None:
    """Each rank's weights are those, to 1e-10."""
    for weights in found:
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-10)


def copy_of_weights(model: nn.Module) -> Named:
    """By name; a tied one under its first."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def copy_of_buffers(model: nn.Module) -> Named:
    """By name, those that are not saved too."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def mean_over_ranks(number: float) -> float:
    """Of all processes."""
    total = torch.tensor(number, dtype=torch.float64)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(total)
        total /= torch.distributed.get_world_size()
    return total.item()


@torch.no_grad()
def _restore_buffers(model: nn.Module, values: Named) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def _grad_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def ranks_agree(traces: Sequence[Trace]) -> bool:
    """Whether all ranks hold the same weights after every step, bit by bit."""
    first = traces[0].weights
    return all(
        torch.equal(mine[name], theirs[name])
        for other in traces[1:]
        for mine, theirs in zip(first, other.weights, strict=True)
        for name in mine
    )
