#!/usr/bin/env python
"""Fills the documents' tables of measured figures, and draws the README's picture, from benchmarks/*.jsonl.

    python tools/measured_tables.py            # write README.md, docs/*.md and docs/pictures/speed.svg
    python tools/measured_tables.py --check    # name what is out of date, and exit with 1

Two comments in a document mark the place of a table; the text between them is replaced:

    <!-- measured: NAME -->
    <!-- /measured -->

A figure is the median of all lines that its query finds (their mean if there are two). A query that finds nothing is an
error.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs/pictures/speed.svg"
PLACE = re.compile(r"(<!-- measured: ([\w-]+) -->\n).*?(<!-- /measured -->)", re.DOTALL)
EVERY_STEP_CLIPPED = "--clip-grad 0.0001"
"""A threshold that every step of the benchmarks exceeds."""
OURS = "gptpar benchmark"

Line = dict[str, Any]


@cache
def lines_of(file: str) -> list[Line]:
    """All lines of ``benchmarks/FILE.jsonl``; what some peers call ``seq`` is ``seq_length`` here."""
    lines = map(json.loads, (ROOT / f"benchmarks/{file}.jsonl").read_text().splitlines())
    return [{"seq_length": line.get("seq"), **line} for line in lines]


class Figures:
    """The lines that a query finds.

    Args:
        file: name of the file, without its folder and ending.
        clipped: only lines whose every step is clipped, or none of them.
        **fields: values that a line must have; a missing field is ``None``.
    """

    def __init__(self, file: str, *, clipped: bool = False, **fields: Any):
        self.lines = [
            line
            for line in lines_of(file)
            if all(line.get(key) == value for key, value in fields.items())
            and (EVERY_STEP_CLIPPED in line.get("flags", "")) == clipped
        ]
        if not self.lines:
            raise LookupError(f"benchmarks/{file}.jsonl has no line with {fields}")

    def median(self, field: str) -> float:
        """The median of a field over the lines that have it."""
        return statistics.median(line[field] for line in self.lines if line.get(field) is not None)

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.median("tokens_per_s")

    @property
    def gib(self) -> str:
        """Memory of a GPU at the peak."""
        return f"{self.median('peak_mem_gib'):.1f}"

    @property
    def mfu(self) -> str:
        """Model FLOP/s utilisation, attention counted over the full square."""
        return f"{100 * self.median('mfu'):.1f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def thousands(tokens_per_s: float) -> str:
    """201193 as 201.2k, 27314014 as 27.3M."""
    return f"{tokens_per_s / 1e6:.1f}M" if tokens_per_s >= 1e6 else f"{tokens_per_s / 1e3:.1f}k"


def times(ours: float, theirs: float) -> str:
    """The ratio of our speed to the peer's, as text."""
    return f"{ours / theirs:.2f}"


def one_gpu() -> str:
    """One H100 beside a plain compiled GPT."""
    models = (
        ("124M, sequence 1,024, micro-batch 32", "O", "124M", "124M", 1024),
        ("350M, sequence 1,024, micro-batch 16", "N", "350M", "350M", 1024),
        ("350M, sequence 2,048, micro-batch 16", "O", "350M", "350M", 2048),
        ("1.3B, sequence 2,048, micro-batch 8", "O", "1.3B", "1.3B", 2048),
        ("2.7B (32 x 2,560, heads of 128), sequence 2,048, micro-batch 4", "O", "32x2560x20", "2.7B-h128", 2048),
    )
    rows = []
    for name, visit, ours, theirs, length in models:
        mine = Figures("h100", visit=visit, program=OURS, model=ours, seq_length=length)
        its = Figures("h100", visit=visit, program="peer: plain compiled GPT", model=theirs, seq_length=length)
        figures = [thousands(mine.speed), mine.mfu, mine.gib, thousands(its.speed), its.mfu, its.gib]
        rows.append([name, *figures, times(mine.speed, its.speed)])
    return table(["model", "tokens/s", "MFU", "GiB", "plain compiled GPT", "MFU", "GiB", "times"], rows)


