"""``ExpertBalance``: counts the choices of experts over a step, and moves the expert bias after it.

Every process has the state of all layers, and all have the same: counts are integers, which are summed over all
processes. So a checkpoint of any layout has it whole, and a process of any other layout takes it as it is. A step that
was skipped changes nothing.

An expert's bias rises by the rate if fewer tokens than the mean chose the expert, and falls by the rate if more did
(Wang et al. 2024, arXiv 2408.15664).

Legend: L layers with experts, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gptpar.config import ModelConfig
from gptpar.config.sections.mlp import LOAD
from gptpar.errors import CheckpointError
from gptpar.model.experts.layer import Experts
from gptpar.model.experts.routing import counts_of, no_choice
from gptpar.model.layer_spec import LayerSpec


def choice_field(layer: str) -> str:
    """Name of the micro-batch's field that keeps a layer's choice of experts."""
    return f"experts of {layer}"


class ExpertBalance:
    """The state that balances the experts of a model.

    Args:
        config: the model's.
        specs: of all layers of the model.
        dtype: of the bias: fp32 or wider.
        device: the model's.

    Attributes:
        names: of the layers with experts.
    """

    def __init__(self, config: ModelConfig, specs: Iterable[LayerSpec], dtype: torch.dtype, device: torch.device):
        self.names = [spec.name for spec in specs if choice_field(spec.name) in spec.batch_fields]
        self._config = config
        shape = len(self.names), config.num_experts
        self._here_LE, self._counts_LE, self._last_LE = torch.zeros(3, *shape, dtype=torch.int64, device=device)
        self._bias_LE = torch.zeros(shape, dtype=dtype, device=device)
        self._rows_here = dict[str, torch.Tensor]()

    def attach(self, layers: Mapping[str, nn.Module]) -> None:
        """Give a stage's layers, by their names, their biases, and count their choices."""
        for number, name in enumerate(self.names):
            if name not in layers:
                continue
            self._rows_here[name] = self._here_LE[number]
            for module in layers[name].modules():
                if isinstance(module, Experts):
                    router = module.router
                    router.bias_E = self._bias_LE[number] if self._config.moe_router_enable_expert_bias else None
                    router.last_E = self._last_LE[number] if self._config.uses_last_choices else None

    def fields(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """Fields of a micro-batch of training, whose choices count."""
        topk, device = self._config.moe_router_topk, self._bias_LE.device
        return {choice_field(name): no_choice(num_tokens, topk, device) for name in self._rows_here}

    def note_choices(self, batches: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Count what this process's layers have chosen in a step, also for experts that were full.

        Args:
            batches: the fields of its micro-batches, after their passes.
        """
        for name, counts_E in self._rows_here.items():
            chosen_NK = torch.cat([fields[choice_field(name)] for fields in batches])
            chosen_NK = torch.where(chosen_NK < 0, ~chosen_NK, chosen_NK)
            counts_E.copy_(counts_of(chosen_NK[None], len(counts_E))[0])

    def count(self, sum_over_all: Callable[[torch.Tensor], torch.Tensor], *, counts: bool) -> list[torch.Tensor]:
        """Sum a step's counts over all processes; returns [] fp64 for each name in :attr:`numbers`.

        Args:
            counts: whether this process's counts are added; tensor ranks have equal counts, so that one adds them.
        """
        if not self.names:
            return []
        self._counts_LE.copy_(self._here_LE if counts else torch.zeros_like(self._here_LE))
        counts_LE = sum_over_all(self._counts_LE).double()
        return [(counts_LE.amax(-1) * self._config.num_experts / counts_LE.sum(-1).clamp(min=1)).mean()]

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of what :meth:`count` returns."""
        return (LOAD,) if self.names else ()

    def advance(self, skipped: torch.Tensor) -> None:
        """Move the bias by a step's counts, unless it was skipped (a scalar on the device that is not 0)."""
        if not self.names:
            return
        taken = skipped == 0
        less_LE = self._counts_LE.sum(-1, keepdim=True) - self._config.num_experts * self._counts_LE
        moved_LE = self._bias_LE + self._config.moe_router_bias_update_rate * less_LE.sign()
        self._bias_LE.copy_(torch.where(taken, moved_LE, self._bias_LE))
        self._last_LE.copy_(torch.where(taken, self._counts_LE, self._last_LE))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of the state, by name."""
        return {"expert bias": self._bias_LE.clone(), "choices of experts": self._last_LE.clone()} if self.names else {}

    def state(self) -> dict[str, Any] | None:
        """The state for a checkpoint, exact in JSON; ``None`` without experts. It waits for the device."""
        if not self.names:
            return None
        return {"layers": self.names, "bias": self._bias_LE.tolist(), "choices": self._last_LE.tolist()}

    def load(self, state: object) -> None:
        """Go on from a checkpoint's state; ``None``: it has none.

        A model that is fine-tuned may have fewer layers, or experts in fewer of them: each takes its own.

        Raises:
            CheckpointError: a layer is missing in the state, or the number of experts differs.
        """
        if state is None or not self.names:
            return
        if isinstance(state, dict) and "layers" not in state and "bias" in state:
            raise CheckpointError(
                "the checkpoint's state of experts does not name its layers, because an older gptpar saved it: go on "
                "with that one, or take another checkpoint with --ckpt-step N."
            )
        try:
            assert isinstance(state, dict)
            rows = [state["layers"].index(name) for name in self.names]
            bias_LE = torch.tensor(state["bias"], dtype=torch.float64)[rows]
            choices_LE = torch.tensor(state["choices"], dtype=torch.int64)[rows]
            fits = bias_LE.shape == choices_LE.shape == self._bias_LE.shape and bool(bias_LE.isfinite().all())
        except (AssertionError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError):
            fits = False
        if not fits:
            raise CheckpointError(
                f"the checkpoint's state of experts is not that of {len(self.names)} layers with "
                f"{self._config.num_experts} experts ({self.names[0]}, ...): take another one with --ckpt-step N."
            )
        self._bias_LE.copy_(bias_LE)
        self._last_LE.copy_(choices_LE)
