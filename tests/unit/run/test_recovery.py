"""From which state the workers of a restart go on, and what the copies in memory need."""

from pathlib import Path

import pytest
import torch

from gptpar.checkpoint import checkpoints_in, save_checkpoint
from gptpar.cli.pretrain import remaining
from gptpar.config.flags import ParsedFlags, parse_flags
from gptpar.config.validate import resolve
from gptpar.errors import ConfigError, GptparError
from gptpar.run import recovery, resume, saved_state
from gptpar.run.accept import Inputs
from gptpar.run.progress import Progress
from gptpar.run.trainer import Trainer
from gptpar.system import restart
from gptpar.system.activity import FOLDER_VARIABLE
from gptpar.system.restart import MEMORY_VARIABLE
from tests.helpers import TINY, make_trainer, tiny_config

INPUTS = Inputs({}, {}, {})


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A launcher's folders, ``activity`` and ``memory``, told to this process as to a worker."""
    for name, variable in (("activity", FOLDER_VARIABLE), ("memory", MEMORY_VARIABLE)):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(variable, str(tmp_path / name))
    return tmp_path


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return make_trainer(tiny_config())


def flags(words: str) -> ParsedFlags:
    return parse_flags([*TINY.split(), *words.split()])


def save(trainer: Trainer, folder: Path, iteration: int) -> None:
    meta = saved_state.meta_of(trainer, Progress(iteration=iteration), INPUTS)
    save_checkpoint(folder, iteration, saved_state.tensors_to_save(trainer), meta)


def test_the_first_start_loads_what_it_is_told(launched: Path, trainer: Trainer) -> None:
    typed = flags(f"--save {launched}/run --load {launched}/other --finetune")
    save(trainer, launched / "run", 4)
    assert recovery.continued(typed) is typed
    restart.note_begun()
    again = recovery.continued(typed).flags.checkpoint
    assert (again.load, again.finetune, again.ckpt_step) == (f"{launched}/run", False, None)


def test_the_newest_state_is_taken(launched: Path, trainer: Trainer) -> None:
    restart.note_begun()
    for folder, iteration in (("run", 4), ("memory", 6), ("run", 8)):
        save(trainer, launched / folder, iteration)
        config = resolve(recovery.continued(flags(f"--save {launched}/run")), 1)[0]
        assert config.checkpoint.load == f"{launched}/run"  # or the folder's own checkpoints would be another run's
        newest = checkpoints_in(resume.folders_to_load(config, config.checkpoint.load))[0][1]
        assert newest == launched / folder / f"iter_{iteration:07d}"


def test_fewer_processes_keep_the_global_batch(launched: Path, trainer: Trainer) -> None:
    """The checkpoint's 2 samples are 1 micro-batch of one process, however many there were."""
    restart.note_begun()
    save(trainer, launched / "memory", 3)
    for typed in ("", "--gradient-accumulation-steps 8"):
        config = resolve(recovery.continued(flags(typed)), 1)[0]
        assert config.batch.global_batch_size == trainer.config.batch.global_batch_size == 2
    with pytest.raises(ConfigError, match="global-batch-size 2"):
        resolve(recovery.continued(flags("")), 2)


@pytest.mark.parametrize(
    ("layout", "left", "goes_on"),
    [("", 3, 2), ("--tensor-model-parallel-size 2", 3, 2), ("--tensor-model-parallel-size 4", 3, 0), ("", 4, 4)],
)
def test_data_parallelism_shrinks_to_what_the_gpus_and_the_batch_allow(
    monkeypatch: pytest.MonkeyPatch, layout: str, left: int, goes_on: int
) -> None:
    """Of 4 processes with 8 samples a step; 3 cannot share them in micro-batches of 2."""
    gpus = [4]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus[0])
    processes_left = remaining(flags(f"--global-batch-size 8 {layout}"), 8, 4)
    gpus[0] = left
    if goes_on:
        assert processes_left(4) == goes_on
    else:
        with pytest.raises(GptparError, match="3 of 4 GPUs are left, and the run cannot go on there: .*tensor"):
            processes_left(4)
