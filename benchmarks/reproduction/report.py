"""One self-contained HTML page: verdicts, plots, tables and sources of all items."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from reproduction import figures, tables
from reproduction.contenders import CONTENDERS
from reproduction.items import ITEMS
from reproduction.results import Results, least, verdict
from reproduction.runs import RUNS
from reproduction.spec import Claim, Item

TEMPLATE = Path(__file__).with_name("report.html.j2")

WORDS = {
    "holds": "holds",
    "part": "in part",
    "some": "holds, not all measured",
    "less": "smaller gain",
    "no": "does not hold",
    "missing": "not measured",
    "shown": "measured",
}
"""Verdicts as the page has them."""


@dataclass(frozen=True)
class Line:
    """A claim and what became of it.

    Attributes:
        claim: the claim.
        bar: what has to be measured for it to hold, as text.
        value: what was measured, as text.
        verdict: one of `WORDS`.
    """

    claim: Claim
    bar: str
    value: str
    verdict: str


@dataclass(frozen=True)
class Section:
    """An item as the page has it.

    Attributes:
        item: the item.
        verdict: one of `WORDS`.
        lines: its claims.
        svg: its figure, or None.
        tables: its numbers.
        sources: of each results file what it says about itself.
        missing: commands of files that are not there.
    """

    item: Item
    verdict: str
    lines: Sequence[Line]
    svg: Markup | None
    tables: Sequence[tables.Table]
    sources: Sequence[dict[str, Any]]
    missing: Sequence[dict[str, str]]


def page(results: Results) -> str:
    """The page."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["with_code"] = _with_code
    template = environment.from_string(TEMPLATE.read_text())
    sections = [section(results, item) for item in ITEMS.values()]
    lines = [line for one in sections for line in one.lines]
    counts = {
        key: sum(line.verdict == key for line in lines)
        for key in ("holds", "less", "no", "missing")
    }
    return template.render(
        sections=sections,
        device=_device(results),
        words=WORDS,
        counts=counts,
        contenders=CONTENDERS,
        parts=(
            ("article", "What the article shows"),
            ("beyond", "Beyond it"),
        ),
    )


def section(results: Results, item: Item) -> Section:
    """Everything that the page says about an item."""
    lines = [_line(results, claim) for claim in item.claims]
    there = [topic for topic in item.topics if results.file(topic) is not None]
    absent = [topic for topic in item.topics if topic not in there]
    return Section(
        item,
        _summary(lines, bool(there)),
        lines,
        _inline(results, item),
        [table for panel in item.panels for table in tables.of_panel(results, panel)],
        [_source(results, topic) for topic in there],
        [
            {
                "file": results.path(topic).name,
                "command": RUNS[topic].command,
                "needs": RUNS[topic].needs,
            }
            for topic in absent
        ],
    )


def _line(results: Results, claim: Claim) -> Line:
    value = results.measured(claim)
    text = "" if value is None else f"{_short(value)}{claim.unit}"
    return Line(claim, _bar(claim), text, verdict(claim, value))


def _bar(claim: Claim) -> str:
    if claim.near is not None:
        return f"{_short(claim.near)}{claim.unit}, ± 5 %"
    if claim.at_most is not None:
        return f"at most {_short(claim.at_most)}{claim.unit}"
    return f"at least {_short(least(claim))}{claim.unit}"


def _short(value: float) -> str:
    """Three digits, and a third decimal near 1, where gains are small."""
    return f"{value:.4g}" if 0.5 < value < 2 else tables.number(value)


def _with_code(text: str) -> Markup:
    """Words between backticks as code."""
    parts = re.split(r"`([^`]*)`", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if i % 2 else Markup.escape(part)
        for i, part in enumerate(parts)
    )


def _summary(lines: Sequence[Line], there: bool) -> str:
    found = {line.verdict for line in lines} - {"missing"}
    if not found:
        return "shown" if there and not lines else "missing"
    if found == {"holds"}:
        return "some" if any(line.verdict == "missing" for line in lines) else "holds"
    return "part" if "holds" in found or "less" in found else "no"


def _source(results: Results, topic: str) -> dict[str, Any]:
    content = results.file(topic)
    assert content is not None
    versions = ", ".join(
        f"{name} {version}" for name, version in content["versions"].items() if version
    )
    return {"file": results.path(topic).name, "versions": versions, **content}


def _device(results: Results) -> str:
    for topic in RUNS:
        content = results.file(topic)
        if content is not None:
            return str(content["device"])
    return results.device


def _inline(results: Results, item: Item) -> Markup | None:
    figure = figures.draw(results, item)
    if figure is None:
        return None
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return Markup(inlined(out.getvalue(), item.id, item.title))


def inlined(svg: str, prefix: str, title: str) -> str:
    """An SVG file as a part of an HTML page, beside others.

    Args:
        svg: the file.
        prefix: for its ids, which must differ from other pictures'.
        title: what is read aloud.
    """
    box = re.search(r'viewBox="0 0 ([\d.]+) [\d.]+"', svg)
    assert box is not None
    most = f"max-width: {float(box[1]) * 1.4:.0f}px"
    head = f'<svg role="img" aria-label="{Markup.escape(title)}" style="{most}" {box[0]}>'
    svg = re.sub(r".*?<svg [^>]*>", lambda _: head, svg, count=1, flags=re.S)
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.S)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = svg.replace("xlink:href", "href")
    return "\n".join(line.rstrip() for line in svg.strip().split("\n"))


def without_plots(html: str) -> str:
    """A page but for its pictures, whose bytes depend on matplotlib's version."""
    return re.sub(r"<svg.*?</svg>", "", html, flags=re.S)


def write(results: Results, folder: Path) -> Iterator[Path]:
    """Plots and the page, into a folder; yields their paths."""
    for item in ITEMS.values():
        figure = figures.draw(results, item)
        if figure is not None:
            yield from figures.write(figure, folder, item.id)
    path = folder / "report.html"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(page(results))
    yield path
