"""The presets: shapes of models by their usual names, from ``presets.toml``."""

from __future__ import annotations

from typing import Any

from gptpar.system.files import facts_in

_FACTS = facts_in("presets.toml", __file__)


def _complete(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a preset or a family, with those of the family that it is like."""
    own = {name: value for name, value in options.items() if name != "like"}
    return {**_complete(_FACTS["families"][options["like"]]), **own} if "like" in options else own


PRESETS: dict[str, dict[str, Any]] = {name: _complete(options) for name, options in _FACTS["presets"].items()}
"""Name -> options of the model's section."""
