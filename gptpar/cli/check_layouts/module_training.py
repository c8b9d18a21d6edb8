"""``check-layouts`` of a user's module: trains it in plain PyTorch, and by ``gptpar.initialize`` in each way."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from gptpar.adapter.user_module import UserModule, load_user_function
from gptpar.cli.check_layouts.compare import Comparison
from gptpar.cli.check_layouts.outcome import Outcome, Tensors
from gptpar.cli.flags import parser_of
from gptpar.cli.launch import is_worker, start_workers, workers_wanted
from gptpar.deepspeed.engines.initialize import initialize
from gptpar.errors import ConfigError, GptparError
from gptpar.plan.space.candidate import Option
from gptpar.plan.space.spaces import to_prove_of_a_module
from gptpar.topology.world import open_world, world_from_environment

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
PASSES = 2
"""Micro-batches of each process in a step; with several, gradients are added up."""

LR, BETAS, DECAY, CLIP = 1e-3, (0.9, 0.95), 0.1, 0.5
EPS = 1e-6
"""AdamW's epsilon; with a smaller one, gradients that are round-off alone would change weights."""


@dataclass(frozen=True)
class ModuleCheck:
    """A training of a user's module.

    Attributes:
        make: the user's function.
        number_format: fp64, fp32 or bf16.
        processes: number of processes; a step has the same samples however these divide the work.
        steps: number of steps.
    """

    make: Callable[[], UserModule]
    number_format: str
    processes: int
    steps: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of parameters and batches."""
        return DTYPES[self.number_format]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of all processes in a step."""
        return PASSES * self.processes

    def made(self) -> UserModule:
        """A new model with the same values, in fp64 or fp32."""
        user = self.make()
        user.module.to(torch.promote_types(self.dtype, torch.float32))
        return user

    def require_repeatable(self, device: torch.device) -> None:
        """Check the module by a first forward pass.

        Raises:
            GptparError: the pass fails, or draws random numbers.
        """
        user = self.made()
        module = user.module.to(device)
        batch = user.batch(0, device, torch.promote_types(self.dtype, torch.float32))
        before = _random_states(device)
        with self.kept_wide():
            user.loss(module, batch)
        if any(not torch.equal(a, b) for a, b in zip(before, _random_states(device), strict=True)):
            paths = [name for name, one in module.named_modules() if isinstance(one, _DropoutNd) and one.p]
            hint = f" ({', '.join(paths[:3])}{', ...' if len(paths) > 3 else ''})" if paths else ""
            raise GptparError(
                f"{user.name}: the model draws random numbers in its forward pass{hint}, and each process draws "
                "others: results would differ. Set dropout to 0, or return the model after model.eval()."
            )

    def kept_wide(self) -> contextlib.AbstractContextManager[Any]:
        """A context that, in fp64, suppresses the casts to fp32 that models have in their losses and norms."""
        return _WithoutCasts() if self.dtype == torch.float64 else contextlib.nullcontext()


