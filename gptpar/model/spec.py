"""``ModelSpec``: a model's layers, their roles, and counts of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gptpar.config.roles import Role
from gptpar.model.layer_spec import LayerSpec, TiedLayerSpec, build_on_meta


@dataclass(frozen=True)
class ModelLayer:
    """One layer of a model.

    Attributes:
        role: its place in the model, such as block or LM head.
        spec: how it is built and called.
        flops: of one token's forward pass: matrix products and attention; lookups and norms count as 0.
    """

    role: Role
    spec: LayerSpec
    flops: float = 0.0


@dataclass(frozen=True)
class ModelSpec:
    """A model, described for one tensor rank; nothing is built.

    Attributes:
        layers: in the order of the forward pass.
    """

    layers: tuple[ModelLayer, ...]

    @cached_property
    def specs(self) -> list[LayerSpec]:
        """Every layer's specification."""
        return [layer.spec for layer in self.layers]

    @cached_property
    def flops(self) -> list[float]:
        """Every layer's floating-point operations, see :class:`ModelLayer`."""
        return [layer.flops for layer in self.layers]

    @cached_property
    def parameters(self) -> list[int]:
        """Every layer's number of parameters on this tensor rank; equal layers are built and counted once."""
        counted: list[tuple[LayerSpec, int]] = []
        counts = []
        for spec in self.specs:
            count = next((count for equal, count in counted if equal.builds_the_same(spec)), None)
            if count is None:
                count = sum(parameter.numel() for parameter in build_on_meta(spec).parameters())
                counted.append((spec, count))
            counts.append(count)
        return counts

    @property
    def num_parameters(self) -> int:
        """Number of parameters on this tensor rank; those that several layers share count once."""
        return sum({spec.name: count for spec, count in zip(self.specs, self.parameters, strict=True)}.values())

    @property
    def shared(self) -> str | None:
        """Name of the layer that is both embedding and LM head; ``None`` if they are not tied."""
        embedding, head = self.first(Role.EMBEDDING), self.first(Role.LM_HEAD)
        return embedding.name if isinstance(head, TiedLayerSpec) and head.name == embedding.name else None

    def first(self, role: Role) -> LayerSpec:
        """The first layer with this role."""
        return next(layer.spec for layer in self.layers if layer.role is role)

    def names(self, role: Role) -> tuple[str, ...]:
        """Names of the layers with this role."""
        return tuple(layer.spec.name for layer in self.layers if layer.role is role)
