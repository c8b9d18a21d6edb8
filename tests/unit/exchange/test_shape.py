"""``--load-hf`` in verbs that need a model's shape alone: no weights have to be there, and the numbers are its own."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gptpar.cli.benchmark import measure
from gptpar.cli.plan import make_planner
from gptpar.config.validate import resolve
from gptpar.errors import ConfigError
from gptpar.model.gpt import gpt_model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 307,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
}
BLOCK = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 100 + 2 * 64
"""Queries and output, keys and values, gate, up and down, two norms."""
PARAMETERS = 2 * 307 * 64 + 3 * BLOCK + 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_plan_takes_the_shape(folder: Path) -> None:
    planner, _ = make_planner(f"--load-hf {folder} --micro-batch-size 1".split())
    job = planner.plan().job
    assert gpt_model(job.config.model).num_parameters == PARAMETERS
    assert (job.shape.seq_length, job.shape.swiglu, job.shape.num_query_groups) == (128, True, 2)


def test_benchmark_takes_the_shape_and_neither_weights_nor_data(folder: Path) -> None:
    words = "--micro-batch-size 1 --make-vocab-size-divisible-by 128 --train-data-path a --valid-data-path b"
    config, _ = resolve(measure.parse(f"--load-hf {folder} --seq-length 32 {words}".split()), 1)
    assert gpt_model(config.model).num_parameters == PARAMETERS and config.model.seq_length == 32
    assert (config.checkpoint.load_hf, config.tokenizer.vocab_size) == (None, 307)


@pytest.mark.parametrize("verb", [make_planner, lambda words: resolve(measure.parse(words), 1)])
def test_what_is_wrong_with_the_folder_is_told(folder: Path, verb: Callable[[list[str]], object]) -> None:
    with pytest.raises(ConfigError) as caught:
        verb(f"--load-hf {folder} --micro-batch-size 1 --num-layers 5".split())
    assert caught.value.problems == ["--num-layers is 5, and the model of --load-hf has 3: leave the flag out."]
    with pytest.raises(ConfigError) as caught:
        verb(f"--load-hf {folder}/none --micro-batch-size 1".split())
    assert caught.value.problems[0] == f"--load-hf: {folder}/none/config.json cannot be read: No such file or directory"
