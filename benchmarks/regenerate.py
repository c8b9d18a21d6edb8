"""Measure the project's results again, with its peers in the same run where they are at hand.

    PYTHONPATH=. python benchmarks/regenerate.py [--peers FOLDER] [--only WORDS] [--seconds S] [--dry-run]

With four or more GPUs it runs the layouts of docs/performance.md. With one to three GPUs it runs the single-GPU models,
also with the optimizer on the CPU. Without a GPU it runs a tiny model and benchmarks/cpu_adam.py. FOLDER holds the
peers' scripts, baseline_megatron.py, baseline_fsdp2.py, baseline_nanogpt.py and baseline_deepspeed.py, which print one
JSON line each. A round runs every case once, ours right before its peer. Each run appends a JSON line; the table shows
medians over rounds. Ctrl-C stops and shows the table so far.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptpar.cli.benchmark.machine import about_machine
from gptpar.cli.benchmark.runner import Completed, append_line, run_command, terminated_like_ctrl_c

HERE = Path(__file__).resolve().parent
INTERRUPTED = 130
RENAMED = {"seq": "seq_length", "micro_batch": "micro_batch_size"}
"""A peer's name of a field -> the name in our lines."""
NEVER, ALWAYS = "1000", "0.0001"
"""Clipping thresholds: no step of these runs exceeds the first, every step exceeds the second."""
CALM = "--bf16 --attention-dropout 0 --hidden-dropout 0"


@dataclass(frozen=True)
class Peer:
    """Another program's run.

    Attributes:
        package: the Python package that it needs.
        layout: its layout, as its JSON line is to say it.
    """

    name: str
    script: str
    flags: str
    layout: str = ""
    package: str = "torch"

    def missing(self, folder: Path) -> str:
        """Why it cannot run here; empty if it can."""
        if not (folder / self.script).exists():
            return f"{folder / self.script} is not there"
        return "" if importlib.util.find_spec(self.package) else f"{self.package} is not installed"

    def command(self, folder: Path, processes: int, steps: str) -> list[str]:
        """Its command line."""
        start = f"-m torch.distributed.run --standalone --nproc-per-node {processes}".split() if processes > 1 else []
        return [sys.executable, *start, str(folder / self.script), *self.flags.split(), *steps.split()]


@dataclass(frozen=True)
class Case:
    """One of our configurations, and the peer that it is compared with.

    Attributes:
        environment: settings such as ``NAME=VALUE``.
    """

    name: str
    flags: str
    peer: Peer | None = None
    environment: str = ""

    def command(self, processes: int, steps: str) -> list[str]:
        """Its command line."""
        before = ["env", self.environment] if self.environment else []
        words = f"-m gptpar benchmark {self.flags} --nproc-per-node {processes} {steps}"
        return [*before, sys.executable, *words.split()]


@dataclass(frozen=True)
class Table:
    """The cases of a machine.

    Attributes:
        ours: our flags for the number of steps.
        theirs: the peers' flags for the number of steps.
    """

    cases: tuple[Case, ...]
    ours: str
    theirs: str


@dataclass(frozen=True)
class Job:
    """One command of a round.

    Attributes:
        about: fields of its JSON line beside the result.
    """

    name: str
    command: list[str]
    about: Mapping[str, str]


def megatron(model: str, layout: str, flags: str) -> Peer:
    """megatron-core with a layout's flags."""
    return Peer("megatron-core", "baseline_megatron.py", f"--model {model} {flags}", layout, "megatron")


def deepspeed(model: str, flags: str) -> Peer:
    """DeepSpeed with the optimizer on the CPU."""
    return Peer("DeepSpeed", "baseline_deepspeed.py", f"--model {model} {flags}", "", "deepspeed")


def plain(model: str, flags: str) -> Peer:
    """A plain compiled GPT."""
    how = "--precision bf16 --loss chunked --attn cudnn"
    return Peer("plain compiled GPT", "baseline_nanogpt.py", f"--model {model} {flags} {how}")


