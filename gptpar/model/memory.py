"""Memory that one rank is expected to need, from the model's shape and the run's plan alone.

Sources: activation formulas of arXiv 2205.05198 (Korthikanti et al.) and Megatron-LM's
theoretical_memory_usage.py, generalised to grouped queries, SwiGLU and wider activations; ZeRO stages of
arXiv 1910.02054. Attention is assumed to run in a fused kernel (torch's scaled_dot_product_attention),
which stores no s x s matrix.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gptpar.model.flops import Shape, qkv_width, query_width


@dataclass(frozen=True)
class MemoryPlan:
    """What decides a rank's memory beside the model's shape.

    Attributes:
        num_parameters: parameters of this rank's stage and tensor-parallel shard, before ZeRO shards them.
        layers_in_flight: layers whose activations are alive at once: ``num_layers`` without a pipeline;
            under 1F1B the stage's layers times the micro-batches it holds, ``min(num_stages - stage,
            num_microbatches)``.
        bytes_per_element: of parameters and activations: 2 for bf16 and fp16, 4 for fp32, 8 for fp64.
        recomputed_layers: those of the layers in flight that are computed again in the backward pass ("full"
            recomputation). "Selective" recomputation is 0 here: what it drops, a fused kernel never stored.
        logits_chunks: pieces in which the head and the cross entropy go over the micro-batch.
    """

    num_parameters: int
    layers_in_flight: int
    micro_batch_size: int
    bytes_per_element: int
    recomputed_layers: int = 0
    hidden_dropout: float = 0.0
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    data_parallel: int = 1
    zero_stage: int = 0
    logits_chunks: int = 1


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank at the peak of a step, by purpose."""

    parameters: int
    gradients: int
    masters: int
    moments: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """Bytes of all parts together; allocator, kernels' workspaces and NCCL come on top."""
        return sum(asdict(self).values())


def layer_activation_bytes_per_token(shape: Shape, plan: MemoryPlan) -> float:
    """Bytes that one layer keeps for the backward pass, for each token of the micro-batch.

    With h hidden, 16-bit elements, dropout and a GELU MLP of 4h this is ``h (10 + 24 / t)``, or ``34 h / t``
    with sequence parallelism.
    """
    size, h = plan.bytes_per_element, shape.hidden_size
    dropout_masks = 2 * h if plan.hidden_dropout > 0 else 0
    replicated = 4 * h * size + dropout_masks  # inputs of both norms, of qkv and of fc1
    mlp = shape.ffn_hidden_size * (3 if shape.swiglu else 2)
    split = (qkv_width(shape) + query_width(shape) + mlp) * size
    replicas = plan.tensor_parallel if plan.sequence_parallel else 1
    return replicated / replicas + split / plan.tensor_parallel


def activation_bytes(shape: Shape, plan: MemoryPlan) -> int:
    """Bytes of activations alive at the peak: layers in flight, embedding's dropout, last norm, head's input.

    A recomputed layer keeps its input, and one at a time its whole set while it is computed again.
    """
    size, h = plan.bytes_per_element, shape.hidden_size
    tokens = shape.seq_length * plan.micro_batch_size
    replicas = plan.tensor_parallel if plan.sequence_parallel else 1
    layer = layer_activation_bytes_per_token(shape, plan)
    whole_layers = plan.layers_in_flight - plan.recomputed_layers + min(plan.recomputed_layers, 1)
    layers = whole_layers * layer + plan.recomputed_layers * h * size / replicas
    embedding_mask = h if plan.hidden_dropout > 0 else 0
    ends = (embedding_mask + 2 * h * size) / replicas  # inputs of the last norm and of the head
    return round(tokens * (layers + ends))


def logits_bytes(shape: Shape, plan: MemoryPlan) -> int:
    """Bytes of one chunk's logits, their log-softmax and its gradient, the latter two in fp32 at least."""
    tokens = shape.seq_length * plan.micro_batch_size / plan.logits_chunks
    bytes_per_logit = plan.bytes_per_element + 2 * max(4, plan.bytes_per_element)
    return round(tokens * shape.padded_vocab_size / plan.tensor_parallel * bytes_per_logit)


def expected_memory(shape: Shape, plan: MemoryPlan) -> MemoryEstimate:
    """Bytes one rank needs: per parameter 18 in 16-bit training and 16 in fp32, divided as ZeRO divides them.

    Gradient sums, masters and Adam's moments are fp32 (fp64 in fp64 training); parameters that wide are their
    own masters.
    """
    size = plan.bytes_per_element
    wide = max(4, size)

    def sharded_from(stage: int, bytes_per_parameter: int) -> int:
        shards = plan.data_parallel if plan.zero_stage >= stage else 1
        return -(-plan.num_parameters // shards) * bytes_per_parameter

    return MemoryEstimate(
        parameters=sharded_from(3, size),
        gradients=sharded_from(2, wide),
        masters=sharded_from(1, wide) if size < wide else 0,
        moments=sharded_from(1, 2 * wide),
        activations=activation_bytes(shape, plan),
        logits=logits_bytes(shape, plan),
    )
