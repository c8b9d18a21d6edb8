"""The start banner's contents: what a run says of itself before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gptpar.config import Config, ModelConfig, OptimizerConfig
from gptpar.config.fields import Derived
from gptpar.config.sections.batch import MEASURED_STEPS
from gptpar.engine.engine import Engine
from gptpar.engine.ranges import Home
from gptpar.errors import GptparError
from gptpar.model.gpt import gpt_model
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.optim.schedule import make_schedule
from gptpar.pipeline.layer_split import LayerSplit
from gptpar.pipeline.schedules import simulate, simulated_bubble
from gptpar.plan.hardware import SUSTAINED
from gptpar.plan.job import Job
from gptpar.plan.memory import memory_of_stages, stage_memory
from gptpar.reporting.banner import Row, Section, banner, format_bytes, format_count, ranges
from gptpar.run.batch_plan import BatchPlan
from gptpar.run.data import Vocabulary
from gptpar.run.gpt import split_of
from gptpar.run.reporter import device_peak
from gptpar.system.host import available_memory, free_swap, place_on_machine
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh

ACTIVATIONS = {"gelu_tanh": "GELU", "gelu": "exact GELU", "squared_relu": "squared ReLU"}
ACTIVATIONS |= {"geglu": "exact GEGLU", "geglu_tanh": "GEGLU", "reglu": "ReGLU", "liglu": "LiGLU"}
ACTIVATIONS |= {"quick_geglu": "GEGLU by a sigmoid"}
OVERESTIMATE = 1.1
"""A run is refused only where even this much less would not fit: the expectation may be wrong."""


def start_banner(
    config: Config,
    topology: Topology,
    plan: BatchPlan,
    vocabulary: Vocabulary,
    derived: Sequence[Derived],
    without_effect: Sequence[str],
) -> str:
    """Model, layout, expected memory, every derived number with its reason, and flags that change nothing."""
    split = split_of(config, topology.mesh)
    sections = [
        Section("model", _model(config, vocabulary)),
        Section("layout", _layout(config, topology)),
        Section("run", _run(config, plan)),
        Section("pipeline", _pipeline(config, topology.mesh, plan, split)),
        Section("memory expected of a process", _memory(config, topology)),
        Section("derived", [Row(d.name, str(d.value), d.reason) for d in derived]),
        Section("accepted, without effect", [Row(*note.split(": ", 1)) for note in without_effect]),
    ]
    return banner(sections)


def offload_line(engine: Engine, host: HostOptimizer) -> str:
    """The parts of the first process's optimizer on the CPU and on the device, in words."""
    table = engine.table
    offloaded = f"{table.elements(Home.HOST):,} of {table.elements():,} elements ({table.ratio:.1%})"
    state, doubled = map(format_bytes, host.state_bytes)
    return (
        f"optimizer: the CPU updates {offloaded}: "
        f"{state} of master weights and moments, {doubled} of double buffers for speculation; {host.kernel}; "
        "the device the others: "
        f"{format_bytes(engine.optimizer.device_bytes)} of master weights, moments and gradients"
    )


def _model(config: Config, vocabulary: Vocabulary) -> list[Row]:
    m = config.model
    model = gpt_model(m)
    shape = f"{m.num_layers} layers x {m.hidden_size} hidden x {m.num_attention_heads} heads of {m.kv_channels}"
    kind = "SwiGLU" if m.swiglu else ACTIVATIONS[m.mlp_activation]
    norm = f"{m.normalization}{' (queries and keys, too)' if m.qk_layernorm else ''}"
    rows = f"padded to a multiple of {m.make_vocab_size_divisible_by}"
    if m.pad_vocab_size_to is not None:
        rows = "padded by --pad-vocab-size-to"
    if config.checkpoint.load_hf:
        rows = "and the rows of --load-hf"
    pad = f"{vocabulary.size:,} token ids, {rows}"
    return [
        Row("shape", shape),
        Row("kind", f"{m.position_embedding_type} positions, {norm}, {kind}, {'tied' if m.tied else 'untied'}"),
        *([Row("options", ", ".join(options))] if (options := list(_options(m))) else []),
        Row("vocabulary", f"{m.padded_vocab_size:,}", pad),
        Row("parameters", format_count(model.num_parameters)),
        *([Row("of these, a token uses", format_count(model.num_active_parameters))] if m.has_experts else []),
        Row("FLOPs a token", f"{model.flops_per_token(causal=False):.3e}", "full attention, forward and backward"),
    ]


