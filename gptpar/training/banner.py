"""What a run says of itself before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from gptpar.config import Config
from gptpar.config.derive import Derived
from gptpar.model.flops import Shape, flops_per_token, num_parameters
from gptpar.model.memory import MemoryPlan, expected_memory
from gptpar.pipeline.module import LayerSplit
from gptpar.pipeline.schedules import idle_share, simulate
from gptpar.reporting.banner import Row, Section, banner, format_bytes, format_count
from gptpar.tensor_parallel.cross_entropy import num_chunks
from gptpar.topology import Layout, Topology
from gptpar.training.batch_plan import BatchPlan
from gptpar.training.data import Vocabulary
from gptpar.training.reporter import device_peak
from gptpar.training.sharded_model import DTYPES, ShardedModel, recomputed_blocks, split_of


def start_banner(
    config: Config,
    topology: Topology,
    plan: BatchPlan,
    vocabulary: Vocabulary,
    derived: Sequence[Derived],
    without_effect: Sequence[str],
) -> str:
    """Model, layout, expected memory, every derived number with its reason, and flags that change nothing."""
    split = split_of(config, topology.layout)
    sections = [
        Section("model", _model(config, vocabulary)),
        Section("layout", _layout(config, topology)),
        Section("run", _run(config, plan)),
        Section("pipeline", _pipeline(config, topology.layout, plan, split)),
        Section("memory expected on the first stage's processes", _memory(config, topology, plan, split)),
        Section("derived", [Row(d.name, str(d.value), d.reason) for d in derived]),
        Section("accepted, without effect", [Row(*note.split(": ", 1)) for note in without_effect]),
    ]
    return banner(sections)


def offload_line(model: ShardedModel) -> str:
    """What of the first process's optimizer is where."""
    assert model.host is not None
    division = model.division
    on_device = (division.elements - division.offloaded) * 4 * model.optimizer.master.element_size()
    return (
        f"optimizer: the CPU updates {division.offloaded:,} of {division.elements:,} elements "
        f"({division.ratio:.1%}): {model.host.describe()}; the device the others: {format_bytes(on_device)} of "
        "masters, moments and gradient sums"
    )


def _model(config: Config, vocabulary: Vocabulary) -> list[Row]:
    m = config.model
    shape = f"{m.num_layers} layers x {m.hidden_size} hidden x {m.num_attention_heads} heads of {m.kv_channels}"
    kind = "SwiGLU" if m.swiglu else "GELU"
    pad = f"{vocabulary.size:,} token ids, padded to a multiple of {m.make_vocab_size_divisible_by}"
    return [
        Row("shape", shape),
        Row(
            "kind",
            f"{m.position_embedding_type} positions, {m.normalization}, {kind}, {'tied' if m.tied else 'untied'}",
        ),
        Row("vocabulary", f"{m.padded_vocab_size:,}", pad),
        Row("parameters", format_count(num_parameters(cast(Shape, m)))),
        Row(
            "FLOPs a token",
            f"{flops_per_token(cast(Shape, m), causal=False):.3e}",
            "full attention, forward and backward",
        ),
    ]


def _layout(config: Config, topology: Topology) -> list[Row]:
    layout, device = topology.layout, topology.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    peak = device_peak(config, device)
    reason = (
        "MFU is not shown: the peak of this device is not known" if peak is None else f"peak {peak / 1e12:.0f} TFLOP/s"
    )
    return [
        Row("processes", f"{layout.world_size}", f"{layout.describe()}, ZeRO-{config.parallel.zero_stage or 0}"),
        Row("device", name, reason),
        Row("number format", config.precision.dtype, "master weights, moments and gradient sums in fp32 or wider"),
    ]


