"""``--config``: a file says what flags say, the command line wins, and a run's own file repeats the run exactly."""

from pathlib import Path

import pytest

from gptpar.config import flag_fields
from gptpar.config.fields import FlagField, flag_name
from gptpar.config.flags import ParsedFlags, parse_flags
from gptpar.config.run_file import read_run_file, run_file_text
from gptpar.config.validate import resolve
from gptpar.errors import ConfigError

FIELDS = list(flag_fields())


def written(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(text)
    return str(path)


def parsed(folder: Path, text: str, words: str = "") -> ParsedFlags:
    return parse_flags(["--config", written(folder, text), *words.split()])


def samples(one: FlagField) -> list[list[str]]:
    """The words of this flag, with each kind of value that it takes."""
    spec, kind = one.spec, one.kind
    name = flag_name(spec.name)
    if kind.scalar is bool:
        return [[spec.metadata["off"] or name]]
    values = {int: ["3", "1234567890123"], float: ["0.3", "1e-05", "7"], str: ['a "b"\\\n#\x7f\u00e9', "[x]"]}[
        kind.scalar
    ]
    values = [*(spec.metadata["choices"] or values), *kind.words]
    return [[name, *values], *([name, value] for value in values)] if kind.several else [[name, v] for v in values]


KEPT = [one for one in FIELDS if one.spec.name != "deepspeed_config"]
MOST = max(len(samples(one)) for one in KEPT)


@pytest.mark.parametrize("number", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, MOST))])
def test_every_value_of_every_flag_survives_its_file(number: int, tmp_path: Path) -> None:
    """Each command line has another value of every flag, beside those of all others."""
    said = {one.key: samples(one)[number % len(samples(one))] for one in KEPT}
    typed = parse_flags([word for words in said.values() for word in words])
    text = run_file_text(typed.typed, "a comment\nof two lines")
    again = parsed(tmp_path, text)
    assert said.keys() - typed.given <= typed.refused and len(typed.typed) >= len(FIELDS) - 20
    assert (again.typed, again.flags, again.given) == (typed.typed, typed.flags, typed.given)
    assert run_file_text(read_run_file(written(tmp_path, text)).values) == run_file_text(typed.typed)


def test_keys_are_flags_flat_or_in_sections_and_the_command_line_wins(tmp_path: Path) -> None:
    flat = 'num_layers = 2\nlr = 1e-3\nbf16 = true\ndata-path = [0.3, "a", 0.7, "b"]\ntrain-tokens = "1.5B"\n'
    sections = "[checkpoint]\nno-async-save = true\n[precision]\nloss-scale-window = 5e2\n[model]\n"
    found = parsed(tmp_path, f"{flat}{sections}layernorm-epsilon = 1e-6", "--lr 5e-4 --num-layers 3")
    flags = found.flags
    assert not found.problems
    assert (flags.model.num_layers, flags.optimizer.lr, flags.precision.bf16) == (3, 5e-4, True)
    assert flags.data.data_path == ("0.3", "a", "0.7", "b") and flags.batch.train_tokens == 1_500_000_000
    assert not flags.checkpoint.async_save and flags.model.norm_epsilon == 1e-6
    assert flags.precision.loss_scale_window == 500
    assert {"model.num_layers", "precision.bf16", "checkpoint.async_save"} <= found.given


def test_all_mistakes_are_told_at_once_with_file_and_key(tmp_path: Path) -> None:
    text = 'num-layer = 2\nlr = "fast"\nbf16 = 1\nseed = true\n[modl]\n[model]\nseed = 3\n'
    text += 'hidden-size = [1]\n[data]\nseed = 4\ndata-path = []\nsplit-rule = "new"\n[optimizer]\nclip_grad = nan\n'
    found = parsed(tmp_path, text)
    place = f"{tmp_path / 'run.toml'}: "
    assert [problem.removeprefix(place) for problem in found.problems] == [
        "num-layer: unknown key; did you mean num-layers.",
        "lr = fast: a number is needed.",
        "bf16 = 1: true or false is needed.",
        "seed = True: a number is needed.",
        "[modl]: unknown section; did you mean [model], and keys may stand without sections, too.",
        "model.seed: this key belongs to [data].",
        "model.hidden-size = [1]: a number is needed.",
        "data.seed: it is said twice, perhaps by two of its names.",
        "data.data-path = []: at least one value is needed.",
        "data.split-rule = new: unknown; it takes one of mcore, legacy.",
        "optimizer.clip_grad = nan: a number is needed.",
    ]
    assert {"optimizer.lr", "model.hidden_size"} <= found.refused


@pytest.mark.parametrize(
    ("text", "told"),
    [("a = = 1", " is no TOML: "), (f"data-path = {'[' * 200_000}", " is no TOML: "), (None, "No such file")],
    ids=["equals", "brackets", "none"],
)
def test_a_file_that_cannot_be_read_is_a_problem(text: str | None, told: str, tmp_path: Path) -> None:
    path = written(tmp_path, text) if text else str(tmp_path / "no.toml")
    with pytest.raises(ConfigError) as caught:  # nothing is asked for that the file may say
        resolve(parse_flags(["--config", path]), 1)
    (problem,) = caught.value.problems
    assert problem.startswith(f"--config {path}") and told in problem
