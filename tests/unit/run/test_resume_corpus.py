"""A resumed run reads the same corpora, or says what differs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptpar.checkpoint import load_meta
from gptpar.config import Config
from gptpar.data.indexed import IndexedDatasetWriter
from gptpar.errors import CheckpointError
from gptpar.run import resume, same_run
from gptpar.run.progress import Progress
from gptpar.run.resume import progress_to_resume
from tests.helpers import make_trainer, tiny_config
from tests.unit.run import saved_runs
from tests.unit.run.saved_runs import DONE, inputs_of, with_fields


def corpus(prefix: Path, documents: int, length: int = 50, seed: int = 0) -> Path:
    tokens = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(documents):
            writer.add_document(tokens.integers(60, size=length))
    return prefix


def corpus_differences(before: Config, here: Config) -> list[str]:
    there = json.loads(json.dumps(same_run.corpora_of(before.data)))
    return list(same_run.other_corpora(there, same_run.corpora_of(here.data)))


def data(*paths: object) -> Config:
    """The tiny model on corpora in place of mock data."""
    fields = {"data.mock_data": False, "data.data_path": tuple(map(str, paths)), "data.split": "969, 30, 1"}
    return with_fields(tiny_config(), fields)


def test_a_corpus_is_known_by_its_contents(tmp_path: Path) -> None:
    a, b = corpus(tmp_path / "a", 40), corpus(tmp_path / "b", 30)
    (tmp_path / "moved").mkdir()
    moved, like_a = corpus(tmp_path / "moved" / "a", 40), corpus(tmp_path / "c", 40, seed=1)
    assert corpus_differences(data(a), data(moved)) == []
    assert corpus_differences(data(3, a, 1, b), data(0.75, moved, 0.25, b)) == []
    assert corpus_differences(data(a), data(b)) == [
        f"corpus 1 of --data-path {a} (40 sequences, 2,000 tokens) there, {b} (30 sequences, 1,500 tokens) here"
    ]
    assert corpus_differences(data(a), data(like_a))[0].endswith(
        f"{like_a} (40 sequences, 2,000 tokens) of the same size with other contents here"
    )
    assert corpus_differences(data(a), data(a, b)) == ["--data-path 1 corpora there, --data-path 2 here"]
    assert corpus_differences(data(3, a, 1, b), data(1, a, 1, b)) == [
        f"the weight of corpus {n} of --data-path {w} there, 0.5 here" for n, w in ((1, 0.75), (2, 0.25))
    ]
    assert corpus_differences(data(a, b), data(1, a, 1, b))[0].endswith("--data-path none there, 0.5 here")
    assert len(corpus_differences(data(a, b), data(b, a))) == 2


def test_a_run_on_another_corpus_is_refused(tmp_path: Path) -> None:
    a, b = corpus(tmp_path / "a", 40), corpus(tmp_path / "b", 30)
    before = data(a)
    run = tmp_path / "run"
    trainer = make_trainer(with_fields(before, {"checkpoint.save": str(run)}))
    saved_runs.save(trainer, DONE, inputs_of(before), keep=None)
    assert load_meta(run)["corpora"]["data_path"][0]["tokens"] == 2000

    def go_on(config: Config, **more: Any) -> Progress:
        config = with_fields(
            config, {"checkpoint.load": str(run), **{k.replace("__", "."): v for k, v in more.items()}}
        )
        return progress_to_resume(config, inputs_of(config))

    assert go_on(before) == DONE and go_on(data(a), data__split="9.69,.3,.01", data__num_workers=0) == DONE
    with pytest.raises(CheckpointError, match=r"other data \(corpus 1 of --data-path .*a \(40 sequences"):
        go_on(data(b))
    with pytest.raises(CheckpointError, match=r"other data \(--split 969, 30, 1 there, 50,50,0 here\)"):
        go_on(data(a), data__split="50,50,0")
    with pytest.raises(CheckpointError, match=r"other data \(--mock-data not given there, given here\)"):
        go_on(tiny_config())
    assert go_on(data(b), data__override_data=True) == DONE
    assert go_on(data(b), logging__skip_train=True) == DONE and go_on(data(b), checkpoint__finetune=True) == Progress()


def test_a_longer_run_that_reads_a_corpus_again_is_told_of_the_new_order(tmp_path: Path) -> None:
    """Epochs are shuffled together: of 2,000 tokens 40 samples of 16 are a part, 400 are several epochs."""
    a, b = corpus(tmp_path / "a", 40), corpus(tmp_path / "b", 40)
    for config, longer, told in ((data(a), 60, False), (data(a), 400, True), (data(a, b), 400, False)):
        assert same_run.reshuffled(config, same_run.corpora_of(config.data), 40, longer) is told
        assert not same_run.reshuffled(config, same_run.corpora_of(config.data), longer, longer)
    before = with_fields(data(a), {"checkpoint.save": str(tmp_path / "run")})
    saved_runs.save(make_trainer(before), DONE, inputs_of(before), keep=None)
    fields = {"checkpoint.load": str(tmp_path / "run"), "batch.train_iters": 200}
    config = with_fields(before, fields | {"optimizer.override_opt_param_scheduler": True})
    said: list[str] = []
    resume.load(make_trainer(config), inputs_of(config), said.append)
    assert said[-1].startswith(" > the run has 400 samples in place of 40: epochs are shuffled together")
