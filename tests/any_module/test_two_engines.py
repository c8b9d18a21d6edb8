"""Loops with two engines, whose losses lead through each other's modules, against the same loop in plain torch."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gptpar
from tests.any_module.case import SAMPLES, WIDTH, Setup, fp64, make_optimizer
from tests.any_module.cases import CASES
from tests.any_module.layouts import each_of
from tests.any_module.matrix import Bench
from tests.any_module.oddities.flow import Recomputed
from tests.any_module.on_rank import said
from tests.any_module.reference import Named, assert_weights, copy_of_weights
from tests.any_module.zoo import Mlp

STEPS, TOLERANCE = 4, 1e-10
SETUPS = [Setup(1, 3, 0.6), Setup(2, 0, 0.6), Setup(2, 1), Setup(2, 2, 0.6), Setup(2, 3)]


def networks(recomputes: bool) -> tuple[nn.Module, nn.Module]:
    """(generator, discriminator), the same values at every call; ``recomputes``: their activations are."""
    with fp64():
        torch.manual_seed(0)
        build = partial(Recomputed, reentrant=False) if recomputes else Mlp
        return build(), build()


def batch_of(step: int, rows: slice) -> tuple[Tensor, Tensor]:
    """(real samples, noise)"""
    generator = torch.Generator().manual_seed(step)
    real, noise = torch.randn(2, 2 * SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return real[rows], noise[rows]


def score(scores: Tensor, real: bool) -> Tensor:
    logits = scores.mean(1)
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))


def gan_in_plain_torch(recomputes: bool) -> tuple[list[float], list[Named]]:
    """(losses of generator and discriminator by turns, last weights of both)"""
    gen, disc = networks(recomputes)
    gen_adam, disc_adam = make_optimizer(gen.parameters()), make_optimizer(disc.parameters())
    losses = []
    for step in range(STEPS):
        real, noise = batch_of(step, slice(None))
        disc_adam.zero_grad()
        score(disc(real), True).backward()
        fake = gen(noise)
        loss = score(disc(fake.detach()), False)
        loss.backward()
        nn.utils.clip_grad_norm_(disc.parameters(), 0.5)
        disc_adam.step()
        gen_adam.zero_grad()
        gen_loss = score(disc(fake), True)
        gen_loss.backward()
        nn.utils.clip_grad_norm_(gen.parameters(), 0.5)
        gen_adam.step()
        losses += [gen_loss.item(), loss.item()]
    return losses, [copy_of_weights(gen), copy_of_weights(disc)]


def engines_of(setup: Setup, recomputes: bool = False) -> list[Any]:
    """For both networks."""
    return [gptpar.initialize(model=net, config=setup.config(CASES["mlp"]))[0] for net in networks(recomputes)]


def rows_of(rank: int, setup: Setup) -> slice:
    """This rank's part of a batch."""
    return slice(None) if setup.world == 1 else slice(rank * SAMPLES, (rank + 1) * SAMPLES)


def closed(engines: list[Any]) -> list[Named]:
    """The weights of both."""
    for engine in engines:
        engine.close()
    return [copy_of_weights(engine.module) for engine in engines]


def gan(rank: int, setup: Setup, recomputes: bool) -> tuple[list[float], list[Named]]:
    """The same loop; losses are this rank's."""
    gen, disc = engines_of(setup, recomputes)
    losses = []
    for step in range(STEPS):
        real, noise = batch_of(step, rows_of(rank, setup))
        disc.zero_grad()
        with disc.no_sync() if step % 2 else nullcontext():
            disc.backward(score(disc(real), True))
        fake = gen(noise)
        loss = score(disc(fake.detach()), False)
        disc.backward(loss)
        disc.step()
        gen.zero_grad()
        disc.module.requires_grad_(False)  # as many loops do, to save the discriminator's gradients
        gen_loss = score(disc(fake), True)
        gen.backward(gen_loss)
        disc.module.requires_grad_(True)
        if setup.stage == 3 and setup.world > 1:
            assert not any(disc.engine.gatherer.is_present(unit.name) for unit in disc.engine.table.units)
        gen.step()
        losses += [gen_loss.item(), loss.item()]
    return losses, closed([gen, disc])


@each_of(SETUPS)
def test_gan(bench: Bench, setup: Setup) -> None:
    recomputes = (setup.stage == 3) == (setup.ratio > 0)
    wanted_losses, wanted = gan_in_plain_torch(recomputes)
    found = bench.on_ranks(setup.world, gan, setup, recomputes)
    means = [sum(some) / len(found) for some in zip(*(losses for losses, _ in found), strict=True)]
    assert means == pytest.approx(wanted_losses, rel=TOLERANCE)
    for number, net in enumerate(wanted):
        assert_weights((nets[number] for _, nets in found), net)


# A joint loss: each engine's backward gives its own gradients.


def joint(rank: int, setup: Setup) -> list[Named]:
    engines = engines_of(setup)
    for step in range(3):
        loss = engines[1](engines[0](batch_of(step, rows_of(rank, setup))[1])).square().mean()
        engines[0].backward(loss, retain_graph=True)
        engines[1].backward(loss)
        for engine in engines:
            engine.step()
    return closed(engines)


@each_of([Setup(1, 0), Setup(2, 3, 0.6)])
def test_joint_loss(bench: Bench, setup: Setup) -> None:
    nets = networks(recomputes=False)
    optimizers = [make_optimizer(net.parameters()) for net in nets]
    for step in range(3):
        nets[1](nets[0](batch_of(step, slice(None))[1])).square().mean().backward()
        for net, optimizer in zip(nets, optimizers, strict=True):
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    for encoder, decoder in bench.on_ranks(setup.world, joint, setup):
        assert_weights([encoder], copy_of_weights(nets[0]))
        assert_weights([decoder], copy_of_weights(nets[1]))


def step_without_backward(rank: int) -> str:
    """What an engine says that takes a step after another engine's backward pass alone."""
    engines = engines_of(Setup())
    engines[1].backward(engines[1](engines[0](batch_of(0, slice(None))[1])).square().mean())
    engines[1].step()
    return said(rank, engines[0].step)


def test_each_engine_needs_its_own_backward(bench: Bench) -> None:
    (told,) = bench.on_ranks(1, step_without_backward)
    assert "no engine.backward(loss)" in told
