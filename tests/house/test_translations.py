"""The Chinese pages have the code, the output and the figures of the English ones."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAIRS = [("README.md", "README.zh.md"), ("docs/five_minutes.md", "docs/five_minutes.zh.md")]
CODE = re.compile(r"```.*?```", re.S)
FIGURES = re.compile(r"<!-- (?:gpu )?figures: .*?<!-- end .*?figures -->", re.S)
NAMES = re.compile(r"`(?:ikbo-tree|ikbo\.|docs/|benchmarks/|--|impl=)[^`\n]*`")


def texts(pair):
    return [(ROOT / name).read_text() for name in pair]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
@pytest.mark.parametrize("what", [CODE, FIGURES], ids=["code", "figures"])
def test_blocks_are_equal(pair, what):
    original, translated = (what.findall(text) for text in texts(pair))
    assert translated == original
    assert original or (what is FIGURES and pair[0] != "README.md")


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_sections_and_names_are_the_same(pair):
    """As many headings of each rank; every command, op, file and option is named in both."""
    plain = [CODE.sub("", text) for text in texts(pair)]
    original, translated = (re.findall(r"^#+ ", text, re.M) for text in plain)
    assert translated == original
    named, in_chinese = ({" ".join(n.split()) for n in NAMES.findall(text)} for text in plain)
    assert in_chinese == named


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_it_is_chinese_with_chinese_punctuation(pair):
    prose = re.sub(
        r"`[^`\n]*`|^    .*$|<!--.*?-->|\]\(.*?\)|^\|.*$",
        "",
        CODE.sub("", texts(pair)[1]),
        flags=re.M,
    )
    assert len(re.findall("[\u4e00-\u9fff]", prose)) > 600
    assert re.findall("[\u4e00-\u9fff][,;:]", prose) == []