def four_gpus() -> Table:
    """The layouts of docs/performance.md."""
    base = f"--preset 1.3B --seq-length 2048 --global-batch-size 32 {CALM}"
    cut, split = "--pipeline-partition-method flops --pipeline-model-parallel-size", "--tensor-model-parallel-size"
    pieces = "--num-virtual-stages-per-pipeline-rank"
    square = f"{split} 2 --sequence-parallel {cut} 2"
    fsdp = Peer("FSDP2, compiled blocks", "baseline_fsdp2.py", "--model 1.3B --micro-batch 8 --seq 2048", "dp4")
    pp4 = megatron("1.3B", "pp4", "--pp 4 --micro-batch 2 --num-micro 16 --seq 2048")
    tp4 = megatron("1.3B", "tp4 sp", "--tp 4 --sp --micro-batch 8 --num-micro 4 --seq 2048")
    tp2pp2 = megatron("1.3B", "tp2 pp2 sp", "--tp 2 --sp --pp 2 --micro-batch 4 --num-micro 8 --seq 2048")
    small = megatron("350M", "tp2 pp2 sp", "--tp 2 --sp --pp 2 --micro-batch 8 --num-micro 8 --seq 1024")
    small_base = f"--preset 350M --seq-length 1024 --global-batch-size 64 {CALM}"
    large = (
        "--preset 6.7B --seq-length 1024 --micro-batch-size 8 --global-batch-size 32 --recompute-granularity full "
        f"--recompute-method uniform --recompute-num-layers 1 --zero-stage 3 --cpu-optimizer --clip-grad {NEVER} {CALM}"
    )
    staged = f"{base} --micro-batch-size 2 {cut} 4 {pieces} 3"
    cases = (
        Case("1.3B, DP4, ZeRO-1", f"{base} --micro-batch-size 8 --zero-stage 1", fsdp),
        Case("1.3B, DP4, ZeRO-3", f"{base} --micro-batch-size 8 --zero-stage 3", fsdp),
        Case("1.3B, PP4", staged, pp4),
        Case("1.3B, PP4, 4 channels", staged, pp4, "NCCL_MAX_P2P_NCHANNELS=4"),
        Case("1.3B, TP4, micro-batch 32", f"{base} --micro-batch-size 32 {split} 4 --sequence-parallel", tp4),
        Case("1.3B, TP4, micro-batch 16", f"{base} --micro-batch-size 16 {split} 4 --sequence-parallel", tp4),
        Case("1.3B, TP2 x PP2", f"{base} --micro-batch-size 8 {square} {pieces} 2", tp2pp2),
        Case("350M, TP2 x PP2", f"{small_base} --micro-batch-size 8 {square}", small),
        Case("6.7B, DP4, ZeRO-3, CPU 1", large, deepspeed("6.7B", "--micro-batch 8 --seq 1024 --ckpt --ratio 1.0")),
    )
    return Table(cases, "--steps 8 --warmup-steps 4", "--steps 8 --warmup 4")


def one_gpu() -> Table:
    """Models that fit one GPU, and two of them with the optimizer on the CPU."""
    cases = []
    models = (("124M", 1024, 32), ("350M", 1024, 16), ("350M", 2048, 16), ("1.3B", 2048, 8), ("2.7B-h128", 2048, 4))
    for model, length, batch in models:
        preset = "2.7B --num-attention-heads 20" if model == "2.7B-h128" else model
        ours = f"--preset {preset} --seq-length {length} --micro-batch-size {batch} {CALM}"
        theirs = f"--micro-batch {batch} --seq {length}"
        name = f"{model}, sequence {length:,}"
        cases.append(Case(name, ours, plain(model, theirs)))
        if (model, length) in (("350M", 1024), ("1.3B", 2048)):
            for ratio, clip_grad, how in (("0.3", NEVER, ""), ("1", NEVER, ""), ("1", ALWAYS, ", every step clipped")):
                flags = f"{ours} --cpu-optimizer --cpu-optimizer-ratio {ratio} --clip-grad {clip_grad}"
                peer = deepspeed(model, f"{theirs} --ratio {ratio}")
                cases.append(Case(f"{name}, CPU {ratio}{how}", flags, peer))
    # Steps before the timed ones: after one that was clipped, the CPU does not begin early for ten.
    return Table(tuple(cases), "--steps 20 --warmup-steps 15", "--steps 20 --warmup 5")


