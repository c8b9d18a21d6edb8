"""The programs of examples/deepspeed run to their end, with plain PyTorch's losses."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.documents import ROOT, block, commands
from tests.e2e.commands import ENVIRONMENT, said_by, said_by_program
from tests.e2e.quick_python import quick_python

EXAMPLES = ROOT / "examples" / "deepspeed"
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
    """What a program of examples/deepspeed prints; ``code``: the exit code that is expected."""
    return said_by_program(EXAMPLES / script, *words, expect=code)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaConfig(**TINY_LLAMA).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"number {i} follows number {i - 1}, and so it goes on. " for i in range(400)))
    return path


TINY = {
    "cifar.py": "--width 16 --num-blocks 2",
    "train.py": "--seq-length 32 --fp32",
    "gpt_lite.py": "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --fp32",
}


CHANGES_ENGINE_ALONE = {"--zero", "3", "--pipeline", "--pipeline_spec_layers", "--checkpoint-activations"}
"""Flags that plain PyTorch accepts, and that change none of its numbers."""


def losses(words: list[str]) -> list[float]:
    """Of five steps of a program of a small size, started by ``gptpar WORDS``."""
    return [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", start(words))]


def start(words: list[str]) -> str:
    """What it prints; a plain program of one process needs no launcher."""
    (program,) = TINY.keys() & {*words}
    place, few = words.index(program), [*TINY[program].split(), "--steps", "5"]
    if "--plain" in words and not any("2" in word for word in words[:place]):
        return run(program, *words[place + 1 :], *few)
    return said_by([*words, *few], folder=EXAMPLES)


@pytest.mark.parametrize("of", ["cifar.py", "train.py", "gpt_lite.json", "twin_flow.json", "ds_zero_offload.json"])
def test_commands_of_deepspeeds_tutorials_have_plain_torchs_losses(of: str, llama: Path, tmp_path: Path) -> None:
    """Plain PyTorch runs once for all commands that train the same; beside a pipeline it has one process."""
    documented = block("examples.md", "Programs of DeepSpeed's tutorials", "bash")
    plain: dict[tuple[str, ...], list[float]] = {}
    checked = 0
    for words in commands(documented, tmp_path):
        few = [word.replace("=8", "=2").replace("FOLDER", str(llama)) for word in words[1:]]
        if of not in few:
            continue
        checked += 1
        if "--run_memory_estimation_only" in few:
            assert "per CPU" in start(few)
            continue
        same = [word for word in few if word not in CHANGES_ENGINE_ALONE]
        if "--pipeline" in few:
            same = [word.replace("--num_gpus=2", "--num_gpus=1") for word in same]
        if tuple(same) not in plain:
            plain[tuple(same)] = losses([*same, "--plain"])
        assert losses(few) == pytest.approx(plain[tuple(same)], rel=0, abs=1e-6 * plain[tuple(same)][0]), words
        assert len(plain[tuple(same)]) == 5
    assert checked == {"gpt_lite.json": 4}.get(of, 1)


def test_compare_reports_the_difference() -> None:
    with quick_python() as python:
        words = [python, EXAMPLES / "compare.py", "cifar.py", "--steps", "2", *TINY["cifar.py"].split()]
        done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    report = done.stdout
    assert done.returncode == 0, report + done.stderr
    assert float(report.split("largest difference of a loss, by the first loss: ")[1].split()[0]) < 1e-6


def test_cnn_reads_the_binary_version(tmp_path: Path) -> None:
    """64 images of two whole batches; a file that is cut off is refused by name."""
    records = b"".join(bytes([number]) + bytes([20 * number]) * 3072 for number in range(8)) * 8
    (tmp_path / "data_batch_1.bin").write_bytes(records)
    words = ("--width", 4, "--num-blocks", 1, "--steps", 2, "--data", tmp_path)
    assert "step 2: loss " in run("cifar.py", *words)
    (tmp_path / "data_batch_2.bin").write_bytes(records[:-1])
    assert "data_batch_2.bin is not a multiple of 3073 bytes" in run("cifar.py", *words, code=1)


def test_hugging_face_model_learns_and_goes_on(tmp_path: Path, text: Path, llama: Path) -> None:
    def steps(number: int, *more: object) -> list[str]:
        words = ("--text", text, *TINY["train.py"].split(), "--model-name", llama, "--steps", number, *more)
        return re.findall("^step .*$", run("train.py", *words), re.MULTILINE)

    first, again = (steps(number, "--save", tmp_path / "run") for number in (4, 6))
    assert len(first) == 4 and first + again == steps(6)
