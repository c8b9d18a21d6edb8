"""What the README and the examples tell people to run does run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


def test_readme_commands_in_order(tmp_path: Path) -> None:
    """The block under "Pretraining by hand", as it stands, in an empty folder."""
    section = (ROOT / "README.md").read_text().split("## Pretraining by hand")[1]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block is not None
    output = run(f'python() {{ "$PYTHON" "$@"; }}\n{block[1]}', tmp_path)
    assert "every byte of" in output and '"tokens_per_s"' in output
    assert (tmp_path / "runs/tiny/iter_0000040/manifest.json").exists()
    assert (tmp_path / "runs/tiny/run.png").stat().st_size > 10_000


def test_readme_deepspeed_json(tmp_path: Path) -> None:
    """The block under "DeepSpeed's JSON": two processes, a part of the optimizer on the CPU."""
    section = (ROOT / "README.md").read_text().split("## DeepSpeed's JSON")[1]
    block = re.search(r"```bash\n(.*?)```", section, re.DOTALL)
    assert block is not None
    output = run(f'gptpar() {{ "$PYTHON" -m gptpar "$@"; }}\n{block[1]}', tmp_path)
    assert re.search(r"cpu optimizer ratio +0\.3 +\(?ds\.json: zero_optimization\.offload_optimizer\.ratio", output)
    assert re.search(r"iteration +20/ +20 .*global batch size: +8", output)


def test_readme_plans(tmp_path: Path) -> None:
    """The commands under "Planning a run"."""
    section = (ROOT / "README.md").read_text().split("## Planning a run")[1].split("\n## ")[0]
    plans, tool = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    output = run(f'python() {{ "$PYTHON" "$@"; }}\n{plans}{tool.replace("tools/", f"{ROOT}/tools/")}', tmp_path)
    assert "fits: stage" in output and "refused" in output and "ZeRO-3, gptpar: states" in output
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_readme_optimizer(tmp_path: Path) -> None:
    """The program under "The optimizer for your own model" learns and saves."""
    section = (ROOT / "README.md").read_text().split("## The optimizer for your own model")[1]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block is not None
    (tmp_path / "twin.py").write_text(block[1])
    losses = [float(line.split()[1]) for line in run('"$PYTHON" twin.py', tmp_path).splitlines() if line[:1].isdigit()]
    assert len(losses) == 20 and losses[-1] < losses[0] - 1.0
    assert (tmp_path / "twin.pt").stat().st_size > 100_000


def test_readme_any_module(tmp_path: Path) -> None:
    """The program under "Any module" learns, and its command proves that the example trains as in plain PyTorch."""
    pytest.importorskip("transformers")
    section = (ROOT / "README.md").read_text().split("## Any module")[1]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block is not None
    (tmp_path / "any.py").write_text(block[1])
    losses = [float(line.split()[1]) for line in run('"$PYTHON" any.py', tmp_path).splitlines() if line[:1].isdigit()]
    assert len(losses) == 4 and losses[-1] < losses[0] - 1.0


def test_readme_any_module_is_proved(tmp_path: Path) -> None:
    """The commands under "Any module": the proof, the plan, the benchmark."""
    pytest.importorskip("transformers")
    section = (ROOT / "README.md").read_text().split("## Any module")[1]
    proof, figures = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)[:2]
    commands = (proof + figures).replace("examples/", f"{ROOT}/examples/")
    output = run(f'python() {{ "$PYTHON" "$@"; }}\n{commands}', tmp_path)
    for count in (4, 16):
        assert f"all {count} combinations compute the same as plain PyTorch" in output
    assert re.search(r"master weights and moments +139.50 KiB  209.25 KiB", output) and '"samples_per_s"' in output


def test_example_of_any_module(tmp_path: Path) -> None:
    """It learns on two processes."""
    script = f'"$PYTHON" -m torch.distributed.run --nproc-per-node 2 {ROOT}/examples/any_module.py'
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (.*)$", run(script, tmp_path), re.MULTILINE)]
    assert len(losses) == 4 and losses[0] < 4.5 and losses[-1] < losses[0] - 0.3


def test_readme_deferred_init(tmp_path: Path) -> None:
    """The program under "A model that fits no single device" makes values of a model of 103 GB."""
    section = (ROOT / "README.md").read_text().split("## A model that fits no single device")[1]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block is not None
    (tmp_path / "deferred.py").write_text(block[1])
    assert "tensor([1., 1., 1.,  ..., 1., 1., 1.], dtype=torch.bfloat16)" in run('"$PYTHON" deferred.py', tmp_path)


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
    first = run(f"{script} --exit-interval 20", tmp_path, **settings)
    assert "saving checkpoint at iteration      20" in first
    second = run(script, tmp_path, **settings)
    assert "(iteration 20)" in second and "saving checkpoint at iteration      30" in second
    summary = re.search(r"loss: ([\d.]+) at the start, ([\d.]+) on average over the last tenth of 30 steps", second)
    entropy = re.search(r"would give ([\d.]+) \(the corpus's unigram entropy\)", second)
    assert summary is not None and entropy is not None
    assert float(summary[2]) < float(summary[1]) - 1.0
    assert (tmp_path / "run/loss.png").stat().st_size > 10_000
