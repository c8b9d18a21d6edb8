"""The examples of any module run to their end and say what is so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT

EXAMPLES = ROOT / "examples"
TINY_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}


def run(script: str, *words: object, code: int = 0) -> str:
    """What an example prints.

    Args:
        script: below examples/.
        code: the exit code that is expected.
    """
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"number {i} follows number {i - 1}, and so it goes on. " for i in range(400)))
    return path


def test_cnn_has_plain_losses() -> None:
    report = run("cifar_offload/compare.py", "--width", 16, "--num-blocks", 2, "--batch-size", 16, "--steps", 5)
    assert "no GPU is here" in report and "largest difference of a loss, by the first loss: " in report
    difference = float(report.split("largest difference of a loss, by the first loss: ")[1].split()[0])
    assert difference < 1e-5


def test_cnn_reads_the_binary_version(tmp_path: Path) -> None:
    """Ten images of which each is its class everywhere, so that wrong bytes would not give this loss of zero steps."""
    words = ("--engine", "gptpar", "--width", 4, "--num-blocks", 1, "--batch-size", 4, "--steps", 2, "--data", tmp_path)
    records = b"".join(bytes([number]) + bytes([20 * number]) * 3072 for number in range(10))
    (tmp_path / "data_batch_1.bin").write_bytes(records)
    found = json.loads(run("cifar_offload/train.py", *words).splitlines()[-1])
    assert found["parameters"] == 3 * 4 * 16 + 4 + 2 * (9 * 16) + 2 * 8 + 10 * 4 + 10 and len(found["losses"]) == 2
    (tmp_path / "data_batch_2.bin").write_bytes(records[:-1])
    assert "data_batch_2.bin is not a multiple of 3073 bytes" in run("cifar_offload/train.py", *words, code=1)


def test_hugging_face_model_learns_and_goes_on(tmp_path: Path, text: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(**TINY_LLAMA).save_pretrained(tmp_path / "llama")
    words = ("--text", text, "--seq-length", 32, "--save", tmp_path / "run", "--model-name", tmp_path / "llama")
    assert "step 10: loss " in run("train_hf_model.py", *words, "--steps", 10)
    again = run("train_hf_model.py", *words, "--steps", 12)
    assert "step 12: loss " in again and "step 10" not in again
    whole = run("train_hf_model.py", *words, "--steps", 12, "--save", tmp_path / "other")
    assert whole.splitlines()[-1].split(",")[0] == again.splitlines()[-1].split(",")[0]


def test_modes_of_the_small_gpt_have_the_same_losses(text: Path) -> None:
    modes = ["plain", "dp", "offload", "pipeline"]
    table = run("gpt_lite/compare.py", "--text", text, "--steps", 4, "--modes", *modes).splitlines()[2:]
    assert [row.split()[0] for row in table] == modes
    assert all(float(row.split()[-1]) < 1e-6 for row in table), table
