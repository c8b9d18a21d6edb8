"""A hook of mkdocs: roles of docstrings, such as ``:class:`gptpar.PipelineModule```, become code, and links."""

from __future__ import annotations

import re
from typing import Any

ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):<code>(?:([^<&]+) &lt;([\w.]+)&gt;|(~?)([\w.]+))</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Replace the roles of a page; a name that the API page documents becomes a link to it."""

    def link(match: re.Match[str]) -> str:
        title, named, short, name = match.groups()
        shown = title or (name.rpartition(".")[2] if short else name)
        return f'<autoref identifier="{named or name}" optional><code>{shown}</code></autoref>'

    return ROLE.sub(link, html)
