"""Recorded steps of any module on a GPU against launched ones: the same bits."""

import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gptpar
from gptpar.deepspeed.engines.engine import ModuleEngine
from gptpar.deepspeed.engines.graph import LAUNCHED_STEPS
from gptpar.offload.events import EventLog, What

pytestmark = pytest.mark.gpu

VOCABULARY, WIDTH, LENGTH, STEPS = 512, 128, 64, 12


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)  # deterministic in every format
        x = x + self.drop(self.out((scores @ v).transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norms[1](x)))))


class Tiny(nn.Module):
    """Like GPT-2, with a tied embedding.

    Attributes:
        calls: of its forward in Python: replays make none.
        waits: whether it waits for the device.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.calls, self.waits = 0, False

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        # one-hot products: an embedding's backward pass adds in any order
        x = F.one_hot(input_ids, VOCABULARY).to(self.tokens.weight.dtype) @ self.tokens.weight + self.places(places)
        for block in self.blocks:
            x = block(x)
        if self.waits:
            x.sum().item()
        logits = self.head(self.norm(x))[:, :-1]
        return {"loss": F.cross_entropy(logits.flatten(0, 1).float(), input_ids[:, 1:].flatten())}


def make(graph: bool, ratio: float, accumulation: int = 1, dropout: float = 0.0, **more: Any) -> ModuleEngine:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 20}},
        "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu", "ratio": ratio}},
        "steps_per_print": 1000,
        "gptpar": {"step_graph": graph, **more.pop("gptpar", {})},
        **more,
    }
    return gptpar.initialize(model=Tiny(dropout).cuda(), config=config)[0]


def batches(length: int = LENGTH) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield {"input_ids": torch.randint(0, VOCABULARY, (4, length), generator=generator)}


def weights_of(engine: ModuleEngine) -> dict[str, torch.Tensor]:
    with engine.gathered():
        return {name: value.clone() for name, value in engine.module.state_dict().items()}


def train(engine: ModuleEngine, between: bool = False) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """(losses and norms, final weights); ``between``: a step of another length amid the others."""
    torch.manual_seed(1)
    data, other, seen = batches(), batches(LENGTH // 2), []
    for step in range(STEPS):
        loss = engine.train_batch(other if between and step in (6, 7) else data)
        assert loss.is_cuda
        seen.append((loss, engine.get_global_grad_norm()))
    weights = weights_of(engine)
    engine.close()
    return [(float(loss), norm) for loss, norm in seen], weights


def check(recorded: ModuleEngine, launched: ModuleEngine, *, between: bool = False) -> None:
    (got, weights), (wanted, theirs) = train(recorded, between), train(launched, between)
    accumulation = recorded.options.batch.accumulation_steps
    assert launched.module.calls == STEPS * accumulation
    assert recorded.module.calls == (LAUNCHED_STEPS + 1 + 2 * between) * accumulation, "nothing was replayed"
    assert got == wanted
    assert [name for name, value in theirs.items() if not torch.equal(weights[name], value)] == []
    assert wanted[-1][0] < wanted[0][0]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("ratio", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_recorded_steps_are_the_launched_ones(precision: str, ratio: float, accumulation: int) -> None:
    numbers: dict[str, Any] = {} if precision == "fp32" else {"bf16": {"enabled": True}}
    recorded, launched = (make(graph, ratio, accumulation, **numbers) for graph in (True, False))
    check(recorded, launched)


@pytest.mark.parametrize("ratio", [0.0, 0.6])
def test_a_moving_loss_scale(ratio: float) -> None:
    numbers = {"fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}}
    recorded, launched = (make(graph, ratio, **numbers) for graph in (True, False))
    (got, weights), (wanted, theirs) = train(recorded), train(launched)
    assert str(got) == str(wanted) and recorded.loss_scaler.value == launched.loss_scaler.value < 2**24
    assert all(torch.equal(weights[name], value) for name, value in theirs.items())


@pytest.mark.parametrize("ratio", [0.0, 0.6, 1.0])
def test_launched_steps_between_replays(ratio: float) -> None:
    # Uncompiled: another length may recompile a block for any length, and the second engine would begin with that code.
    recorded, launched = (make(graph, ratio, gptpar={"compile": False}) for graph in (True, False))
    check(recorded, launched, between=True)


def test_compiled_blocks() -> None:
    recorded, launched = (make(graph, 0.6, gptpar={"compile": True}, bf16={"enabled": True}) for graph in (True, False))
    check(recorded, launched)


def test_dropout_draws_the_same_numbers() -> None:
    """Torch's default generator goes on in replays as it does in launched steps."""
    recorded, launched = (make(graph, 0.6, dropout=0.1) for graph in (True, False))
    check(recorded, launched)


