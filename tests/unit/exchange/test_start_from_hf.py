"""``--load-hf``: a run or a verb begins with the model of a Hugging Face folder; a dense one's MLPs become experts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gptpar.cli.benchmark import measure
from gptpar.cli.plan import make_planner
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.data.loader import make_micro_batch
from gptpar.errors import ConfigError
from gptpar.exchange.start_from_hf import start_from_hf, take_model_of_hf
from gptpar.model.families import config_of
from gptpar.model.gpt import gpt_model
from tests.helpers import make_trainer
from tests.unit.exchange.hf_models import TOKENS, save_theirs
from tests.unit.model.test_families import CASES

BLOCK = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 32
"""Queries and output, keys and values, gate, up and down, two norms."""
PARAMETERS = 2 * 61 * 32 + 3 * BLOCK + 32
RUN = "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --eval-iters 0 --fp64 --moe-use-upcycling "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Without weights."""
    (tmp_path / "config.json").write_text(json.dumps(CASES["Llama"]))
    return tmp_path


def test_verbs_that_need_no_weights_take_the_shape_alone(folder: Path) -> None:
    """Nor does the benchmark need data."""
    planner, _ = make_planner(f"--load-hf {folder} --micro-batch-size 1".split())
    job = planner.plan().job
    assert gpt_model(job.config.model).num_parameters == PARAMETERS
    assert (job.shape.seq_length, job.shape.swiglu, job.shape.num_query_groups) == (16, True, 2)
    words = "--micro-batch-size 1 --make-vocab-size-divisible-by 61 --train-data-path a --valid-data-path b"
    config, _ = resolve(measure.parse(f"--load-hf {folder} --seq-length 8 {words}".split()), 1)
    assert gpt_model(config.model).num_parameters == PARAMETERS and config.model.seq_length == 8
    assert (config.checkpoint.load_hf, config.tokenizer.vocab_size) == (None, 61)


@pytest.mark.parametrize("verb", [make_planner, lambda words: resolve(measure.parse(words), 1)])
def test_what_is_wrong_with_the_folder_is_told(folder: Path, verb: Callable[[list[str]], object]) -> None:
    with pytest.raises(ConfigError) as caught:
        verb(f"--load-hf {folder} --micro-batch-size 1 --num-layers 5".split())
    assert caught.value.problems == ["--num-layers is 5, and the model of --load-hf has 3: leave the flag out."]
    with pytest.raises(ConfigError) as caught:
        verb(f"--load-hf {folder}/none --micro-batch-size 1".split())
    assert caught.value.problems[0] == f"--load-hf: {folder}/none/config.json cannot be read: No such file or directory"


@pytest.mark.parametrize("family", ["GPT-2", "Llama"])
def test_a_longer_sequence_than_the_folders_is_told_with_a_remedy_that_works(family: str, tmp_path: Path) -> None:
    """Learned positions cannot be stretched."""

    def problems(length: int, more: str = "") -> list[str]:
        parsed = parse_flags(f"--load-hf {tmp_path} --seq-length {length} --micro-batch-size 1 {more}".split())
        take_model_of_hf(parsed, str(tmp_path))
        return parsed.problems

    save_theirs(tmp_path, family)
    stretched = "--rope-scaling-type yarn --rope-scaling-factor 4 --original-max-position-embeddings 16"
    remedy = f", or stretch them, such as by {stretched}, or by a larger --rotary-base" if family == "Llama" else ""
    told = [f"--seq-length 64 goes past the 16 positions of the model of --load-hf: use at most 16{remedy}."]
    assert problems(64) == told and problems(16) == problems(8) == []
    if family == "GPT-2":
        assert problems(64, "--rotary-base 10000") == told
    else:
        assert problems(64, stretched) == problems(64, "--rotary-base 500000") == []


@pytest.mark.parametrize("blocks", ["[0,1,1]", "1"])
def test_the_mixture_begins_with_the_dense_models_loss(blocks: str, tmp_path: Path) -> None:
    reference = save_theirs(tmp_path, "Llama")
    flags = f"--num-experts 4 --moe-router-topk 3 --moe-layer-freq {blocks} --moe-z-loss-coeff 1e-3"
    parsed = parse_flags(f"--load-hf {tmp_path} {RUN} {flags}".split())
    take_model_of_hf(parsed, str(tmp_path))
    config, _ = resolve(parsed, 1)
    trainer = make_trainer(config)
    held = trainer.engine.optimizer.state_tensors()["weights"]
    assert start_from_hf(tmp_path, held, None, config.model) == "llama"
    trainer.engine.publish()
    loss = trainer.evaluate([make_micro_batch(one.numpy(), eod=0) for one in TOKENS.split(1)]).item()
    weights = {name: parts.parts[0][1] for name, parts in held.items()}
    with torch.no_grad():
        wanted = F.cross_entropy(reference(TOKENS[:, :-1]).logits.flatten(0, 1), TOKENS[:, 1:].flatten()).item()
    # transformers forms the angles of rotary positions in fp32.
    assert loss == pytest.approx(wanted, rel=1e-6)
    theirs = reference.state_dict()
    for expert in range(4):
        prefix = "model.layers.2.mlp"
        gate_and_up = torch.stack([theirs[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up")])
        assert torch.equal(weights["layers.2.mlp.up"][expert], gate_and_up)
        assert torch.equal(weights["layers.2.mlp.down"][expert], theirs[f"{prefix}.down_proj.weight"])
    assert 0 < weights["layers.2.mlp.router.weight"].std() < 0.1
    if blocks == "1":
        assert config_of(config.model, 61)["model_type"] == "mixtral"
    trainer.close()
