"""Engines that a program drops without ``close()``, as notebooks do."""

import gc
import threading
import weakref

import pytest
import torch

import gptpar

SECONDS = 30.0


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("offload", [{}, {"offload_optimizer": {"device": "cpu"}}])
def test_it_is_garbage_and_its_thread_ends(stage: int, offload: dict[str, object]) -> None:
    before = set(threading.enumerate())
    model = torch.nn.Linear(8, 1)
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **offload},
    }
    engine, *_ = gptpar.initialize(model=model, model_parameters=model.parameters(), config=config)
    loss = engine(torch.ones(4, 8)).sum()
    engine.backward(loss)
    engine.step()
    threads = set(threading.enumerate()) - before
    alive = weakref.ref(engine), weakref.ref(model)

    del engine, model, loss, _
    gc.collect()

    assert [one() for one in alive] == [None, None]
    assert any(thread.name == "gptpar-cpu-adam" for thread in threads) == bool(offload)
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)


def test_its_module_keeps_it_alive() -> None:
    model = torch.nn.Linear(8, 1)
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine, *_ = gptpar.initialize(model=model, model_parameters=model.parameters(), config=config)
    alive = weakref.ref(engine)
    del engine, _
    gc.collect()
    kept = alive()
    assert kept is not None
    kept.close()
