import re
from dataclasses import replace
from datetime import datetime

from gptpar.reporting.console import iteration_line, short_line, timing_line, validation_lines
from gptpar.reporting.records import CpuOptimizerTimes, ValidationRecord
from tests.unit.reporting.records import record

NOW = datetime(2026, 3, 4, 5, 6, 7, 89)
RECORD = record(
    **{"iteration": 100, "train_iters": 500000, "progress": 0.1234, "eta_s": 754.0, "elapsed_ms": 1234.56},
    **{"consumed_samples": 25600, "global_batch_size": 256, "learning_rate": 1.5e-4},
    **{"lm_loss": 6.7890123, "grad_norm": 1.23456},
    **{"tokens_per_s": 188700.04, "tflops_per_gpu": 428.76, "mfu": 0.4622, "mfu_causal": 0.4334},
)


def test_line_with_and_without_every_optional_field():
    line = (
        " [2026-03-04 05:06:07.000089] iteration      100/  500000 | consumed samples:        25600 |"
        " skipped samples:          512 | elapsed time per iteration (ms): 1234.6 |"
        " throughput per GPU (TFLOP/s/GPU): 428.8 | learning rate: 1.500000E-04 | global batch size:   256 |"
        " lm loss: 6.789012E+00 | loss scale: 65536.0 | grad norm: 1.235 | num zeros: 17 |"
        " params norm: 321.988 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        " tokens/s: 188700.0 |"
        " MFU: 46.2% (causal 43.3%) | 12.3% done | ETA: 0:12:34 |"
    )
    plain = replace(RECORD, loss_scale=65536.0)
    full = replace(plain, skipped_samples=512, num_zeros=17, params_norm=321.98765)
    assert iteration_line(full, log_throughput=True, now=NOW) == line
    line = re.sub(r" (skipped samples|throughput per GPU|num zeros|params norm)[^|]*\|", "", line)
    assert iteration_line(plain, now=NOW) == line


def test_short_lines_for_people() -> None:
    assert short_line(RECORD, now=NOW) == (
        " 05:06:07 iteration      100/  500000 | loss 6.7890 | lr 1.50e-04 | norm 1.23 | 188,700 tokens/s | "
        "MFU 46.2% | ETA 0:12:34"
    )
    skipped = replace(RECORD, lm_loss=None, grad_norm=None, mfu=None, num_skipped=1, num_nan=1, tokens_per_s=61.04)
    assert short_line(skipped, now=NOW) == (
        " 05:06:07 iteration      100/  500000 | lr 1.50e-04 | skipped 1 | nan 1 | 61.0 tokens/s | ETA 0:12:34"
    )


def test_a_usual_megatron_log_parser_reads_the_line():
    number = r"([-+\d.E]+)"
    pattern = re.compile(
        rf"iteration\s+(\d+)/\s*(\d+) \|.*consumed samples:\s+(\d+) \|.*"
        rf"elapsed time per iteration \(ms\): {number} \|.*"
        rf"throughput per GPU \(TFLOP/s/GPU\): {number} \|.*learning rate: {number} \|.*"
        rf"global batch size:\s+(\d+) \|.*lm loss: {number} \|.*loss scale: {number} \|.*"
        rf"grad norm: {number} \|.*"
        r"number of skipped iterations:\s+(\d+) \|.*number of nan iterations:\s+(\d+) \|"
    )
    match = pattern.search(iteration_line(RECORD, log_throughput=True))
    assert match is not None
    values = [float(value) for value in match.groups()]
    assert values == [100, 500000, 25600, 1234.6, 428.8, 1.5e-4, 256, 6.789012, 1.0, 1.235, 0, 0]


def test_validation_lines():
    line = " validation loss at iteration 1000 | lm loss value: 3.000000E+00 | lm loss PPL: 2.008554E+01 | "
    rule = "-" * (len(line) + 1)
    assert validation_lines(ValidationRecord(1000, 256000, 1, 3.0)) == f"{rule}\n{line}\n{rule}"
    test = validation_lines(ValidationRecord(1000, 256000, 1, 3.0, split="test"))
    assert " validation loss at iteration 1000 on test set | lm loss value: 3.000000E+00 |" in test


def test_times_of_an_iteration():
    assert timing_line(RECORD) == "times (ms) | iteration: 1234.6"
    times = CpuOptimizerTimes(12.34, 567.89, num_updated=12, num_ahead=6)
    assert timing_line(replace(RECORD, cpu_optimizer=times)) == (
        "times (ms) | iteration: 1234.6 | waited for the CPU optimizer: 12.3 | CPU optimizer busy: 567.9"
        " | updated before the norm was known: 50% | steps redone: 0"
    )
    line = timing_line(replace(RECORD, cpu_optimizer=CpuOptimizerTimes(waited=12.34, busy=0.0, redone=1)))
    assert line.endswith(" | updated before the norm was known: none updated | steps redone: 1")
