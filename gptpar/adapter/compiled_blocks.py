"""Compiles a module's blocks: on GPUs by default, and then only those that torch can compile as one graph each."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._triton import has_triton

from gptpar.adapter.guards.eager_stance import EAGER_STANCE
from gptpar.adapter.options import EngineOptions
from gptpar.adapter.placed import PlacedParameters
from gptpar.system.compile_cache import refuse_others_compile_cache

MAX_GRAPHS = 8
"""Compiling a graph takes about ten seconds."""

BLOCKS_PER_GRAPH = 6
"""Compilation pays where blocks share a graph: one for each six blocks, and two for the smallest models."""


class CompiledBlocks:
    """The forwards of blocks, compiled while that succeeds and pays.

    A graph is compiled as a whole before its first operator runs. So a block that cannot be compiled has computed
    nothing yet: it runs uncompiled in the same call, and from then on. Blocks that ran compiled before stay compiled,
    because a recomputation has to run as the forward pass did. Blocks that never did run uncompiled.

    An instance is the ``backend`` of torch.compile. Instances compare equal, so that a new engine reuses compiled
    graphs: torch would compile each again, and after eight for one class compile no more.

    Args:
        num_blocks: number of blocks that may share graphs.
        backend: takes a graph and its inputs, and compiles it.

    Attributes:
        num_graphs: graphs that torch found so far.
    """

    def __init__(self, num_blocks: int, backend: Callable[..., Any]):
        self._backend, self._limit = backend, min(MAX_GRAPHS, max(2, num_blocks // BLOCKS_PER_GRAPH))
        self._num_blocks, self._has_given_up = num_blocks, False
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        """Compile a new graph."""
        self.num_graphs += 1
        if self.num_graphs > self._limit:
            raise RuntimeError("too many graphs")
        return self._backend(graph, inputs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CompiledBlocks) and self._backend == other._backend

    def __hash__(self) -> int:
        return hash(self._backend)

    def forward_of(self, block: nn.Module) -> Callable[..., Any]:
        """The block's forward, compiled at its first call."""
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # takes a second to import

        plain, kind = block.forward, type(block).__name__
        compiled = torch.compile(plain, backend=self, fullgraph=True)
        has_run = fails = False

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_run, fails
            if fails or (self._has_given_up and not has_run):
                return plain(*args, **kwargs)
            try:
                output = compiled(*args, **kwargs)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                fails = True
                output = plain(*args, **kwargs)  # an error of the user's own ends it here
                self._give_up(kind, error)
                return output
            has_run = has_run or not EAGER_STANCE.is_forced
            return output

        return forward

    def _give_up(self, kind: str, error: Exception) -> None:
        if self._has_given_up:
            return
        self._has_given_up = True
        if self.num_graphs > self._limit or "recompile_limit" in str(error):
            reason = (
                f"the model's {self._num_blocks} blocks need more than {self._limit} different graphs, and compiling "
                "one takes seconds. (Blocks of transformers share one graph after model.config.use_cache = False.)"
            )
        else:
            stack = getattr(error, "real_stack", None)
            where = f" ({stack[-1].filename}:{stack[-1].lineno})" if stack else ""
            reason = f"torch cannot compile {kind} as one graph: {str(error).strip().splitlines()[0]}{where}."
        warnings.warn(
            f'Blocks run uncompiled, which may be slower: {reason} {{"gptpar": {{"compile": false}}}} does not try it; '
            "true compiles what can be compiled, at any price.",
            stacklevel=4,
        )


def compile_blocks(stage: PlacedParameters, options: EngineOptions, device: torch.device) -> None:
    """Compile blocks as ``options.compile`` says; with ``auto``, on GPUs, unless the user has compiled some.

    Args:
        stage: has the module, or layers, with the engine's hooks.
        device: where the module computes.

    Raises:
        GptparError: see :func:`~gptpar.system.compile_cache.refuse_others_compile_cache`.
    """
    if options.compile == "on":
        compile_scopes(stage)
    elif options.compile == "auto" and device.type == "cuda" and has_triton():
        compile_shared(stage)


def compile_scopes(stage: PlacedParameters, backend: str = "inductor") -> None:
    """Compile each block by itself, without its hooks; if there are no blocks, compile the whole model."""
    refuse_others_compile_cache()
    for path in [scope.path for scope in stage.plan.scopes if scope.path] or [""]:
        module = stage.scope_module(path)
        _replace_forward(stage, module, torch.compile(module.forward, backend=backend))


def compile_shared(stage: PlacedParameters, backend: str = "inductor") -> CompiledBlocks | None:
    """Compile blocks by themselves while that pays; ``None``: there are none, or the user has compiled some."""
    blocks = [stage.scope_module(scope.path) for scope in stage.plan.scopes if scope.path]
    if not blocks or any(map(_is_compiled, blocks)):
        return None
    refuse_others_compile_cache()
    compiled = CompiledBlocks(len(blocks), torch._dynamo.lookup_backend(backend))
    for block in blocks:
        _replace_forward(stage, block, compiled.forward_of(block))
    return compiled


def _replace_forward(stage: PlacedParameters, module: nn.Module, forward: Callable[..., Any]) -> None:
    if "forward" in vars(module):
        stage.undo.callback(setattr, module, "forward", module.forward)
    else:
        stage.undo.callback(delattr, module, "forward")
    module.forward = forward  # type: ignore[method-assign]


def _is_compiled(block: nn.Module) -> bool:
    """Whether the user has compiled a part of a block, by ``torch.compile`` or ``Module.compile``."""
    return any(
        one._compiled_call_impl is not None
        or isinstance(one, torch._dynamo.OptimizedModule)
        or hasattr(one.forward, "_torchdynamo_orig_callable")
        for one in block.modules()
    )