@pytest.mark.parametrize("ratio", [0.0, 0.6])
def test_what_waits_for_the_device_is_launched(ratio: float) -> None:
    recorded, launched = (make(graph, ratio, dropout=0.1) for graph in (True, False))
    recorded.module.waits = launched.module.waits = True
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got, weights = train(recorded)
    (told,) = [str(one.message) for one in said if "recording it as a graph failed" in str(one.message)]
    assert "synchroniz" in told and f"{__file__}:" in told
    wanted, theirs = train(launched)
    assert got == wanted and all(torch.equal(weights[name], value) for name, value in theirs.items())
    assert recorded.module.calls == STEPS + 1
    assert torch.cuda.get_sync_debug_mode() == 0


def steps_one_by_one(engine: ModuleEngine, observes: bool) -> dict[str, torch.Tensor]:
    """Final weights; an observer compares the weights before each backward pass with those before the step."""
    log = EventLog()
    if engine.host is not None:
        engine.host.shared.log = log
    data = batches()
    for step in range(STEPS):
        before = weights_of(engine) if observes else {}
        engine.backward(engine(next(data)["input_ids"].cuda())["loss"])
        if step % 2:
            time.sleep(0.02)  # else the CPU is still at work
        between = weights_of(engine) if observes else {}
        assert [name for name, value in before.items() if not torch.equal(between[name], value)] == []
        engine.step()
    final = weights_of(engine)
    if engine.host is not None and observes:
        assert log.of(What.TAKEN_BACK), "the observer never met a step at work"
    elif engine.host is not None:
        assert engine.host.num_ahead > 0, "the CPU never worked ahead, so that nothing was tested"
    engine.close()
    return final


@pytest.mark.parametrize("ratio", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_before_its_step_a_weight_is_the_last_steps(precision: str, ratio: float) -> None:
    """Also where the CPU has worked ahead; and who looked has the weights of who did not."""
    numbers: dict[str, Any] = {} if precision == "fp32" else {"bf16": {"enabled": True}}
    numbers["gradient_clipping"] = 1e3  # each speculation is right
    seen, unseen = (steps_one_by_one(make(False, ratio, **numbers), observes) for observes in (True, False))
    assert [name for name, value in unseen.items() if not torch.equal(seen[name], value)] == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_on_the_gpu_is_not_there_twice(precision: str) -> None:
    """The most memory while the engine is built is what it has afterwards, and less than half of the model."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)) for _ in range(8))).cuda()
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    config: dict[str, Any] = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    config |= {} if precision == "fp32" else {"bf16": {"enabled": True}}
    torch.cuda.reset_peak_memory_stats()
    engine, *_ = gptpar.initialize(model=model, config=config)
    assert torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() < num_bytes / 2
    engine.close()


def one_of_two(engine: ModuleEngine) -> dict[str, torch.Tensor]:
    """Final weights; every second step has two micro-batches, of which the configuration says nothing."""
    data = batches()
    for step in range(STEPS):
        for last in (True,) if step % 2 else (False, True):
            engine.set_gradient_accumulation_boundary(last)
            engine.backward(engine(next(data)["input_ids"].cuda())["loss"])
        engine.step()
    weights = weights_of(engine)
    engine.close()
    return weights


@pytest.mark.parametrize("speculation", ["off", "on"])
def test_copies_of_16_bit_gradients_become_as_wide_as_their_sums(
    speculation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring's slots, made for bf16, are replaced by wider ones when the first fp32 sum comes."""
    monkeypatch.setattr("gptpar.offload.gpu_transfers.RING_BYTES", 1 << 20)
    # With the host, the first pass is observed and runs uncompiled, which rounds differently.
    more: dict[str, Any] = {"bf16": {"enabled": True}, "gptpar": {"speculation": speculation, "compile": False}}
    there, here = (make(False, ratio, **more) for ratio in (1.0, 0.0))
    transfers = there.host._transfers
    slot_bytes = transfers.slot_bytes
    weights, wanted = one_of_two(there), one_of_two(here)
    assert transfers.slot_bytes == 2 * slot_bytes
    assert [name for name, value in wanted.items() if not torch.equal(weights[name], value)] == []


def test_train_batch_counts_the_steps_that_frozen_parameters_missed() -> None:
    """The numbers of a step are read late there; with engine.backward they are known before the next step begins."""

    def ends(by_batch: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3)).double()
        config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
        engine: Any = gptpar.initialize(model=model, config=config, loss_fn=lambda y, batch: y.square().mean())[0]
        for step in range(7):
            model[0].weight.requires_grad_(step not in (1, 2, 4))
            x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            if by_batch:
                engine.train_batch(iter([x]))
            else:
                engine.backward(engine(x.cuda()).square().mean())
                engine.step()
        engine.close()
        return [p.detach() for p in model.parameters()]

    for got, want in zip(ends(by_batch=True), ends(by_batch=False), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