def no_gpu() -> Table:
    """A model that a CPU trains in milliseconds."""
    ours = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 512 "
        f"--make-vocab-size-divisible-by 512 --micro-batch-size 4 {CALM}"
    )
    peer = plain("tiny", "--micro-batch 4 --seq 64 --no-compile")
    return Table((Case("tiny, CPU", ours, peer),), "--steps 20 --warmup-steps 5", "--steps 20 --warmup 5")


TABLES: Mapping[int, Callable[[], Table]] = {4: four_gpus, 1: one_gpu, 0: no_gpu}


def jobs(table: Table, processes: int, peers: Path | None, only: str) -> list[Job]:
    """One round: every case, each followed by its peer unless that has run already.

    Args:
        processes: of each job.
        only: words that a case's name must hold.
    """
    found: list[Job] = []
    for case in table.cases:
        if only not in case.name:
            continue
        settings = {"environment": case.environment} if case.environment else {}
        about = {"program": "gptpar benchmark", "case": case.name, "flags": case.flags, **settings}
        found.append(Job(case.name, case.command(processes, table.ours), about))
        peer = case.peer
        if peers is None or peer is None or peer.missing(peers):
            continue
        about = {"program": f"peer: {peer.name}", **({"layout": peer.layout} if peer.layout else {})}
        job = Job(peer_job(peer), peer.command(peers, processes, table.theirs), about)
        if job not in found:
            found.append(job)
    return found


def peer_job(peer: Peer) -> str:
    """The name of a peer's job."""
    return f"{peer.name} {peer.flags}"


def measure(
    round_: Sequence[Job], rounds: int, timeout: float, seconds: float, run: Callable[[Sequence[str], float], Completed]
) -> Iterator[tuple[Job, int, Completed]]:
    """Run the jobs in turns until all rounds are done or the time is over; yields (job, round, outcome)."""
    deadline = time.monotonic() + seconds
    for number in range(1, rounds + 1):
        for place, job in enumerate(round_, 1):
            left = deadline - time.monotonic()
            if left <= 0:
                print(f"the {seconds:g} s are over in round {number}, before {job.name}")
                return
            print(f"[round {number} of {rounds}, {place} of {len(round_)}] {job.name}", end=" ... ", flush=True)
            outcome = run(job.command, min(timeout, left))
            result = outcome.result
            print(f"{result['tokens_per_s']:,.1f} tokens/s" if result else outcome.failure, flush=True)
            yield job, number, outcome


def line_of(job: Job, outcome: Completed, more: Mapping[str, Any]) -> dict[str, Any]:
    """A result as a line of ``benchmarks/*.jsonl``."""
    result = {RENAMED.get(key, key): value for key, value in (outcome.result or {}).items()}
    return {**result, **job.about, **more}


def show(table: Table, measured: Mapping[str, list[Completed]]) -> str:
    """A table of medians over rounds, with our speed divided by the peer's."""
    head = f"{'':28} {'tokens/s':>11} {'ms':>9} {'GiB':>6}  {'peer':24} {'tokens/s':>11} {'ms':>9} {'times':>6}"
    lines = [head]
    for case in table.cases:
        if case.name not in measured:
            continue
        ours, theirs = measured[case.name], measured.get(peer_job(case.peer), []) if case.peer else []
        memory = _median(ours, "peak_mem_gib")
        text = f"{case.name:28} {_figures(ours)} " + (f"{memory:6.2f}" if memory else f"{'-':>6}")
        if case.peer and theirs:
            mine, its = _median(ours, "tokens_per_s"), _median(theirs, "tokens_per_s")
            ratio = f" {mine / its:6.2f}" if mine and its else ""
            text += f"  {case.peer.name:24} {_figures(theirs)}{ratio}"
        lines.append(text)
    return "\n".join(lines)


