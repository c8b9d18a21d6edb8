"""DeepSpeed's monitors of an engine: what they write, where a run goes on, and what a failure leaves."""

import importlib.machinery
import sys
import types
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gptpar
from gptpar.adapter.monitor import Point, make_monitor
from gptpar.config.sections.logging import LoggingFlags
from gptpar.deepspeed.engines.engine import ModuleEngine
from gptpar.errors import ConfigError
from gptpar.reporting.sinks import TensorBoardSink
from tests.e2e.commands import said_in_fork
from tests.unit.reporting.records import read_tensorboard

LOSS, RATE, SCALE = (f"Train/Samples/{name}" for name in ("train_loss", "lr", "loss_scale"))
WARMUP = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}


def make(**more: Any) -> ModuleEngine:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": WARMUP},
        **more,
    }
    return gptpar.initialize(model=nn.Linear(4, 1), config=config, loss_fn=lambda y, x: y.float().square().mean())[0]


def batches(seed: int, dtype: torch.dtype = torch.float32) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(3, 4, generator=generator).to(dtype)


def train(engine: ModuleEngine, data: Iterator[Any], steps: int = 1) -> list[float]:
    return [engine.train_batch(data).item() for _ in range(steps)]


def monitors(folder: Path) -> dict[str, Any]:
    both = {"enabled": True, "output_path": str(folder)}
    return {"csv_monitor": {**both, "job_name": "csv"}, "tensorboard": {**both, "job_name": "board"}}


def csv_of(folder: Path, name: str) -> list[tuple[int, float]]:
    header, *rows = (folder / "csv" / f"{name.replace('/', '_')}.csv").read_text().splitlines()
    assert header == f"step,{name.rpartition('/')[2]}"
    return [(int(step), float(value)) for step, value in (row.split(",") for row in rows)]


def test_loss_and_rate_of_each_step_over_the_samples_consumed(tmp_path: Path) -> None:
    engine = make(**monitors(tmp_path))
    data, losses, rates = batches(1), [], []
    for _ in range(3):
        rates += engine.get_lr()
        losses += train(engine, data)
    rates += engine.get_lr()
    losses.append(0.0)
    for x in (next(data), next(data)):  # and by the user's own calls
        loss = engine(x).square().mean()
        losses[3] += loss.item() / 2
        engine.backward(loss)
        engine.step()
    samples = [6, 12, 18, 24]
    engine.close()
    loss, rate = csv_of(tmp_path, LOSS), csv_of(tmp_path, RATE)
    assert [step for step, _ in loss] == samples and [value for _, value in loss] == pytest.approx(losses, rel=1e-6)
    assert rate == list(zip(samples, rates, strict=True)) and rates == pytest.approx([0.0, 0.0, 0.025, 0.05])
    assert sorted(path.name for path in (tmp_path / "csv").iterdir()) == [
        "Train_Samples_lr.csv",
        "Train_Samples_train_loss.csv",
    ]
    drawn = read_tensorboard(tmp_path / "board")
    assert drawn == {LOSS: [(s, pytest.approx(v)) for s, v in loss], RATE: [(s, pytest.approx(v)) for s, v in rate]}


def test_fp16_has_a_curve_of_the_scale_that_each_step_used(tmp_path: Path) -> None:
    engine = make(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1}, **monitors(tmp_path))
    rates = []
    overflows = repeat(torch.full((3, 4), 6e4, dtype=torch.float16))
    for data in (batches(2, torch.float16), overflows, batches(2, torch.float16)):
        train(engine, data)
        rates += engine.get_lr()
    engine.close()
    assert rates[0] == rates[1] < rates[2]  # the schedule does not count a step that is skipped
    assert csv_of(tmp_path, SCALE) == [(6, 16.0), (12, 16.0), (18, 8.0)]


