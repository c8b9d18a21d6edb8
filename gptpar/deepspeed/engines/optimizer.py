"""The optimizer that ``gptpar.initialize`` returns: parameter groups that can be read and changed, without state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from gptpar.adapter.torch_optimizers import changed_beyond
from gptpar.errors import GptparError, wrong_type
from gptpar.optim.loss_scale import LossScale
from gptpar.optim.update import Hyperparameters, Update


class ParameterOffload:
    """DeepSpeed's hooks of ZeRO-3, which programs (TRL) remove before a model generates, and register afterwards.

    The engine's hooks stay: in ``GatheredParameters`` they find all parameters there. So there is nothing to remove.

    Attributes:
        module: what the hooks are on; without parameters, since none waits for a module that reads it.
        forward_hooks, backward_hooks: empty.
    """

    def __init__(self) -> None:
        self.module, self.forward_hooks, self.backward_hooks = self, list[Any](), list[Any]()

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Nothing."""
        return iter(())

    def ds_external_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Nothing: a parameter that another module reads is found when it is read."""
        return iter(())

    def _register_deepspeed_module(self, module: Any) -> None:
        """Do nothing, since the engine's hooks are there."""


class LossScaler:
    """The loss scale by DeepSpeed's names, which programs print and some set.

    Args:
        scale: the engine's; 1 without fp16.
        steps: returns :attr:`cur_iter`.
    """

    def __init__(self, scale: LossScale, steps: Callable[[], int]):
        self._scale, self._steps = scale, steps
        self.scale_window, self.min_scale = scale.window, scale.minimum

    @property
    def cur_scale(self) -> float:
        """The present factor of losses; it can be set between two steps, on all processes alike."""
        return self._scale.value

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self._scale.value = float(value)

    loss_scale = cur_scale

    @property
    def dynamic(self) -> bool:
        """Whether the factor changes by itself."""
        return self._scale.dynamic

    @property
    def cur_iter(self) -> int:
        """Number of steps, with the skipped ones."""
        return self._steps()


