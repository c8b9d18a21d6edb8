"""``gptpar plan``: memory and time against hand counts, against what the run allocates, and against measurements."""

from pathlib import Path

import numpy as np
import pytest

from gptpar.cli import main as cli
from gptpar.data.indexed import IndexedDatasetWriter
from gptpar.pipeline.schedules import simulate
from gptpar.plan.report import plan_text
from gptpar.plan.search import search
from gptpar.plan.timing import rounds_idle, rounds_transferring
from tests.unit.plan.plans import CALM, GIB, SMALL, block_bytes, plan, planner_of

# --- measurements ---------------------------------------------------------------------------------------------------

ONE_B3 = "--preset 1.3B --seq-length 2048 --global-batch-size 32 --world-size 4 "
M350 = "--preset 350M --seq-length 1024 --global-batch-size 64 --world-size 4 "
L22 = "--num-layers 22 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --world-size 4 "
PP4 = "--pipeline-partition-method flops --pipeline-model-parallel-size 4 --micro-batch-size 2 "
TP4 = "--tensor-model-parallel-size 4 --sequence-parallel "
TP2PP2 = (
    "--pipeline-partition-method flops --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
    "--sequence-parallel "
)
PIECES = "--num-virtual-stages-per-pipeline-rank "
EAGER = " --cuda-graph off"
# flags, milliseconds a step, GiB allocated on rank 0 at most; H200, benchmarks/*.jsonl
MEASURED = [
    (ONE_B3 + "--micro-batch-size 8 --zero-stage 1", 269.9, 39.41),
    (ONE_B3 + "--micro-batch-size 8 --zero-stage 3", 273.2, 32.87),
    (ONE_B3 + PP4 + PIECES + "3", 332.1, 15.75),
    (ONE_B3 + PP4 + PIECES + "3" + EAGER, 359.7, 14.88),
    (ONE_B3 + TP4 + "--micro-batch-size 32", 361.5, 32.83),
    (ONE_B3 + TP4 + "--micro-batch-size 16", 380.8, 19.63),
    (ONE_B3 + TP2PP2 + "--micro-batch-size 8 " + PIECES + "2", 358.5, 23.21),
    (ONE_B3 + TP2PP2 + "--micro-batch-size 8 " + PIECES + "2" + EAGER, 368.7, 22.90),
    (ONE_B3 + TP2PP2 + "--micro-batch-size 4", 395.2, 13.39),
    (ONE_B3 + TP2PP2 + "--micro-batch-size 4 --no-tp-comm-overlap " + PIECES + "3", 389.8, 14.76),
    (M350 + TP2PP2 + "--micro-batch-size 8", 189.2, 5.69),
    (M350 + TP2PP2 + "--micro-batch-size 8" + EAGER, 343.1, 5.62),
    (L22 + PP4 + "--global-batch-size 32", 360.3, 13.38),
    (L22 + PP4 + "--global-batch-size 64", 675.0, 13.63),
    (L22 + PP4 + "--global-batch-size 32 " + PIECES + "3", 298.3, 15.75),
]


@pytest.mark.parametrize(("flags", "milliseconds", "gib"), MEASURED)
def test_prediction_is_near_the_measurement(flags: str, milliseconds: float, gib: float) -> None:
    predicted = plan(f"{CALM} --gpu h200 {flags}")
    assert predicted.memory[0].allocated / GIB == pytest.approx(gib, rel=0.07)
    assert 1e3 * predicted.time.total == pytest.approx(milliseconds, rel=0.15)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_states_of_a_small_model_by_hand() -> None:
    """Per layer: a block has 12 h^2 + 13 h parameters, each parameter aligned to 64 elements (as h is here)."""
    h, padded = 64, 128
    elements = 4 * (12 * h * h + 13 * h) + (padded + 32) * h + 2 * h
    memory = plan(SMALL + "--micro-batch-size 2").memory[0]
    assert (memory.parameters, memory.gradients, memory.optimizer) == (2 * elements, 2 * elements, 12 * elements)
    summed = plan(SMALL + "--micro-batch-size 2 --global-batch-size 4").memory[0]
    assert (summed.parameters, summed.gradients, summed.optimizer) == (2 * elements, 4 * elements, 12 * elements)
    per_token = 4 * (32 * h + 16 + 4 * 4)  # 34 h without dropout's masks, norms' statistics, attention's log-sums
    assert memory.activations == 2 * 32 * per_token
    wide = plan(SMALL.replace("--bf16", "") + "--micro-batch-size 2 --gpu a100").memory[0]
    assert (wide.parameters, wide.gradients, wide.optimizer) == (0, 4 * elements, 12 * elements)  # live as masters


