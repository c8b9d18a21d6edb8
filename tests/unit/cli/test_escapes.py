"""Nothing that a stranger wrote into a checkpoint steers the terminal of who looks at it."""

import re
import shutil
from pathlib import Path

import pytest

from gptpar.cli import main
from gptpar.cli.generate import _without_controls
from tests.faults.strangers import FORGED, forge, read_manifest, write_manifest

CHECKPOINTS = Path(__file__).parents[2] / "fixtures/checkpoints"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202e]")


@pytest.mark.parametrize(
    "words",
    [
        "inspect RUN/iter_0000020",
        "runs RUN --verify",
        "generate --load RUN --prompt a --num-tokens 2 --device cpu",
        "pretrain --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 "
        "--train-iters 9 --lr 1 --mock-data --vocab-size 9 --load RUN --nproc-per-node 1",
    ],
)
def test_no_verb_prints_what_a_meta_forges(words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = min(CHECKPOINTS.rglob("manifest.json")).parent
    checkpoint = shutil.copytree(source, tmp_path / "iter_0000020")
    body = read_manifest(checkpoint)
    keys_too = not words.startswith("generate")  # which needs to find what it looks for
    body["iteration"], body["meta"] = 20, forge(body["meta"], keys=lambda: keys_too)
    body["tensors"] = {name + FORGED: entry for name, entry in body["tensors"].items()}
    write_manifest(checkpoint, body)
    assert main(words.replace("RUN", str(tmp_path)).split()) in (0, 1)
    told = "".join(capfd.readouterr())
    assert told and not CONTROL.search(told), CONTROL.findall(told)
    assert "Traceback" not in told


def test_made_text_keeps_its_lines_and_loses_its_controls() -> None:
    assert _without_controls("a\tb\nc\x1b[2J\x9b é\u200d") == "a\tb\nc\\x1b[2J\\x9b é\u200d"
