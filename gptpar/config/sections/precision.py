"""Flags of number formats, the loss scale, compilation and CUDA graphs, and what forbids these."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptpar.config.fields import Notes, flag, on_unless
from gptpar.config.sections.mlp import SENT_TO_ALL, share_of_tokens

if TYPE_CHECKING:
    from gptpar.config import Config, Flags


GROUPED_MULTIPLE = 8
"""Widths are multiples of this where one kernel computes all experts' products, in 16-bit formats."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats. Master weights, moments and gradient sums are always fp32 (fp64 with --fp64)."""

    fp16: bool = flag(False, "16-bit floats with a dynamic loss scale")
    bf16: bool = flag(False, "bfloat16 weights and activations")
    fp64: bool = flag(False, "64-bit floats throughout, for checks of exactness")
    loss_scale: float | None = flag(None, "constant loss scale for --fp16 (default: dynamic)", above=0)
    initial_loss_scale: float = flag(2.0**32, "where the dynamic loss scale starts")
    min_loss_scale: float = flag(1.0, "the dynamic loss scale stops the run below this", above=0)
    loss_scale_window: int = flag(1000, "good steps before the loss scale doubles", least=1)
    hysteresis: int = flag(2, "overflows tolerated before the loss scale halves", least=1)
    compile: bool = on_unless("--no-compile", "do not compile the blocks (they are compiled on GPUs only)")
    cuda_graph: str = flag(
        "auto",
        "launch forward and backward of a step as one CUDA graph (auto: on GPUs, if nothing forbids it); with "
        "--cpu-optimizer on one process only, in parts between which the host waits for layers and takes gradients",
        choices=("auto", "on", "off"),
    )
    gradient_accumulation_fusion: bool = flag(
        False,
        "the products that form the gradients of the blocks' linear layers add to the fp32 sums over micro-batches: no "
        "micro-batch's gradient is rounded to 16 bits, or written to memory",
    )

    deterministic_mode: bool = flag(
        False, "the same command on the same devices computes the same bits each time; kernels that cannot are refused"
    )
    disable_bf16_reduced_precision_matmul: bool = flag(
        False, "the parts into which a GPU cuts a bf16 product's sum are added in fp32 (cuBLAS may add them in bf16)"
    )

    @property
    def dtype(self) -> str:
        """``"fp16"``, ``"bf16"``, ``"fp64"`` or ``"fp32"``."""
        return next((name for name in ("fp16", "bf16", "fp64") if getattr(self, name)), "fp32")


def check_precision(flags: Flags, world_size: int) -> Iterator[str]:
    """Number formats and the loss scale."""
    p = flags.precision
    chosen = [f"--{name}" for name in ("fp16", "bf16", "fp64") if getattr(p, name)]
    if len(chosen) > 1:
        yield f"{' and '.join(chosen)} exclude each other: choose one number format."
    if p.initial_loss_scale < p.min_loss_scale:
        yield (f"--initial-loss-scale {p.initial_loss_scale:g} must be at least --min-loss-scale {p.min_loss_scale:g}.")
    if p.fp64 and flags.parallel.grad_reduce_in_bf16:
        yield "--grad-reduce-in-bf16 rounds the gradients that --fp64 is to keep exact: drop one of them."
    if p.deterministic_mode and flags.batch.train_minutes is not None:
        yield (
            "--deterministic-mode and --train-minutes exclude each other: the number of steps, and with it the "
            "learning rate, would follow from the clock; give --train-iters alone."
        )
    if p.gradient_accumulation_fusion:
        for obstacle in _fusion_obstacles(flags, world_size):
            yield f"--gradient-accumulation-fusion: {obstacle}."
    if p.cuda_graph == "on":
        for obstacle in graph_obstacles(flags, flags.parallel.num_copies(world_size)):
            yield f"--cuda-graph on: {obstacle}."


