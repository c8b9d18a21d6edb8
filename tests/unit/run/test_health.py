"""Outliers in a run: what is skipped, logged and kept, also by a resumed run; the checksum of replicated weights."""

import contextlib
import io
import itertools
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gptpar.cli import main
from gptpar.reporting.metrics_file import read_metrics
from gptpar.run.health import replicas, spikes
from gptpar.run.health.replicas import checksum
from tests.helpers import TINY
from tests.unit.optim.test_skip_step import oracle
from tests.unit.run.whole_runs import column, run

FLAGS = f"{TINY} --fp64 --log-interval 1 --skip-step-window 4 --log-layer-norms-interval 3"
OFTEN = "--skip-step-sigma 0.8"
"""Of a few steps with ordinary batches, some are this far from the mean."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that judges no step."""
    folder = tmp_path_factory.mktemp("plain")
    run(folder, start=FLAGS)
    return folder


@pytest.fixture(scope="module")
def skipping(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run that skips outliers, and what it printed."""
    folder = tmp_path_factory.mktemp("skipping")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run(folder, OFTEN, FLAGS)
    return folder, out.getvalue()


def steps(folder: Path) -> list[dict[str, Any]]:
    """The records of training, without what time has to do with."""
    timed = ("iteration_time_ms", "tokens_per_s")
    return [{k: v for k, v in one.items() if k not in timed} for one in read_metrics(folder / "metrics.jsonl")]


def test_an_outlier_is_told_logged_and_kept(skipping: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    root, out = skipping
    found = [one for one in steps(root) if one["outlier_iterations"]]
    assert 0 < len(found) < 10
    judged = [(one["lm_loss"], one["grad_norm"]) for one in steps(root)]
    assert [bool(one["outlier_iterations"]) for one in steps(root)] == oracle(judged, 0.8, 4)
    assert not any(one["skipped_iterations"] or one["nan_iterations"] for one in steps(root))
    folders = spikes.bundles_in(root / "spikes")
    assert [path.name for path in folders] == [f"iter_{one['iteration']:07d}" for one in found]
    assert sorted(os.listdir(root / "spikes")) == [path.name for path in folders]
    for record, path in zip(found, folders, strict=True):
        first = 2 * (record["iteration"] - 1)
        assert record["outlier_batch"] == {"first_sample": first, "samples": 2}
        assert f"iteration {record['iteration']} was skipped as an outlier" in out
        values = spikes.read_bundle(path)
        assert (values["loss"], values["grad_norm"]) == (record["lm_loss"], record["grad_norm"])
        assert values["first_sample"] == first and len(values["sources"]) == 2
        before = [step["lm_loss"] for step in steps(root) if step["iteration"] < record["iteration"]]
        assert values["window"]["losses"] == before[-4:]
        square = sum(norm**2 for norm in values["layers"]["grad-norm"].values())
        assert square**0.5 == pytest.approx(record["grad_norm"], rel=1e-12)
        assert np.load(path / "tokens.npy", allow_pickle=False).shape == (2, 17)
    assert " | outliers 1 | " in out
    assert main(["inspect", str(folders[0])]) == 0
    shown = capsys.readouterr().out
    assert "was skipped as an outlier" in shown and "layers.1" in shown
    assert "sample 0 of the mock data" not in shown[:40]
    assert main(["inspect", str(root / "spikes"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(folders)


@pytest.mark.slow
def test_overflows_are_counted_apart(tmp_path: Path) -> None:
    """They do not enter the window, and alone lower the loss scale."""
    run(tmp_path, f"{OFTEN} --fp16 --initial-loss-scale 4294967296", FLAGS.replace("--fp64", ""))
    found = steps(tmp_path)
    overflows = [bool(one["skipped_iterations"]) for one in found]
    judged = [(one["lm_loss"], math.nan if one["skipped_iterations"] else one["grad_norm"]) for one in found]
    outliers = [bool(one["outlier_iterations"]) for one in found]
    assert outliers == oracle(judged, 0.8, 4) and any(outliers) and any(overflows)
    lowered = [after["loss_scale"] < before["loss_scale"] for before, after in itertools.pairwise(found)]
    assert all(overflow or not less for overflow, less in zip(overflows, lowered, strict=False))


@pytest.mark.slow
def test_layers_are_logged_at_their_interval_and_measuring_changes_no_number(plain: Path, tmp_path: Path) -> None:
    for record in steps(plain):
        named = {name.partition("/")[0] for name in record if "/" in name}
        expected = {"activation-rms", "grad-norm", "update-norm"} if record["iteration"] % 3 == 0 else set()
        assert named == expected and "outlier_iterations" not in record
    run(tmp_path, "--log-layer-norms-interval 1000 --skip-step-sigma 1e9 --check-replicas-interval 2", FLAGS)
    for name in ("lm_loss", "grad_norm", "learning_rate"):
        assert column(tmp_path, name) == column(plain, name)


@pytest.mark.slow
def test_a_resumed_run_decides_as_the_uninterrupted_one(skipping: tuple[Path, str], tmp_path: Path) -> None:
    whole = steps(skipping[0])
    first = next(one["iteration"] for one in whole if one["outlier_iterations"])
    run(tmp_path, f"{OFTEN} --exit-interval {first}", FLAGS)
    run(tmp_path, f"{OFTEN} --load {tmp_path}", FLAGS)
    assert steps(tmp_path) == whole


@pytest.mark.parametrize("change", [{"sources": 0}, {"layers": {"grad-norm": {"a": "x"}}}, {"window": {}}])
def test_a_bundle_that_lacks_something_is_no_readable_one(
    change: dict[str, Any], skipping: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = spikes.bundles_in(skipping[0] / "spikes")[0]
    copy = Path(shutil.copytree(bundle, tmp_path / "spikes" / bundle.name))
    (copy / "spike.json").write_text(json.dumps({**json.loads((bundle / "spike.json").read_text()), **change}))
    assert main(["inspect", str(copy)]) == 1
    assert "is no readable bundle of an outlier" in capsys.readouterr().err


def by_hand(values: torch.Tensor) -> int:
    """Of fp32, in Python's integers."""
    total = sum(bits * (2 * i + 1) for i, bits in enumerate(values.view(torch.int32).tolist()))
    return (total + 2**63) % 2**64 - 2**63


def test_it_is_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1001, generator=torch.Generator().manual_seed(1)) * 1e30
    assert checksum(values).item() == by_hand(values)
    monkeypatch.setattr(replicas, "BLOCK", 64)
    assert checksum(values).item() == by_hand(values)


def test_halves_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges that the host updates and those of the device are summed apart."""
    monkeypatch.setattr(replicas, "BLOCK", 64)
    values = torch.randn(301, generator=torch.Generator().manual_seed(2))
    assert checksum(values) == checksum(values[:100]) + checksum(values[100:], 100)