def _four(layout: str, pieces: int | None = None, batch: int | None = None, **fields: Any) -> Figures:
    wanted = {"model": "1.3B", "layout": layout, "micro_batch_size": batch, "pieces_per_stage": pieces, **fields}
    wanted = {key: value for key, value in wanted.items() if value is not None}
    return Figures("h200x4", visit="D", program=OURS, **wanted)


def _megatron(visit: str, layout: str, model: str = "1.3B") -> Figures:
    return Figures("h200x4", visit=visit, program="peer: megatron-core 0.19.2", layout=layout, model=model)


def four_gpus() -> str:
    """Four H200 beside FSDP2 and megatron-core."""
    fsdp = Figures("h200x4", visit="D", program="peer: FSDP2, compiled blocks")
    rows = []
    for stage in (1, 3):
        mine = _four("dp4 x tp1 x pp1", zero_stage=stage)
        name, flags = f"DP4, ZeRO-{stage}", f"`--micro-batch-size 8 --zero-stage {stage}`"
        peer = f"FSDP2, compiled blocks: {thousands(fsdp.speed)}"
        rows.append([name, thousands(mine.speed), flags, peer, times(mine.speed, fsdp.speed)])
    small = "350M, sequence 1,024: TP2 x PP2"
    square, its_square = "dp1 x tp2 x pp2", "tp2 pp2 sp"
    staged = (
        ("PP4, 16 micro-batches", _four("dp1 x tp1 x pp4"), "2`, 3 virtual stages", "pp4", "1.3B"),
        ("TP4, sequence parallel", _four("dp1 x tp4 x pp1", batch=32), "32`", "tp4 sp", "1.3B"),
        ("TP2 x PP2, sequence parallel", _four(square), "8`, 2 virtual stages", its_square, "1.3B"),
        (small, _four(square, model="350M"), "8`", its_square, "350M"),
    )
    for name, mine, flags, layout, model in staged:
        its, faster_host = (_megatron(visit, layout, model).speed for visit in "DB")
        peer = f"megatron-core 0.19.2: {thousands(its)} ({thousands(faster_host)})"
        ratio = f"{times(mine.speed, its)} ({times(mine.speed, faster_host)})"
        rows.append([name, thousands(mine.speed), f"`--micro-batch-size {flags}", peer, ratio])
    return table(["layout", "gptpar", "flags", "peer", "times"], rows)


