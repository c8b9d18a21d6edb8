"""A section is declared once: what is open as typed is known in the complete configuration."""

import dataclasses
import typing

from gptpar.config import Config, Flags, LoggingConfig, ParallelConfig, ParallelFlags, flag_fields
from gptpar.config.fields import completed, is_open
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from tests.helpers import TINY

COMPLETE = typing.get_type_hints(Config)
OPEN = [(name, spec.name) for name, kind in COMPLETE.items() for spec in dataclasses.fields(kind) if is_open(spec)]


def test_an_open_field_is_none_until_something_says_it() -> None:
    typed, config = Flags(), resolve(parse_flags(TINY.split()), 1)[0]
    assert len(OPEN) >= 20 and ("model", "hidden_size") in OPEN
    assert all(getattr(getattr(typed, section), name) is None for section, name in OPEN)
    assert all(getattr(getattr(config, section), name) is not None for section, name in OPEN)


def test_every_field_that_is_a_flag_has_a_place_in_the_help() -> None:
    """A flag that stands for others is before an open field, or behind all of them."""
    sections = {spec.name: type(getattr(Flags(), spec.name)) for spec in dataclasses.fields(Flags)}
    fields = [f"{name}.{s.name}" for name, kind in sections.items() for s in dataclasses.fields(kind) if s.metadata]
    places = [one.key for one in flag_fields()]
    assert sorted(places) == sorted(fields)
    groups = places.index("model.group_query_attention")
    assert places[groups + 1] == "model.num_query_groups" and places[0] == "model.preset"


def test_a_complete_section_has_defaults_for_open_fields_and_no_flag_that_stands_for_others() -> None:
    config = completed(ParallelConfig, ParallelFlags(no_pipeline_parallel=True))
    assert (config.zero_stage, config.num_virtual_stages_per_pipeline_rank) == (0, 1)
    assert type(config) is ParallelConfig and not hasattr(config, "no_pipeline_parallel")
    assert completed(ParallelConfig, ParallelFlags(zero_stage=3)).zero_stage == 3
    assert completed(LoggingConfig, Flags().logging).eval_interval == 1000
