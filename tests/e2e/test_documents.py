"""What the README, docs/ and the examples tell people to run does run."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.documents import ROOT, block, commands
from tests.e2e.commands import ENVIRONMENT, said_by, said_by_program
from tests.e2e.quick_python import quick_python


def verbs(script: str, folder: Path, count: int | None = None) -> str:
    """What the first verbs of gptpar in a block print, each in a fork."""
    words = commands(script, folder)
    assert all(one[:3] == ["python", "-m", "gptpar"] for one in words)
    return "".join(said_by(one[3:], folder=folder) for one in words[:count])


def losses_of(output: str) -> list[float]:
    """The second word of each line that begins with a number."""
    return [float(line.split()[1]) for line in output.splitlines() if line[:1].isdigit()]


def test_quickstart_in_order(tmp_path: Path) -> None:
    """The block under "Step by step", with short sequences and little text, in an empty folder."""
    steps = block("quickstart.md", "Step by step", "bash").replace("--seq-length 128", "--seq-length 24")
    steps = steps.replace("--output corpus.jsonl", "--output corpus.jsonl --max-megabytes 2")
    steps = steps.replace("--eval-iters 2", "--eval-iters 2 --split 8,1,1")  # some documents for each
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
    assert "fits: stage" in verbs(plans, tmp_path, 1)
    ((_, program, *words),) = commands(tool, tmp_path)
    assert "ZeRO-3, gptpar: states" in said_by_program(ROOT / program, *words)
    assert (tmp_path / "plan.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("page", "heading", "steps", "falls"),
    [
        ("README.md", "Train your own model", 10, 0.5),
        ("own-models.md", "TwinFlowAdamW", 20, 1.0),
        ("own-models.md", "PipelineModule", 20, 1.0),
        ("any-module.md", "Any module", 4, 1.0),
    ],
)
def test_a_program_learns(page: str, heading: str, steps: int, falls: float, tmp_path: Path) -> None:
    if heading == "Any module":
        pytest.importorskip("transformers")
    program = tmp_path / "program.py"
    program.write_text(block(page, heading, "python"))
    if heading == "PipelineModule":
        said = said_by(["launch", "--nproc-per-node", "2", program.name], folder=tmp_path)
    else:
        said = said_by_program(program)
    losses = losses_of(said)
    assert len(losses) == steps and losses[-1] < losses[0] - falls
    assert heading != "TwinFlowAdamW" or (tmp_path / "twin.pt").stat().st_size > 100_000


def test_any_module_is_proved(tmp_path: Path) -> None:
    """The proof of one combination, the plan, the benchmark; tests/ranks/test_module_layouts.py has all of them."""
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
    settings = {"RUN": str(tmp_path / "run"), "DATA": str(small_text), "MINUTES": "0.1"}
    with quick_python() as python:

        def run(more: str = "") -> str:
            words = f"{ROOT}/examples/pretrain_gpt_350M.sh {tiny} --train-iters 30 {more}".split()
            environment = {**ENVIRONMENT, **settings, "PYTHON": str(python)}
            done = subprocess.run(
                ["bash", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400
            )
            assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            return done.stdout + done.stderr

        assert "saving checkpoint at iteration      20" in run("--exit-interval 20")
        second = run()
    assert "(iteration 20)" in second and "saving checkpoint at iteration      30" in second
    summary = re.search(r"loss: ([\d.]+) at the start, ([\d.]+) on average over the last tenth of 30 steps", second)
    entropy = re.search(r"would give ([\d.]+) \(the corpus's unigram entropy\)", second)
    assert summary is not None and entropy is not None
    assert float(summary[2]) < float(summary[1]) - 1.0
    assert (tmp_path / "run/loss.png").stat().st_size > 10_000