def _fusion_obstacles(flags: Flags, world_size: int) -> Iterator[str]:
    """Why there is no sum over micro-batches for products to add to, each as a part of a sentence."""
    b, stage = flags.batch, flags.parallel.zero_stage
    if flags.parallel.num_copies(world_size) > 1 and stage in (2, 3):
        yield f"--zero-stage {stage} sums each micro-batch's gradient over processes first (use --zero-stage 1)"
    grows = b.rampup_batch_size is not None or b.step_batch_size_schedule is not None
    of_micro_batches = (b.micro_batch_size or 0) * flags.parallel.data_parallel_size(world_size)
    if not grows and of_micro_batches and of_micro_batches == (b.global_batch_size or of_micro_batches):
        yield (
            f"a step of {of_micro_batches} samples is one micro-batch of each process, so that there is no sum (raise "
            "--global-batch-size, or leave out --gradient-accumulation-fusion)"
        )


def _waits_for_loads(config: Flags | Config) -> Iterator[str]:
    """Reasons why the host has to know how many tokens each expert has."""
    m, p = config.model, config.parallel
    if not m.has_experts:
        return
    share = share_of_tokens(p.expert_model_parallel_size, m.moe_router_topk)
    if p.expert_model_parallel_size > 1 and share < SENT_TO_ALL:
        yield (
            f"--expert-model-parallel-size {p.expert_model_parallel_size} with --moe-router-topk {m.moe_router_topk} "
            "sends tokens by counts that the host reads (on fewer processes, all tokens go to all)"
        )
    width = m.width_of_experts(m.ffn_hidden_size or 0) // max(1, p.tensor_model_parallel_size)
    if config.precision.dtype != "bf16" or width % GROUPED_MULTIPLE or (m.hidden_size or 0) % GROUPED_MULTIPLE:
        yield (
            f"experts of width {width} in {config.precision.dtype}, in a model of width {m.hidden_size}, are "
            "multiplied one after another, by counts that the host reads (a kernel takes all in bf16, where both "
            f"widths are multiples of {GROUPED_MULTIPLE})"
        )


def graph_obstacles(config: Flags | Config, num_copies: int) -> Iterator[str]:
    """Reasons that need the host in the middle of a step, each as a part of a sentence.

    Args:
        num_copies: number of copies of the model's weights, on the data and context axes.
    """
    if config.model.has_dropout:
        yield "dropout is seeded by the host (set --attention-dropout 0 --hidden-dropout 0)"
    yield from _waits_for_loads(config)
    if num_copies > 1 and config.parallel.zero_stage in (2, 3):
        yield f"--zero-stage {config.parallel.zero_stage} gives and takes memory during the step (use stage 1)"
    if config.offload.cpu_optimizer and (num_copies > 1 or config.parallel.model_parallel_size > 1):
        yield "--cpu-optimizer waits for each layer, amid the messages of several processes"
    if config.offload.gradients_leave_at_once:
        yield "--offload-gradients on gives back the memory of gradients during the step"
    if config.offload.cpu_parameters:
        yield "--cpu-parameters brings and drops them during the step"
    if config.recompute.checkpoint_in_cpu:
        yield "--checkpoint-in-cpu asks for host memory during the step"
    if config.recompute.cpu_offloading_num_layers:
        yield "--cpu-offloading-num-layers asks for host memory during the step"
    if config.batch.rampup_batch_size is not None:
        yield "--rampup-batch-size changes the number of micro-batches"
    if config.batch.batch_sizes is not None:
        yield "--step-batch-size-schedule changes the number of micro-batches"


def wants_graph(config: Config, num_copies: int) -> bool:
    """Whether a run on a GPU uses a graph. With ``auto`` it does if there is no obstacle and a graph is not slower.

    Under ZeRO-1 alone a graph is slower: a recorded step has to wait until all parameters are gathered, while one whose
    kernels are launched one by one waits for each layer's parameters. With experts it has not been measured.
    """
    if config.precision.cuda_graph != "auto" or config.model.has_experts:
        return config.precision.cuda_graph == "on"
    gathers = config.parallel.zero_stage == 1 and num_copies > 1
    return not any(graph_obstacles(config, num_copies)) and not (gathers and config.parallel.model_parallel_size == 1)


def derive_precision(notes: Notes) -> None:
    """Drop a loss scale that nothing needs."""
    p = notes.flags.precision
    if p.loss_scale is not None and not p.fp16:
        reason = f"without --fp16: the constant {p.loss_scale:g} would be divided out again"
        notes.replace("precision", "loss_scale", None, reason)
