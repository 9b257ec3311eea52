"""The code of docs/five_minutes.md runs, and prints what stands below it."""

import re
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "docs" / "five_minutes.md").read_text()
BLOCK = re.compile(r"```python\n(.*?)```(?:\n```text\n(.*?)```)?", re.S)


def test_every_block_runs_and_prints_what_it_says(capsys):
    blocks = BLOCK.findall(TEXT)
    assert len(blocks) > 5
    scope = {}
    for code, printed in blocks:
        exec(compile(code, "docs/five_minutes.md", "exec"), scope)
        assert capsys.readouterr().out == printed
