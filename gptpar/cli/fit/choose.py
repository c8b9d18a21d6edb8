"""Chooses flags for a preset on a machine, each with its reason. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gptpar.cli.fit.machine import Machine, Pace
from gptpar.config import Config, Flags
from gptpar.config.sections.batch import MEASURED_STEPS
from gptpar.config.sections.model import expand_preset
from gptpar.config.validate import complete, derive
from gptpar.errors import GptparError
from gptpar.model.gpt import gpt_model
from gptpar.plan.job import Job
from gptpar.plan.memory import stage_memory
from gptpar.reporting.banner import format_bytes, format_count
from gptpar.reporting.console import format_duration
from gptpar.system.files import facts_in
from gptpar.topology.mesh import Mesh

CPU_MAX_STEPS = 2000
"""Number of steps to prepare data for on a CPU, where the minutes end a run."""
WHOLE_COMMAND_MINUTES = 12.0
CLOSING_MINUTES = 0.6
"""Starting the training, the evaluations, the sample and the picture, on a machine that does nothing else."""
CLOSING_MINUTES_A_PARAMETER = 1.5 / 303e6
"""The first weights and the checkpoint: 4.2 GB for the 350M model."""
BYTES_PREPARED_A_MINUTE = 150e6
"""Rate at which text passes the tokenizer's training and ``preprocess`` on two cores."""
MIN_TRAINING_MINUTES = 3.0
LENGTH_FLAGS = {"train-iters", "train-samples", "train-tokens", "train-minutes"}
SHAPE_FLAGS = {"preset", "num-layers", "hidden-size", "load-hf"}
PRESET = "350M"
_CHOICES = facts_in("choices.toml", __file__)


@dataclass(frozen=True)
class Choice:
    """One flag's value and why."""

    flag: str
    value: str
    reason: str


@dataclass(frozen=True)
class Lesson:
    """Settings that teach a model much in little time on a CPU, measured on Python's library with 128 tokens a step.

    Attributes:
        steps: with which the last tenth of the losses was 0.3 nats below the unigram entropy.
        lr: with which these steps taught most.
    """

    preset: str
    steps: int
    lr: str


@dataclass(frozen=True)
class Course:
    """The model of a run and its time.

    Attributes:
        steps: that probably fit on a CPU.
    """

    preset: Choice
    minutes: Choice
    lesson: Lesson
    steps: int


LESSONS = tuple(Lesson(preset, *row) for preset, row in _CHOICES["lessons"].items())
"""A lesson for each preset, from the largest model to the smallest."""


def vocabulary_for(machine: Machine, *, own_text: bool) -> Choice:
    """The size of the vocabulary; it is small if steps are few, because a piece is learnt only if it is seen often.

    Args:
        own_text: the user's text may have more different characters than Python's library.
    """
    if machine.num_gpus:
        return Choice("vocab-size", "8192", "a corpus of a few million words fills this many pieces")
    size = "1024" if own_text else "512"
    return Choice("vocab-size", size, "few steps fit the time, so each piece must be seen often")


def training_minutes(seconds_used: float, text_bytes: int, parameters: int, slowness: float) -> Choice:
    """The rest of the whole command's twelve minutes for training on a CPU, as a flag.

    Args:
        parameters: of the model.
        slowness: the factor by which other programs slow this one down.
    """
    used, prepare = seconds_used / 60, slowness * text_bytes / BYTES_PREPARED_A_MINUTE
    closing = slowness * (CLOSING_MINUTES + CLOSING_MINUTES_A_PARAMETER * parameters)
    left = WHOLE_COMMAND_MINUTES - used - prepare - closing
    reason = (
        f"{WHOLE_COMMAND_MINUTES:g} for the whole command, less {used:.1f} used so far, {prepare:.1f} to prepare the "
        f"text and {closing:.1f} to start, save and sum up"
    )
    if left < MIN_TRAINING_MINUTES:
        left, reason = MIN_TRAINING_MINUTES, f"less teaches nothing; the whole takes more than {reason}"
    return Choice("train-minutes", f"{left:.1f}", reason)


def teachable(pace: Pace, preset: str | None, vocab_size: int, minutes_for: Callable[[int], Choice]) -> Course:
    """The largest model that a CPU can teach something in the time.

    Args:
        preset: the model, where the user named it: no other is taken then.
        minutes_for: number of parameters -> ``train-minutes``.
    """
    named = preset or PRESET
    lessons = [one for one in LESSONS if preset in (None, one.preset)] or [replace(LESSONS[0], preset=named)]
    wanted = ""
    for lesson in lessons:
        parameters = gpt_model(config_of(lesson.preset, 64, vocab_size, 1).model).num_parameters
        minutes = minutes_for(parameters)
        steps = int(60 * float(minutes.value) / (pace.seconds_a_parameter * parameters))
        fit = f"about {steps:,} steps of its {format_count(parameters)} parameters fit into {minutes.value} minutes"
        reason = f"the largest model that this machine can teach something in the time: {fit}; {wanted}"
        if lesson is lessons[0]:
            wanted = f"of the {named} model about {steps:,} fit, and about {lesson.steps:,} are needed"
            reason = f"{fit}, and about {lesson.steps:,} teach it something"
        if steps >= lesson.steps:
            break
    return Course(Choice("preset", lesson.preset, reason), minutes, lesson, steps)


