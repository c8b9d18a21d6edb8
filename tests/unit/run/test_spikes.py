"""Outliers in a run: what is skipped, logged and kept, and that a resumed run does the same."""

import contextlib
import io
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptpar.cli import main
from gptpar.reporting.metrics_file import read_metrics
from gptpar.run.health import spikes
from tests.helpers import TINY
from tests.unit.optim.test_skip_step import oracle

FLAGS = f"{TINY} --fp64 --log-interval 1 --skip-step-window 4 --log-layer-norms-interval 3"
OFTEN = "--skip-step-sigma 0.8"
"""Of a few steps with ordinary batches, some are this far from the mean."""

Run = Callable[..., str]
Ran = tuple[Path, str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(folder: Path, flags: str = "", base: str = FLAGS) -> str:
        status = main(["pretrain", *f"{base} --save {folder} {flags}".split()])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        return captured.out

    return call


def _run_of(flags: str, folder: Path) -> Ran:
    """What a run of these flags leaves, for tests that look at it, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["pretrain", *f"{FLAGS} --save {folder} {flags}".split()]) == 0
    return folder, out.getvalue()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run that judges no step."""
    return _run_of("", tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def skipping(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """A run that skips outliers."""
    return _run_of(OFTEN, tmp_path_factory.mktemp("skipping"))


def steps(folder: Path) -> list[dict[str, Any]]:
    """The records of training, without what time has to do with."""
    timed = ("iteration_time_ms", "tokens_per_s")
    return [{k: v for k, v in one.items() if k not in timed} for one in read_metrics(folder / "metrics.jsonl")]


def test_an_outlier_is_told_logged_and_kept(skipping: Ran, capsys: pytest.CaptureFixture[str]) -> None:
    root, out = skipping
    found = [one for one in steps(root) if one["outlier_iterations"]]
    assert 0 < len(found) < 10
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
    assert (
        "was skipped as an outlier" in shown and "layers.1" in shown and "sample 0 of the mock data" not in shown[:40]
    )
    assert main(["inspect", str(root / "spikes"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(folders)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("--bf16 --clip-grad 0.1 --global-batch-size 4", marks=pytest.mark.slow),
        "--fp16 --initial-loss-scale 4294967296",
    ],
)
def test_decisions_are_those_of_the_rule(tmp_path: Path, run: Run, flags: str) -> None:
    """Overflows are counted apart, do not enter the window, and alone lower the loss scale."""
    run(tmp_path, f"{OFTEN} {flags}", base=FLAGS.replace("--fp64", "") if flags else FLAGS)
    found = steps(tmp_path)
    overflows = [bool(one["skipped_iterations"]) for one in found]
    taken = [(one["lm_loss"], one["grad_norm"]) for one in found]
    pairs = [(loss, math.nan if overflow else norm) for (loss, norm), overflow in zip(taken, overflows, strict=True)]
    outliers = [bool(one["outlier_iterations"]) for one in found]
    assert outliers == oracle(pairs, 0.8, 4) and any(outliers)
    assert any(overflows) == ("fp16" in flags)
    lowered = [after["loss_scale"] < before["loss_scale"] for before, after in itertools.pairwise(found)]
    assert all(overflow or not less for overflow, less in zip(overflows, lowered, strict=False))


@pytest.mark.slow
def test_layers_are_logged_at_their_interval(plain: Ran) -> None:
    for record in steps(plain[0]):
        named = {name.partition("/")[0] for name in record if "/" in name}
        expected = {"activation-rms", "grad-norm", "update-norm"} if record["iteration"] % 3 == 0 else set()
        assert named == expected
        assert "outlier_iterations" not in record


@pytest.mark.slow
def test_measuring_changes_no_number(plain: Ran, tmp_path: Path, run: Run) -> None:
    run(tmp_path, "--log-layer-norms-interval 1000 --skip-step-sigma 1e9 --check-replicas-interval 2")
    names = ("lm_loss", "grad_norm", "learning_rate")
    both = zip(steps(plain[0]), steps(tmp_path), strict=True)
    assert all(a[name] == b[name] for a, b in both for name in names)


@pytest.mark.slow
def test_a_resumed_run_decides_as_the_uninterrupted_one(skipping: Ran, tmp_path: Path, run: Run) -> None:
    whole = steps(skipping[0])
    first = next(one["iteration"] for one in whole if one["outlier_iterations"])
    run(tmp_path, f"{OFTEN} --exit-interval {first}")
    run(tmp_path, f"{OFTEN} --load {tmp_path}")
    assert steps(tmp_path) == whole


@pytest.mark.parametrize("change", [{"sources": 0}, {"layers": {"grad-norm": {"a": "x"}}}, {"window": {}}])
def test_a_bundle_that_lacks_something_is_no_readable_one(
    change: dict[str, Any], skipping: Ran, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = spikes.bundles_in(skipping[0] / "spikes")[0]
    copy = Path(shutil.copytree(bundle, tmp_path / "spikes" / bundle.name))
    (copy / "spike.json").write_text(json.dumps({**json.loads((bundle / "spike.json").read_text()), **change}))
    assert main(["inspect", str(copy)]) == 1
    assert "is no readable bundle of an outlier" in capsys.readouterr().err
