"""Batches and the length of the run."""

from __future__ import annotations

from collections.abc import Iterator

from gptpar.config import Config


def check_batch(config: Config, world_size: int) -> Iterator[str]:
    """Whether every step's batch can be cut evenly."""
    b = config.batch
    data_parallel = config.parallel.data_parallel_size(world_size)
    steps = b.gradient_accumulation_steps
    if b.micro_batch_size is None and b.global_batch_size and steps and steps > 0:
        yield (
            f"--global-batch-size {b.global_batch_size} is not a multiple of --gradient-accumulation-steps {steps} x "
            f"{data_parallel} data-parallel process(es) = {steps * data_parallel}, so there is no --micro-batch-size "
            "for it: change one of them."
        )
        return
    if b.micro_batch_size is None:
        yield "--micro-batch-size is missing: the number of samples one process runs at once, for example 4."
        return
    unit = max(1, b.micro_batch_size) * data_parallel
    if b.global_batch_size is not None and b.global_batch_size % unit:
        yield (
            f"--global-batch-size {b.global_batch_size} is not a multiple of --micro-batch-size "
            f"{b.micro_batch_size} x {data_parallel} data-parallel process(es) = {unit}: "
            f"the nearest that fits is {max(unit, round(b.global_batch_size / unit) * unit)}."
        )
    elif b.global_batch_size is not None and steps and steps > 0 and b.global_batch_size != unit * steps:
        yield (
            f"--global-batch-size {b.global_batch_size} is not --micro-batch-size {b.micro_batch_size} x "
            f"--gradient-accumulation-steps {steps} x {data_parallel} data-parallel process(es) = {unit * steps}: drop "
            "one of the three, or make them agree."
        )
    if b.rampup_batch_size is not None:
        yield from _rampup(b.rampup_batch_size, b.global_batch_size or unit, unit)


def _rampup(ramp: tuple[int, ...], target: int, unit: int) -> Iterator[str]:
    if len(ramp) != 3:
        yield f"--rampup-batch-size takes START INCREMENT SAMPLES; {len(ramp)} value(s) were given."
        return
    start, increment, samples = ramp
    if min(ramp) < 1 or start > target:
        yield f"--rampup-batch-size {start} {increment} {samples}: positive numbers and a start <= {target} are needed."
        return
    if (target - start) % increment:
        yield f"--rampup-batch-size: from {start} to {target} is not a whole number of steps of {increment}."
    if start % unit or increment % unit:
        yield (
            f"--rampup-batch-size: start {start} and increment {increment} must be multiples of "
            f"micro-batch x data-parallel = {unit}, or some steps could not be cut."
        )


def check_duration(config: Config) -> Iterator[str]:
    """How long to train, and when to save."""
    b, c = config.batch, config.checkpoint
    spans = {"--train-iters": b.train_iters, "--train-samples or --train-tokens": b.train_samples}
    given = [name for name, value in spans.items() if value is not None]
    if config.logging.skip_train:
        if not c.load:
            yield "--skip-train evaluates a checkpoint: give --load."
    elif not given:
        yield "how long to train is not said: give --train-iters, --train-samples or --train-tokens."
    elif len(given) > 1:
        yield f"how long to train is said twice ({' and '.join(given)}): keep one."
    if b.rampup_batch_size is not None and b.train_iters is not None:
        yield "--rampup-batch-size needs --train-samples or --train-tokens: with it, steps differ in size."
    if b.train_minutes is not None:
        yield from _fitted_length(config)
    if c.save_interval is not None and not c.save:
        yield "--save-interval is given but --save is not: say where to save."


def _fitted_length(config: Config) -> Iterator[str]:
    """The first steps are taken before their number is known: their learning rate must not depend on it."""
    b, o = config.batch, config.optimizer
    minutes = f"--train-minutes {b.train_minutes:g}"
    if b.train_iters is None:
        yield f"{minutes} lowers --train-iters, which is missing: give the most steps that the run may take."
    if o.lr_warmup_fraction is not None:
        yield (
            f"{minutes} chooses the number of steps after the first ten, so --lr-warmup-fraction "
            f"{o.lr_warmup_fraction:g} has no length before that: give --lr-warmup-iters."
        )
    if o.weight_decay_incr_style != "constant":
        yield (
            f"{minutes} chooses the number of steps after the first ten, so --weight-decay-incr-style "
            f"{o.weight_decay_incr_style} has no length before that: keep the weight decay constant."
        )
