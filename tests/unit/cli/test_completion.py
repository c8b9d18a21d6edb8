"""``gptpar completion``: scripts that shells accept, and that complete what the parsers take."""

import subprocess
from pathlib import Path

import pytest

from gptpar.cli import VERBS, completion
from gptpar.config import flag_fields
from gptpar.config.fields import flag_name

pytestmark = pytest.mark.slow  # every verb is imported, with all that it needs


@pytest.fixture(scope="module")
def flags() -> dict[str, list[completion.FlagWords]]:
    return {verb: list(completion.flags_of(verb)) for verb in VERBS}


@pytest.fixture(scope="module")
def script(flags: dict[str, list[completion.FlagWords]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "gptpar.sh"
    path.write_text("\n".join(completion.bash_script(flags)))
    return path


def completed(script: Path, line: str) -> set[str]:
    """What bash offers for the last word of a line."""
    words = line.split(" ")
    begin = f'source {script}; COMP_WORDS=("$@"); COMP_CWORD={len(words) - 1}; '
    program = begin + '_gptpar; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-uc", program, "bash", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_every_verb_tells_its_flags(flags: dict[str, list[completion.FlagWords]]) -> None:
    assert set(flags) == set(VERBS) and all("--help" in {one.name for one in own} for own in flags.values())
    pretrain = {one.name: one for one in flags["pretrain"]}
    assert {one.spec.metadata["off"] or flag_name(one.spec.name) for one in flag_fields()} <= pretrain.keys()
    assert pretrain["--lr-decay-style"].choices and not pretrain["--bf16"].takes_value and pretrain["--lr"].takes_value


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("gptpar pre", {"pretrain", "preprocess"}),
        ("gptpar pretrain --num-lay", {"--num-layers", "--num-layers-per-virtual-pipeline-stage"}),
        ("gptpar pretrain --bf16 --lr-wsd-decay-style ", {"exponential", "linear", "cosine", "minus_sqrt"}),
        ("gptpar plan --gpu h2", {"h200", "h20"}),
        ("gptpar pretrain --load ", set()),
        ("gptpar completion --h", {"--help"}),
    ],
)
def test_bash_completes(script: Path, line: str, offered: set[str]) -> None:
    assert completed(script, line) == offered