def train_plainly(check: ModuleCheck, device: torch.device) -> Outcome:
    """The reference: one process, plain PyTorch, AdamW over master weights of at least fp32."""
    user = check.made()
    module = user.module.to(device)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    master_weights = {name: p.detach().clone().requires_grad_() for name, p in trained.items()}
    for parameter in module.parameters():
        parameter.data = parameter.data.to(check.dtype)
    optimizer = torch.optim.AdamW(master_weights.values(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    outcome = Outcome(initial=_copies(trained))
    for step in range(check.steps):
        total = 0.0
        sums = {
            name: torch.zeros_like(master) for name, master in master_weights.items()
        }  # also of parameters that no batch uses
        for micro in range(check.micro_batches):
            with check.kept_wide():
                loss = user.loss(module, user.batch(step * check.micro_batches + micro, device, check.dtype))
                (loss / check.micro_batches).backward()
            total += loss.item() / check.micro_batches
            for name, parameter in trained.items():
                if parameter.grad is not None:
                    sums[name] += parameter.grad.to(sums[name].dtype)
                    parameter.grad = None
        for name, master in master_weights.items():
            master.grad = sums[name]
        outcome.gradients.append(_copies(sums))
        norm = torch.nn.utils.clip_grad_norm_(master_weights.values(), CLIP)
        outcome.steps.append((total, norm.item()))
        optimizer.step()
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(master_weights[name])
        outcome.weights.append(_copies(trained))
    return outcome


def train_case(check: ModuleCheck, case: Option) -> Outcome:
    """Train with ``gptpar.initialize``; all processes call this, and the main one has the outcome."""
    user = check.made()
    engine, *_ = initialize(model=user.module, config=_config(check, case))
    trained = {name: p for name, p in user.module.named_parameters() if p.requires_grad}
    rank, is_main = engine.topology.rank, engine.topology.is_main

    def weights() -> Tensors:
        with engine.gathered():
            return _copies(trained) if is_main else {}

    outcome = Outcome(initial=weights())
    for step in range(check.steps):
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(PASSES):
            number = step * check.micro_batches + micro * check.processes + rank
            with check.kept_wide():
                loss = user.loss(engine, user.batch(number, engine.device, check.dtype))
                engine.backward(loss)
            total += loss.item() / check.micro_batches
            if micro == PASSES - 1:
                gradients = {name: engine.full_gradient(name) for name in trained}  # all processes ask
                outcome.gradients.append(_copies(gradients) if is_main else {})
            engine.step()
        if check.processes > 1:
            dist.all_reduce(total)
        outcome.steps.append((total.item(), engine.get_global_grad_norm()))
        outcome.weights.append(weights())
    engine.close()
    return outcome


def _config(check: ModuleCheck, case: Option) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # the user's batches have any size
        "gradient_accumulation_steps": PASSES,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY}},
        "bf16": {"enabled": check.number_format == "bf16"},
        "zero_optimization": dict(case.changes),
        "steps_per_print": 10**9,
    }


def _copies(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def _random_states(device: torch.device) -> list[torch.Tensor]:
    on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_gpu]


class _WithoutCasts(TorchDispatchMode):
    """Makes casts from fp64 to fp32 or less give fp64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64:
            wanted = kwargs.get("dtype")
            if wanted is not None and wanted.is_floating_point:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


TIMEOUT_MINUTES = 30.0


def parser() -> argparse.ArgumentParser:
    """Flags of the verb for a module."""
    parser = parser_of("check-layouts --module")
    formats = parser.add_mutually_exclusive_group()
    for name in DTYPES:
        formats.add_argument(f"--{name}", dest="format", action="store_const", const=name, default="fp64")
    return parser


def main(argv: list[str]) -> int:
    """Check, or start workers that check: first one process, then two, and so on."""
    options = parser().parse_args(argv)
    make = load_user_function(options.module)
    if is_worker():
        count = world_from_environment()[2]
        return _check_all(ModuleCheck(make, options.format, count, options.steps), options.only)
    count = options.nproc or workers_wanted(None)
    numbers = [number for number in range(1, count + 1) if _chosen(number, options.only)]
    if not numbers:
        raise ConfigError([f"--only {options.only}: no combination of up to {count} processes has these words."])
    words = ["--module", options.module, "--steps", str(options.steps), f"--{options.format}"]
    words += [] if options.only is None else ["--only", options.only]
    for number in numbers:
        status = start_workers(number, ["check-layouts", *words])
        if status:
            return status
    return 0


def _chosen(processes: int, only: str | None) -> list[Option]:
    return [case for case in to_prove_of_a_module(processes) if only is None or only in case.name]


def _check_all(check: ModuleCheck, only: str | None) -> int:
    """Train in all ways, which every worker does in the same order; the main one compares and prints."""
    with open_world(None, TIMEOUT_MINUTES) as (rank, device):
        torch.set_num_threads(1)
        check.require_repeatable(device)
        reference = train_plainly(check, device) if rank == 0 else Outcome()
        comparison = Comparison(check.number_format, check.steps, "plain PyTorch", speaks=rank == 0, resumes=False)
        for case in _chosen(check.processes, only):
            comparison.compare(case.name, train_case(check, case), reference)
        failed = torch.tensor([comparison.num_failed])
        if check.processes > 1:
            dist.broadcast(failed, 0)
    comparison.sum_up()
    return int(failed.item() > 0)