def offload() -> str:
    """The CPU optimizer beside nothing on the CPU, and beside DeepSpeed."""
    rows: list[list[str]] = []

    def add(where: str, what: str, mine: Figures, nothing: Figures | None = None, peer: Figures | None = None) -> None:
        share = f" ({100 * mine.speed / nothing.speed:.1f} %)" if nothing else ""
        theirs = [f"{peer.speed:,.0f}", peer.gib, f"{mine.speed / peer.speed:.1f}"] if peer else ["", "", ""]
        rows.append([where, what, f"{mine.speed:,.0f}{share}", mine.gib, *theirs])

    def h100(visit: str, model: str, ratio: float, **more: Any) -> Figures:
        return Figures("h100", visit=visit, program=OURS, model=model, cpu_optimizer_ratio=ratio, **more)

    clipped, early = "everything, every step clipped", "the tied embedding's gradient goes early, as first built"
    nothing = h100("AA", "350M", 0.0)
    add("H100, 350M", "nothing", nothing)
    add("", "everything", h100("AA", "350M", 1.0), nothing)
    add("", clipped, h100("AA", "350M", 1.0, clipped=True), nothing)
    add("", "30 %", h100("T", "350M", 0.3), h100("T", "350M", 0.0))
    for visit, model in (("R", "350M"), ("S", "1.3B")):
        its = Figures("h100", visit=visit, program="baseline_deepspeed.py")
        whole = h100("R", "350M", 0.0) if visit == "R" else None
        add(f"H100, {model}", "everything", h100(visit, model, 1.0, variant=early), whole, its)
        add("", clipped, h100(visit, model, 1.0, clipped=True), whole, its)
    nothing = Figures("h200x2", visit="AK", case="350M", commit="25a1577")
    add("H200, 350M", "nothing", nothing)
    add("", "everything", Figures("h200x2", visit="AK", case="350M cpu", commit="25a1577"), nothing)
    add("H200, 1.3B", "everything", Figures("h200", visit="AL", case="1.3B cpu", commit="25a1577"))
    half = Figures("h200", visit="L", program=OURS, model="10B")
    add("H200, 10B", "50 %", half, peer=Figures("h200", visit="L", program="peer: DeepSpeed 0.19.8"))
    add("H200, 10.3B", "everything", Figures("h200x2", visit="AK", model="50x4096x32"))
    add("H200, 14.7B", "63.8 %", Figures("h200", visit="L", model="46x5120x40"))
    add("H100, 10B", "90 %", Figures("h100", visit="K"))
    its = Figures("h200x2", visit="AB", program="DeepSpeed 0.19.8")
    add("2 x H200, 6.7B, ZeRO-3", "everything", Figures("h200x2", visit="AB", program=OURS), peer=its)
    for visit in ("AE", "AI"):
        nothing = Figures("h200x4", visit=visit, program=OURS, cpu_optimizer_ratio=0.0)
        its = Figures("h200x4", visit=visit, program="DeepSpeed 0.19.8")
        everything = Figures("h200x4", visit=visit, program=OURS, cpu_optimizer_ratio=1.0)
        add("4 x H200, 6.7B, ZeRO-3", "nothing", nothing)
        add("", "everything", everything, nothing, its)
        if visit == "AE":
            all_clipped = Figures("h200x4", visit=visit, cpu_optimizer_ratio=1.0, clipped=True)
            add("", clipped, all_clipped, nothing, its)
    return table(["GPU, model", "on the CPU", "tokens/s", "GiB", "DeepSpeed tokens/s", "GiB", "times"], rows)


def hosts() -> str:
    """The effect of the host: the same model on several hosts."""
    rows = []
    for visit, commit in (("Y", "846a31c"), ("AA", "4d6c148"), ("AC", "18ebb0a"), ("AD", "dddd29e"), ("AH", "2b59b94")):
        nothing = Figures("h100", visit=visit, program=OURS, model="350M", cpu_optimizer_ratio=0.0).speed
        runs = Figures("h100", visit=visit, commit=commit, model="350M", cpu_optimizer_ratio=1.0, variant=None)
        shares = sorted(100 * line["tokens_per_s"] / nothing for line in runs.lines)
        busy = sorted(line["cpu_optimizer_busy_ms"] for line in runs.lines)
        single = ", ".join(f"{share:.1f}" for share in shares)
        whole = f"{runs.speed:,.0f} ({100 * runs.speed / nothing:.1f} %)"
        rows.append([f"{nothing:,.0f}", whole, f"{single} %", f"{busy[0]:.0f} to {busy[-1]:.0f}"])
    return table(["nothing on the CPU", "everything", "single runs", "the CPU works, ms a step"], rows)


def cpu_kernel() -> str:
    """The CPU optimizer's pass over 100M and 1,000M elements beside what memory allows."""
    many = 100_000_000
    columns: list[dict[str, Any]] = [
        {"commit": "3b893d0", "elements": many, "threads": 1},
        {"commit": "3b893d0", "elements": many, "threads": 2},
        {"visit": "Y", "elements": many},
        {"visit": "S", "elements": 10 * many},
    ]

    def cell(contender: str, query: dict[str, Any]) -> str:
        if contender == "DeepSpeed, casts" and query.get("visit") == "Y":
            query = {**query, "visit": "S"}
        return f"{Figures('cpu_adam', contender=contender, **query).median('median_ms'):.1f}"

    names = {
        "bound, in place": "bound: one pass over the same bytes",
        "gptpar, in place": "**gptpar**",
        "bound, out of place": "bound, with a double buffer",
        "gptpar, out of place": "**gptpar**, with a double buffer",
        "torch fused, casts": "torch's fused AdamW with its casts",
        "DeepSpeed, casts": "DeepSpeedCPUAdam 0.19.8 with its casts",
    }
    rows = [[text, *(cell(contender, query) for query in columns)] for contender, text in names.items()]
    return table(["ms", "Zen 5, 1 thread", "Zen 5, 2 threads", "Xeon, 16 threads", "1,000M, 16 threads"], rows)


