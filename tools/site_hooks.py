"""Hooks of mkdocs: a link to the source, and links from docstrings to the names that the API page documents."""

from __future__ import annotations

import os
import re
from typing import Any

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):<code>(?:([^<&]+) &lt;([\w.]+)&gt;|(~?)([\w.]+))</code>")
"""A role of a docstring, such as ``:class:`gptpar.PipelineModule```, on a page."""


def on_config(config: Any) -> Any:
    """Add a link to the source where ``GPTPAR_REPOSITORY`` has its URL.

    The theme's own ``repo_url`` would make a reader's browser ask the repository's host for its numbers.
    """
    if url := os.environ.get("GPTPAR_REPOSITORY"):
        config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": url, "name": "source"}]
    return config


def on_page_content(html: str, **_: Any) -> str:
    """Replace the roles of a page by code, and by links where there is something to link to."""

    def link(match: re.Match[str]) -> str:
        title, named, short, name = match.groups()
        shown = title or (name.rpartition(".")[2] if short else name)
        return f'<autoref identifier="{named or name}" optional><code>{shown}</code></autoref>'

    return ROLE.sub(link, html)