def _median(outcomes: Sequence[Completed], key: str) -> float | None:
    values = [outcome.result[key] for outcome in outcomes if outcome.result and outcome.result.get(key) is not None]
    return statistics.median(values) if values else None


def _figures(outcomes: Sequence[Completed]) -> str:
    """Tokens/s and ms, or why the last run failed."""
    speed, ms = _median(outcomes, "tokens_per_s"), _median(outcomes, "ms_per_step")
    return f"{outcomes[-1].failure[:21]:>21}" if speed is None or ms is None else f"{speed:11,.1f} {ms:9,.1f}"


def default_file(processes: int) -> Path:
    """``h200.jsonl`` or ``h200x4.jsonl`` beside this file, after the GPU's name."""
    if not processes:
        return HERE / "cpu.jsonl"
    name = re.search(r"[A-Z]+\d+\w*", torch.cuda.get_device_name())
    return HERE / f"{name[0].lower() if name else 'gpu'}{f'x{processes}' if processes > 1 else ''}.jsonl"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="run the peers' scripts in this folder, too")
    parser.add_argument("--only", default="", metavar="WORDS", help="only cases whose name holds these words")
    parser.add_argument("--gpus", type=int, choices=sorted(TABLES), help="which cases (default: after this machine)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each case (default: 3)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for each run (default: 600)")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S", help="seconds for everything")
    parser.add_argument(
        "--json-lines", type=Path, metavar="FILE", help="where lines go (default: after the GPU's name)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands of a round and stop")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when everything was measured, 1 when something failed, 130 after Ctrl-C."""
    options = parse(argv)
    here = torch.cuda.device_count()
    gpus = options.gpus if options.gpus is not None else max(n for n in TABLES if n <= here)
    processes, table = max(1, gpus), TABLES[gpus]()
    round_ = jobs(table, processes, options.peers, options.only)
    cpu_adam = [sys.executable, str(HERE / "cpu_adam.py"), "--json", str(HERE / "cpu_adam.jsonl")]
    scripts = [cpu_adam] if gpus == 0 and options.only in "cpu_adam" else []
    if options.peers is not None:
        missing = {case.peer.name: case.peer.missing(options.peers) for case in table.cases if case.peer}
        for name, why in missing.items():
            if why:
                print(f"without {name}: {why}")
    if options.dry_run:
        print(*map(shlex.join, [*(job.command for job in round_), *scripts]), sep="\n")
        return 0
    file = options.json_lines or default_file(gpus)
    more = {"visit": datetime.datetime.now().isoformat(timespec="minutes"), **about_machine(processes)}
    measured: dict[str, list[Completed]] = {}
    status = 0
    started = time.monotonic()
    try:
        with terminated_like_ctrl_c():
            for job, number, outcome in measure(round_, options.rounds, options.timeout, options.seconds, run_command):
                measured.setdefault(job.name, []).append(outcome)
                if outcome.result:
                    append_line(file, line_of(job, outcome, {**more, "round": number}))
            for script in scripts:
                left = min(options.timeout, options.seconds - (time.monotonic() - started))
                outcome = run_command(script, max(0.0, left), wants_result=False)
                print(f"{shlex.join(script)}: {outcome.failure or 'done'}")
                status |= bool(outcome.failure)
    except KeyboardInterrupt:
        status = INTERRUPTED
    print(show(table, measured))
    failed = any(outcome.failure for outcomes in measured.values() for outcome in outcomes)
    return status or int(failed)


if __name__ == "__main__":
    sys.exit(main())