def _gpt2(contender: str, **fields: Any) -> Figures:
    return Figures("h200x2", visit="AN", contender=f"hf-gpt2-{contender}", **fields)


def any_module() -> str:
    """An unmodified transformers GPT-2 beside its peers."""
    plain, deepspeed, fsdp = _gpt2("plain"), _gpt2("deepspeed"), _gpt2("fsdp2", gpus=2)
    alone = _gpt2("gptpar", gpus=1, ratio=0.0, train_batch=False)
    sharded = _gpt2("gptpar", gpus=2, ratio=0.0)
    launched, recorded = (_gpt2("gptpar", gpus=1, ratio=1.0, train_batch=whole) for whole in (False, True))
    on_cpu = f"{thousands(launched.speed)}, {thousands(recorded.speed)} by `train_batch`"
    factors = f"{launched.speed / deepspeed.speed:.1f}, {recorded.speed / deepspeed.speed:.1f}"
    here, own = (Figures("h200", visit="AY", contender="hf-gpt2-gptpar", ratio=ratio).speed for ratio in (1.0, 0.0))
    rows = [
        ["one H200", thousands(alone.speed), f"plain PyTorch, compiled blocks: {thousands(plain.speed)}"],
        ["one H200, everything on the CPU", on_cpu, f"DeepSpeed ZeRO-3: {thousands(deepspeed.speed)}"],
        ["the same, later", thousands(here), f"gptpar with nothing on the CPU: {thousands(own)}"],
        ["two H200, ZeRO-3", thousands(sharded.speed), f"FSDP2: {thousands(fsdp.speed)}"],
    ]
    ratios = [times(alone.speed, plain.speed), factors, times(here, own), times(sharded.speed, fsdp.speed)]
    return table(["", "gptpar", "peer", "times"], [[*row, ratio] for row, ratio in zip(rows, ratios, strict=True)])


def preprocessing() -> str:
    """Tokenising text on two cores."""
    rows = []
    for name, contender in (("gptpar", "gptpar"), ("Megatron-LM's tool", "Megatron-LM 00736f4, fast tokenizer")):
        found = [Figures("preprocess", contender=contender, workers=2, copies=copies) for copies in (1, 4)]
        cells = [[thousands(one.speed), f"{one.median('peak_mb'):.0f} MB"] for one in found]
        rows.append([name, *cells[0], *cells[1]])
    return table(["", "58 MB of text, tokens/s", "memory", "231 MB of text, tokens/s", "memory"], rows)


def summary_rows() -> list[tuple[str, float, str, float]]:
    """(what, our tokens/s, peer, its tokens/s) of the README's table; of two measurements, the peer's better one."""
    early = "the tied embedding's gradient goes early, as first built"
    return [
        (
            "350M on one H100",
            Figures("h100", visit="N", program=OURS).speed,
            "plain compiled GPT",
            Figures("h100", visit="N", program="peer: plain compiled GPT").speed,
        ),
        (
            "350M on one H100, optimizer wholly on the CPU",
            Figures("h100", visit="R", model="350M", cpu_optimizer_ratio=1.0, variant=early).speed,
            "DeepSpeed 0.19.8",
            Figures("h100", visit="R", program="baseline_deepspeed.py").speed,
        ),
        (
            "1.3B on four H200, data parallel, ZeRO-3",
            _four("dp4 x tp1 x pp1", zero_stage=3).speed,
            "FSDP2, compiled blocks",
            Figures("h200x4", visit="D", program="peer: FSDP2, compiled blocks").speed,
        ),
        (
            "1.3B on four H200, tensor 2 x pipeline 2",
            _four("dp1 x tp2 x pp2").speed,
            "megatron-core 0.19.2",
            max(_megatron(visit, "tp2 pp2 sp").speed for visit in "DB"),
        ),
    ]


