"""Data that do not suffice for a run: refused, or repeated for evaluations, before anything is trained."""

from pathlib import Path

import numpy as np
import pytest
import torch

from gptpar.config import Config
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.data.indexed import IndexedDatasetWriter
from gptpar.errors import DataError
from gptpar.run.batch_plan import BatchPlan
from gptpar.run.data import Loaders, Vocabulary, data_order, make_loaders, other_order
from gptpar.topology.groups import make_topology
from gptpar.topology.mesh import Mesh

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
    with pytest.raises(
        DataError, match="needs 40 training samples, .* without weights have 39 .*: give weights .*cyclic"
    ):
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
    def config(flags: str, world_size: int = 2) -> Config:
        return config_of(f"--mock-data --train-iters 9 --global-batch-size 8 {flags}", world_size)

    single, cyclic = config(""), config("--dataloader-type cyclic")
    sharded = config("--dataloader-type cyclic --data-sharding")

    def differing(there: Config, here: Config, processes: int) -> list[str]:
        return other_order(data_order(there, 2), there.data, data_order(here, processes))

    for there in (single, cyclic):  # neither depends on the number of processes
        assert differing(there, there, 1) == []
    assert differing(sharded, sharded, 2) == []
    assert differing(sharded, sharded, 1) == ["data parallel size 2 there, 1 here"]
    assert differing(sharded, cyclic, 2)[:2] == [
        "data sharding True there, False here",
        "data parallel size 2 there, None here",
    ]
    assert differing(cyclic, sharded, 2) == ["data sharding False there, True here"]
    assert differing(single, cyclic, 2) == []  # told of the flag itself
    # checkpoints that do not say it: cyclic was always sharded
    assert other_order(None, single.data, data_order(single, 2)) == []
    assert other_order(None, cyclic.data, data_order(sharded, 2)) == []
    assert other_order(None, cyclic.data, data_order(cyclic, 2)) == ["data sharding True there, False here"]
