"""Corpora, a tokenizer, a stopped run and undisturbed runs, which all faults share.

Everything is made once, by the commands under test. Each fault has a copy of the stopped run, or a link to the data.
"""

import dataclasses
import hashlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import commands

STEPS, INTERVAL, STOPPED_AT = 40, 5, 22
MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --make-vocab-size-divisible-by 8 "
    "--micro-batch-size 2 --global-batch-size 4 --attention-dropout 0 --hidden-dropout 0.1 --lr 1e-2 "
    f"--train-iters {STEPS} --log-interval 1 --eval-iters 1 --eval-interval 1000 --distributed-timeout-minutes 4"
)
DATA = (
    "--data-path data/corpus_text_document --split 90,10,0 --tokenizer-type SentencePieceTokenizer "
    "--tokenizer-model data/words.model --data-cache-path cache"
)
SAVING = f"--save run --load run --save-interval {INTERVAL} --keep-checkpoints 2"
LAYOUTS = {1: "", 2: "--nproc-per-node 2", 4: "--nproc-per-node 4 --tensor-model-parallel-size 2 --zero-stage 1"}
LIMIT = 240.0


def training(workers: int) -> list[str]:
    """The command of all runs of the suite: it begins a run, and goes on with it."""
    return f"pretrain {MODEL} {DATA} {SAVING} {LAYOUTS[workers]}".split()


@dataclass(frozen=True)
class Reference:
    """The undisturbed run with some number of workers.

    Attributes:
        losses: by iteration.
        state: hash of the last checkpoint's tensors and progress.
        start_seconds: until the first step was printed.
        train_seconds: from then to the end.
        operations: number of each rank's operations on files below the run folder.
    """

    losses: dict[int, float]
    state: str
    start_seconds: float
    train_seconds: float
    operations: list[int]


class Prepared:
    """The folder of everything prepared.

    Args:
        folder: made if missing; a run with N workers is complete if ``reference-N.json`` is there.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.stopped = folder / "stopped"
        self._references: dict[int, Reference] = {}

    def reference(self, workers: int) -> Reference:
        """The undisturbed run."""
        if workers not in self._references:
            values = json.loads((self.folder / f"reference-{workers}.json").read_text())
            values["losses"] = {int(key): value for key, value in values["losses"].items()}
            self._references[workers] = Reference(**values)
        return self._references[workers]

    def prepare(self, worker_counts: set[int]) -> None:
        """Make what is missing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "data").is_dir():
            _make_data(self.folder)
        for workers in sorted(worker_counts):
            if not (self.folder / f"reference-{workers}.json").is_file():
                self._run_undisturbed(workers)
        if not self.stopped.is_dir():
            self._stop_a_run()

    def _run_undisturbed(self, workers: int) -> None:
        place = self.folder / f"undisturbed-{workers}"
        _link_data(self.folder, place)
        count = {"under": str(place / "run"), "count": str(place / "operations")}
        words = training(workers)
        running = commands.start(words, place / "log", folder=place, mark=f"{place}", disturbed=count)
        began = running.until(lambda: "iteration        1/" in running.text(), LIMIT)
        first = time.monotonic()
        if not (running.wait(LIMIT) and running.status == 0 and began):
            raise SystemExit(f"the undisturbed run failed:\n{running.text()}")
        files = [place / f"operations-{rank}" for rank in range(workers)]
        found = Reference(
            losses=losses(place / "run"),
            state=commands.asked(state_of, str(place / "run"), STEPS),
            start_seconds=first - running.started,
            train_seconds=time.monotonic() - first,
            operations=[int(file.read_text()) for file in files],
        )
        text = json.dumps(dataclasses.asdict(found))
        (self.folder / f"reference-{workers}.json").write_text(text)

    def _stop_a_run(self) -> None:
        place = self.folder / "stopping"
        _link_data(self.folder, place)
        words = [*training(1), "--exit-interval", str(STOPPED_AT)]
        _run(words, place)
        place.rename(self.stopped)


def _run(words: Sequence[str], folder: Path) -> None:
    running = commands.start(words, folder / "log", folder=folder, mark=f"{folder}")
    if not (running.wait(LIMIT) and running.status == 0):
        raise SystemExit(f"{words} failed:\n{running.text()}")


def _make_data(folder: Path) -> None:
    making = folder / "making" / "data"
    making.mkdir(parents=True, exist_ok=True)
    random_words = random.Random(5)
    words = ["".join(random_words.choices("abcdefghijklmnop", k=random_words.randint(2, 6))) for _ in range(60)]
    lines = [json.dumps({"text": " ".join(random_words.choices(words, k=30))}) for _ in range(240)]
    (making / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    for words_ in (
        "train-tokenizer --input data/corpus.jsonl --output data/words.model --vocab-size 300",
        "preprocess --input data/corpus.jsonl --output-prefix data/corpus --tokenizer-type SentencePieceTokenizer "
        "--tokenizer-model data/words.model --append-eod --workers 1",
    ):
        _run(words_.split(), making.parent)
    making.rename(folder / "data")


def _link_data(folder: Path, place: Path) -> None:
    place.mkdir(parents=True)
    (place / "data").symlink_to(folder / "data")


def losses(run: Path) -> dict[int, float]:
    """Losses by iteration, of a sound ``metrics.jsonl``."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["iteration"]: line["lm_loss"] for line in lines if "lm_loss" in line}


def state_of(run: str, iteration: int) -> str:
    """Hash of all tensors and of the progress in a checkpoint, whatever its files look like."""
    from gptpar.checkpoint import load_meta, read_tensors

    path = Path(run) / f"iter_{iteration:07d}"
    digest = hashlib.sha256(json.dumps(_progress(load_meta(path)), sort_keys=True).encode())
    for name, tensor in sorted(read_tensors(path).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def _progress(meta: dict[str, Any]) -> dict[str, Any]:
    return {"progress": meta["progress"], "optimizer_steps": meta["optimizer_steps"]}