def _options(m: ModelConfig) -> Iterator[str]:
    """The rarer options of a model, in words."""
    if m.apply_layernorm_1p:
        yield "weights of norms less one"
    if m.embed_layernorm:
        yield "normalised embeddings"
    if m.norm_placement != "pre":
        yield f"norms {'after' if m.norm_placement == 'post' else 'before and after'} attention and MLP"
    if m.use_parallel_residual:
        yield "attention and MLP side by side"
    if m.attention_output_gate:
        yield "gated attention"
    if m.softmax_type == "learnable":
        yield "attention sinks"
    yield from _position_options(m)
    if m.has_experts:
        of_token = f"{m.moe_router_topk} of {m.num_experts} experts of width {m.width_of_experts(m.ffn_hidden_size)}"
        yield f"{of_token} in {sum(m.blocks_with_experts(m.num_layers))} blocks ({m.moe_router_score_function} scores)"
        if m.moe_expert_capacity_factor is not None:
            yield f"an expert takes {m.capacity(m.seq_length)} tokens of a sequence at most"
        if m.balances_micro_batches:
            yield "a balance of each micro-batch, which depends on --micro-batch-size"
    if m.logit_softcap:
        yield f"logits capped at {m.logit_softcap:g}"
    if m.z_loss_weight:
        yield f"z-loss {m.z_loss_weight:g}"
    if m.mup:
        yield f"muP from a width of {m.mup_base_hidden_size}"


def _position_options(m: ModelConfig) -> Iterator[str]:
    """The rarer options of positions and attention, in words."""
    if m.rope_scaling_type is not None:
        yield f"rotary positions scaled by {m.rope_scaling_factor:g} ({m.rope_scaling_type})"
    if m.rope_pattern is not None:
        yield f"layers with and without positions ({m.rope_pattern})"
    if m.window_size is not None:
        yield f"windows of {m.window_size} tokens ({m.window_pattern or 'S'})"


def _layout(config: Config, topology: Topology) -> list[Row]:
    mesh, device = topology.mesh, topology.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    peak = device_peak(config.precision.dtype, device)
    reason = (
        "MFU is not shown: the peak of this device is not known" if peak is None else f"peak {peak / 1e12:.0f} TFLOP/s"
    )
    return [
        Row("processes", f"{mesh.world_size}", f"{mesh.describe()}, ZeRO-{config.parallel.zero_stage}"),
        Row("device", name, reason),
        Row("number format", config.precision.dtype, _wide_formats(config.optimizer)),
    ]


def _wide_formats(optimizer: OptimizerConfig) -> str:
    """The number formats of master weights, moments and sums, in words."""
    if not (rounded := optimizer.rounded_moments):
        return "master weights, moments and gradient sums in fp32 or wider"
    rest = "" if len(rounded) > 1 else ", the other moment"
    kept = " and ".join(f"{name} in {one}" for name, one in rounded.items())
    return f"master weights{rest} and gradient sums in fp32 or wider; {kept}, rounded stochastically"


def _run(config: Config, plan: BatchPlan) -> list[Row]:
    m, o = config.model, config.optimizer
    tokens = plan.train_samples * m.seq_length
    undecided = config.batch.train_minutes is not None and plan.train_iters == config.batch.train_iters
    rows = [
        Row("batch", f"{plan.full} samples x {m.seq_length} tokens", f"{plan.full * m.seq_length:,} tokens a step"),
        Row(
            "length",
            f"{'at most ' * undecided}{plan.num_iterations():,} steps",
            f"{plan.train_samples:,} samples, {format_count(tokens)} tokens"
            + f"; after {MEASURED_STEPS} steps, what fits into {config.batch.train_minutes} minutes" * undecided,
        ),
        Row("learning rate", _rates(o), _last_rate(config, plan)),
        *muon_rows(o),
        *_growth(config, plan),
    ]
    if config.checkpoint.save:
        rows.append(Row("run folder", config.checkpoint.save, "checkpoints, metrics.jsonl, TensorBoard"))
    return rows


