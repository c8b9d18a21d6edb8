"""``DeepSpeedConfigModel``: the base of programs' own sections of a configuration, by pydantic."""

from __future__ import annotations

import logging
from typing import Any

from pydantic import BaseModel, ConfigDict

from gptpar.errors import ConfigError

_logger = logging.getLogger("DeepSpeed")


class DeepSpeedConfigModel(BaseModel):
    """A section that knows its keys, and translates deprecated ones.

    A deprecated field has ``json_schema_extra`` with ``deprecated``, and perhaps with ``new_param``, the name of the
    field that gets its value, and ``new_param_fn``, which makes that of this one.

    Args:
        strict: whether ``"auto"`` is a value; else it counts as absent.

    Raises:
        ValidationError: a key is unknown, or a value cannot be.
        AssertionError: a deprecated key and the one in its place are both there.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any):
        super().__init__(**(data if strict else {key: value for key, value in data.items() if value != "auto"}))
        self._translate()

    def _translate(self) -> None:
        for name, field in type(self).model_fields.items():
            facts: Any = field.json_schema_extra
            if not isinstance(facts, dict) or not facts.get("deprecated") or name not in self.model_fields_set:
                continue
            new = facts.get("new_param", "")
            _logger.warning(f"{name} is deprecated{f': use {new}' if new else ''}.")
            if new:
                if new in self.model_fields_set:
                    raise ConfigError([f"{name} is deprecated, and {new}, in its place, is there, too."])
                setattr(self, new, facts.get("new_param_fn", lambda value: value)(getattr(self, name)))
