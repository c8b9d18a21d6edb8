"""Runs whose workers meet faults at chosen places, and what such a run has learnt."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from gptpar.checkpoint import latest, read_tensors
from gptpar.cli import main
from tests.e2e.commands import ENVIRONMENT, ROOT, ended_fork, losses, words

# Python imports it before anything else, in the launcher's template and in workers. The faults follow as a function's
# body that sees the iteration just launched, the number of the restart, the rank, and the folder in memory.
FAULTS = """
import os, signal
if "GPTPAR_ACTIVITY_FOLDER" in os.environ:
    from pathlib import Path
    from gptpar.errors import GptparError
    from gptpar.run import loop, resume

    def meet(place, iteration):
        restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        rank, memory, me = int(os.environ["RANK"]), Path(os.environ.get("GPTPAR_MEMORY_FOLDER", "")), os.getpid()
        at = restart, rank, iteration
{faults}

    launch_update, load = loop.Run.launch_update, resume.load

    def launch(self, *arguments):
        step = launch_update(self, *arguments)
        meet("step", self.progress.iteration)
        return step

    def loading(*arguments):
        meet("load", 0)
        return load(*arguments)

    loop.Run.launch_update, resume.load = launch, loading
"""


@dataclass
class Finished:
    """A run's end.

    Attributes:
        said, errors: on stdout and stderr.
    """

    code: int | None
    said: str
    errors: list[str]
    folder: Path

    def losses(self) -> list[float]:
        """Of each iteration; no iteration twice."""
        return losses(self.folder)

    def restarts(self) -> list[int]:
        """Of each iteration: how often the workers had been started again before it was taken."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line).get("restarts", 0) for line in lines]

    def state(self) -> str:
        """A hash of all tensors of the newest checkpoint."""
        path = latest(self.folder)
        assert path is not None, self.said
        state = hashlib.sha256(path.name.encode())
        for name, tensor in sorted(read_tensors(path).items()):
            state.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return state.hexdigest()


def environment_with(faults: str, folder: Path) -> dict[str, str]:
    """For a launcher whose workers meet the faults."""
    folder.mkdir(exist_ok=True)
    body = "\n".join(f"        {line}" for line in faults.strip().splitlines())
    (folder / "sitecustomize.py").write_text(FAULTS.replace("{faults}", body or "        pass"))
    return {**ENVIRONMENT, "PYTHONPATH": f"{ROOT}:{folder}"}


def run(flags: str, tmp_path: Path, name: str, faults: str = "") -> Finished:
    """``gptpar pretrain`` of the tiny model into ``tmp_path/name``; its workers meet the faults; or it ends well."""
    given = words(f"{flags} --save {tmp_path / name} --lr-decay-style constant --log-interval 1")
    environment = environment_with(faults, tmp_path / "site") if faults else ENVIRONMENT
    code, said, errors = ended_fork(main, given, environment)
    assert faults or code == 0, said + errors
    return Finished(code, said, errors.splitlines(), tmp_path / name)
