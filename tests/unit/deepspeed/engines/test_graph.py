"""Steps of any module, recorded and replayed, against the same steps launched: the same bits."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import repeat
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gptpar
from gptpar.adapter.options import read_options
from gptpar.deepspeed.engines.engine import ModuleEngine
from gptpar.deepspeed.engines.graph import LAUNCHED_STEPS, RecordedWork, _warn, check_graph, wants_graph
from gptpar.errors import ConfigError
from tests.python_recorder import PythonRecorder

VOCABULARY, WIDTH = 11, 8


def block(dropout: float) -> nn.Module:
    up, down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
    return nn.Sequential(nn.LayerNorm(WIDTH), up, nn.GELU(), down, nn.Dropout(dropout))


class Tiny(nn.Module):
    """A language model with a tied embedding, and a running mean in a buffer.

    Attributes:
        calls: of its forward in Python: replays make none.
        trouble: called in each forward.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block(dropout) for _ in range(3))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.calls = 0
        self.trouble: Callable[[torch.Tensor], object] = lambda x: None

    def forward(self, tokens: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        self.calls += 1
        x = self.embedding(tokens)
        for number in (0, 1, 2):
            x = x + self.blocks[number](x)
        self.trouble(x)
        self.mean.lerp_(x.detach().float().mean((0, 1)), 0.1)
        x = x - self.mean.to(x.dtype)
        logits = self.head(x)[:, :-1].flatten(0, 1)
        return {"loss": scale * F.cross_entropy(logits.float(), tokens[:, 1:].flatten())}


def make(ratio: float = 0.0, accumulation: int = 1, dropout: float = 0.0, **more: Any) -> ModuleEngine:
    torch.manual_seed(0)
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation}
    config: dict[str, Any] = {
        **sizes,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.05, "warmup_type": "linear"}},
        **more,
    }
    if ratio:
        config["zero_optimization"] = {"stage": 0, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
    return gptpar.initialize(model=Tiny(dropout), config=config)[0]


def record(engine: ModuleEngine) -> PythonRecorder:
    """Let an engine on the CPU record its steps."""
    recorder = PythonRecorder()
    engine._recorded = RecordedWork(engine.module, engine._work, engine.engine, recorder)
    return recorder


def make_both(*given: Any, **more: Any) -> tuple[ModuleEngine, ModuleEngine, PythonRecorder]:
    """Two equal engines: one that launches its steps, and one that records them."""
    launched, recorded = make(*given, **more), make(*given, **more)
    return launched, recorded, record(recorded)


def batches(length: int = 6, seed: int = 0) -> Iterator[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield (torch.randint(0, VOCABULARY, (2, length), generator=generator),)


def train(engine: ModuleEngine, data: Iterator[Any], steps: int = 1) -> list[tuple[float, float]]:
    """Losses and norms."""
    return [(float(engine.train_batch(data)), engine.get_global_grad_norm()) for _ in range(steps)]


def assert_same(one: ModuleEngine, other: ModuleEngine) -> None:
    """And close both."""
    states = []
    for engine in (one, other):
        states.append(engine.module_state_dict())
        engine.close()
    assert [name for name, value in states[0].items() if not torch.equal(value, states[1][name])] == []


FP16 = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ratio", "accumulation", "precision"),
    [(0.0, 3, {"bf16": {"enabled": True}}), (0.6, 1, {"fp16": FP16}), (0.6, 3, {}), (1.0, 1, {})],
)
def test_recorded_steps_are_the_launched_ones(ratio: float, accumulation: int, precision: dict[str, Any]) -> None:
    """fp16: the scale halves at overflows and doubles after two good steps; a replay must not keep the first one."""
    launched, recorded, recorder = make_both(ratio, accumulation, **precision)
    data, same, scales = batches(), batches(), []
    for _ in range(12):
        assert str(train(recorded, data)) == str(train(launched, same))
        assert recorded.loss_scaler.value == launched.loss_scaler.value
        scales.append(recorded.loss_scaler.value)
    assert recorder.recordings == 1 and recorded.module.calls == (LAUNCHED_STEPS + 1) * accumulation
    assert (recorder.replays == 12 - LAUNCHED_STEPS) == (ratio == 0)  # else cut into parts
    assert recorded.micro_steps == 12 * accumulation
    assert (len(set(scales[LAUNCHED_STEPS + 1 :])) > 1) == ("fp16" in precision)
    assert_same(recorded, launched)


def test_a_replay_takes_the_present_loss_scale() -> None:
    """A sixteenth of the recorded scale: a replay with the recorded one would have 16 times the norm."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
        "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1000},
    }
    engine = gptpar.initialize(model=nn.Linear(4, 1), config=config, loss_fn=lambda y, x: y.float().square().mean())[0]
    recorder, batch = record(engine), torch.ones(2, 4, dtype=torch.float16)
    seen = train(engine, repeat(batch), LAUNCHED_STEPS + 1)
    engine.loss_scaler.value = 16.0
    seen += train(engine, repeat(batch))
    assert recorder.recordings == 1 and engine.loss_scaler.value == 16.0
    # The output is y = sum(w) + b, the loss y * y, and each of the five gradients 2 * y.
    assert [norm for _, norm in seen] == pytest.approx([2 * math.sqrt(5 * loss) for loss, _ in seen], rel=1e-3)
    engine.close()


@pytest.mark.parametrize("ratio", [0.0, 0.6])
@pytest.mark.slow
def test_other_work_between_replays(ratio: float) -> None:
    """Steps of another length, a loop's step, an evaluation, and a step that is forgotten."""
    launched, recorded, recorder = make_both(ratio)
    found: list[list[Any]] = [[], []]
    for seen, engine in zip(found, (recorded, launched), strict=True):
        data = batches()
        seen += train(engine, data, 5)
        seen += train(engine, batches(9, seed=1), 2)
        seen += train(engine, data, 2)
        loss = engine(*next(data))["loss"]
        engine.backward(loss)
        engine.step()
        seen += [loss.item(), engine.get_global_grad_norm(), float(engine.eval_batch(data))]
        seen += train(engine, data, 2)
        engine.backward(engine(*next(data))["loss"])
        engine.zero_grad()
        seen += train(engine, data, 2)
    assert found[0] == found[1] and recorder.recordings == 1
    assert recorded.module.calls == LAUNCHED_STEPS + 1 + 2 + 3
    assert_same(recorded, launched)


def test_loaded_weights_and_changed_rates_count() -> None:
    launched, recorded, _ = make_both(0.6)
    found = []
    for engine in (recorded, launched):
        data = batches()
        losses = train(engine, data, 5)
        with engine.gathered(), torch.no_grad():
            engine.module.head.weight.mul_(0.5)
        engine.optimizer.param_groups[0]["weight_decay"] = 0.5
        found.append(losses + train(engine, data, 3))
    assert found[0] == found[1]
    assert_same(recorded, launched)


@pytest.mark.parametrize(
    ("trouble", "accumulation"),
    [(lambda x: x.sum().item(), 1), (lambda x: x.register_hook(lambda grad: grad.sum().item() and None), 2)],
    ids=["forward", "backward"],
)
def test_what_waits_for_the_device_is_launched_for_good(trouble: Any, accumulation: int) -> None:
    """In the backward pass, units were submitted by then, as far as the host knows; nothing of it counts."""
    launched, recorded, recorder = make_both(0.6, accumulation)
    launched.module.trouble = recorded.module.trouble = trouble
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = train(recorded, batches(), 8)
    assert found == train(launched, batches(), 8) and recorder.recordings == 1
    (told,) = [str(one.message) for one in said if "graph" in str(one.message)]
    assert "called a synchronizing operation" in told and "python_recorder.py:" in told
    assert_same(recorded, launched)


def test_a_warning_names_the_users_line_in_an_environment_of_torchs_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__file__", "/envs/torch/lib/torch/__init__.py")
    names: dict[str, Any] = {}
    exec(compile("def inner(): raise RuntimeError('waits')", "/envs/torch/lib/torch/inner.py", "exec"), names)
    exec(compile("\ndef users(): inner()", "/envs/torch/lib/users.py", "exec"), names)
    with pytest.raises(RuntimeError) as caught:
        names["users"]()
    users = caught.value.__traceback__.tb_next  # type: ignore[union-attr] # without this file's frame
    with pytest.warns(UserWarning, match=r"failed: waits \(/envs/torch/lib/users.py:2\)\. A recorded step"):
        _warn(caught.value.with_traceback(users))


def test_an_error_while_recording_is_the_users_own() -> None:
    engine = make()
    record(engine)
    data = batches()
    train(engine, data, LAUNCHED_STEPS)
    engine.module.trouble = lambda x: 1 / 0
    with pytest.warns(UserWarning, match="division by zero"), pytest.raises(ZeroDivisionError):
        engine.train_batch(data)
    engine.module.trouble = lambda x: None
    train(engine, data, 2)
    assert engine.global_steps == LAUNCHED_STEPS + 2


def test_steps_that_differ_are_launched() -> None:
    engine = make()
    recorder = record(engine)
    tokens = next(batches())[0]
    for number in range(6):  # a value in Python is part of the recording
        engine.train_batch(iter([{"tokens": tokens, "scale": 1.0 + number}]))
    for length in (4, 5, 6, 4, 5, 6):
        engine.train_batch(batches(length))
    order = iter([(0, 1), (1, 0)] * 4)  # other blocks in each step

    def two_more(x: torch.Tensor) -> None:
        for number in next(order):
            engine.module.blocks[number](x)

    engine.module.trouble = two_more
    train(engine, batches(), 8)
    assert recorder.recordings == 0


def test_a_recording_that_took_another_path_is_dropped() -> None:
    engine = make()
    recorder = record(engine)
    data = batches()
    train(engine, data, LAUNCHED_STEPS)
    once = iter([0])
    engine.module.trouble = lambda x: [engine.module.blocks[number](x) for number in once]
    train(engine, data)
    assert (recorder.recordings, recorder.replays) == (1, 0)
    train(engine, data, LAUNCHED_STEPS + 1)
    assert recorder.recordings == 2 and recorder.replays > 0


def test_another_mode_is_launched_and_nothing_is_held_after_closing() -> None:
    engine = make(0.6, dropout=0.5)
    recorder = record(engine)
    data = batches()
    train(engine, data, LAUNCHED_STEPS + 1)
    calls, replays = engine.module.calls, recorder.replays
    engine.eval()
    train(engine, data, 1)
    assert (engine.module.calls, recorder.replays) == (calls + 1, replays)
    engine.train()
    train(engine, data, 1)
    assert engine.module.calls == calls + 1 and recorder.replays > replays
    recorded = engine._recorded
    engine.close()
    assert not recorder._new and recorded._graph._parts == []  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("world", "zero", "wanted", "possible"),
    [
        (1, {"stage": 3}, True, True),
        (1, {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.6}}, True, True),
        (1, {"stage": 3, "offload_param": {"device": "cpu"}}, False, False),
        (2, {"stage": 0}, True, True),
        (2, {"stage": 1}, False, True),
        (2, {"stage": 2}, False, False),
        (2, {"stage": 0, "offload_optimizer": {"device": "cpu", "ratio": 0.6}}, False, False),
    ],
)
def test_where_steps_are_recorded(world: int, zero: dict[str, Any], wanted: bool, possible: bool) -> None:
    """By themselves, and where it is demanded: an error where that is impossible."""

    def options(graph: Any) -> Any:
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "gptpar": {"step_graph": graph}}
        return read_options(config, world=world)

    gpu = torch.device("cuda")
    assert wants_graph(options("auto"), world, gpu) == wanted
    assert not wants_graph(options("auto"), world, torch.device("cpu"))
    assert not wants_graph(options(False), world, gpu) and wants_graph(options(True), world, gpu)
    check_graph(options("auto"), world)
    with nullcontext() if possible else pytest.raises(ConfigError, match=r"1 problem:\n  1\. gptpar\.step_graph: zero"):
        check_graph(options(True), world)
