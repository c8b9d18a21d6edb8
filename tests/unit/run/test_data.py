"""The corpora of a run: data that do not suffice, and whether a resumed run reads the same in the same order."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gptpar.checkpoint import load_meta
from gptpar.config import Config
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.data.indexed import IndexedDatasetWriter
from gptpar.errors import CheckpointError, DataError
from gptpar.run import resume, same_run
from gptpar.run.batch_plan import BatchPlan
from gptpar.run.data import Loaders, Vocabulary, data_order, make_loaders, other_order
from gptpar.run.progress import Progress
from gptpar.run.resume import progress_to_resume
from gptpar.topology.groups import make_topology
from gptpar.topology.mesh import Mesh
from tests.helpers import make_trainer, tiny_config
from tests.unit.run import saved_runs
from tests.unit.run.saved_runs import DONE, inputs_of, with_fields

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --lr 1e-3 --vocab-size 60"


def corpus(prefix: Path, num_samples: int) -> str:
    """One document; its sample i of 8 + 1 tokens begins with token i modulo 60."""
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        writer.add_document(np.arange(8 * num_samples + 1) // 8 % 60)
    return str(prefix)


def config_of(flags: str, world_size: int = 1) -> Config:
    return resolve(parse_flags(f"{MODEL} --micro-batch-size 2 {flags}".split()), world_size)[0]


def loaders_of(flags: str, said: list[str] | None = None) -> Loaders:
    config = config_of(flags)
    topology = make_topology(Mesh(), 0, torch.device("cpu"))
    said = [] if said is None else said
    return make_loaders(config, topology, BatchPlan.of(config.batch), Vocabulary(60, None, {}), said.append)


def test_training_corpora_that_do_not_suffice_are_refused_with_numbers_and_a_remedy(tmp_path: Path) -> None:
    a, b = corpus(tmp_path / "a", 30), corpus(tmp_path / "b", 9)
    path = f"--split 1 --data-path {a} {b} --eval-iters 0 --global-batch-size 4"
    told = "needs 40 training samples, .* without weights have 39 .*: give weights .*cyclic"
    with pytest.raises(DataError, match=told):
        loaders_of(f"{path} --train-iters 10")
    with pytest.raises(DataError, match="needs 40 training samples"):
        loaders_of(f"{path} --train-samples 43")
    assert loaders_of(f"{path} --train-iters 9")["train"] is not None
    assert loaders_of(f"{path} --train-samples 39")["train"] is not None  # 9 batches of 4
    assert loaders_of(f"{path} --train-iters 100 --dataloader-type cyclic")["train"] is not None
    for remedy in (f"--data-path 30 {a} 9 {b}", f"--data-path {a}"):
        assert loaders_of(f"--split 1 {remedy} --eval-iters 0 --train-iters 100")["train"] is not None


def test_evaluations_repeat_what_does_not_suffice_and_say_so_once(tmp_path: Path) -> None:
    a, b = corpus(tmp_path / "a", 3), corpus(tmp_path / "b", 4)
    flags = f"--train-data-path {a} --valid-data-path {a} {b} --test-data-path {a} {b} --global-batch-size 4"
    said: list[str] = []
    loaders = loaders_of(f"{flags} --train-iters 20 --eval-interval 10 --eval-iters 2", said)
    assert len(said) == 2
    assert "the validation data have 7 samples and all evaluations together read 24" in said[0]
    assert "the test data have 7 samples and all evaluations together read 8" in said[1]
    valid = loaders["valid"]
    assert valid is not None
    read = torch.cat([batch.tokens_BS[:, 0] for start in range(0, 24, 4) for batch in valid.fetch(start, 4)]).tolist()
    assert read == (read[:7] * 4)[:24]

    said.clear()
    loaders_of(f"--train-data-path {a} --valid-data-path 1 {a} 1 {b} --train-iters 20 --eval-interval 10", said)
    assert said == []  # weights repeat by themselves, as a single corpus does


def test_full_validation_is_one_pass_over_all_corpora(tmp_path: Path) -> None:
    a, b = corpus(tmp_path / "a", 13), corpus(tmp_path / "b", 4)
    flags = "--train-iters 10 --global-batch-size 4 --full-validation --eval-iters 0"
    said: list[str] = []
    valid = loaders_of(f"--train-data-path {a} --valid-data-path {a} {b} {flags}", said)["valid"]
    assert valid is not None and said == []
    assert valid.whole(4) == [(0, 4), (4, 4), (8, 4), (12, 4), (16, 2)]
    counted = sum(batch.num_counted for place in valid.whole(4) for batch in valid.fetch(*place))
    assert counted == 17 * 8
    assert config_of(f"--data-path {a} {flags}").logging.eval_interval == 1000
    with pytest.raises(DataError, match="--split 1 leaves --full-validation nothing to read"):
        loaders_of(f"--data-path {a} --split 1 {flags}")


def test_a_resumed_run_reads_in_the_same_order() -> None:
    def config(flags: str) -> Config:
        return config_of(f"--mock-data --train-iters 9 --global-batch-size 8 {flags}", 2)

    single, cyclic = config(""), config("--dataloader-type cyclic")
    sharded = config("--dataloader-type cyclic --data-sharding")
    for there, here, processes, told in (
        (single, single, 1, []),
        (cyclic, cyclic, 1, []),
        (sharded, sharded, 2, []),
        (sharded, sharded, 1, ["data parallel size 2 there, 1 here"]),
        (sharded, cyclic, 2, ["data sharding True there, False here", "data parallel size 2 there, None here"]),
        (cyclic, sharded, 2, ["data sharding False there, True here"]),
        (single, cyclic, 2, []),  # told of the flag itself
    ):
        found = other_order(data_order(there, 2), there.data, data_order(here, processes))
        assert found[:2] == told
    for there, here, told in (  # checkpoints that do not say it: cyclic was always sharded
        (single, single, []),
        (cyclic, sharded, []),
        (cyclic, cyclic, ["data sharding True there, False here"]),
    ):
        assert other_order(None, there.data, data_order(here, 2)) == told


def documents(prefix: Path, count: int, seed: int = 0) -> Path:
    """A corpus of documents of 50 random tokens."""
    tokens = np.random.default_rng(seed)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for _ in range(count):
            writer.add_document(tokens.integers(60, size=50))
    return prefix


def corpus_differences(before: Config, here: Config) -> list[str]:
    there = json.loads(json.dumps(same_run.corpora_of(before.data)))
    return list(same_run.other_corpora(there, same_run.corpora_of(here.data)))


def data(*paths: object) -> Config:
    """The tiny model on corpora in place of mock data."""
    fields = {"data.mock_data": False, "data.data_path": tuple(map(str, paths)), "data.split": "969, 30, 1"}
    return with_fields(tiny_config(), fields)


def test_a_corpus_is_known_by_its_contents(tmp_path: Path) -> None:
    a, b = documents(tmp_path / "a", 40), documents(tmp_path / "b", 30)
    (tmp_path / "moved").mkdir()
    moved, like_a = documents(tmp_path / "moved" / "a", 40), documents(tmp_path / "c", 40, seed=1)
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
    a, b = documents(tmp_path / "a", 40), documents(tmp_path / "b", 30)
    before, run = data(a), tmp_path / "run"
    trainer = make_trainer(with_fields(before, {"checkpoint.save": str(run)}))
    saved_runs.save(trainer, DONE, inputs_of(before), keep=None)
    assert load_meta(run)["corpora"]["data_path"][0]["tokens"] == 2000

    def go_on(config: Config, fields: dict[str, Any]) -> Progress:
        config = with_fields(config, {"checkpoint.load": str(run)} | fields)
        return progress_to_resume(config, inputs_of(config))

    assert go_on(before, {}) == go_on(data(a), {"data.split": "9.69,.3,.01", "data.num_workers": 0}) == DONE
    for config, fields, told in (
        (data(b), {}, r"corpus 1 of --data-path .*a \(40 sequences"),
        (data(a), {"data.split": "50,50,0"}, r"--split 969, 30, 1 there, 50,50,0 here\)"),
        (tiny_config(), {}, r"--mock-data not given there, given here\)"),
    ):
        with pytest.raises(CheckpointError, match=rf"other data \({told}"):
            go_on(config, fields)
    assert go_on(data(b), {"data.override_data": True}) == go_on(data(b), {"logging.skip_train": True}) == DONE
    assert go_on(data(b), {"checkpoint.finetune": True}) == Progress()


def test_a_longer_run_that_reads_a_corpus_again_is_told_of_the_new_order(tmp_path: Path) -> None:
    """Epochs are shuffled together: of 2,000 tokens 40 samples of 16 are a part, 400 are several epochs."""
    a, b = documents(tmp_path / "a", 40), documents(tmp_path / "b", 40)
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
