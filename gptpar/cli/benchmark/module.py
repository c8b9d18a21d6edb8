"""``gptpar benchmark --module``: steps of a user's own module, summed up in one JSON line."""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import torch

from gptpar.adapter.user_module import load_user_function
from gptpar.cli.benchmark.machine import peak_memory
from gptpar.cli.flags import parser_of
from gptpar.cli.launch import is_worker, start_workers, workers_wanted
from gptpar.deepspeed.engines.initialize import initialize
from gptpar.deepspeed.engines.training_engine import TrainingEngine
from gptpar.topology.world import open_world

TIMEOUT_MINUTES = 30.0


def main(argv: list[str]) -> int:
    """Time the steps, in one process or in workers; the main one prints the line last."""
    options = parser_of("benchmark --module").parse_args(argv)
    make = load_user_function(options.module)
    count = workers_wanted(options.nproc)
    if count > 1 and not is_worker():
        words = ["--module", options.module, "--config", str(options.config), "--steps", str(options.steps)]
        return start_workers(count, ["benchmark", *words, "--warmup-steps", str(options.warmup_steps)])
    with open_world(None, TIMEOUT_MINUTES) as (rank, device):
        user = make()
        engine, *_ = initialize(model=user.module, config=options.config)
        passes, world = engine.options.batch.accumulation_steps, engine.topology.mesh.data
        batches = [user.batch(number * world + rank, device) for number in range(passes)]
        seconds: list[float] = []
        for _ in range(options.warmup_steps + options.steps):
            began = time.perf_counter()
            for batch in batches:
                loss = user.loss(engine, batch)
                engine.backward(loss)
                engine.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        line = _result_line(options.module, engine, seconds[options.warmup_steps :], loss.item())
        engine.close()
    if rank == 0:
        print(json.dumps(line), flush=True)
    return 0


def _result_line(name: str, engine: TrainingEngine, seconds: list[float], loss: float) -> dict[str, Any]:
    """The figures of the timed steps."""
    on_gpu, options, median = engine.device.type == "cuda", engine.options, statistics.median(seconds)
    return {
        "module": name,
        "params": sum(p.numel() for p in engine.module.parameters()),
        "samples_per_s": round(options.batch.train_batch_size / median, 2),
        "ms_per_step": round(1e3 * median, 3),
        "ms_min": round(1e3 * min(seconds), 3),
        "ms_max": round(1e3 * max(seconds), 3),
        **peak_memory(on_gpu),
        "loss": round(loss, 4),
        "processes": engine.topology.mesh.data,
        "micro_batch_size": options.batch.micro_batch_size,
        "global_batch_size": options.batch.train_batch_size,
        "zero_stage": options.zero_stage,
        "cpu_optimizer_ratio": options.offload.least_ratio,
        "cpu_parameters": options.offload.cpu_parameters,
        "compile": options.compile,
        "precision": "as the module's" if options.dtype is None else str(options.dtype).removeprefix("torch."),
        "steps": len(seconds),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
    }