def summary() -> str:
    """The README's table."""
    rows = (
        [what, thousands(ours), f"{peer}: {thousands(theirs)}", times(ours, theirs)]
        for what, ours, peer, theirs in summary_rows()
    )
    return table(["tokens/s", "gptpar", "peer", "times"], rows)


def picture() -> str:
    """The README's table as bars: in each row, ours is above the peer's, on a scale of its own."""
    left, width, height, top = 24, 760, 76, 54
    rows = summary_rows()
    total = top + height * len(rows) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" font-family="sans-serif" '
        'font-size="14">',
        f'<rect width="{width}" height="{total}" fill="#ffffff"/>',
        f'<text x="{left}" y="30" font-size="17" font-weight="bold" fill="#1f2933">'
        "Training speed beside the peer, tokens/s</text>",
    ]
    room = width - 2 * left - 250
    for number, (what, ours, peer, theirs) in enumerate(rows):
        y = top + number * height
        parts.append(f'<text x="{left}" y="{y + 12}" fill="#1f2933">{what}</text>')
        for name, speed, color, offset in (("gptpar", ours, "#0f766e", 20), (peer, theirs, "#9aa5b1", 40)):
            length = room * speed / max(ours, theirs)
            parts.append(f'<rect x="{left}" y="{y + offset}" width="{length:.1f}" height="16" rx="2" fill="{color}"/>')
            label = f"{name}  {thousands(speed)}" + (f"  ({times(ours, theirs)}x)" if name == "gptpar" else "")
            parts.append(f'<text x="{left + length + 8:.1f}" y="{y + offset + 13}" fill="#52606d">{label}</text>')
    return "\n".join([*parts, "</svg>", ""])


def survived_faults(which: str = "built") -> str:
    """The last recorded run of ``tests.faults`` with a set of kinds; the first lines have no name of a set."""
    recorded = [line for line in lines_of("faults") if line.get("set", "built") == which][-1]
    rows = []
    for row in recorded["kinds"]:
        survived = row["outcomes"].get("ok", 0)
        others = ", ".join(f"{name} {count}" for name, count in row["outcomes"].items() if name != "ok")
        name = row["kind"].replace("-", " ")
        cells = [name, row["workers"], row["faults"], survived, others or "none", row["max_steps_lost"]]
        rows.append([*map(str, cells), f"{row['max_seconds_to_exit']:.0f} s" if row["max_seconds_to_exit"] else ""])
    total = [recorded["faults"], recorded["faults"] - recorded["not_survived"], recorded["not_survived"]]
    rows.append(["all", "", *map(str, total), "", ""])
    return table(
        ["fault", "processes", "injected", "survived", "other outcomes", "most steps lost", "longest time to exit"],
        rows,
    )


def goodput() -> str:
    """Runs whose workers are killed."""
    rows = []
    for line in lines_of("goodput"):
        times = f"{line['kill_to_next_step_median_s']:.2f} s, at most {line['kill_to_next_step_max_s']:.2f} s"
        rows.append([f"{line['kill_every_s']:.0f} s", str(line["kills"]), f"{100 * line['goodput']:.1f} %", times])
    return table(["a kill every", "kills in 10 minutes", "goodput", "from the kill to the next step"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "summary": summary,
    "one-gpu": one_gpu,
    "four-gpus": four_gpus,
    "offload": offload,
    "hosts": hosts,
    "cpu-kernel": cpu_kernel,
    "any-module": any_module,
    "preprocessing": preprocessing,
    "survived-faults": survived_faults,
    "held-out-faults": lambda: survived_faults("held-out"),
    "goodput": goodput,
}


def filled(text: str) -> str:
    """A document with up-to-date tables."""
    return PLACE.sub(lambda place: f"{place[1]}\n{TABLES[place[2]]()}\n\n{place[3]}", text)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files; returns 1 if ``--check`` finds a file that is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 where something would change")
    options = parser.parse_args(argv)
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    wanted = {path: filled(path.read_text()) for path in documents} | {PICTURE: picture()}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is out of date' if options.check else 'written'}")
        if not options.check:
            path.write_text(wanted[path])
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
