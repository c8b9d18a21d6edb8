"""Training in plain torch: what an engine has to give, number by number.

Parameters that a step does not use have a zero gradient: AdamW moves them by their moments and decays them. Master
weights and gradient sums have the widest dtype of all trained parameters, at least fp32. Losses are divided by the
number of micro-batches before the backward pass, as in torch's own loops, and sums by that of processes afterwards.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from tests.any_module.case import Batch, Case, Setup, make_optimizer

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
    """One process computes the micro-batches of all ranks; each rank has its own buffers.

    BatchNorm's statistics are those of a rank's micro-batch, as with DistributedDataParallel.
    """
    model = case.make_model()
    masters, trace = MasterCopies(case, model), Trace()
    buffers = [copy_of_buffers(model) for _ in range(setup.world)]
    for step in range(setup.steps):
        loss = 0.0
        for rank in range(setup.world):
            _restore_buffers(model, buffers[rank])
            for micro in range(setup.accumulation):
                loss += _add_micro_batch(case, setup, model, masters, case.make_batch(step, micro, rank, setup.world))
            buffers[rank] = copy_of_buffers(model)
        masters.average(setup.world)
        trace.losses.append(loss / setup.accumulation / setup.world)
        trace.gradients.append(masters.gradients())
        trace.norms.append(masters.step(setup.clip))
        trace.weights.append(copy_of_weights(model))
    trace.buffers = buffers[0]
    return trace


def _add_micro_batch(case: Case, setup: Setup, model: nn.Module, masters: MasterCopies, batch: Batch) -> float:
    """Add its gradients to the sums; returns its loss."""
    losses = case.losses_of(model, batch)
    for number, loss in enumerate(losses):
        again = case.shares_graph and number < len(losses) - 1
        (loss / setup.accumulation).backward(retain_graph=again)
    masters.add_gradients()
    return sum(loss.item() for loss in losses)


def a_loop(
    case: Case,
    steps: int,
    accumulation: int = 1,
    clip: float = 0.0,
    before_clip: Callable[[nn.Module], object] = lambda model: None,
    before_step: Callable[[nn.Module, int], object] = lambda model, step: None,
    after_step: Callable[[nn.Module, torch.optim.Optimizer], object] = lambda model, optimizer: None,
) -> tuple[list[float], Named]:
    """A user's own loop over rank 0's batches, which is right for engines whose ranks all have these.

    Returns:
        The norms of the gradients before clipping, and the last weights.
    """
    model, norms = case.make_model(), []
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trained)
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulation):
            (case.losses_of(model, case.make_batch(step, micro, 0, 1))[0] / accumulation).backward()
        before_clip(model)
        norms.append(nn.utils.clip_grad_norm_(trained, clip or float("inf")).item())
        before_step(model, step)
        optimizer.step()
        after_step(model, optimizer)
    return norms, copy_of_weights(model)


def weights_of_a_loop(*args: Any, **kwargs: Any) -> Named:
    return a_loop(*args, **kwargs)[1]


def assert_weights(found: Iterable[Named], wanted: Named) -> None:
    """Each rank's weights are those, to 1e-10 of the largest of each parameter."""
    for weights in found:
        for name, value in wanted.items():
            assert (weights[name] - value).abs().max() <= 1e-10 * value.abs().max(), name


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