@pytest.mark.parametrize(("stage", "parts"), [(0, (2, 4, 12)), (1, (2, 5, 3)), (2, (2, 1, 3)), (3, (0.5, 1, 3))])
def test_zero_shards_stage_by_stage(stage: int, parts: tuple[float, float, float]) -> None:
    """Bytes of each parameter on four ranks; ZeRO-1 keeps its shard of the sum beside the whole sum."""
    planned = plan(f"{SMALL} --hidden-size 256 --micro-batch-size 2 --world-size 4 --zero-stage {stage}")
    memory, (elements,) = planned.memory[0], planned.job.split.parameters
    elements -= 256 * 128  # tied: both ends list the one matrix
    found = (memory.parameters / elements, memory.gradients / elements, memory.optimizer / elements)
    assert found == pytest.approx(parts, rel=0.01)  # padding


def test_recomputation_and_offload_of_inputs() -> None:
    flags = SMALL + "--micro-batch-size 2 --recompute-granularity full"
    tokens, h = 2 * 32, 64
    assert plan(flags).memory[0].activations == 4 * tokens * h * 2
    assert plan(flags + " --recompute-method uniform --recompute-num-layers 2").memory[0].activations == (
        2 * tokens * h * 2
    )
    kept = plan(SMALL + "--micro-batch-size 2").memory[0].activations
    some = plan(flags + " --recompute-method block --recompute-num-layers 1").memory[0].activations
    assert some == kept * 3 / 4 + tokens * h * 2
    offloaded = plan(flags + " --checkpoint-in-cpu").memory[0]
    assert offloaded.activations == 0
    assert offloaded.host - plan(flags).memory[0].host == 4 * tokens * h * 2
    assert offloaded.buffers - plan(flags).memory[0].buffers == tokens * h * 2  # it leaves, or has returned early
    selective = plan(SMALL + "--micro-batch-size 2 --recompute-granularity selective --recompute-modules mlp layernorm")
    # Two norms' inputs, 8 h for attention: neither the norms' outputs and statistics nor the MLP's inside are kept.
    assert block_bytes(selective.job) == 12 * h + 16


DOCUMENTS = "--reset-attention-mask --tokenizer-type NullTokenizer --data-path ids "


@pytest.mark.parametrize(
    ("flags", "masks"),
    [("", (0, 0)), (DOCUMENTS, (0, 0)), ("--kv-channels 20 ", (32, 0)), (f"--kv-channels 20 {DOCUMENTS}", (64, 64))],
)
def test_attention_without_its_kernel_has_a_mask(flags: str, masks: tuple[int, int]) -> None:
    """A mask of 32 x 32 tokens, 2 bytes each, is 32 bytes for each of 64 tokens; two samples' documents have two."""
    job = plan(SMALL + flags + "--window-size 8 --window-pattern SF --micro-batch-size 2").job
    plain = plan(SMALL + flags.partition("--reset")[0] + "--micro-batch-size 2").job
    assert tuple(block_bytes(job, number) - block_bytes(plain) for number in range(2)) == masks
    times = [plan(f"{SMALL} {window} --micro-batch-size 2").time.compute for window in ("--window-size 8", "")]
    assert times[0] < times[1]


