"""Time `gptpar preprocess` with GPT-2's BPE beside other programs that take Megatron's flags, and compare their files.

    PYTHONPATH=. python benchmarks/preprocess.py --input corpus.jsonl --vocab-file encoder.json --merge-file vocab.bpe \
        [--peer "Megatron-LM=python MEGATRON/tools/preprocess_data.py"] [--copies 1 4] [--json FILE]

Whole commands are timed, start-up included. They run in turns, each round in another order, so that other work of the
machine slows all of them alike. Peak memory comes from one more run of each command, sampled 20 times a second: the
memory in use, summed over all processes of the command; memory that several processes share counts once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.about import about
from gptpar.data.indexed import IndexedDataset

HERE = Path(__file__).resolve().parent
SAMPLE_S = 0.05
OURS = "gptpar"


@dataclass
class Contender:
    """One program with one number of workers on one input."""

    name: str
    command: list[str]
    workers: int
    copies: int
    seconds: list[float] = field(default_factory=list)
    peak_mb: float = 0.0

    def run(self, arguments: argparse.Namespace, corpus: Path, folder: Path, *, sample: bool = False) -> Path:
        """Run it once.

        Args:
            sample: sample the memory instead of timing the run.

        Returns:
            The prefix of the files that it wrote, below ``folder``.
        """
        flags = ["--append-eod", "--tokenizer-type", "GPT2BPETokenizer", "--workers", str(self.workers)]
        flags += ["--vocab-file", arguments.vocab_file, "--merge-file", arguments.merge_file]
        command = [*self.command, *flags, "--input", str(corpus), "--output-prefix", str(folder / "out")]
        start = time.perf_counter()
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
            while sample and process.poll() is None:
                self.peak_mb = max(self.peak_mb, memory_mb(process.pid))
                time.sleep(SAMPLE_S)
            status = process.wait()
            if not sample:
                self.seconds.append(time.perf_counter() - start)
            output.seek(0)
            if status:
                raise SystemExit(f"{shlex.join(command)} failed:\n{output.read()}")
        return folder / "out_text_document"


def memory_mb(root: int) -> float:
    """Memory of a process and its descendants, each page divided by the number of processes that share it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has just ended
                continue
            children.setdefault(parent, []).append(int(entry.name))
    todo, total = [root], 0
    while todo:
        process = todo.pop()
        todo += children.get(process, [])
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def digest(prefix: Path) -> str:
    """The SHA-256 of a data set's two files."""
    sha = hashlib.sha256()
    for end in (".bin", ".idx"):
        with open(f"{prefix}{end}", "rb") as file:
            sha.update(hashlib.file_digest(file, "sha256").digest())
    return sha.hexdigest()


def measure(
    arguments: argparse.Namespace, corpus: Path, copies: int, programs: dict[str, list[str]]
) -> list[dict[str, object]]:
    """One line for each contender.

    Raises:
        SystemExit: a command failed, or the contenders wrote different bytes.
    """
    contenders = [
        Contender(name, command, workers, copies) for name, command in programs.items() for workers in arguments.workers
    ]
    order, digests, counts = random.Random(0), set(), (0, 0)
    for number in range(arguments.rounds + 1):  # the last one is for memory
        for contender in order.sample(contenders, len(contenders)):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                prefix = contender.run(arguments, corpus, Path(folder), sample=number == arguments.rounds)
                digests.add(digest(prefix))
                corpus_written = IndexedDataset(prefix)
                counts = len(corpus_written.document_index) - 1, corpus_written.num_tokens
    if len(digests) > 1:
        raise SystemExit("the contenders wrote different bytes")
    size = corpus.stat().st_size
    return [line(contender, size, *counts) for contender in contenders]


def line(contender: Contender, size: int, documents: int, tokens: int) -> dict[str, object]:
    median = statistics.median(contender.seconds)
    return {
        "contender": contender.name,
        "workers": contender.workers,
        "copies": contender.copies,
        "input_mb": round(size / 1e6, 1),
        "documents": documents,
        "tokens": tokens,
        "median_s": round(median, 3),
        "min_s": round(min(contender.seconds), 3),
        "tokens_per_s": round(tokens / median),
        "peak_mb": round(contender.peak_mb, 1),
        "rounds": len(contender.seconds),
    }


def show(lines: list[dict[str, object]]) -> None:
    print(f"{'':30} {'workers':>7} {'MB':>7} {'median s':>9} {'min s':>8} {'tokens/s':>12} {'peak MB':>8}")
    for of in lines:
        print(
            f"{of['contender']:30} {of['workers']:>7} {of['input_mb']:>7} {of['median_s']:>9} {of['min_s']:>8} "
            f"{of['tokens_per_s']:>12,} {of['peak_mb']:>8}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help='JSON lines with the key "text", or a .txt file')
    parser.add_argument("--vocab-file", required=True)
    parser.add_argument("--merge-file", required=True)
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=COMMAND", help="may be given several times"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 1], help="numbers of workers to time")
    parser.add_argument("--copies", type=int, nargs="+", default=[1], help="copies of the input in one file")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each command")
    parser.add_argument("--folder", type=Path, default=tempfile.gettempdir(), help="folder for temporary files")
    parser.add_argument("--json", type=Path, help="append one JSON object a line to this file")
    arguments = parser.parse_args()
    programs = {OURS: [sys.executable, "-m", "gptpar", "preprocess"]}
    programs |= {name: shlex.split(command) for name, _, command in (peer.partition("=") for peer in arguments.peer)}
    machine = about("tiktoken", "transformers", "tokenizers")  # the last two are peers'
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for copies in arguments.copies:
        with tempfile.NamedTemporaryFile(dir=arguments.folder, suffix=arguments.input.suffix) as corpus:
            for _ in range(copies):
                with arguments.input.open("rb") as source:
                    shutil.copyfileobj(source, corpus)
            corpus.flush()
            lines = measure(arguments, Path(corpus.name), copies, programs)
        show(lines)
        if arguments.json:
            with arguments.json.open("a") as file:
                file.writelines(json.dumps({**of, **machine}) + "\n" for of in lines)


if __name__ == "__main__":
    main()
