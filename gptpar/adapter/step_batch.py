"""The number of samples of a step, in DeepSpeed's three numbers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gptpar.errors import GptparError, is_whole, wrong_type


@dataclass(frozen=True)
class StepBatch:
    """The samples of a step: train_batch_size = micro_batch_size x accumulation_steps x data-parallel size."""

    train_batch_size: int
    micro_batch_size: int
    accumulation_steps: int

    def resized(self, train_batch_size: int, data: int) -> StepBatch:
        """A step of another size, with more or fewer micro-batches of the same size.

        Args:
            train_batch_size: samples of the new step.
            data: number of data-parallel processes.

        Raises:
            GptparError: it is not the size of a whole number of micro-batches.
        """
        if not is_whole(train_batch_size):
            raise GptparError(wrong_type("train_batch_size", train_batch_size, "a whole number of samples is needed"))
        train_batch_size = int(train_batch_size)
        steps, rest = divmod(train_batch_size, self.micro_batch_size * data)
        if rest or steps < 1:
            raise GptparError(
                f"set_train_batch_size({train_batch_size}): {train_batch_size} is no positive multiple of "
                f"{self.micro_batch_size} x {data}, a micro-batch on each data-parallel process."
            )
        return StepBatch(train_batch_size, self.micro_batch_size, steps)


def step_batch(train: int | None, micro: int | None, steps: int | None, *, world: int) -> StepBatch:
    """DeepSpeed's three numbers from those that are given; if only one of the others is given, ``steps`` is 1.

    Args:
        train, micro, steps: samples in a step, samples in a micro-batch, micro-batches in a process's step.
        world: the data-parallel size.

    Raises:
        ValueError: they contradict each other, or do not suffice.
    """
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    if train is None and micro is None:
        raise ValueError(f"the batch size is missing: give {names[0]} or {names[1]}.")
    if train is None:
        assert micro is not None
        return StepBatch(micro * (steps or 1) * world, micro, steps or 1)
    known, number = (names[2], steps or 1) if micro is None else (names[1], micro)
    unit = number * world
    if train % unit:
        raise ValueError(
            f"{names[0]} {train} is not a multiple of {known} {number} x {world} data-parallel process(es) = {unit}: "
            f"the nearest that fits is {max(unit, round(train / unit) * unit)}."
        )
    if micro is None:
        return StepBatch(train, train // unit, number)
    if steps is not None and train != unit * steps:
        raise ValueError(
            f"{names[0]} {train} is not {names[1]} {micro} x {names[2]} {steps} x {world} data-parallel process(es) = "
            f"{unit * steps}: drop one of the three, or make them agree."
        )
    return StepBatch(train, micro, train // unit)
