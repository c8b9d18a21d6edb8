"""``ModelSpec``: a model's layers, their roles, and counts of their parameters and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from gptpar.config.roles import Role
from gptpar.model.layer_spec import LayerSpec, build_on_meta
from gptpar.tensor_parallel.cost import BatchShape, Cost


@dataclass(frozen=True)
class ModelLayer:
    """One layer of a model.

    Attributes:
        role: its place in the model, such as block or LM head.
        spec: how it is built and called.
    """

    role: Role
    spec: LayerSpec


@dataclass(frozen=True)
class ModelSpec:
    """A model, described for one tensor rank; nothing is built.

    Attributes:
        layers: all layers, in the order of the forward pass.
        seq_length: tokens of a sample.
    """

    layers: tuple[ModelLayer, ...]
    seq_length: int

    @cached_property
    def specs(self) -> list[LayerSpec]:
        """Every layer's specification."""
        return [layer.spec for layer in self.layers]

    @cached_property
    def kinds(self) -> list[int]:
        """Number, for every layer, of the first layer that equals it but for the name."""
        firsts: list[int] = []
        kinds = []
        for number, spec in enumerate(self.specs):
            kind = next((first for first in firsts if self.specs[first].builds_the_same(spec)), number)
            firsts += [number] * (kind == number)
            kinds.append(kind)
        return kinds

    @cached_property
    def built(self) -> dict[int, nn.Module]:
        """Kind -> such a layer, without memory."""
        return {kind: build_on_meta(self.specs[kind]) for kind in dict.fromkeys(self.kinds)}

    def costs(self, batch: BatchShape) -> list[Cost]:
        """Every layer's cost on this tensor rank."""
        cost = {kind: self.specs[kind].cost(layer, batch) for kind, layer in self.built.items()}
        return [cost[kind] for kind in self.kinds]

    @cached_property
    def _counted(self) -> list[Cost]:
        return self.costs(BatchShape(self.seq_length, self.seq_length))

    @cached_property
    def flops(self) -> list[float]:
        """Every layer's floating-point operations of one token's forward pass; lookups and norms count as 0."""
        return [cost.flops for cost in self._counted]

    def flops_per_token(self, *, causal: bool, document_lengths: tuple[int, ...] | None = None) -> float:
        """FLOPs of one token's forward and backward pass in all layers; recomputation is not counted.

        Two definitions are in use: attention over the whole square (PaLM, arXiv 2204.02311 appendix B; nanoGPT,
        torchtitan) or over its causal half (Megatron-LM since 2025, llm.c). The utilisations that they give differ by
        2 to 15 %. In a layer with a sliding window, and with documents, the causal count covers what tokens see, and
        the whole square is twice that. The causal count equals that of Megatron-LM's ``num_floating_point_operations``.

        Args:
            document_lengths: see :class:`~gptpar.tensor_parallel.cost.BatchShape`.
        """
        shape = BatchShape(self.seq_length, self.seq_length, document_lengths=document_lengths)
        costs = self._counted if document_lengths is None else self.costs(shape)
        return 3 * sum(cost.flops + (0 if causal else cost.attention) for cost in costs)

    @cached_property
    def parameters(self) -> list[int]:
        """Every layer's number of parameters on this tensor rank."""
        counts = {kind: sum(p.numel() for p in layer.parameters()) for kind, layer in self.built.items()}
        return [counts[kind] for kind in self.kinds]

    @property
    def num_parameters(self) -> int:
        """Number of parameters on this tensor rank; those that several layers share count once."""
        return sum({spec.name: count for spec, count in zip(self.specs, self.parameters, strict=True)}.values())

    @property
    def num_active_parameters(self) -> int:
        """Number of the parameters that a token is computed with: without experts that it does not go to."""
        idle = {
            kind: sum(getattr(m, "idle_parameters", 0) for m in layer.modules()) for kind, layer in self.built.items()
        }
        return self.num_parameters - sum(idle[kind] for kind in self.kinds)

    @cached_property
    def shared(self) -> str | None:
        """Name of the layer that is both embedding and LM head; ``None`` if they are not tied."""
        (embedding,), (head,) = self.names(Role.EMBEDDING), self.names(Role.LM_HEAD)
        return head if head == embedding else None

    def names(self, role: Role) -> tuple[str, ...]:
        """Names of the layers with this role."""
        return tuple(layer.spec.name for layer in self.layers if layer.role is role)
