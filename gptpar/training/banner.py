"""What a run says of itself before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from gptpar.config import Config
from gptpar.config.derive import Derived
from gptpar.model.flops import Shape, flops_per_token, num_parameters
from gptpar.model.memory import MemoryPlan, expected_memory
from gptpar.reporting.banner import Row, Section, banner, format_bytes, format_count
from gptpar.tensor_parallel.cross_entropy import num_chunks
from gptpar.topology import Topology
from gptpar.training.batch_plan import BatchPlan
from gptpar.training.data import Vocabulary
from gptpar.training.reporter import device_peak
from gptpar.training.sharded_model import DTYPES


def start_banner(
    config: Config,
    topology: Topology,
    plan: BatchPlan,
    vocabulary: Vocabulary,
    derived: Sequence[Derived],
    without_effect: Sequence[str],
) -> str:
    """Model, layout, expected memory, every derived number with its reason, and flags that change nothing."""
    sections = [
        Section("model", _model(config, vocabulary)),
        Section("layout", _layout(config, topology)),
        Section("run", _run(config, plan)),
        Section("memory expected on each process", _memory(config, topology)),
        Section("derived", [Row(d.name, str(d.value), d.reason) for d in derived]),
        Section("accepted, without effect", [Row(*note.split(": ", 1)) for note in without_effect]),
    ]
    return banner(sections)


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
        Row("processes", f"{layout.world_size}", layout.describe()),
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


def _memory(config: Config, topology: Topology) -> list[Row]:
    m, b = config.model, config.batch
    assert m.num_layers and m.seq_length and m.padded_vocab_size and b.micro_batch_size
    size = DTYPES[config.precision.dtype].itemsize
    plan = MemoryPlan(
        num_parameters=num_parameters(cast(Shape, m)),
        layers_in_flight=m.num_layers,
        micro_batch_size=b.micro_batch_size,
        bytes_per_element=size,
        recomputed_layers=len(recomputed_layers(config)),
        hidden_dropout=m.hidden_dropout,
        data_parallel=topology.layout.data,
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