class EngineOptimizer(torch.optim.Optimizer):
    """An optimizer that has parameter groups; the engine updates the parameters with the groups' present values.

    So torch's schedulers and the user's own work on it as on any optimizer. Moments and master weights are in the
    engine and in its checkpoints; ``state`` stays empty.

    Args:
        updates: by group; each says which hyperparameters its group has.
        groups: complete ones, as :func:`~gptpar.deepspeed.engines.client_optimizer.groups_of` makes them. These
            dictionaries become ``param_groups``, so that other holders of them change the hyperparameters, too.
        update: updates all parameters with :meth:`hyperparameters`.
        drop_gradients: drops the gradients.
        scaler: the loss scale.
        local_weights: a parameter -> [n] a copy of the master weights of its elements that this process updates.
        overflowed: returns :attr:`overflow`.
        steps: returns the number of steps, with the skipped ones.

    Attributes:
        updates: see above.
        loss_scaler: the loss scale by DeepSpeed's names.
        parameter_offload: DeepSpeed's hooks of ZeRO-3.
        offload_states, reload_states: the engine's.
    """

    offload_states: Callable[..., None]
    reload_states: Callable[..., None]

    def __init__(
        self,
        updates: Sequence[Update],
        groups: Sequence[dict[str, Any]],
        update: Callable[[], None],
        drop_gradients: Callable[[], None],
        scaler: LossScale,
        local_weights: Callable[[torch.Tensor], torch.Tensor],
        overflowed: Callable[[], bool],
        steps: Callable[[], int],
    ):
        self._complete, self.updates = False, updates
        # Schedulers that move a beta, too, look for it among the defaults.
        values = updates[0].group_of(updates[0].of_group(groups[0]))
        super().__init__(list(groups), values | {name: groups[0][name] for name in values.keys() & groups[0].keys()})
        self._update, self._drop_gradients, self._complete = update, drop_gradients, True
        self._scaler, self._local_weights, self._overflowed = scaler, local_weights, overflowed
        self.parameter_offload, self.loss_scaler = ParameterOffload(), LossScaler(scaler, steps)

    @property
    def optimizer(self) -> EngineOptimizer:
        """Itself: it has the parameter groups, which the optimizer inside of DeepSpeed's has."""
        return self

    @property
    def overflow(self) -> bool:
        """Whether the last step changed nothing because its gradient was not finite.

        With fp16 this is known after each step; else it may be of the step before, so that no program waits for it.
        """
        return self._overflowed()

    @property
    def cur_scale(self) -> float:
        """The present factor of losses; 1 without fp16."""
        return self._scaler.value

    loss_scale = cur_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the factor of losses changes by itself."""
        return self._scaler.dynamic

    @property
    def bit16_groups(self) -> list[list[torch.Tensor]]:
        """The parameters of each group; the name is DeepSpeed's, whatever their number format."""
        return [list(group["params"]) for group in self.param_groups]

    fp16_groups = bit16_groups

    @property
    def bit16_groups_flat(self) -> list[torch.Tensor]:
        """A copy of the parameters, [n] of each group; the name is DeepSpeed's, whatever their number format."""
        flat = [[one.detach().flatten() for one in group] for group in self.bit16_groups]
        return [torch.cat(parts or [torch.empty(0)]) for parts in flat]

    def needs_scaler(self) -> bool:
        """Whether a loss has to be scaled (``engine.scale(loss).backward()``), as fp16 needs."""
        return self._scaler.dynamic or self._scaler.value != 1

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """A copy of the master weights that this process updates, [n] of each group; the name is DeepSpeed's."""
        flat = [[self._local_weights(one) for one in group["params"]] for group in self.param_groups]
        return [torch.cat(parts or [torch.empty(0)]) for parts in flat]

    single_partition_of_fp32_groups = fp32_partitioned_groups_flat

    def hyperparameters(self) -> tuple[Hyperparameters, ...]:
        """The present hyperparameters of each group.

        Raises:
            GptparError: a group was changed to what its update cannot do.
        """
        groups = list(zip(self.updates, self.param_groups, strict=True))
        for place, (update, group) in enumerate(groups):
            if problem := changed_beyond(update, group):
                raise GptparError(f"parameter group {place} has {problem}: make the engine with such a value.")
        return tuple(update.of_group(group) for update, group in groups)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters.

        Raises:
            GptparError: there is a closure, which would differentiate the loss without the engine.
        """
        if closure is not None:
            raise GptparError(
                "optimizer.step(closure) differentiates a loss itself, which the engine has to do: call engine(...), "
                "engine.backward(loss) and engine.step()."
            )
        self._update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, also those of a step's micro-batches so far."""
        self._drop_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which only the constructor may do: the engine's memory is laid out by the groups.

        Raises:
            GptparError: at any later time.
        """
        if self._complete:
            raise GptparError(
                "a parameter group was added after gptpar.initialize, which lays out the memory of all groups: pass "
                "all of them to it, frozen ones too."
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the groups' hyperparameters; schedulers that hold the groups see them.

        Raises:
            GptparError: the groups have other sizes, or there is state, which ``engine.load_checkpoint`` loads.
        """
        if not isinstance(state_dict, Mapping) or not {"param_groups", "state"} <= state_dict.keys():
            raise GptparError(
                wrong_type("state_dict", state_dict, "what state_dict() of an optimizer has returned is needed")
            )
        saved, groups = state_dict["param_groups"], self.param_groups
        if state_dict["state"]:
            raise GptparError(
                f"this state_dict has moments of {len(state_dict['state'])} parameters, and the engine keeps its own: "
                "load them with engine.load_checkpoint, or pass the param_groups alone."
            )
        sizes = [[len(g["params"]) for g in some] for some in (saved, groups)]
        if sizes[0] != sizes[1]:
            raise GptparError(
                f"this state_dict has groups of {sizes[0]} parameters, and the optimizer has groups of {sizes[1]}: "
                "pass gptpar.initialize the same groups."
            )
        for group, other in zip(groups, saved, strict=True):
            group.update({name: value for name, value in other.items() if name != "params"})
