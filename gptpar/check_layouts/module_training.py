"""Trains a user's module: in plain PyTorch, and with ``gptpar.initialize`` in one of the ways that have to agree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from gptpar.any_module.initialize import initialize
from gptpar.any_module.user_module import UserModule
from gptpar.check_layouts.cases import ModuleCase
from gptpar.check_layouts.outcome import Outcome, Tensors
from gptpar.errors import GptparError

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
PASSES = 2
"""Micro-batches of each process in a step: gradients are added up."""

ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
"""Divided by a smaller epsilon, gradients that are nothing but round-off would move weights."""
CLIP = 0.5


@dataclass(frozen=True)
class ModuleCheck:
    """What is trained.

    Attributes:
        make: the user's function.
        number_format: fp64, fp32 or bf16.
        processes: that take part; a step has the same samples with any way to share the work among so many.
        steps: to take.
    """

    make: Callable[[], UserModule]
    number_format: str
    processes: int
    steps: int

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and batches."""
        return DTYPES[self.number_format]

    @property
    def micro_batches(self) -> int:
        """Of all processes in a step."""
        return PASSES * self.processes

    def made(self) -> UserModule:
        """The model anew, with the same values, in fp64 or fp32."""
        user = self.make()
        user.module.to(torch.promote_types(self.dtype, torch.float32))
        return user

    def require_repeatable(self, device: torch.device) -> None:
        """Refuse a module that draws random numbers, and whatever else fails in a first forward pass.

        Raises:
            GptparError: with the reason.
        """
        user = self.made()
        module = user.module.to(device)
        batch = user.batch(0, device, torch.promote_types(self.dtype, torch.float32))
        before = _random_states(device)
        with self.kept_wide():
            user.loss(module, batch)
        if any(not torch.equal(a, b) for a, b in zip(before, _random_states(device), strict=True)):
            paths = [name for name, one in module.named_modules() if getattr(one, "p", 0.0) and "Drop" in str(type(one))]
            hint = f" ({', '.join(paths[:3])}{', ...' if len(paths) > 3 else ''})" if paths else ""
            raise GptparError(
                f"{user.name}: the model draws random numbers in its forward pass{hint}, and each process draws others: "
                "results would differ. Set dropout to 0, or return the model after model.eval()."
            )

    def kept_wide(self) -> contextlib.AbstractContextManager[Any]:
        """In fp64, leave out the casts to fp32 that models write into their losses and norms."""
        return _WithoutCasts() if self.dtype == torch.float64 else contextlib.nullcontext()


def train_plainly(check: ModuleCheck, device: torch.device) -> Outcome:
    """The reference: one process, plain PyTorch, AdamW over master weights of at least fp32."""
    user = check.made()
    module = user.module.to(device)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    masters = {name: p.detach().clone().requires_grad_() for name, p in trained.items()}
    for parameter in module.parameters():
        parameter.data = parameter.data.to(check.dtype)
    optimizer = torch.optim.AdamW(masters.values(), **ADAM)
    outcome = Outcome(initial=_copies(masters))
    for step in range(check.steps):
        total = 0.0
        for master in masters.values():
            master.grad = torch.zeros_like(master)  # of what a step does not use, too
        for micro in range(check.micro_batches):
            with check.kept_wide():
                loss = user.loss(module, user.batch(step * check.micro_batches + micro, device, check.dtype))
                (loss / check.micro_batches).backward()
            total += loss.item() / check.micro_batches
            for name, parameter in trained.items():
                if parameter.grad is not None:
                    masters[name].grad += parameter.grad.to(masters[name].dtype)
                    parameter.grad = None
        outcome.gradients.append({name: master.grad.cpu().clone() for name, master in masters.items()})
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), CLIP)
        outcome.steps.append((total, norm.item()))
        optimizer.step()
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(masters[name])
        outcome.weights.append(_copies(masters))
    return outcome


def train_case(check: ModuleCheck, case: ModuleCase) -> Outcome:
    """With ``gptpar.initialize``; all processes call it, and the main one has the outcome."""
    user = check.made()
    engine, *_ = initialize(model=user.module, config=_config(check, case))
    names = [name for name, p in user.module.named_parameters() if p.requires_grad]
    rank, is_main = engine.topology.rank, engine.topology.is_main

    def whole(read: Callable[[str], torch.Tensor]) -> Tensors:
        tensors = {name: read(name) for name in names}  # all processes read
        return {name: tensor.cpu().clone() for name, tensor in tensors.items()} if is_main else {}

    def weight(name: str) -> torch.Tensor:
        return engine.weights.whole(name, "weights")

    outcome = Outcome(initial=whole(weight))
    for step in range(check.steps):
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(PASSES):
            number = step * check.micro_batches + micro * check.processes + rank
            with check.kept_wide():
                loss = user.loss(engine, user.batch(number, engine.device, check.dtype))
                engine.backward(loss)
            total += loss.item() / check.micro_batches
            if micro == PASSES - 1:
                outcome.gradients.append(whole(engine.full_gradient))
            engine.step()
        if check.processes > 1:
            dist.all_reduce(total)
        outcome.steps.append((total.item(), engine.get_global_grad_norm()))
        engine.engine.finish()
        outcome.weights.append(whole(weight))
    engine.close()
    return outcome


def _config(check: ModuleCheck, case: ModuleCase) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # the user's batches have whichever size
        "gradient_accumulation_steps": PASSES,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "betas": list(ADAM["betas"])}},
        "bf16": {"enabled": check.number_format == "bf16"},
        "zero_optimization": dict(case.zero),
        "steps_per_print": 10**9,
    }


def _copies(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _random_states(device: torch.device) -> Iterator[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return iter(states)


class _WithoutCasts(TorchDispatchMode):
    """Casts from fp64 to fp32 or less give fp64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64:
            wanted = kwargs.get("dtype")
            if wanted is not None and wanted.is_floating_point:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
