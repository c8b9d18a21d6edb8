"""What the README, docs/ and the examples tell people to run does run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT, block, commands
from tests.e2e.commands import said_by, said_by_program
from tests.e2e.quick_python import quick_python

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}


def run(script: str, cwd: Path, **more: str) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=cwd,
        env={**ENVIRONMENT, **more},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def verbs(script: str, folder: Path, count: int | None = None) -> str:
    """What the first verbs of gptpar in a block print, each in a fork."""
    words = commands(script, folder)
    assert all(one[:3] == ["python", "-m", "gptpar"] for one in words)
    return "".join(said_by(one[3:], folder=folder) for one in words[:count])


def losses_of(output: str) -> list[float]:
    """The second word of each line that begins with a number."""
    return [float(line.split()[1]) for line in output.splitlines() if line[:1].isdigit()]


def test_quickstart_in_order(tmp_path: Path) -> None:
    """The block under "Step by step", with short sequences, in an empty folder."""
    steps = block("quickstart.md", "Step by step", "bash").replace("--seq-length 128", "--seq-length 24")
    output = verbs(steps, tmp_path)
    assert "every byte of" in output and '"tokens_per_s"' in output
    assert (tmp_path / "runs/tiny/iter_0000040/manifest.json").exists()
    assert (tmp_path / "runs/tiny/run.png").stat().st_size > 10_000


def test_deepspeed_json(tmp_path: Path) -> None:
    """The block under "The file with `gptpar pretrain`": two processes, a part of the optimizer on the CPU."""
    script = block("moving-over.md", "The file with `gptpar pretrain`", "bash")
    output = verbs(script.replace("gptpar pretrain", "python -m gptpar pretrain"), tmp_path)
    assert re.search(r"cpu optimizer ratio +0\.3 +\(?ds\.json: zero_optimization\.offload_optimizer\.ratio", output)
    assert re.search(r"iteration +20/ +20 \| loss ", output) and re.search(r"global batch size +8 ", output)


def test_plans(tmp_path: Path) -> None:
    """The first command under "Plan a run", and the tool; the others are parsed where all commands are."""
    plans, tool = (block("planning.md", "Plan a run", "bash", number) for number in (0, 1))
    output = verbs(plans, tmp_path, 1)
    output += run(f'python() {{ "$PYTHON" "$@"; }}\n{tool.replace("tools/", f"{ROOT}/tools/")}', tmp_path)
    assert "fits: stage" in output and "ZeRO-3, gptpar: states" in output
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_twin_flow(tmp_path: Path) -> None:
    """The program under "TwinFlowAdamW" learns and saves."""
    (tmp_path / "twin.py").write_text(block("own-models.md", "TwinFlowAdamW", "python"))
    losses = losses_of(said_by_program(tmp_path / "twin.py"))
    assert len(losses) == 20 and losses[-1] < losses[0] - 1.0
    assert (tmp_path / "twin.pt").stat().st_size > 100_000


def test_pipeline_module(tmp_path: Path) -> None:
    """The program under "PipelineModule" learns on two processes."""
    (tmp_path / "pipe.py").write_text(block("own-models.md", "PipelineModule", "python"))
    losses = losses_of(said_by(["launch", "--nproc-per-node", "2", "pipe.py"], folder=tmp_path))
    assert len(losses) == 20 and losses[-1] < losses[0] - 1.0


def test_readme_own_model(tmp_path: Path) -> None:
    """The program in the README learns."""
    (tmp_path / "own.py").write_text(block("README.md", "Train your own model", "python"))
    losses = losses_of(said_by_program(tmp_path / "own.py"))
    assert len(losses) == 10 and losses[-1] < losses[0] - 0.5


def test_any_module(tmp_path: Path) -> None:
    """The first program of "Any module" learns."""
    pytest.importorskip("transformers")
    (tmp_path / "any.py").write_text(block("any-module.md", "Any module", "python"))
    losses = losses_of(said_by_program(tmp_path / "any.py"))
    assert len(losses) == 4 and losses[-1] < losses[0] - 1.0


def test_any_module_is_proved(tmp_path: Path) -> None:
    """The commands of "Any module": the proof of one combination, the plan, the benchmark.

    ``tests/ranks/test_module_layouts.py`` has all combinations.
    """
    pytest.importorskip("transformers")
    proof = block("any-module.md", "The proof", "bash")
    figures = block("any-module.md", "Memory and speed beforehand", "bash")
    few = proof.replace("--nproc 2", '--nproc 2 --only "ZeRO-3, CPU optimizer 0.6"')
    output = verbs((few + figures).replace("examples/", f"{ROOT}/examples/"), tmp_path)
    assert "the combination computes the same as plain PyTorch" in output
    assert re.search(r"master weights and moments +139.50 KiB  209.25 KiB", output) and '"samples_per_s"' in output


def test_example_of_any_module() -> None:
    """It learns; the proof above trains its model on two processes."""
    said = said_by_program(ROOT / "examples/any_module.py")
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (.*)$", said, re.MULTILINE)]
    assert len(losses) == 4 and losses[0] < 4.5 and losses[-1] < losses[0] - 0.3


def test_deferred_init(tmp_path: Path) -> None:
    """The program under "A model that fits no single device" makes values of a model of 103 GB."""
    (tmp_path / "deferred.py").write_text(block("any-module.md", "A model that fits no single device", "python"))
    assert "tensor([1., 1., 1.,  ..., 1., 1., 1.], dtype=torch.bfloat16)" in said_by_program(tmp_path / "deferred.py")


@pytest.fixture
def small_text(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    line = '{"text": "%s"}\n'
    path.write_text("".join(line % f"number {i} follows number {i - 1} and so it goes on, " for i in range(3000)))
    return path


def test_example_runs_resumes_and_sums_up(tmp_path: Path, small_text: Path) -> None:
    """The example with the user's own text and a tiny shape: a second run goes on where the first ended."""
    tiny = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --save-interval 10 --lr 1e-2"
    script = f"bash {ROOT}/examples/pretrain_gpt_350M.sh {tiny} --train-iters 30"
    settings = {"RUN": str(tmp_path / "run"), "DATA": str(small_text), "MINUTES": "0.1"}
    with quick_python() as python:
        settings["PYTHON"] = str(python)
        first = run(f"{script} --exit-interval 20", tmp_path, **settings)
        assert "saving checkpoint at iteration      20" in first
        second = run(script, tmp_path, **settings)
    assert "(iteration 20)" in second and "saving checkpoint at iteration      30" in second
    summary = re.search(r"loss: ([\d.]+) at the start, ([\d.]+) on average over the last tenth of 30 steps", second)
    entropy = re.search(r"would give ([\d.]+) \(the corpus's unigram entropy\)", second)
    assert summary is not None and entropy is not None
    assert float(summary[2]) < float(summary[1]) - 1.0
    assert (tmp_path / "run/loss.png").stat().st_size > 10_000
