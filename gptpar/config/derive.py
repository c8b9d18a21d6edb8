"""Values that follow from others, each with its reason. Pure; run before validation, so it tolerates missing fields."""

from __future__ import annotations

import contextlib
from collections.abc import Set
from dataclasses import dataclass

from gptpar.config import Flags
from gptpar.config.batch_sizes import BatchSizes, read_schedule
from gptpar.config.fields import flag_name
from gptpar.config.layer_patterns import LAYER_LISTS, layer_pattern
from gptpar.config.presets import PRESETS
from gptpar.config.sections.data import SPLIT
from gptpar.config.sections.logging import EVAL_INTERVAL
from gptpar.config.sections.model import FUSED_GELU, UNFUSED_GELU
from gptpar.config.sections.parallel import SHARDED
from gptpar.config.sections.positions import LLAMA_3_CONTEXT

OFF_AT_0 = (("checkpoint", "save_interval"), ("batch", "exit_interval"), ("batch", "exit_duration_in_mins"))
"""Intervals that are not kept where they are 0."""
NO_START = {
    "alibi": "ALiBi's distances do not depend on where positions start",
    "none": "there are no positions",
}
"""Kinds of positions that are the same wherever they start, and why."""


@dataclass(frozen=True)
class Derived:
    """A value nobody typed: its name, what it became, and why."""

    name: str
    value: object
    reason: str


class _Notes:
    """Fills fields that are ``None`` and remembers why."""

    def __init__(self, flags: Flags):
        self.flags = flags
        self.derived: list[Derived] = []

    def fill(self, section: str, name: str, value: object, reason: str) -> None:
        if getattr(getattr(self.flags, section), name) is None:
            self.replace(section, name, value, reason)

    def replace(self, section: str, name: str, value: object, reason: str) -> None:
        self.flags = self.flags.update(section, **{name: value})
        self.add(name.replace("_", " "), value, reason)

    def add(self, name: str, value: object, reason: str) -> None:
        """A value that has no field of its own."""
        self.derived.append(Derived(name, value, reason))


def ffn_width(hidden_size: int, gated: bool) -> int:
    """4 x hidden; with a gate two thirds of it, a multiple of 64 (as Megatron: ``int(8h/3/64)*64``)."""
    return int(4 * hidden_size * 2 / 3 / 64) * 64 if gated else 4 * hidden_size


def expand_preset(flags: Flags, given: Set[str]) -> tuple[Flags, list[Derived]]:
    """Set the model's options that its preset stands for.

    Args:
        given: fields that keep what was typed, as ``section.field``.
    """
    notes, preset = _Notes(flags), flags.model.preset
    for name, value in PRESETS.get(preset or "", {}).items():
        if f"model.{name}" not in given:
            notes.replace("model", name, value, f"--preset {preset}")
    return notes.flags, notes.derived


def choose_gelu(flags: Flags, given: Set[str]) -> tuple[Flags, list[Derived]]:
    """Set Megatron's GELU of an MLP that has no bias to fuse it with, or whose fusion is off.

    Args:
        given: fields that keep what was typed, as ``section.field``.
    """
    notes, model = _Notes(flags), flags.model
    switches = model.swiglu, model.glu_activation, model.quick_geglu, model.squared_relu
    other = any(switches) or model.mlp_activation != FUSED_GELU
    if not other and "model.mlp_activation" not in given and not (model.add_bias_linear and model.bias_gelu_fusion):
        reason = "--disable-bias-linear" if not model.add_bias_linear else "--no-bias-gelu-fusion"
        notes.replace("model", "mlp_activation", UNFUSED_GELU, f"{reason}, as in Megatron-LM")
    return notes.flags, notes.derived


def derive(flags: Flags, world_size: int) -> tuple[Flags, list[Derived]]:
    """Fill what can be filled.

    Args:
        flags: the flags as typed.
        world_size: number of processes the run will have.

    Returns:
        The completed configuration and the list of derived values with their reasons.
    """
    notes = _Notes(flags)
    _derive_model(notes)
    _derive_parallel(notes, world_size)
    _derive_batch(notes, world_size)
    _derive_recompute(notes)
    _derive_rest(notes)
    return notes.flags, notes.derived


def _derive_position_embedding(notes: _Notes) -> None:
    """Derive the kind of positions from the older switches."""
    model = notes.flags.model
    if model.use_rotary_position_embeddings and model.position_embedding_type != "rope":
        notes.replace("model", "position_embedding_type", "rope", "--use-rotary-position-embeddings")
    elif not model.add_position_embedding and model.position_embedding_type == "learned_absolute":
        notes.replace("model", "position_embedding_type", "none", "--no-position-embedding")
    kind = notes.flags.model.position_embedding_type
    if notes.flags.data.reset_position_ids and kind in NO_START:
        notes.replace("data", "reset_position_ids", False, NO_START[kind])