def test_what_later_steps_wrote_is_dropped_when_a_checkpoint_takes_the_engine_back(tmp_path: Path) -> None:
    engine = make(**monitors(tmp_path))
    train(engine, batches(1), 2)
    engine.save_checkpoint(str(tmp_path / "saved"))
    train(engine, batches(2), 3)
    first = csv_of(tmp_path, LOSS)
    assert [step for step, _ in first] == [6, 12, 18, 24, 30]
    engine.load_checkpoint(str(tmp_path / "saved"))
    train(engine, batches(2), 2)
    assert csv_of(tmp_path, LOSS) == first[:4]
    engine.close()
    again = make(**monitors(tmp_path))  # as another process that goes on
    again.load_checkpoint(str(tmp_path / "saved"))
    train(again, batches(2))
    again.close()
    assert csv_of(tmp_path, LOSS) == first[:3]
    drawn = read_tensorboard(tmp_path / "board")[LOSS]  # files of one second are read in any order
    assert sorted(step for step, _ in drawn) == [6, 12, 18]


def test_a_folder_that_cannot_be_written_is_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "csv").write_text("a file")
    engine = make(**monitors(tmp_path))
    train(engine, batches(1), 3)
    engine.close()
    told = [line for line in "".join(capfd.readouterr()).splitlines() if "csv_monitor" in line]
    assert len(told) == 1 and "the curves of csv_monitor cannot be written" in told[0], told
    assert [step for step, _ in read_tensorboard(tmp_path / "board")[LOSS]] == [6, 12, 18]


def test_weights_and_biases_gets_the_curves_over_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    fake = types.ModuleType("wandb")
    fake.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    run = types.SimpleNamespace(log=lambda values, step: calls.append((step, values)))
    run.finish = lambda: calls.append("end")
    fake.init = lambda **place: calls.append(place) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.chdir(tmp_path)
    engine = make(wandb={"enabled": True, "project": "p", "team": "t", "group": "g"})
    (loss,) = train(engine, batches(1))
    engine.close()
    place, *others = calls
    assert [place[key] for key in ("project", "entity", "group")] == ["p", "t", "g"]
    assert others == [(6, {LOSS: pytest.approx(loss), RATE: 0.0}), "end"]


def test_a_section_that_is_off_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And needs no package."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    off = {"enabled": False, "output_path": str(tmp_path), "job_name": "x"}
    engine = make(csv_monitor=off, tensorboard=off, wandb={"enabled": False, "project": "p"})
    train(engine, batches(1))
    engine.close()
    assert list(tmp_path.iterdir()) == []
    off_notes = [f"{name}: it is off" for name in ("csv_monitor", "tensorboard", "wandb")]
    assert sorted(engine.options.without_effect) == off_notes
    with pytest.raises(ConfigError, match=r"the package wandb is not installed: run pip install 'gptpar\[wandb\]'"):
        make(wandb={"enabled": True, "project": "p"})


def test_losses_of_a_users_own_calls_are_judged_as_outliers() -> None:
    engine = make(gptpar={"skip_step_sigma": 3, "skip_step_window": 4}, gradient_accumulation_steps=1)
    data = batches(3)
    for step in range(6):
        loss = engine(next(data)).square().mean() * 1e-3
        engine.backward(loss + 1e3 * (step == 5))  # a loss far above the others', with a gradient like theirs
        engine.step()
        assert engine.was_step_applied() == (step != 5)


def one_step(folder: Path) -> None:
    engine = make(**monitors(folder))
    engine._take_note_of_last_step = lambda: None  # as on a GPU, whose numbers are read a step later
    engine.train_batch(batches(1))


@pytest.mark.slow
def test_a_process_that_closes_nothing_has_written_its_last_step(tmp_path: Path) -> None:
    said_in_fork(one_step, tmp_path)
    assert [step for step, _ in csv_of(tmp_path, LOSS)] == [6]


@pytest.mark.parametrize(("samples", "others"), [(0, [8, 800]), (80, [8])])
def test_a_new_engine_leaves_others_curves_and_a_resumed_one_cuts_them(
    samples: int, others: Any, tmp_path: Path
) -> None:
    logging = LoggingFlags(tensorboard_dir=str(tmp_path))
    sink = TensorBoardSink(tmp_path, logging)
    for step in (8, 800):
        sink.scalars(step, {"another's": 1.0})
    sink.close()
    monitor = make_monitor(logging, with_loss_scale=False, warn=pytest.fail, end=sink.close)
    assert monitor is not None
    monitor.write(Point(samples, samples + 8, learning_rate=0.1, loss_scale=1.0, lm_loss=1.0))
    monitor.finish(None, lambda: None)
    assert [step for step, _ in read_tensorboard(tmp_path)["another's"]] == others