def _run(config: Config, plan: BatchPlan) -> list[Row]:
    m, o = config.model, config.optimizer
    assert m.seq_length
    tokens = plan.train_samples * m.seq_length
    rows = [
        Row("batch", f"{plan.full} samples x {m.seq_length} tokens", f"{plan.full * m.seq_length:,} tokens a step"),
        Row(
            "length",
            f"{plan.num_iterations():,} steps",
            f"{plan.train_samples:,} samples, {format_count(tokens)} tokens",
        ),
        Row("learning rate", f"{o.lr} to {o.min_lr}, {o.lr_decay_style}"),
    ]
    if plan.start != plan.full:
        text = f"from {plan.start} by {plan.increment} to {plan.full} over {plan.ramp_samples:,} samples"
        rows.append(Row("batch ramp-up", text))
    if config.checkpoint.save:
        rows.append(Row("run folder", config.checkpoint.save, "checkpoints, metrics.jsonl, TensorBoard"))
    return rows


def _pipeline(config: Config, layout: Layout, plan: BatchPlan, split: LayerSplit) -> list[Row]:
    if layout.pipeline == 1:
        return []
    num_micro = plan.full // ((config.batch.micro_batch_size or 1) * layout.data)
    chunks = config.parallel.num_chunks
    idle = idle_share(simulate(layout.pipeline, num_micro, chunks))
    layers = [split.layers_of(stage) for stage in range(layout.pipeline)]
    rows = [
        Row(
            f"stage {stage}",
            f"{len(numbers)} layers",
            f"{format_count(round(count))} parameters, numbers {ranges(numbers)}",
        )
        for stage, (numbers, count) in enumerate(zip(layers, split.parameters, strict=True))
    ]
    name = "1F1B" if chunks == 1 else f"interleaved 1F1B, {chunks} pieces a stage"
    return [
        Row("schedule", name, f"{num_micro} micro-batches a step, {100 * idle:.1f} % of the time idle by the schedule"),
        Row("balance", f"{100 * split.efficiency:.1f} %", "mean stage over heaviest stage, by FLOPs"),
        *rows,
    ]


def ranges(numbers: Sequence[int]) -> str:
    """``0-2, 7-9`` for consecutive numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _memory(config: Config, topology: Topology, batches: BatchPlan, split: LayerSplit) -> list[Row]:
    """Of the first stage, which keeps the most micro-batches."""
    m, b, layout = config.model, config.batch, topology.layout
    assert m.num_layers and m.seq_length and m.padded_vocab_size and b.micro_batch_size
    size = DTYPES[config.precision.dtype].itemsize
    num_micro = batches.full // (b.micro_batch_size * layout.data)
    in_flight = min(layout.pipeline, num_micro)
    blocks = [f"layers.{layer - 2}" for layer in split.layers_of(0) if 2 <= layer < m.num_layers + 2]
    recomputed = sum(len(group) for group in recomputed_blocks(config, blocks))
    plan = MemoryPlan(
        num_parameters=round(split.parameters[0] / layout.tensor),
        layers_in_flight=len(blocks) * in_flight,
        micro_batch_size=b.micro_batch_size,
        bytes_per_element=size,
        recomputed_layers=recomputed * in_flight,
        hidden_dropout=m.hidden_dropout,
        tensor_parallel=layout.tensor,
        sequence_parallel=config.parallel.sequence_parallel,
        data_parallel=layout.data,
        zero_stage=config.parallel.zero_stage or 0,
        logits_chunks=num_chunks(b.micro_batch_size * m.seq_length, m.padded_vocab_size, size, topology.device.type),
    )
    expected = expected_memory(cast(Shape, m), plan)
    parts = ("parameters", "gradients", "masters", "moments", "activations", "logits")
    text = ", ".join(f"{part} {format_bytes(getattr(expected, part))}" for part in parts if getattr(expected, part))
    rows = [Row("total", format_bytes(expected.total), text)]
    if topology.device.type == "cuda":
        capacity = torch.cuda.get_device_properties(topology.device).total_memory
        rows.append(Row("device has", format_bytes(capacity)))
    return rows
