"""What mkdocs is told of this repository: hooks, and an extension of Griffe for the API pages.

The package is laid out as it is installed: `kernels/` and `mapping/` lie below `ikbo_tree`. Links
that leave docs/ for another file of the repository become plain text: they are right where the
pages are read in the repository, and lead nowhere on the site. Such a file must exist; other links
are left to mkdocs, which reports those that are broken. Examples in docstrings become code blocks.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import griffe
from mkdocs.plugins import event_priority

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\[([^\]]+)\]\((\.\.?/[^)#\s]+)(?:#[^)\s]*)?\)")
_EXAMPLE = re.compile(r"(?:^|(?<=\n\n))(>>> .*?)(?=\n\n|\Z)", re.S)
_LAID_OUT = tempfile.TemporaryDirectory()


@event_priority(100)  # before mkdocstrings reads its own
def on_config(config: Any) -> Any:
    """Called by mkdocs once."""
    package = Path(_LAID_OUT.name) / "ikbo_tree"
    if not package.exists():
        package.mkdir()
        found = [*(ROOT / "ikbo_tree").iterdir(), ROOT / "kernels", ROOT / "mapping"]
        for path in found:
            (package / path.name).symlink_to(path)
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [_LAID_OUT.name]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs for every page."""
    docs = Path(config["docs_dir"]).resolve()
    here = Path(page.file.abs_src_path).resolve().parent

    def replaced(link: re.Match[str]) -> str:
        target = (here / link[2]).resolve()
        outside = target.exists() and not target.is_relative_to(docs)
        return link[1] if outside else link[0]

    return _LINK.sub(replaced, markdown)


class Examples(griffe.Extension):
    """Doctests as code blocks."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Called by Griffe for every object."""
        if obj.docstring is not None:
            fenced = _EXAMPLE.sub(r"```pycon\n\1\n```", obj.docstring.value)
            obj.docstring.value = fenced
