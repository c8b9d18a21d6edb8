"""Nothing that a stranger wrote into a checkpoint steers the terminal of who looks at it."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from gptpar.cli import main
from gptpar.cli.generate import _without_controls

CHECKPOINTS = Path(__file__).parents[2] / "fixtures/checkpoints"
FORGED = "\x1b[2J\x07\r\n error: all is well\u202e\x9b31m\u2028"
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202e]")


def forged(values: Any, behind_key: str) -> Any:
    """Escapes behind every string, and something behind every key."""
    if isinstance(values, dict):
        return {key + behind_key: forged(value, behind_key) for key, value in values.items()}
    if isinstance(values, list):
        return [forged(value, behind_key) for value in values]
    return values + FORGED if isinstance(values, str) else values


@pytest.mark.parametrize(
    ("words", "behind_key"),
    [
        ("inspect RUN", FORGED),
        ("runs RUN --verify", FORGED),
        ("generate --load RUN --prompt a --num-tokens 2 --device cpu", ""),
        (
            "pretrain --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 "
            "--train-iters 9 --lr 1 --mock-data --vocab-size 9 --load RUN --nproc-per-node 1",
            FORGED,
        ),
    ],
)
def test_no_verb_prints_what_a_meta_forges(
    words: str, behind_key: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = min(CHECKPOINTS.rglob("manifest.json"))
    checkpoint = tmp_path / "iter_0000020"
    shutil.copytree(source.parent, checkpoint)
    body = json.loads(source.read_text())["manifest"]
    body["iteration"], body["meta"] = 20, forged(body["meta"], behind_key)
    body["tensors"] = {name + FORGED: entry for name, entry in body["tensors"].items()}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    document = {"sha256": hashlib.sha256(canonical.encode()).hexdigest(), "manifest": body}
    (checkpoint / "manifest.json").write_text(json.dumps(document))
    assert main(words.replace("RUN", str(tmp_path)).split()) in (0, 1)
    told = "".join(capfd.readouterr())
    assert told and not CONTROL.search(told), CONTROL.findall(told)
    assert "Traceback" not in told


def test_made_text_keeps_its_lines_and_loses_its_controls() -> None:
    assert _without_controls("a\tb\nc\x1b[2J\x9b é\u200d") == "a\tb\nc\\x1b[2J\\x9b é\u200d"