def _rates(optimizer: OptimizerConfig) -> str:
    """The schedule in a few words."""
    if optimizer.scheduler is not None:
        return f"{optimizer.lr}, DeepSpeed's {optimizer.scheduler['type']}"
    rates = f"{optimizer.lr} to {optimizer.min_lr}"
    if optimizer.decoupled_lr is not None:
        lowest = optimizer.min_lr if optimizer.decoupled_min_lr is None else optimizer.decoupled_min_lr
        rates += f" (embedding and output layer {optimizer.decoupled_lr} to {lowest})"
    return f"{rates}, {optimizer.lr_decay_style}"


def muon_rows(o: OptimizerConfig) -> list[Row]:
    """The row of Muon, how it updates matrices; none with another optimizer."""
    if o.optimizer != "muon":
        return []
    nesterov = " with Nesterov's look-ahead" if o.muon_nesterov else ""
    iterations = f"{o.muon_num_ns_steps} iterations ({o.muon_coefficient_type})"
    qkv = {"split": "queries, keys and values apart", "heads": "each head apart", "fused": "QKV as one matrix"}
    of = {"spectral": "max(rows, columns)", "unit_rms_norm": "rows / columns"}
    scale = f"{o.muon_extra_scale_factor:g} x sqrt({of.get(o.muon_scale_mode, 'max(1, rows / columns)')})"
    rate = "" if o.muon_lr is None else f"learning rate {o.muon_lr:g}, "
    why = f"momentum {o.muon_momentum:g}{nesterov}, {iterations}; embedding, LM head, norms and biases: AdamW"
    return [Row("muon", f"{rate}updates x {scale}, {qkv[o.muon_qkv]}", why)]


def _last_rate(config: Config, plan: BatchPlan) -> str:
    """The learning rate of the last step: a run may be shorter than its decay, or than its warm-up."""
    if config.logging.skip_train:
        return ""
    schedule = make_schedule(config, plan.train_samples)
    end = plan.sizes.samples_after(plan.num_iterations() - plan.done.iteration - 1, plan.done.consumed_samples)
    in_unit = end * config.model.seq_length if schedule.in_tokens else end
    return f"{schedule.learning_rate(in_unit):.3g} in the last step"


def _growth(config: Config, plan: BatchPlan) -> list[Row]:
    """The rows of a batch that grows; none if it does not."""
    batch, length = config.batch, config.model.seq_length
    if batch.batch_sizes is not None:
        sizes = ", ".join(f"{size} from {format_count(first * length)} tokens on" for first, size in batch.batch_sizes)
        beyond = [size for first, size in batch.batch_sizes if first >= plan.train_samples]
        note = f"the run ends before {', '.join(map(str, beyond))}" if beyond else ""
        return [Row("batch size schedule", sizes, note)]
    if batch.rampup_batch_size is not None:
        start, increment, samples = batch.rampup_batch_size
        return [Row("batch ramp-up", f"from {start} by {increment} to {plan.full} over {samples:,} samples")]
    return []


def _pipeline(config: Config, mesh: Mesh, plan: BatchPlan, split: LayerSplit) -> list[Row]:
    if mesh.pipeline == 1:
        return []
    num_micro = plan.full // (config.batch.micro_batch_size * mesh.data)
    chunks = config.parallel.num_virtual_stages
    idle = simulated_bubble(simulate(mesh.pipeline, num_micro, chunks))
    layers = [split.layers_of(stage) for stage in range(mesh.pipeline)]
    rows = [
        Row(
            f"stage {stage}",
            f"{len(numbers)} layers",
            f"{format_count(round(count))} parameters, numbers {ranges(numbers)}",
        )
        for stage, (numbers, count) in enumerate(zip(layers, split.parameters, strict=True))
    ]
    name = "1F1B" if chunks == 1 else f"interleaved 1F1B, {chunks} virtual stages each"
    return [
        Row("schedule", name, f"{num_micro} micro-batches a step, {100 * idle:.1f} % of the time idle by the schedule"),
        Row("balance", f"{100 * split.efficiency:.1f} %", "mean stage over heaviest stage, by FLOPs"),
        *rows,
    ]