def _derive_rotary(notes: _Notes) -> None:
    """Derive scaled frequencies, and layers without positions or windows, from Megatron's words."""
    model = notes.flags.model
    if model.use_rope_scaling:
        notes.fill("model", "rope_scaling_type", "llama3", "--use-rope-scaling")
    if notes.flags.model.rope_scaling_type == "llama3":
        notes.fill("model", "original_max_position_embeddings", LLAMA_3_CONTEXT, "that of Llama 3.1")
    for name, pattern, letters, most in LAYER_LISTS:
        if (text := getattr(model, name)) is not None:
            with contextlib.suppress(ValueError):  # the checks report it
                notes.fill("model", pattern, layer_pattern(text, letters, most), f"{flag_name(name)} {text}")


def _derive_gate(notes: _Notes) -> None:
    """Derive the gate from other programs' words, beside which the MLP has another width."""
    gate = notes.flags.model.glu_activation
    reason = f"--glu-activation {gate}"
    if gate is None and notes.flags.model.quick_geglu:
        gate, reason = "quick_geglu", "--quick-geglu"
    if gate is not None and not notes.flags.model.swiglu:
        name, value = ("swiglu", True) if gate == "swiglu" else ("mlp_activation", gate)
        notes.replace("model", name, value, reason)
        if notes.flags.model.hidden_size:
            width = 4 * notes.flags.model.hidden_size
            notes.fill("model", "ffn_hidden_size", width, f"4 x hidden, as {reason.split()[0]} has it")


def _derive_model(notes: _Notes) -> None:
    _derive_position_embedding(notes)
    _derive_rotary(notes)
    _derive_gate(notes)
    if notes.flags.model.squared_relu:
        notes.replace("model", "mlp_activation", "squared_relu", "--squared-relu")
    model = notes.flags.model
    if model.hidden_size:
        reason = "8/3 x hidden for a gated MLP, a multiple of 64" if model.gated else "4 x hidden"
        notes.fill("model", "ffn_hidden_size", ffn_width(model.hidden_size, model.gated), reason)
        if model.num_attention_heads:
            width = model.hidden_size // model.num_attention_heads
            notes.fill("model", "kv_channels", width, "hidden / heads")
    if not model.group_query_attention and model.num_query_groups:
        notes.replace("model", "group_query_attention", True, "--num-query-groups is given")
    elif not model.group_query_attention:
        notes.fill("model", "num_query_groups", model.num_attention_heads, "one key/value head a query head")
    if model.seq_length and model.position_embedding_type == "learned_absolute":
        notes.fill("model", "max_position_embeddings", model.seq_length, "--seq-length")


