"""Records of a run that tests write, and what TensorBoard's files hold of them."""

from gptpar.reporting.records import IterationRecord


def record(iteration: int, **changes) -> IterationRecord:
    values = {
        "iteration": iteration,
        "train_iters": 10,
        "consumed_samples": iteration * 8,
        "consumed_tokens": iteration * 8 * 128,
        "elapsed_ms": 250.0,
        "learning_rate": 1e-4,
        "global_batch_size": 8,
        "lm_loss": 5.0 - iteration / 10,
        "loss_scale": 1.0,
        "grad_norm": 2.0,
        "num_skipped": 0,
        "num_nan": 0,
        "tokens_per_s": 4096.0,
        "tokens_per_s_per_gpu": 1024.0,
        "tflops_per_gpu": 3.5,
        "mfu": 0.5,
        "mfu_causal": 0.4,
        "progress": iteration / 10,
        "eta_s": 1.0,
    }
    return IterationRecord(**(values | changes))


def read_tensorboard(folder) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