def _memory(config: Config, topology: Topology) -> list[Row]:
    """The rows of memory expected of the stage that needs the most."""
    job = Job(config, topology.mesh, topology.device.type)
    stages = memory_of_stages(job)
    worst = max(range(len(stages)), key=lambda stage: stages[stage].allocated)
    memory = stages[worst]
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers")
    text = ", ".join(f"{part} {format_bytes(round(getattr(memory, part)))}" for part in parts if getattr(memory, part))
    rows = [Row("total" if len(stages) == 1 else f"stage {worst}", format_bytes(round(memory.allocated)), text)]
    if config.offload.cpu_optimizer or config.offload.cpu_parameters:
        rows.append(Row("on the host", format_bytes(round(memory.host))))
    if topology.device.type == "cuda":
        capacity = torch.cuda.get_device_properties(topology.device).total_memory
        rows.append(Row("device has", format_bytes(capacity)))
    return rows


def refuse_what_cannot_fit(config: Config, topology: Topology) -> None:
    """Refuse a run that needs far more memory than there is; all processes call this before they allocate anything.

    Raises:
        GptparError: this process's stage needs far more than its GPU has, or the processes of a machine far more than
            it has free.
    """
    if topology.device.type == "cuda":
        need = stage_memory(Job(config, topology.mesh), topology.stage).allocated
        capacity = torch.cuda.get_device_properties(topology.device).total_memory
        if need > OVERESTIMATE * capacity:
            raise GptparError(
                f"stage {topology.stage} is expected to need {format_bytes(round(need))} and its GPU has "
                f"{format_bytes(capacity)}: lower --micro-batch-size {config.batch.micro_batch_size}, add "
                "--recompute-granularity full or --cpu-optimizer, raise --zero-stage or the tensor or pipeline "
                "parallel size; gptpar plan with the same flags shows what helps how much."
            )
    if config.logging.skip_train:  # an evaluation keeps no activations
        return
    need, free = host_need(config, topology), available_memory() + free_swap()
    is_short = bool(free) and need > OVERESTIMATE * free
    # A process that allocates before another one has looked would leave that one less.
    if topology.any_rank(is_short):
        raise GptparError(_host_is_short(config, topology, need, free) if is_short else "another machine is too small.")


def host_need(config: Config, topology: Topology) -> float:
    """Bytes of host memory that the run's processes on this machine are expected to allocate, at least.

    On a CPU torch's kernels need more than the formulas of a GPU's memory say (two to three times with many
    activations), so that a run that is refused by this sum does not fit.
    """
    on_gpu = topology.device.type == "cuda"
    stages = memory_of_stages(Job(config, topology.mesh, topology.device.type))
    place, count = place_on_machine()
    first = max(0, topology.rank - place)
    here = range(first, min(first + count, topology.mesh.world_size))
    needs = [stages[topology.mesh.position(rank, "pipeline")] for rank in here]
    return sum(one.host - SUSTAINED.host_process + (0.0 if on_gpu else one.allocated) for one in needs)


def _host_is_short(config: Config, topology: Topology, need: float, free: float) -> str:
    count = place_on_machine()[1]
    what = "move less to the host (a lower --cpu-optimizer-ratio, --offload-speculation off, --optimizer-nvme-path)"
    if topology.device.type == "cpu":
        what = (
            f"lower --micro-batch-size {config.batch.micro_batch_size}, add --recompute-granularity full, or put the "
            "optimizer's state on a disk (--cpu-optimizer --optimizer-nvme-path FOLDER)"
        )
    return (
        f"the run is expected to need at least {format_bytes(round(need))} of this machine's memory ({count} "
        f"process{'es' * (count > 1)}), and {format_bytes(round(free))} are free: {what}, choose a smaller model, or "
        "take more machines; gptpar plan with the same flags shows what helps how much."
    )