def choose(machine: Machine, course: Course, vocab_size: int) -> list[Choice]:
    """Flags that make a preset train for a time on a machine.

    Args:
        course: the preset and the minutes; on GPUs the number of steps is estimated from them instead.

    Raises:
        GptparError: the model does not fit into the memory even with the smallest batch.
    """
    seq_length, largest = (1024, 16) if machine.num_gpus else (64, 2)
    where = "the GPU" if machine.num_gpus else "the host"
    preset, micro = course.preset.value, largest
    while (need := memory_needed(preset, seq_length, vocab_size, micro, machine)) > 0.9 * machine.memory:
        micro //= 2
        if not micro:
            raise GptparError(
                f"the {preset} model needs {format_bytes(need)} to train even with one sample of {seq_length} tokens, "
                f"and {where} has {format_bytes(machine.memory)} free: choose a smaller --preset."
            )
    batch = max(micro * max(1, machine.num_gpus), largest)
    length_reason = "GPT-2's" if machine.num_gpus else "many small steps learn more in little time"
    format_reason = f"the fastest number format here ({machine.description})"
    return [
        course.preset,
        Choice("seq-length", str(seq_length), length_reason),
        Choice("micro-batch-size", str(micro), f"needs {format_bytes(need)} of {format_bytes(machine.memory)}"),
        Choice("global-batch-size", str(batch), f"{batch * seq_length:,} tokens a step"),
        *(
            _for_gpus(machine, preset, vocab_size, batch, float(course.minutes.value))
            if machine.num_gpus
            else _for_cpu(course)
        ),
        *([Choice(machine.precision, "", format_reason)] * (machine.precision != "fp32")),
    ]


def _for_gpus(machine: Machine, preset: str, vocab_size: int, batch: int, minutes: float) -> list[Choice]:
    flops = gpt_model(config_of(preset, 1024, vocab_size, 1).model).flops_per_token(causal=False)
    seconds = batch * 1024 * flops / machine.flops
    steps = min(1000, max(200, int(minutes * 60 / seconds)))
    length = f"about {format_duration(steps * seconds)} at an expected {seconds:.2f} s a step"
    return [Choice("train-iters", str(steps), length), *(Choice(flag, *row) for flag, row in _CHOICES["gpu"].items())]


def _for_cpu(course: Course) -> list[Choice]:
    needed = course.lesson.steps * 2 // 3
    warmup = max(MEASURED_STEPS, min(20, course.steps // 5))
    return [
        Choice("train-iters", str(CPU_MAX_STEPS), "at most: training decides by the time that its steps take"),
        course.minutes,
        Choice("train-iters-needed", str(needed), "steps from which the model knows more than frequencies"),
        Choice("lr-warmup-iters", str(warmup), "a fifth of the steps, from 10 to 20"),
        Choice("lr", course.lesson.lr, _CHOICES["cpu"]["min-lr"][1]),
        *(Choice(flag, *row) for flag, row in _CHOICES["cpu"].items()),
    ]


def flag_names(words: Sequence[str]) -> set[str]:
    """The names of the flags among a command line's words, without dashes."""
    return {word.split("=")[0].removeprefix("--") for word in words if word.startswith("--")}


def for_command(choices: Sequence[Choice], given: Sequence[str]) -> list[Choice]:
    """The choices that a command line leaves open; if it sets the run's length, the warm-up is a fraction of that.

    Args:
        given: the command line's words.
    """
    flags = flag_names(given)
    if flags & LENGTH_FLAGS - {"train-minutes"}:
        fraction = Choice("lr-warmup-fraction", "0.1", "a tenth of the run")
        choices = [fraction if choice.flag == "lr-warmup-iters" else choice for choice in choices]
        flags |= LENGTH_FLAGS | {"train-iters-needed"}
    if any(flag.startswith("lr-warmup-") for flag in flags):
        flags |= {"lr-warmup-fraction", "lr-warmup-iters"}
    return [choice for choice in choices if choice.flag not in flags]


def config_of(preset: str, seq_length: int, vocab_size: int, micro_batch_size: int) -> Config:
    """A preset with another length and vocabulary, on one process that runs one micro-batch a step."""
    flags = Flags().update("model", preset=preset, seq_length=seq_length)
    flags = flags.update("tokenizer", vocab_size=vocab_size).update("batch", micro_batch_size=micro_batch_size)
    return complete(derive(expand_preset(flags, {"model.seq_length"})[0], 1)[0])


def memory_needed(preset: str, seq_length: int, vocab_size: int, micro_batch_size: int, machine: Machine) -> int:
    """Bytes that one process is expected to need."""
    config = config_of(preset, seq_length, vocab_size, micro_batch_size)
    config = config.update("model", attention_dropout=0.0, hidden_dropout=0.0)
    if machine.precision != "fp32":
        config = config.update("precision", **{machine.precision: True})
    return round(stage_memory(Job(config, Mesh(), "cuda" if machine.num_gpus else "cpu"), 0).allocated)
