"""An engine's getters, with DeepSpeed's names; none of them changes the engine, and some wait for the last step."""

from __future__ import annotations

import os
from typing import Any

import torch

from gptpar.adapter.weights import copy_to_host
from gptpar.deepspeed.engines.deepspeed_getters import DeepSpeedGetters
from gptpar.system.host import local_rank


class Getters(DeepSpeedGetters):
    """DeepSpeed's getters. As in DeepSpeed, those of the configuration are methods, those of the process attributes."""

    # The last step.

    def get_global_grad_norm(self) -> float:
        """The L2 norm of the last step's gradient before clipping, 0 before the first step; waits for that step.

        A process may call it alone. After a step that was refused it is infinite, and the next step raises the error.
        """
        self._read_last_step()
        return self._norm

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` changed the parameters; waits for it. Within a step it did not."""
        self._take_note_of_last_step()
        return self._ended_step and not self._skipped

    # The batch.

    def train_batch_size(self) -> int:
        """Samples of a step, on all processes."""
        return self.options.batch.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch on a process."""
        return self.options.batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step on a process."""
        return self.options.batch.accumulation_steps

    # The update.

    def zero_optimization(self) -> bool:
        """Whether ZeRO is used."""
        return self.options.zero_stage > 0

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self.options.zero_stage

    def gradient_clipping(self) -> float:
        """The norm to which gradients are clipped; 0: they are not."""
        return self.options.max_norm

    def steps_per_print(self) -> int:
        """Steps between lines on the console; 0: none."""
        return self.options.steps_per_print

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The two betas of each parameter group, or its momentum; 0 where it has neither."""
        return [tuple(group.get("betas", ())) or group.get("momentum", 0) for group in self.optimizer.param_groups]

    # Number formats.

    def fp16_enabled(self) -> bool:
        """Whether the configuration has turned fp16 on."""
        return self.options.dtype == torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether the configuration has turned bf16 on."""
        return self.options.dtype == torch.bfloat16

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale is dynamic."""
        return self.options.loss_scale.dynamic

    def loss_scale(self) -> float:
        """The configured loss scale; 0 if it is dynamic, and :attr:`cur_scale` has the present one."""
        return 0.0 if self.dynamic_loss_scale() else self.options.loss_scale.value

    @property
    def cur_scale(self) -> float:
        """The present factor of losses; 1 without fp16."""
        return self.loss_scaler.value

    # The module.

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """A copy of the module's present state in host memory, which can be kept, or saved as a whole or in part.

        All processes call it. Its tensors have memory of their own, except that tied ones share theirs. Tensors of
        ``module.state_dict()``, in contrast, are the parameters themselves if these stay on the device: writing to them
        changes the module, and ``torch.save`` of one of them writes the memory of all.

        Args:
            exclude_frozen_parameters: leave out parameters that require no gradient.
        """
        state = self.module.state_dict()
        named = self.module.named_parameters(remove_duplicate=False) if exclude_frozen_parameters else ()
        for name in [name for name, parameter in named if not parameter.requires_grad and name in state]:
            del state[name]
        copy_to_host(state, [name for name, value in state.items() if isinstance(value, torch.Tensor)])
        return state

    # The process.

    @property
    def device(self) -> torch.device:
        """Where the module computes."""
        return self.topology.device

    @property
    def global_rank(self) -> int:
        """This process's number among all."""
        return self.topology.rank

    @property
    def local_rank(self) -> int:
        """This process's number on its machine."""
        place = local_rank(os.environ)
        return (self.device.index or 0) if place is None else place

    @property
    def world_size(self) -> int:
        """Number of processes of all pipeline stages together."""
        return self.topology.mesh.world_size

    @property
    def dp_world_size(self) -> int:
        """Number of processes with micro-batches of their own."""
        return self.topology.mesh.data
