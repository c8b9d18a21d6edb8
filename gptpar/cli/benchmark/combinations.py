"""Makes a sweep's combinations of the values that its flags list, and refuses contradictory ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from gptpar.config import Flags
from gptpar.config.fields import as_word
from gptpar.config.flags import ParsedFlags, flag_name
from gptpar.config.validate import derive
from gptpar.errors import ConfigError
from gptpar.plan.space.candidate import Candidate, configured
from gptpar.plan.space.spaces import CHOSEN, SweepValues, to_measure
from gptpar.topology.mesh import COPIES, PIPELINE, TENSOR, Mesh

LABELS = {
    "layout": "{}",
    "micro-batch": "micro-batch {}",
    "recompute": "recompute {}",
    "ZeRO": "ZeRO-{}",
    "virtual": "{} virtual",
    "CPU ratio": "CPU ratio {}",
}
"""Column of the table -> how its cell is written in a sentence."""


@dataclass(frozen=True)
class Combination:
    """A candidate of a sweep.

    Attributes:
        typed: the flags with the candidate's changes, and with values that follow from them.
        refusal: why it is not started; empty if it is.
    """

    candidate: Candidate
    typed: Flags
    refusal: str = ""

    @property
    def mesh(self) -> Mesh:
        """Sizes of the axes."""
        return self.candidate.mesh

    @cached_property
    def cells(self) -> dict[str, str]:
        """The combination's entries in the table, by the names of the columns."""
        flags = self.typed
        return {
            "layout": self.mesh.describe(),
            "micro-batch": str(flags.batch.micro_batch_size),
            "recompute": flags.recompute.recompute_granularity or "none",
            "ZeRO": str(flags.parallel.zero_stage),
            "virtual": str(flags.parallel.num_virtual_stages),
            "CPU ratio": as_word(flags.offload.ratio),
        }

    def describe(self, names: list[str]) -> str:
        """Some of the cells in one line."""
        return ", ".join(LABELS[name].format(self.cells[name]) for name in names)

    @property
    def flags(self) -> list[str]:
        """The changes as words of a command line."""
        return self.candidate.flags


def contradictions(parsed: ParsedFlags) -> Iterator[str]:
    """Problems of flags that contradict those of a sweep."""
    typed_here = parsed.given - parsed.from_config  # a combination's words have precedence over the file
    for wish, fields in CHOSEN.items():
        for name in fields:
            if getattr(parsed.rest, f"sweep_{wish}") is not None and name in typed_here:
                swept, typed = flag_name(f"sweep_{wish}"), flag_name(name.split(".")[1])
                yield f"{swept} chooses {typed}, which is given as well: keep one."
    for name in ("save", "load", "wandb_project"):
        if parsed.given & {f"checkpoint.{name}", f"logging.{name}"}:
            yield f"{flag_name(name)} is for one run: leave it out with --sweep."
    if parsed.rest.breakdown or parsed.rest.trace is not None:
        yield "--breakdown and --trace are for one run: leave them out with --sweep."


def combinations(parsed: ParsedFlags, count: int) -> list[Combination]:
    """All combinations on a number of processes, in the order in which they are to run; refused ones too."""
    values = SweepValues(**{name: getattr(parsed.rest, f"sweep_{name}") for name in CHOSEN})
    found = to_measure(parsed.flags, parsed.given, count, values)
    return [_combination(parsed, count, candidate) for candidate in found]


def _combination(parsed: ParsedFlags, count: int, candidate: Candidate) -> Combination:
    flags = candidate.applied_to(parsed.flags)
    derived, _ = derive(flags, count)
    refusal = _needless(parsed, count, candidate.mesh, derived)
    if not refusal:
        try:
            configured(flags, count)
        except ConfigError as error:
            refusal = " ".join(error.problems)
    return Combination(candidate, derived, refusal)


def _needless(parsed: ParsedFlags, count: int, mesh: Mesh, flags: Flags) -> str:
    """Refusals of combinations that could run, but would measure something else, or the same again."""
    if mesh.world_size != count and count % mesh.size(TENSOR, PIPELINE) == 0:
        return f"{mesh.describe()} is {mesh.world_size} processes, and here are {count}."
    stages = parsed.rest.sweep_zero
    if stages and mesh.size(*COPIES) == 1 and flags.parallel.zero_stage != stages[0]:
        return f"where no weights have copies, ZeRO-{flags.parallel.zero_stage} is the same as ZeRO-{stages[0]}."
    return ""