def _derive_parallel(notes: _Notes, world_size: int) -> None:
    p = notes.flags.parallel
    data_parallel = p.data_parallel_size(world_size)
    tensor, pipeline = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    if p.sequence_parallel and tensor == 1:  # as in Megatron, which warns
        notes.replace("parallel", "sequence_parallel", False, "--tensor-model-parallel-size is 1: nothing to split")
    if notes.flags.precision.deterministic_mode and tensor > 1 and p.tp_comm_overlap:
        reason = "--deterministic-mode: products fused with transfers are not proved to add in one order"
        notes.replace("parallel", "tp_comm_overlap", False, reason)
    context = f" x {p.context_parallel_size} context" if p.context_parallel_size > 1 else ""
    if p.model_parallel_size > 1 or context:
        reason = f"{world_size} processes / ({tensor} tensor x {pipeline} pipeline{context})"
        notes.add("data parallel size", data_parallel, reason)
    _derive_context(notes)
    num_layers, per_chunk = notes.flags.model.num_layers, p.num_layers_per_virtual_pipeline_stage
    if num_layers and per_chunk and pipeline > 0 and num_layers % (pipeline * per_chunk) == 0:
        reason = f"{num_layers} layers / ({pipeline} stages x {per_chunk} layers in a virtual stage)"
        notes.fill("parallel", "num_virtual_stages_per_pipeline_rank", num_layers // (pipeline * per_chunk), reason)
    _derive_zero_stage(notes, p.num_copies(world_size))


def _derive_context(notes: _Notes) -> None:
    """Choose how context-parallel processes exchange tokens, where ``--cp-comm-type`` is ``auto``."""
    p, m = notes.flags.parallel, notes.flags.model
    size, tensor = p.context_parallel_size, p.tensor_model_parallel_size
    if (
        size <= 1
        or tensor < 1
        or p.cp_comm_type != "auto"
        or not (m.num_attention_heads and m.num_query_groups and m.seq_length)
    ):
        return
    notes.replace("parallel", "cp_comm_type", *_way_over_context(notes.flags, m.num_attention_heads // tensor))


def _way_over_context(flags: Flags, heads: int) -> tuple[str, str]:
    """The value of ``--cp-comm-type`` that ``auto`` stands for, and the reason.

    Args:
        heads: query heads of a tensor rank.
    """
    p, m, size = flags.parallel, flags.model, flags.parallel.context_parallel_size
    if heads % size:
        return "allgather", f"{heads} heads do not divide over {size} processes"
    if m.attention_dropout and (m.num_query_groups or 0) // p.tensor_model_parallel_size % size:
        return "allgather", "dropout of attention, whose masks belong to whole query groups"
    if m.attention_dropout:
        return "a2a", "dropout of attention, which allgather computes for all tokens"
    if m.seq_length and m.seq_length % (2 * size):
        return "a2a", f"{2 * size} chunks need other lengths"
    if not flags.precision.bf16:
        return "a2a", "allgather needs a mask in memory without --bf16"
    if not flags.data.reset_attention_mask and m.window_size is None:
        return "a2a", "whole samples have a faster kernel there"
    sent = p.heads_sent(m.num_attention_heads or 0, m.num_query_groups or 0)
    said = ", ".join(f"{n:g} by {way}" for way, n in sent.items())
    return min(sent, key=sent.__getitem__), f"heads that a layer sends for a token: {said}"


def _derive_zero_stage(notes: _Notes, num_copies: int) -> None:
    p = notes.flags.parallel
    strategy = p.data_parallel_sharding_strategy or SHARDED[-1]
    if p.use_megatron_fsdp and strategy in SHARDED:
        notes.fill("parallel", "zero_stage", SHARDED.index(strategy), f"--use-megatron-fsdp, {strategy}")
    elif p.no_pipeline_parallel and num_copies > 1:
        reason = f"--no-pipeline-parallel with {num_copies} copies of the weights"
        notes.fill("parallel", "zero_stage", 3, reason)
    elif p.use_distributed_optimizer:
        notes.fill("parallel", "zero_stage", 1, "--use-distributed-optimizer")
    else:
        notes.fill("parallel", "zero_stage", 0, "every process holds all of its part of the model and the optimizer")


def _derive_batch(notes: _Notes, world_size: int) -> None:
    _derive_schedule(notes)
    batch = notes.flags.batch
    data_parallel = notes.flags.parallel.data_parallel_size(world_size)
    steps = batch.gradient_accumulation_steps
    if steps and batch.global_batch_size and batch.global_batch_size % (steps * data_parallel) == 0:
        reason = (
            f"batch {batch.global_batch_size} / ({steps} micro-batches x {data_parallel} data-parallel process(es))"
        )
        notes.fill("batch", "micro_batch_size", batch.global_batch_size // (steps * data_parallel), reason)
    batch = notes.flags.batch
    if batch.micro_batch_size:
        reason = f"micro-batch {batch.micro_batch_size} x {data_parallel} data-parallel process(es)"
        unit = batch.micro_batch_size * data_parallel
        times = f" x {steps} a step" if steps else ""
        notes.fill("batch", "global_batch_size", unit * (steps or 1), reason + times)
        full = notes.flags.batch.global_batch_size
        if full and unit > 0 and full % unit == 0:
            notes.add("micro batches per step", full // unit, f"batch {full} / ({reason})")
    _derive_length(notes)


def _derive_schedule(notes: _Notes) -> None:
    """Derive the sizes of --step-batch-size-schedule; the checks report one that cannot be read."""
    words, seq_length = notes.flags.batch.step_batch_size_schedule, notes.flags.model.seq_length
    if words is None or not seq_length:
        return
    with contextlib.suppress(ValueError):
        notes.flags = notes.flags.update("batch", batch_sizes=read_schedule(words, seq_length))
        last = BatchSizes(notes.flags.batch.batch_sizes or ()).last
        notes.fill("batch", "global_batch_size", last, "the last of --step-batch-size-schedule")


def _derive_length(notes: _Notes) -> None:
    """Derive the run's length: of --train-tokens and what is given beside it, whichever is reached first ends it."""
    batch, seq_length = notes.flags.batch, notes.flags.model.seq_length
    if not batch.train_tokens or not seq_length:
        return
    limit = -(-batch.train_tokens // seq_length)
    reason = f"{batch.train_tokens:,} tokens / {seq_length} a sample"
    notes.flags = notes.flags.update("batch", sample_limit=limit)
    if batch.train_iters is not None:
        _first_of_steps_and_tokens(notes, limit, reason)
    elif batch.train_samples is None:
        notes.fill("batch", "train_samples", limit, reason)
    elif batch.train_samples > limit:
        first = f"{reason}, reached before --train-samples {batch.train_samples:,}"
        notes.replace("batch", "train_samples", limit, first)
    elif batch.train_samples < limit:
        notes.add("train samples", batch.train_samples, f"reached before --train-tokens {batch.train_tokens:,}")


def _first_of_steps_and_tokens(notes: _Notes, limit: int, reason: str) -> None:
    batch = notes.flags.batch
    if batch.global_batch_size is None or batch.rampup_batch_size is not None:
        return  # the checks report it
    steps = BatchSizes(batch.batch_sizes or ((0, batch.global_batch_size),)).steps_within(limit)
    if steps < (batch.train_iters or 0):
        notes.add("last iteration", steps, f"{reason}, reached before --train-iters {batch.train_iters}")
    else:
        notes.add("last iteration", batch.train_iters, f"reached before --train-tokens {batch.train_tokens:,}")


def _derive_whole_blocks(notes: _Notes) -> None:
    """Ignore how whole blocks are recomputed where none are, as Megatron does."""
    names = ["recompute_num_layers", "checkpoint_num_layers"]
    if notes.flags.recompute.recompute_granularity is None:
        names.append("recompute_method")
    for name in names:
        if getattr(notes.flags.recompute, name) is not None:
            notes.replace("recompute", name, None, "no whole blocks are recomputed: see --recompute-granularity full")


def _derive_saved_inputs(notes: _Notes) -> None:
    """Derive where inputs of recomputed blocks are kept; it is ignored without any, as in Megatron-DeepSpeed."""
    r = notes.flags.recompute
    if r.recompute_granularity is None:
        for name in ("checkpoint_in_cpu", "distribute_saved_activations"):
            if getattr(r, name):
                notes.replace("recompute", name, False, "nothing is recomputed: see --recompute-granularity full")
    elif r.distribute_saved_activations and notes.flags.parallel.tensor_model_parallel_size == 1:
        reason = "--tensor-model-parallel-size is 1: nobody to share with"
        notes.replace("recompute", "distribute_saved_activations", False, reason)


def _derive_recompute(notes: _Notes) -> None:
    r = notes.flags.recompute
    if r.checkpoint_activations:
        notes.fill("recompute", "recompute_granularity", "full", "--checkpoint-activations")
    if r.activations_checkpoint_method is not None:
        reason = f"--activations-checkpoint-method {r.activations_checkpoint_method}"
        notes.fill("recompute", "recompute_granularity", "full", reason)
        notes.fill("recompute", "recompute_method", r.activations_checkpoint_method, reason)
    if r.recompute_activations:
        notes.fill("recompute", "recompute_granularity", "selective", "--recompute-activations")
    if notes.flags.recompute.recompute_granularity != "full":
        _derive_whole_blocks(notes)
    elif r.checkpoint_num_layers is not None:
        reason = f"--checkpoint-num-layers {r.checkpoint_num_layers}"
        notes.fill("recompute", "recompute_method", "uniform", reason)
        notes.fill("recompute", "recompute_num_layers", r.checkpoint_num_layers, reason)
    if notes.flags.recompute.recompute_granularity == "selective":
        notes.fill("recompute", "recompute_modules", ("core_attn",), "Megatron's default")
    _derive_saved_inputs(notes)


def _derive_rest(notes: _Notes) -> None:
    _derive_tokenizer(notes)
    for section, name in OFF_AT_0:
        if getattr(getattr(notes.flags, section), name) == 0:
            notes.flags = notes.flags.update(section, **{name: None})
            notes.add(name.replace("_", " "), "none", "0 is off, as in Megatron")
    flags = notes.flags
    if flags.precision.loss_scale is not None and not flags.precision.fp16:
        reason = f"without --fp16: the constant {flags.precision.loss_scale:g} would be divided out again"
        notes.replace("precision", "loss_scale", None, reason)
    if flags.checkpoint.save_interval is not None and not flags.checkpoint.save:
        notes.add("save interval", "none", "--save is not given: nothing is saved")
    if flags.data.data_path:
        notes.fill("data", "split", SPLIT, "Megatron's default")
    if flags.logging.eval_iters or flags.logging.full_validation:
        notes.fill("logging", "eval_interval", EVAL_INTERVAL, "default")
    if flags.checkpoint.save:
        notes.fill("logging", "tensorboard_dir", f"{flags.checkpoint.save}/tensorboard", "inside --save")


def _derive_tokenizer(notes: _Notes) -> None:
    """Derive the tokenizer's kind by Megatron's default, and its file by GPT-NeoX's way to name it."""
    t = notes.flags.tokenizer
    if t.tokenizer_type is None and t.vocab_file and t.merge_file:
        notes.fill("tokenizer", "tokenizer_type", "GPT2BPETokenizer", "--vocab-file and --merge-file, as in Megatron")
    if t.tokenizer_type in ("HFTokenizer", "PretrainedFromHF") and t.vocab_file:
        notes.fill("tokenizer", "tokenizer_model", t.vocab_file, "--vocab-file, as in GPT-NeoX")