def test_documents_are_counted_by_their_lengths(tmp_path: Path) -> None:
    """Equal documents of 8 in samples of 32 have a quarter of the pairs; those of a missing corpus count as whole."""
    with IndexedDatasetWriter(tmp_path / "ids", "uint16") as writer:
        writer.add_documents(np.ones(800, np.uint16), np.full(100, 8))
    flags = SMALL + "--micro-batch-size 2 " + DOCUMENTS
    here = flags.replace("ids", str(tmp_path / "ids"))
    there, elsewhere, plain = (plan(words) for words in (here, flags, SMALL + "--micro-batch-size 2"))
    assert set(there.job.document_lengths or ()) == {8} and elsewhere.job.document_lengths is None
    (cost,) = {there.job.costs[number] for number in there.job.blocks(there.job.stages[0])}
    whole = plain.job.costs[plain.job.blocks(plain.job.stages[0])[0]]
    assert cost.attention == whole.attention / 4 and cost.masked == pytest.approx(cost.attention * (1 / 0.55 - 1))
    assert plain.job.flops_per_token - there.job.flops_per_token == 3 * 4 * 0.75 * whole.attention
    assert elsewhere.job.flops_per_token == plain.job.flops_per_token
    assert there.time.compute < elsewhere.time.compute
    (row,) = (line for line in plan_text(there, []).splitlines() if line.startswith("  documents"))
    assert "8 tokens each" in row and "25 % of whole samples' pairs" in row


# --- time -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "count", "chunks"), [(4, 16, 1), (4, 8, 3), (4, 6, 2)])
def test_idle_rounds_and_transfers_are_those_of_the_simulation(stages: int, count: int, chunks: int) -> None:
    def length(transfer: float) -> float:
        spans = simulate(stages, count, chunks, 1 / chunks, 2 / chunks, transfer)
        return max(span.end for row in spans for span in row)

    assert length(0) / 3 - count == pytest.approx(rounds_idle(stages, count, chunks))
    if count % stages == 0:
        small = 1e-3
        assert (length(small) - length(0)) / small == pytest.approx(rounds_transferring(stages, count, chunks))


# --- verdicts and the search ----------------------------------------------------------------------------------------


def test_out_of_memory_names_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    flags = CALM + "--preset 6.7B --micro-batch-size 4 --global-batch-size 64 --world-size 8"
    assert cli(["plan", *flags.split()]) == 1
    text = capsys.readouterr().out
    need = f"{plan(flags).need / GIB:.2f} GiB"
    assert f"OUT OF MEMORY: a process of stage 0 needs {need} and a GPU has 79.10 GiB." in text
    (row,) = [line for line in text.splitlines() if line.startswith("  --zero-stage 2 ")]
    smaller = plan(flags + " --zero-stage 2")
    assert smaller.fits and f"{smaller.need / GIB:.2f} GiB" in row
    assert cli(["plan", *f"{flags} --gpu-memory 8".split()]) == 1
    assert "nothing that was tried is enough" in capsys.readouterr().out


@pytest.mark.slow
def test_search_takes_the_fastest_that_fits() -> None:
    flags = f"{CALM} --preset 2.7B --zero-stage 1 --global-batch-size 64 --world-size 8 --gpu-memory 40"
    found = search(planner_of(f"{flags} --search"))
    best = found.accepted[0]
    assert best.fits and all(p.fits and p.time.total >= best.time.total for p in found.accepted)
    assert found.tried == len(found.accepted) + sum(count for count, _ in found.refused.values())
    count, example = found.refused["does not fit into a GPU's memory"]
    assert count > 0 and "a GPU has 40.00 GiB" in example
    assert "is not a multiple of --micro-batch-size" in found.refused["--global-batch-size does not allow it"][1]
    again = plan(f"{flags} {best.flags()}")
    assert again.time.total == best.time.total and again.need == best.need
